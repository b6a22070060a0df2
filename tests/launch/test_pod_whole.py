"""The pod command with hosts that are real: their shells and processes run here, only gcloud is a stand-in."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A pod that is ACTIVE, with two hosts: folders home-0 and home-1, whose shells run what ssh is given.
GCLOUD = f"""#!{sys.executable} -IS
import json, os, subprocess, sys
here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
words = dict(word.split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
if "queued-resources" in sys.argv:
    print(json.dumps({{"state": {{"state": "ACTIVE"}}}}))
elif "describe" in sys.argv:
    print(json.dumps({{"networkEndpoints": [{{"ipAddress": "10.0.0.7"}}, {{"ipAddress": "10.0.0.8"}}]}}))
elif "ssh" in sys.argv:
    hosts = "01" if words["--worker"] == "all" else words["--worker"]
    shells = [subprocess.Popen(words["--command"], shell=True, cwd=here + "/home-" + host) for host in hosts]
    sys.exit(max(shell.wait() for shell in shells))
"""
# Host 0 is told to leave in the first start and host 1 fails for it; the second start is done.
CRL = f"""#!{sys.executable} -IS
import json, sys
with open("told", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
first = "--resume" not in sys.argv
sys.exit((75 if "0" in sys.argv[sys.argv.index("--process-id") + 1] else 1) if first else 0)
"""
SETTING = 'run.name=it\'s a; touch x $(touch y) \\ "z"  *'


def test_T05_T03_words_arrive_as_they_were_given_and_a_preempted_run_is_resumed(tmp_path: pathlib.Path) -> None:
    for host in (0, 1):
        crl = tmp_path / f"home-{host}" / "crl_jax" / ".venv" / "bin" / "crl"
        crl.parent.mkdir(parents=True)
        crl.write_text(CRL)
        crl.chmod(0o755)
        (tmp_path / f"home-{host}" / "worker.py").write_bytes((ROOT / "launch" / "worker.py").read_bytes())
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.parent.mkdir()
    gcloud.write_text(GCLOUD)
    gcloud.chmod(0o755)
    program = "import pathlib, sys; from launch.tpu_vm import pod; sys.exit(pod.main(sys.argv[2:], records=pathlib.Path(sys.argv[1])))"
    machine = ["--accelerator-type", "v5litepod-16", "--runtime-version", "v2-alpha-tpuv5-lite", "--zone", "us-west4-a"]
    run = ["run", "--name", "learner", *machine, "--poll-s", "0.2", "--max-failures", "0", "configs/smoke.yaml", SETTING]
    environment = {**os.environ, "PATH": f"{gcloud.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(tmp_path / "records"), *run]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "preempted: host 0 exited 75, host 1 exited 1" in done.stdout
    for host in (0, 1):
        home = tmp_path / f"home-{host}"
        first, second = (json.loads(line) for line in (home / "crl_jax" / "told").read_text().splitlines())
        topology = ["--coordinator", "10.0.0.7:8476", "--process-id", str(host), "--processes", "2"]
        assert first == ["train", "configs/smoke.yaml", SETTING, *topology]
        assert second == ["train", "configs/smoke.yaml", SETTING, "--resume", *topology]
        assert not any((home / folder / name).exists() for folder in (".", "crl_jax") for name in ("x", "y"))
