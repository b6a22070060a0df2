"""The same episode in SWE-bench's own containers, graded by its own harness.

Owns: the commands for Docker and for the ``swebench`` harness, the prediction file, and reading the harness's report.
Promises: without Docker, its daemon or ``swebench``: ``EnvUnavailable`` that says what is missing. Containers have no network, and bounds
on memory and processes; they are removed when the episode is closed.
Does not: pull or build images; the harness's documentation says how. The tests reach as far as the commands it makes: they have no daemon.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.api import EnvError, EnvUnavailable
from envs.swe.bounds import Limits
from envs.swe.grading import Verdict
from envs.swe.instance import Instance
from envs.swe.layout import TREE
from envs.swe.sandbox import Finished
from envs.swe.tools import Tools

_LIFE_S = "86400"  # of a container: an episode is shorter, and one whose worker was killed ends by itself
MODEL = "crl-jax"


class Docker:
    """As ``Workplace``. Raises ``EnvUnavailable``."""

    def __init__(self, command_s: int, grading_s: int) -> None:
        self._program = find_docker()
        self._limits, self._grading_s = Limits(wall_s=float(command_s)), grading_s

    def open(self, instance: Instance) -> DockerBench:
        """Start the container of an instance. Raises ``EnvError``."""
        return DockerBench(Container(self._program, instance), instance, self._limits, self._grading_s)


def find_docker() -> str:
    """Docker's program, with a daemon that answers and the harness installed. Raises ``EnvUnavailable``."""
    program = shutil.which("docker")
    if program is None:
        raise EnvUnavailable("swe: backend=docker needs Docker, and docker is not on PATH: see docs.docker.com, or use backend=auto")
    if importlib.util.find_spec("swebench") is None:
        raise EnvUnavailable("swe: backend=docker is graded by SWE-bench's harness, which is not installed: pip install swebench")
    answer = _call([program, "version", "--format", "{{.Server.Version}}"], 20.0)
    if answer.returncode != 0:
        said = answer.stdout.decode(errors="replace").strip()[-200:]
        raise EnvUnavailable(f"swe: backend=docker needs Docker's daemon, which does not answer: {said}")
    return program


def image_of(instance: Instance) -> str:
    """The image that SWE-bench publishes for an instance."""
    return f"swebench/sweb.eval.x86_64.{instance.instance_id.lower().replace('__', '_1776_')}:latest"


