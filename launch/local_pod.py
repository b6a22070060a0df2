"""A pod on this machine: the processes that a pod's hosts run, with virtual CPU devices in the place of chips.

    the bank:         crl bank serve RECIPE
    two jobs, each of --processes processes under launch/worker.py, as on a host:
      crl train RECIPE --role actor|extractor --coordinator ... --process-id I --processes N

Owns: their start, their watch and their end. Promises: a job that ends badly is started again with --resume, at most ``--max-failures``
times (an end by preemption, code 75, is not counted); when this ends, for whatever reason, none of the processes is left; every wait has a
deadline. Does not: reach beyond this machine; a pod's jobs and bank are started by ``tpu_vm`` and ``gke``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import fcntl
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from launch.cloud.commands import Commands
from launch.cloud.errors import LaunchError, Refused
from launch.cloud.names import all_checked, checked
from launch.cloud.outcome import PREEMPTED_CODES

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROLES = ("actor", "extractor")
POLL_S = 0.2
SPARE_S = 15.0  # a host's watcher kills its trainer at the end of the grace period: a watcher that is killed sooner leaves it running
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
WRONG = 2  # a trainer's exit code for settings that cannot be run


@dataclasses.dataclass(frozen=True)
class Pod:
    """What is started. ``coordinators`` are the ports where the processes of each job meet, ``listen`` those of the extractor's servers."""

    recipe: str
    settings: tuple[str, ...]
    folder: pathlib.Path
    processes: int
    bank_port: int
    coordinators: dict[str, int]
    listen: tuple[int, ...]
    grace_s: float
    stall_s: float

    def bank(self) -> list[str]:
        """The command of the bank."""
        servers = ",".join(f"http://127.0.0.1:{port}" for port in self.listen)
        where = [f"run.dir={self.folder}", "run.name=bank", f"extractor.server.url={servers}", "extractor.serve_tensor=0"]
        return [*_crl("bank", "serve"), self.recipe, *self.settings, *where, "--port", str(self.bank_port)]

    def trainer(self, role: str, index: int, *, resume: bool) -> list[str]:
        """The command of one process of a job: the host's watcher, and what it runs."""
        watch = ["--folder", str(self.folder / "hosts" / f"{role}-{index}"), "--process-id", str(index), "--processes", str(self.processes)]
        watch += ["--coordinator", f"127.0.0.1:{self.coordinators[role]}", "--cwd", str(ROOT)]
        watch += ["--grace-s", f"{self.grace_s:g}", "--stall-s", f"{self.stall_s:g}"]
        own = [f"run.dir={self.folder}", f"run.name={role}", f"bank.server.url=grpc://127.0.0.1:{self.bank_port}", "bank.server.run=pod"]
        own.append(f"run.preempt_grace_s={0.9 * self.grace_s:g}")  # it leaves with 75 before its watcher kills it
        if role == "extractor":
            own.append(f"extractor.listen.port={self.listen[index]}")
        crl = [*_crl("train"), self.recipe, *self.settings, *own, "--role", role, *(["--resume"] if resume else [])]
        echo = ["--echo"] if (role, index) == ("actor", 0) else []  # the lines of the run, for whoever started it
        return [sys.executable, str(ROOT / "launch" / "worker.py"), "run", *watch, *echo, "--", *crl]


