"""``crl bench`` knows every benchmark of the source tree and starts it."""

import pathlib

import pytest

from crl_jax import benchmarks, cli

FOLDER = pathlib.Path(__file__).parent / "bench"


def test_every_script_has_a_name():
    parts = {"gpu_attention.py", "bank_load.py", "envs_speed.py", "envs_success.py", "async_rows.py", "timed_process.py", "waiting_envs.py"}
    scripts = {path.name for path in FOLDER.glob("*.py")} - parts
    assert {script for script, _ in benchmarks.SCRIPTS.values()} == scripts


def test_the_command_line_says_what_each_measures(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    said = "".join(capsys.readouterr().out.split())  # lines are broken at hyphens too
    assert all("".join(f"{name}: {measures}".split()) in said for name, (_, measures) in benchmarks.SCRIPTS.items())


def test_arguments_reach_the_script_and_its_exit_code_comes_back(capfd):
    assert cli.main(["bench", "step", "--help"]) == 0
    assert "--batching" in capfd.readouterr().out
    assert cli.main(["bench", "step", "--steps", "many"]) == 2
    assert cli.main(["bench", "step", "--steps", "a=b"]) == 2  # key=value words belong to settings only
    assert "invalid int value: 'a=b'" in capfd.readouterr().err


def test_outside_a_source_tree_the_fix_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmarks, "FOLDER", tmp_path)
    assert cli.main(["bench", "step"]) == 2
    assert "clone of the repository" in capsys.readouterr().err
