#!/usr/bin/env python3
"""Runs the trainer on one host of a pod, and stays with it to its end.

    worker.py start  --folder F --process-id 1 --processes 4 --coordinator 10.0.0.2:8476 -- .venv/bin/crl train ...   in the background
    worker.py run    (the same)                                                                                     in the foreground
    worker.py status --folder F          one line: crl-worker ID running | exited CODE | stopped CODE | absent
    worker.py stop   --folder F          SIGTERM, then wait, then SIGKILL

Owns: the trainer's process group, its log (F/log) and its state (F/state.json). Promises: the process count, id and coordinator come from
this start only, whatever the environment still says of an earlier one; a connection that breaks does not end the trainer; one trainer per
folder; a trainer that has made a step and then prints nothing for ``--stall-s`` seconds is made to write the stacks of its threads and
ended with code 124; nothing of it is left running. Does not: restart; what an exit code means is for the launcher to say
(``cloud/outcome.py``).

Standard library of Python 3.8 or newer: it runs on hosts before anything is installed, and alone, without the rest of this folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

NOTHING_THERE = re.compile(r"matched no objects|does not exist|not found|did not match", re.IGNORECASE)
HUNG = 124  # as timeout(1)
# what the trainer prints when a step is done, of the actor or of the extractor; before the first one it compiles, which may take long
STEP = re.compile(rb"step \d+/\d+|update +\d+  at step \d+/\d+")
# What says who is who in a pod. Left over from an earlier start it would lead to a coordinator that is gone. MEGASCALE_* joins slices into
# one program; here every role is a program of its own slice.
STALE = re.compile(r"(CRL|JAX)_(COORDINATOR\w*|NUM_PROCESSES|PROCESSES|PROCESS_ID)|MEGASCALE_\w+")
STALE_ON_A_MACHINE = re.compile(r"TPU_WORKER_(ID|HOSTNAMES)|CLOUD_TPU_TASK_ID|TPU_PROCESS_\w+")  # in a container these are always new


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(words)
    args.words = words[1:]
    args.folder.mkdir(parents=True, exist_ok=True)
    return int(args.do(args))


def start(args: argparse.Namespace) -> int:
    """Starts `run` in a session of its own; a trainer that runs already is left alone."""
    if _locked(args.folder):
        print(status_line(args.folder))
        return 0
    _remove(args.folder / "state.json")
    words = [sys.executable, os.path.abspath(__file__), "run", *args.words]
    with (args.folder / "worker.log").open("ab") as log:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    if not _until(lambda: (args.folder / "state.json").exists() or child.poll() is not None, 30):
        print("worker.py: the trainer's watcher did not come up within 30 s; see worker.log", file=sys.stderr)
        return 1
    print(status_line(args.folder))
    return 0


def run(args: argparse.Namespace) -> int:
    """Runs the trainer to its end and returns its exit code."""
    with _lock(args.folder) as mine:
        if not mine:
            print("worker.py: a trainer is running in this folder already", file=sys.stderr)
            return 1
        _remove(args.folder / "stop")
        return Watch(args).code()


def status(args: argparse.Namespace) -> int:
    print(status_line(args.folder))
    return 0


def stop(args: argparse.Namespace) -> int:
    """Ends the trainer: it saves and leaves when it can, and is killed after ``--grace-s``."""
    if _locked(args.folder):
        (args.folder / "stop").write_text(f"{args.grace_s:g}")
        state = _read_state(args.folder)
        _signal(os.kill, state.get("pid"), signal.SIGTERM)
        gone = lambda: not _locked(args.folder) and not _runs(state.get("pid"))  # noqa: E731
        if not _until(gone, args.grace_s + 15):
            _signal(os.killpg, state.get("child"), signal.SIGKILL)
            _signal(os.kill, state.get("pid"), signal.SIGKILL)
            _until(gone, 10)
    print(status_line(args.folder))
    return 0


def status_line(folder: pathlib.Path) -> str:
    """The line of `status`. A watcher that is gone without a last word was killed: code 137."""
    state = _read_state(folder)
    if not state:
        return "crl-worker 0 absent"
    if state["state"] == "running" and not _locked(folder):
        return f"crl-worker {state['id']} {_ended(folder)} 137"
    return " ".join(["crl-worker", str(state["id"]), state["state"], *([] if state["state"] == "running" else [str(state["code"])])])


@dataclasses.dataclass
class Topology:
    """Who this process is among how many, and where they meet."""

    process_id: int
    processes: int
    coordinator: str

    def words(self) -> list[str]:
        """What the trainer is told; nothing when it is alone."""
        if self.processes == 1:
            return []
        return ["--coordinator", self.coordinator, "--process-id", str(self.process_id), "--processes", str(self.processes)]


class Watch:
    """A trainer and what is watched of it."""

    def __init__(self, args: argparse.Namespace):
        self._args, self._folder = args, args.folder
        self._topology = Topology(args.process_id, args.processes, args.coordinator)
        self._heard = time.monotonic()
        self._stepped = False
        self._told: list[int] = []  # SIGTERM came; no Event: a second one inside its set() would wait for the first for ever
        self._over = threading.Event()

    def code(self) -> int:
        """Runs the trainer and returns its exit code, as a shell would give it."""
        signal.signal(signal.SIGTERM, lambda number, _: self._told.append(number))
        self._write_state("running")
        with (self._folder / "log").open("ab") as log:
            if not self._mirror("down"):
                self._note(log, "the runs in the bucket could not be fetched: not started, for it would begin again at step 0")
                return self._end(1)
            if self._told:
                self._note(log, "told to leave before the start")
                return self._end(75)
            words = [*self._args.command, *self._topology.words()]
            self._note(log, "start: " + " ".join(words))
            try:
                child = subprocess.Popen(
                    words,
                    cwd=self._args.cwd,
                    env=environment(dict(os.environ), keep_tpu=self._args.in_container),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self._note(log, f"cannot start: {error}")
                return self._end(127)
            self._write_state("running", child=child.pid)
            reader = threading.Thread(target=self._read, args=(child, log), daemon=True)
            reader.start()
            uploader = threading.Thread(target=self._mirror_often, daemon=True)
            uploader.start()
            code = self._wait(child, log)
            _signal(os.killpg, child.pid, signal.SIGKILL)  # what it started and left
            reader.join(10)
            self._over.set()
            uploader.join(600)
            self._note(log, f"end: exit code {code}")
            log.flush()
        return self._end(code)

    def _end(self, code: int) -> int:
        self._mirror("up", last=True)
        self._write_state(_ended(self._folder), code=code)
        if code not in (0, 75, 143) and self._args.hold_failure_s:
            # A sibling that was preempted takes this one down. Its own end must be seen first, or the whole counts as a failure.
            end = time.monotonic() + self._args.hold_failure_s
            while not self._told and time.monotonic() < end:
                time.sleep(0.1)
        return code

    def _wait(self, child: "subprocess.Popen[bytes]", log: Any) -> int:
        kill_at = 0.0
        hung = False
        while True:
            try:
                code = child.wait(0.1)
                return HUNG if hung else 128 - code if code < 0 else code
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            if kill_at and now > kill_at:
                self._note(log, "it does not end: SIGKILL")
                _signal(os.killpg, child.pid, signal.SIGKILL)
                kill_at = now + 60
            elif self._told and not kill_at:
                grace_s = _asked_grace(self._folder) or self._args.grace_s
                self._note(log, f"told to leave: SIGTERM, and SIGKILL in {grace_s:g} s")
                _signal(os.kill, child.pid, signal.SIGTERM)
                kill_at = now + grace_s
            elif self._stepped and not kill_at and self._args.stall_s and now - self._heard > self._args.stall_s:
                self._note(log, f"no output for {self._args.stall_s:g} s after a step: stacks of all threads, then the end")
                _signal(os.kill, child.pid, signal.SIGABRT)
                hung, kill_at = True, now + min(10.0, self._args.stall_s)

    def _read(self, child: "subprocess.Popen[bytes]", log: Any) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self._heard = time.monotonic()
            self._stepped = self._stepped or bool(STEP.match(line))
            log.write(line)
            log.flush()
            if self._args.echo:
                sys.stdout.buffer.write(line)
                sys.stdout.flush()

    def _note(self, log: Any, text: str) -> None:
        line = f"worker {self._topology.process_id} of {self._topology.processes}: {text}\n"
        log.write(line.encode())
        log.flush()
        print(line, end="", flush=True)

    def _write_state(self, state: str, **more: int) -> None:
        path = self._folder / "state.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"state": state, "id": self._topology.process_id, "pid": os.getpid(), **more}))
        os.replace(new, path)

    def _mirror_often(self) -> None:
        while not self._over.wait(self._args.mirror_s):
            self._mirror("up")

    def _mirror(self, way: str, *, last: bool = False) -> bool:
        """Copies; says what failed. An empty bucket is no failure."""
        if way == "down" and self._args.runs:
            os.makedirs(self._args.runs, exist_ok=True)
        failures = []
        for words in mirror_commands(self._args.bucket, self._folder, self._args.runs, self._topology.process_id, way, last=last):
            try:
                done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800)
            except (OSError, subprocess.TimeoutExpired) as error:
                failures.append(str(error))
                continue
            if done.returncode and not (way == "down" and NOTHING_THERE.search(done.stderr)):
                failures.append(f"exit code {done.returncode} from {' '.join(words)}: {done.stderr.strip()[-300:]}")
        for failure in failures:
            print(f"worker.py: {failure}", flush=True)
        return not failures


def environment(found: "dict[str, str]", *, keep_tpu: bool) -> "dict[str, str]":
    """The trainer's environment: without what an earlier start left about the pod, with Python unbuffered and its stacks on demand."""
    kept = {k: v for k, v in found.items() if not STALE.fullmatch(k) and (keep_tpu or not STALE_ON_A_MACHINE.fullmatch(k))}
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def mirror_commands(bucket: str, folder: pathlib.Path, runs: str, process_id: int, way: str, *, last: bool) -> list[list[str]]:
    """The copies between this host and ``bucket`` ("" = none): every host's log goes up; process 0 also sends the folder of runs, and every
    host fetches it before it starts. Manifests go in a second pass, after the arrays they vouch for; the bank's file only when nobody
    writes it.
    """
    if not bucket:
        return []
    sync = ["gcloud", "storage", "rsync", "--recursive"]
    if way == "down":
        return [[*sync, f"{bucket}/runs", runs]] if runs else []
    words = [["gcloud", "storage", "cp", str(folder / "log"), f"{bucket}/logs/worker-{process_id}.log"]]
    if runs and process_id == 0:
        # gcloud matches from the start of the path
        unsafe = r"(.*/)?lock$" if last else r"(.*/)?(lock|bank\.sqlite[^/]*)$"
        words.append([*sync, "--exclude", unsafe + r"|(.*/)?manifest\.json$", runs, f"{bucket}/runs"])
        words.append([*sync, "--exclude", unsafe, runs, f"{bucket}/runs"])
    return words