class Job:
    """The processes of one role."""

    def __init__(self, pod: Pod, role: str, environment: dict[str, str], commands: Commands) -> None:
        self.role = role
        self._pod, self._environment, self._commands = pod, environment, commands
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *, resume: bool) -> None:
        """Starts every process of the job."""
        words = [self._pod.trainer(self.role, i, resume=resume) for i in range(self._pod.processes)]
        self._running = [_started(argv, self._environment, None, self._commands) for argv in words]

    def codes(self) -> list[int | None]:
        """The exit code of each process; None while it runs."""
        return [process.poll() for process in self._running]

    def tell(self) -> None:
        """Tells the processes to save and leave."""
        for process in self._running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def settle(self, limit_s: float) -> list[int | None]:
        """After a bad end of one process: how those ended that did so by themselves within ``limit_s``; the others are made to."""
        _wait(self._running, limit_s)
        ended = self.codes()
        self.stop(self._pod.grace_s + SPARE_S)
        return ended

    def stop(self, limit_s: float) -> list[int | None]:
        """Tells the processes to save and leave, and kills what has not left after ``limit_s``."""
        self.tell()
        _wait(self._running, limit_s)
        for process in self._running:
            _end(process)
        return self.codes()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when the run is over, 75 when it was stopped and can be resumed, else the code of the process that failed."""
    args = _parser().parse_args(argv)
    commands = Commands(dry_run=args.dry_run)
    try:
        return _run(args, commands)
    except Refused as error:
        print(f"local_pod: {error}", file=sys.stderr)
        return 2
    except LaunchError as error:
        print(f"local_pod: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, commands: Commands) -> int:
    recipe = checked("recipe", args.recipe)
    if not (ROOT / recipe).is_file():
        raise Refused(f"recipe {recipe} is not in {ROOT}: give one, e.g. configs/local_pod.yaml")
    all_checked("setting", args.settings)
    if args.processes < 1 or args.devices < 1:
        raise Refused(f"--processes {args.processes} and --devices {args.devices} must be 1 or more")
    for name, limit_s in vars(args).items():
        if name.endswith("_s") and not limit_s >= 0:
            raise Refused(f"--{name.replace('_', '-')} {limit_s:g}: give 0 or more seconds")
    folder = pathlib.Path(args.folder).absolute()
    ports = _free_ports(3 + args.processes)
    pod = Pod(
        recipe=recipe,
        settings=tuple(args.settings),
        folder=folder,
        processes=args.processes,
        bank_port=ports[0],
        coordinators=dict(zip(ROLES, ports[1:3], strict=True)),
        listen=tuple(ports[3:]),
        grace_s=args.grace_s,
        stall_s=args.stall_s,
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(args.devices)}
    jobs = [Job(pod, role, environment, commands) for role in ROLES]
    if args.dry_run:
        commands.say("each in the background, with JAX_PLATFORMS=cpu and JAX_NUM_CPU_DEVICES=" + str(args.devices))
        for words in (pod.bank(), *(pod.trainer(role, i, resume=args.resume) for role in ROLES for i in range(args.processes))):
            commands.run(words, timeout_s=1)
        return 0
    _check(recipe, args.settings, environment)
    with _told_to_stop() as told, _claimed(folder), _bank(pod, environment, commands) as bank:
        try:
            return _watch(jobs, bank, args, told)
        finally:
            _stop(jobs, args.grace_s + SPARE_S)


def _check(recipe: str, settings: Sequence[str], environment: dict[str, str]) -> None:
    """Raises Refused for settings that no process could run, before any is started."""
    words = [*_crl("config", "check"), recipe, *settings]
    found = subprocess.run(words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    if found.returncode:
        raise Refused(found.stderr.strip().removeprefix("crl: "))


def _watch(jobs: Sequence[Job], bank: subprocess.Popen[bytes], args: argparse.Namespace, told: list[int]) -> int:
    """Until the actor's job is over and the extractor's has seen it."""
    failures, end, extractor_end = 0, time.monotonic() + args.timeout_s, 0.0
    for job in jobs:
        job.start(resume=args.resume)
    while True:
        if told:
            codes = _stop(jobs, args.grace_s + SPARE_S)
            print(f"local_pod: stopped, exit codes {codes}: the same command with --resume goes on", flush=True)
            return 75
        if bank.poll() is not None:
            raise LaunchError(f"the bank ended with code {bank.returncode}: see bank.log in {args.folder}")
        if time.monotonic() > end:
            raise LaunchError(f"not over after --timeout-s {args.timeout_s:g}; --resume goes on")
        codes = {job.role: job.codes() for job in jobs}
        if all(code == 0 for found in codes.values() for code in found):
            print("local_pod: the run is over", flush=True)
            return 0
        for job in jobs:
            bad = [code for code in codes[job.role] if code not in (None, 0)]
            if not bad:
                continue
            everyones = job.settle(args.siblings_s)
            preempted = any(code in PREEMPTED_CODES for code in everyones)
            failures += not preempted
            print(f"local_pod: the {job.role}'s job {'was stopped' if preempted else 'failed'}, exit codes {everyones}", flush=True)
            if WRONG in everyones or failures > args.max_failures:
                why = "another start would end the same way" if WRONG in everyones else f"{args.max_failures} retries are used up"
                print(f"local_pod: {why}: see hosts/{job.role}-*/log in {args.folder}", file=sys.stderr)
                return WRONG if WRONG in everyones else next(int(code) for code in bad if code is not None)
            job.start(resume=True)
        if all(code == 0 for code in codes["actor"]):
            extractor_end = extractor_end or time.monotonic() + args.finish_s
            if time.monotonic() > extractor_end:
                raise LaunchError(f"the extractor's job did not end within {args.finish_s:g} s of the actor's")
        time.sleep(POLL_S)


def _stop(jobs: Sequence[Job], limit_s: float) -> list[int | None]:
    """All jobs at once."""
    for job in jobs:
        job.tell()
    return [code for job in jobs for code in job.stop(limit_s)]


@contextlib.contextmanager
def _claimed(folder: pathlib.Path) -> Iterator[None]:
    """The folder, made if needed, for one pod at a time; the lock goes with this process. Raises Refused before anything was started."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / "lock").open("a"))
        except OSError as error:
            raise Refused(f"cannot write in {folder} ({error.strerror}): give another --folder") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(f"another local_pod runs in {folder}: wait for its end, stop it, or give another --folder") from error
        yield