def run_command(program: str, instance: Instance, name: str) -> list[str]:
    """Starts a container that waits."""
    bounds = ["--network", "none", "--memory", "8g", "--pids-limit", "512", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    return [program, "run", "--detach", "--rm", "--init", "--name", name, *bounds, image_of(instance), "sleep", _LIFE_S]


def exec_command(program: str, name: str, argv: Sequence[str], wall_s: float) -> list[str]:
    """Runs ``argv`` in the container, and kills it when its time is up."""
    inside = [
        "timeout",
        "--signal",
        "KILL",
        f"{wall_s:g}",
        "bash",
        "-c",
        'exec 9>/tmp/.note; "$@" 2>&1 | head -c 20000000; exit ${PIPESTATUS[0]}',
        "bash",
        *argv,
    ]
    return [program, "exec", "--interactive", "--workdir", TREE, name, *inside]


def prediction(instance: Instance, patch: bytes) -> dict[str, str]:
    """What the harness reads about an episode."""
    return {"instance_id": instance.instance_id, "model_patch": patch.decode(errors="replace"), "model_name_or_path": MODEL}


def harness_command(instance: Instance, folder: Path, run_id: str, grading_s: int) -> list[str]:
    """Grades the predictions in ``folder``, which holds ``instances.json`` too."""
    files = ["--dataset_name", str(folder / "instances.json"), "--predictions_path", str(folder / "predictions.jsonl")]
    what = ["--instance_ids", instance.instance_id, "--run_id", run_id, "--max_workers", "1", "--timeout", str(grading_s)]
    return [sys.executable, "-m", "swebench.harness.run_evaluation", *files, *what]


def read_report(instance: Instance, report: Mapping[str, Any]) -> Verdict:
    """The harness's summary of a run with one instance. Raises ``EnvError`` when it did not come to a verdict."""
    name = instance.instance_id
    if name in report.get("resolved_ids", ()):
        return Verdict(True, ())
    if name in report.get("unresolved_ids", ()) or name in report.get("empty_patch_ids", ()):
        return Verdict(False, (*instance.fail_to_pass, *instance.pass_to_pass))
    raise EnvError(f"swe: SWE-bench's harness did not grade {name}: {json.dumps(dict(report))[:300]}")


class Container:
    """A ``Runner`` in a container."""

    def __init__(self, program: str, instance: Instance) -> None:
        self._program, self._name = program, f"crl-swe-{uuid.uuid4().hex[:12]}"
        self.python = "python3"
        started = _call(run_command(program, instance, self._name), 300.0)
        if started.returncode != 0:
            said = started.stdout.decode(errors="replace").strip()[-300:]
            raise EnvError(f"swe: the container of {instance.instance_id} ({image_of(instance)}) did not start: {said}")

    def run(self, argv: Sequence[str], limits: Limits, *, stdin: bytes = b"") -> Finished:
        """As ``Runner``; the container bounds memory and processes."""
        began = time.monotonic()
        done = _call(exec_command(self._program, self._name, argv, limits.wall_s), limits.wall_s + 30.0, stdin)
        late = done.returncode == 137
        cut = len(done.stdout) - limits.head - limits.tail
        gap = f"\n[... {cut} bytes left out ...]\n".encode() if limits.tail else b""
        output = done.stdout if cut <= 0 else done.stdout[: limits.head] + gap + done.stdout[len(done.stdout) - limits.tail :]
        note = _call([self._program, "exec", self._name, "cat", "/tmp/.note"], 30.0)
        code = None if late else done.returncode
        return Finished(output, max(0, cut), code, "time" if late else "", note.stdout, time.monotonic() - began)

    def remove(self) -> None:
        """End the container."""
        _call([self._program, "rm", "--force", self._name], 60.0)


class DockerBench(Tools):
    """Tools in a container, graded by the harness in containers of its own."""

    def __init__(self, container: Container, instance: Instance, limits: Limits, grading_s: int) -> None:
        super().__init__(container, limits)
        self._container, self._instance, self._grading_s = container, instance, grading_s
        self._open = True

    def grade(self) -> Verdict:
        """As ``Workbench``."""
        argv = ["bash", "-c", "git add -A && git -c core.fileMode=false diff --cached --binary --no-color HEAD"]
        taken = self._container.run(argv, Limits(wall_s=120.0, head=4_000_000, tail=0))
        if taken.code != 0 or taken.dropped:
            return Verdict(False, (*self._instance.fail_to_pass, *self._instance.pass_to_pass), "the changes cannot be told as a patch")
        run_id = uuid.uuid4().hex[:12]
        with tempfile.TemporaryDirectory(prefix="swe-harness-") as home:
            folder = Path(home)
            (folder / "instances.json").write_text(json.dumps([self._instance.record()]), encoding="utf-8")
            (folder / "predictions.jsonl").write_text(json.dumps(prediction(self._instance, taken.output)) + "\n", encoding="utf-8")
            said = _call(harness_command(self._instance, folder, run_id, self._grading_s), self._grading_s + 600.0, cwd=folder)
            for report in folder.glob(f"*.{run_id}.json"):
                return read_report(self._instance, json.loads(report.read_text(encoding="utf-8")))
        raise EnvError(f"swe: SWE-bench's harness wrote no report: {said.stdout.decode(errors='replace').strip()[-300:]}")

    def close(self) -> None:
        """Remove the container."""
        if self._open:
            self._open = False
            with contextlib.suppress(EnvError):
                self._container.remove()


def _call(command: list[str], timeout_s: float, stdin: bytes = b"", cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run Docker's or the harness's program. Raises ``EnvError`` when it does not end."""
    try:
        return subprocess.run(
            command, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False, cwd=cwd
        )
    except subprocess.TimeoutExpired as late:
        raise EnvError(f"swe: {' '.join(command[:3])} did not end in {timeout_s:g} s") from late