def _read_state(folder: pathlib.Path) -> "dict[str, Any]":
    try:
        return json.loads((folder / "state.json").read_text())
    except FileNotFoundError:
        return {}


def _ended(folder: pathlib.Path) -> str:
    """Whether an end was asked for by `stop`, or came by itself."""
    return "stopped" if (folder / "stop").exists() else "exited"


def _asked_grace(folder: pathlib.Path) -> float:
    """The seconds that `stop` grants; 0 when it was not `stop` that sent the signal."""
    try:
        return float((folder / "stop").read_text())
    except (FileNotFoundError, ValueError):
        return 0.0


def _remove(path: pathlib.Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


@contextlib.contextmanager
def _lock(folder: pathlib.Path) -> Iterator[bool]:
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _locked(folder: pathlib.Path) -> bool:
    with _lock(folder) as mine:
        return not mine


def _runs(pid: int | None) -> bool:
    """Whether a process is there and has not ended (one whose exit code nobody collects stays listed)."""
    if not pid:
        return False
    try:
        return ") Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _until(true: Any, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _signal(send: Any, pid: int | None, number: int) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="worker.py", description="Runs the trainer on one host of a pod.")
    verbs = top.add_subparsers(required=True, dest="verb")
    for name, do in (("start", start), ("run", run), ("status", status), ("stop", stop)):
        verb = verbs.add_parser(name)
        verb.set_defaults(do=do)
        verb.add_argument("--folder", type=pathlib.Path, required=True, help="of this run on this host: log, state, lock")
        verb.add_argument("--grace-s", type=float, default=300.0, help="from SIGTERM to SIGKILL")
        if name in ("start", "run"):
            verb.add_argument("--process-id", type=int, required=True)
            verb.add_argument("--processes", type=int, required=True)
            verb.add_argument("--coordinator", required=True, help="HOST:PORT of process 0")
            verb.add_argument("--cwd", default=".", help="the project's folder")
            verb.add_argument("--stall-s", type=float, default=1800.0, help="silence after a step that means it hangs; 0 = never")
            verb.add_argument("--hold-failure-s", type=float, default=0.0, help="wait this long with a failure before ending with it")
            verb.add_argument("--bucket", default="", help="gs://BUCKET/FOLDER for logs and runs")
            verb.add_argument("--runs", default="", help="the folder of runs to keep in the bucket")
            verb.add_argument("--mirror-s", type=float, default=120.0, help="from one copy to the bucket to the next")
            verb.add_argument("--echo", action="store_true", help="print the trainer's output too (containers)")
            verb.add_argument("--in-container", action="store_true", help="the environment was made for this start: keep its TPU_*")
            verb.add_argument("command", nargs="+", help="the trainer, after --")
    return top


if __name__ == "__main__":
    sys.exit(main())