@contextlib.contextmanager
def _bank(pod: Pod, environment: dict[str, str], commands: Commands) -> Iterator[subprocess.Popen[bytes]]:
    with (pod.folder / "bank.log").open("ab") as log:
        bank = _started(pod.bank(), environment, log.fileno(), commands)
        try:
            yield bank
        finally:
            bank.send_signal(signal.SIGTERM)
            _wait([bank], 45)
            _end(bank)


@contextlib.contextmanager
def _told_to_stop() -> Iterator[list[int]]:
    """The signals that came; they end nothing by themselves."""
    told: list[int] = []
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as by nohup; else a closed terminal would leave the processes running
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda found, _: told.append(found)) for number in numbers}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _started(argv: Sequence[str], environment: dict[str, str], log: int | None, commands: Commands) -> subprocess.Popen[bytes]:
    """In a session of its own, so that a terminal's SIGINT comes to this process alone."""
    commands.say("start: " + " ".join(argv[-12:]))
    stop = _stopped_with(os.getpid()) if sys.platform == "linux" else None
    return subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=stop
    )


def _stopped_with(parent: int) -> Callable[[], None]:
    """What a child calls before it begins, so that it is told to stop when this process is killed, which cannot do it then (Linux)."""
    prctl = ctypes.CDLL(None).prctl  # looked up here: a child between fork and exec should do little

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills it with all it started, if it is still there."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _crl(*words: str) -> list[str]:
    return [sys.executable, "-m", "crl_jax.cli", *words]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="local_pod.sh", description="Runs a pod's processes on this machine, with virtual CPU devices.")
    top.add_argument(
        "recipe", nargs="?", default="configs/local_pod.yaml", help="its meshes must fit: processes times devices for each role"
    )
    top.add_argument("settings", nargs="*", metavar="section.key=value")
    top.add_argument("--folder", default="runs/local_pod", help="the runs (actor, extractor, bank) and each host's log")
    top.add_argument("--processes", type=int, default=2, help="of each job")
    top.add_argument("--devices", type=int, default=1, help="virtual CPU devices of each process")
    top.add_argument("--resume", action="store_true", help="go on with the runs in --folder")
    top.add_argument("--max-failures", type=int, default=3, help="ends with an error after which a job is started again")
    top.add_argument("--grace-s", type=float, default=60.0, help="from SIGTERM to SIGKILL of a trainer")
    top.add_argument("--siblings-s", type=float, default=90.0, help="from a bad end of one process to that of the job's others")
    top.add_argument("--finish-s", type=float, default=900.0, help="from the end of the actor's job to that of the extractor's")
    top.add_argument("--stall-s", type=float, default=1800.0, help="silence after a step that means a trainer hangs")
    top.add_argument("--timeout-s", type=float, default=24 * 3600.0, help="of the whole")
    top.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    return top


if __name__ == "__main__":
    sys.exit(main())
