"""The serving benchmarks without their peers: what they compute from reports, and the soak on a small load."""

import asyncio
import pathlib
import sys

import pytest

from crl_jax.models import transformer
from crl_jax.models.params import flatten
from crl_jax.models.presets import preset
from crl_jax.serving.sampler import EngineSampler

BENCH = pathlib.Path(__file__).parent / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "peers")]

import bench_serve  # noqa: E402  (scripts, not a package)
import bench_serve_multiturn  # noqa: E402
import interleave  # noqa: E402
import peer_common as pc  # noqa: E402
import serve_workload as sl  # noqa: E402
import soak_serve  # noqa: E402


def report(**seconds: float) -> dict:
    """A report whose phases took these CPU seconds at best, and twice that in the median."""
    phases = {name: {"min_cpu_s": s, "median_cpu_s": 2 * s, "tok_per_cpu_s": 64 / s} for name, s in seconds.items()}
    return {"phases": phases, "box": {"load1_min": 1, "load1_max": 2, "calib_min_s": 0.1}, "peak_rss_mb": 5, "versions": {"numpy": "2"}}


def test_single_turn_goals_take_the_best_of_all_rounds_and_the_better_peer():
    rows = {
        "crl_jax": [report(rollout=0.8, rollout_short=0.2), report(rollout=0.7, rollout_short=0.21)],
        "tunix": [report(rollout=2.1, rollout_short=1.0)],
        "transformers": [report(rollout=1.4, rollout_short=1.0)],
        "llama": [report(rollout=0.5, rollout_short=0.1)],
    }
    goals = interleave.goals(bench_serve.measured(bench_serve.single_summary(rows), {}))
    assert goals["rollout_cpu_s"] == {"value": 0.7, "goal": "<= 0.7", "pass": True}
    assert goals["better_peer_over_ours"] == {"value": 2.0, "goal": ">= 2.2", "pass": False}
    assert goals["decode_step_ms"]["value"] == pytest.approx(1e3 * 0.5 / 56, abs=1e-3)
    assert set(goals) == {"rollout_cpu_s", "better_peer_over_ours", "decode_step_ms"}


def test_a_goal_without_its_peers_is_left_out():
    assert set(interleave.goals(bench_serve.measured({"tunix": {"rollout": {"best_cpu_s": 1.0}}}, {}))) == set()


def test_smollm2_shares_are_of_whichever_bound_is_larger():
    ours, theirs = ({f"batch{b}": s * b for b in (1, 8, 32)} | {f"batch{b}_short": s * b / 8 for b in (1, 8, 32)} for s in (1.0, 2.0))
    rates = {"gflops jax": 50.0, "gflops numpy": 40.0, "gbytes numpy": 20.0}
    greedy = {str(b): [[1] * 64] * b for b in (1, 8, 32)}
    other = greedy | {"8": [[1] * 64] * 7 + [[1] * 60 + [2] * 4]}
    rows = {"crl_jax": [report(**ours) | {"rates": rates, "greedy": greedy}], "transformers": [report(**theirs) | {"greedy": other}]}
    found = bench_serve.smollm2_summary(rows)
    step_ms, cached = 1e3 * 32 * (1 - 1 / 8) / 56, 64 + 36
    flops = 32 * (2 * 134_479_872 + 4 * 30 * 9 * 64 * cached)
    row = found["crl_jax"]["batch32"]
    assert row["decode_step_ms"]["best"] == pytest.approx(step_ms, abs=1e-3)
    assert row["roofline_share"] == pytest.approx(1e3 * flops / 50e9 / step_ms, abs=1e-3)
    read = 4 * (134_479_872 + cached * 30 * 2 * 3 * 64)
    assert found["crl_jax"]["batch1"]["roofline_ms"] == pytest.approx(1e3 * read / 20e9, abs=1e-2)
    assert found["crl_jax"]["greedy_as_transformers"]["batch8"] == {"rows": 8, "identical": 7, "mean_agreeing": 63.5}
    assert bench_serve.measured({}, found)["smollm2_batch8_over_transformers"] == (2.0, ">=", 1.0)


