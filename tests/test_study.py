"""The comparison of a study: areas, intervals, and reading curves from metrics files."""

import json

import numpy as np
import pytest

from crl_jax.study import Curve, compare, interval, plot, read_curve


def test_area_is_the_mean_of_a_constant_and_half_of_a_ramp():
    assert Curve(np.array([0.0, 10.0]), np.array([0.4, 0.4])).area(10) == pytest.approx(0.4)
    assert Curve(np.array([0.0, 10.0]), np.array([0.0, 1.0])).area(10) == pytest.approx(0.5)
    assert Curve(np.array([0.0, 10.0]), np.array([0.0, 1.0])).area(5) == pytest.approx(0.25)


def test_interval_is_student_t():
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.303 / np.sqrt(3), rel=1e-3)
    assert np.isnan(interval([1.0])[1])


def _write(folder, final):
    folder.mkdir(parents=True)
    rows = [{"step": 0, "eval/known/without/sampled": 0.2, "eval/known/with/sampled": 0.2}]
    for step in (1, 2):
        rows.append({"step": step, "eval/known/without/sampled": final * step / 2, "eval/known/with/sampled": final * step / 2})
        rows.append({"step": step, "env_steps": 100 * step})
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps({"kind": "metrics"} | row) for row in rows) + "\n")


def test_methods_are_compared_at_equal_environment_steps(tmp_path):
    for seed in (0, 1):
        _write(tmp_path / f"baseline-s{seed}", 0.4)
        _write(tmp_path / f"complementary-s{seed}", 0.8)
    table = compare(tmp_path, ["baseline", "complementary"], [0, 1])
    assert table["env_steps"] == 200
    assert set(table["lines"]) == {"baseline", "complementary, with experience", "complementary, without"}
    assert table["lines"]["baseline"]["final"] == (0.4, 0.0)
    assert table["lines"]["complementary, with experience"]["area"][0] > table["lines"]["baseline"]["area"][0]
    plot(table, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_run_without_evaluations_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "metrics", "step": 1, "env_steps": 5}) + "\n")
    with pytest.raises(ValueError, match="eval_every"):
        read_curve(tmp_path / "metrics.jsonl", "eval/known/with/sampled")
