"""What the Docker backend would call. No daemon is needed, and none is tested."""

import subprocess

import pytest

from envs import registry
from envs.api import EnvError, EnvUnavailable
from envs.swe import docker
from envs.swe.calls import Call
from envs.swe.instance import Instance

INSTANCE = Instance("astropy/astropy", "astropy__astropy-1", "abc", "p", "t", "issue", ("a",), ("b",))


def test_without_docker_or_the_harness_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(docker.shutil, "which", lambda name: None)
    with pytest.raises(EnvUnavailable, match="docker is not on PATH"):
        registry.make("swe/repair", backend="docker")
    monkeypatch.setattr(docker.shutil, "which", lambda name: "/usr/bin/docker")
    monkeypatch.setattr(docker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvUnavailable, match="pip install swebench"):
        docker.find_docker()
    monkeypatch.setattr(docker.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        docker.subprocess, "run", lambda argv, **k: subprocess.CompletedProcess(argv, 1, b"Cannot connect to the Docker daemon")
    )
    with pytest.raises(EnvUnavailable, match="daemon, which does not answer: Cannot connect"):
        docker.find_docker()


def test_the_commands():
    started = docker.run_command("docker", INSTANCE, "box")
    assert started[-3:] == ["swebench/sweb.eval.x86_64.astropy_1776_astropy-1:latest", "sleep", "86400"]
    assert "none" in started[started.index("--network") :][1]
    command = docker.exec_command("docker", "box", ["ls", "-l"], 30.0)
    assert command[:6] == ["docker", "exec", "--interactive", "--workdir", "/testbed", "box"]
    assert command[-2:] == ["ls", "-l"]
    assert command[command.index("timeout") :][:4] == ["timeout", "--signal", "KILL", "30"]


def test_the_harness_gets_the_prediction(monkeypatch, tmp_path):
    assert docker.prediction(INSTANCE, b"diff") == {
        "instance_id": "astropy__astropy-1",
        "model_patch": "diff",
        "model_name_or_path": "crl-jax",
    }
    command = docker.harness_command(INSTANCE, tmp_path, "run1", 120)
    assert command[1:3] == ["-m", "swebench.harness.run_evaluation"]
    assert dict(zip(command[3::2], command[4::2], strict=True)) == {
        "--dataset_name": str(tmp_path / "instances.json"),
        "--predictions_path": str(tmp_path / "predictions.jsonl"),
        "--instance_ids": "astropy__astropy-1",
        "--run_id": "run1",
        "--max_workers": "1",
        "--timeout": "120",
    }


def test_N12_the_harnesss_report():
    assert docker.read_report(INSTANCE, {"resolved_ids": ["astropy__astropy-1"]}).resolved
    assert not docker.read_report(INSTANCE, {"resolved_ids": [], "unresolved_ids": ["astropy__astropy-1"]}).resolved
    assert not docker.read_report(INSTANCE, {"empty_patch_ids": ["astropy__astropy-1"]}).resolved
    with pytest.raises(EnvError, match="did not grade"):
        docker.read_report(INSTANCE, {"error_ids": ["astropy__astropy-1"]})


def test_tools_and_grading_in_a_container(monkeypatch):
    called = []

    def run(argv, **options):
        called.append(argv)
        if "swebench.harness.run_evaluation" in argv:
            run_id = argv[argv.index("--run_id") + 1]
            options["cwd"].joinpath(f"crl-jax.{run_id}.json").write_text('{"resolved_ids": ["astropy__astropy-1"]}')
        return subprocess.CompletedProcess(argv, 0, b"/testbed/sub\n" if argv[-1] == "/tmp/.note" else b"said\n")

    monkeypatch.setattr(docker.subprocess, "run", run)
    bench = docker.DockerBench(docker.Container("docker", INSTANCE), INSTANCE, docker.Limits(), 120)
    assert bench.use(Call("execute_bash", {"command": "ls"})) == ("said", True)
    assert bench.use(Call("execute_bash", {"command": "pwd"})) == ("said", True)
    assert called[3][-2:] == ["/testbed/sub", "pwd"]
    assert bench.grade().resolved
    bench.close()
    bench.close()
    assert [argv[1] for argv in called].count("rm") == 1