def test_weights_of_the_roofline_are_those_of_the_model():
    shapes = flatten(transformer.param_shapes(preset("smollm2-135m")))
    assert sum(leaf.size for leaf in shapes.values() if leaf.ndim == 2) == sl.SMOLLM2.weights


def test_multiturn_goals():
    rows = {"crl_jax": [report(episode=5.0) | {"per_episode": {"prefilled_tokens": 512.0, "recomputed_tokens": 1.0}}]}
    rows["tunix"] = [report(episode=40.0, episode_sized=20.0)]
    goals = interleave.goals(bench_serve_multiturn.measured(bench_serve_multiturn.summary(rows)))
    assert goals["tunix_over_ours"] == {"value": 8.0, "goal": ">= 6.0", "pass": True}
    assert goals["prefilled_tokens_per_episode"]["pass"]
    assert not goals["recomputed_tokens_per_episode"]["pass"]


def test_no_two_conversations_or_turns_read_the_same():
    w = pc.Workload()
    rows = [tuple(row) for seed in range(2) for turn in range(sl.TURNS) for row in sl.context(w, seed, turn)]
    assert len(set(rows)) == len(rows) == 2 * sl.TURNS * 32
    assert {len(row) for row in rows} == {64}
    assert sl.history([[1], [2]], [[3], [4]], [[5], [6]]) == [[1, 3, 5], [2, 4, 6]]


def test_no_program_is_given_a_prompt_twice():
    seen: list[tuple[int, ...]] = []

    def generate(rows, new, _seed):
        seen.extend(dict.fromkeys(map(tuple, rows)))
        return [[1] * new for _ in rows], [[-1.0] * new for _ in rows]

    sl.single(pc.Stopwatch(), pc.Workload(), generate, 3)
    assert len(seen[16:]) == len(set(seen[16:])) == 3 * 2 * 8  # after those that compile
    for batch in sl.SMOLLM2_BATCHES:
        seen.clear()
        sl.smollm2(pc.Stopwatch(), generate, [[i] for i in range(sl.SMOLLM2_ROWS)], batch, 3)
        assert len(seen) == len(set(seen)) == batch * (1 + 2 * sl.SMOLLM2_REPS[batch])


def test_a_missing_environment_is_named_with_the_lines_that_make_it(tmp_path):
    with pytest.raises(SystemExit, match=r"venv-llama/bin/python is missing[\s\S]*pip install llama-cpp-python"):
        interleave.python("llama", tmp_path)
    assert interleave.python("crl_jax", None) == sys.executable


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(soak_serve, "WAVES", 3)
    monkeypatch.setattr(soak_serve, "WARM_WAVES", 1)
    monkeypatch.setattr(soak_serve, "SAMPLE", 1.0)
    monkeypatch.setattr(soak_serve, "FIRST", 20)
    monkeypatch.setattr(soak_serve, "SHAPES", soak_serve.SHAPES | {"row_buckets": (), "chunk_buckets": (16,)})
    return monkeypatch


def test_small_soak(small):
    found = asyncio.run(soak_serve.soak(300, 0, lambda _: None))
    assert found["faults"] == []
    assert found["requests"] >= 300
    assert {kind for kind in soak_serve.KINDS if found["counts"][kind]} == set(soak_serve.KINDS)
    assert found["counts"]["compared_with_solo"] > 20
    assert found["swaps"] > 0


def test_the_soak_sees_a_session_that_was_not_closed_and_greedy_ids_that_differ(small):
    small.setattr(soak_serve, "SETTLE_S", 0.2)
    closing, lost = EngineSampler.close, list[str]()

    async def leaky(self, session):
        if session == "s3" and not lost:
            lost.append(session)
        else:
            await closing(self, session)

    small.setattr(EngineSampler, "close", leaky)
    solo = soak_serve.compare
    small.setattr(soak_serve, "compare", lambda sampler, sets, greedy: solo(sampler, sets[::-1], greedy))
    faults = asyncio.run(soak_serve.soak(60, 1, lambda _: None))["faults"]
    assert any("1 sessions open" in fault for fault in faults)
    assert any("greedy ids" in fault for fault in faults)
