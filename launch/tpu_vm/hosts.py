"""The hosts of a pod that is ACTIVE.

Owns: bringing the code to them, starting the trainer on each, asking how it is, its log, its end. Promises: who is process 0, how many
there are and where they meet is read from the pod at every start and kept nowhere; what a host's shell reads is put together by
``shlex.join`` from words; the trainer does not depend on the connection that started it. Does not: decide what happens after an end
(``supervise``).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shlex
import tarfile
import tempfile

from launch.cloud.commands import Commands, written
from launch.cloud.cost import slice_of
from launch.cloud.errors import LaunchError
from launch.cloud.outcome import HostState, read_states
from launch.tpu_vm.queued import QueuedPod, Time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = "crl_jax"  # the project's folder in the home of a host
COPY_S, SETUP_S, SSH_S = 1800.0, 3600.0, 180.0
NO_CONNECTION, ATTEMPTS, RETRY_S = 255, 6, 20.0  # ssh's exit code; how often, and how long (s) between
COORDINATOR_PORT = 8476  # jax.distributed's usual one


@dataclasses.dataclass(frozen=True)
class Training:
    """What is run: a recipe with settings, and how long to wait for what."""

    recipe: str
    settings: tuple[str, ...] = ()
    role: str | None = None
    bucket: str | None = None
    runs: str = "runs"
    stall_s: float = 1800.0
    grace_s: float = 300.0

    def words(self, *, resume: bool) -> list[str]:
        """The trainer's command, without who is who."""
        role = ["--role", self.role] if self.role else []
        return [".venv/bin/crl", "train", self.recipe, *self.settings, *role, *(["--resume"] if resume else [])]


class Hosts:
    """All hosts of the pod in ``zone``."""

    def __init__(self, pod: QueuedPod, commands: Commands, time: Time, zone: str):
        self._pod, self._commands, self._time, self._zone, self._name = pod, commands, time, zone, pod.wanted.name
        self.folder = f"launch-{self._name}"  # in the home of a host: log, state

    def sync(self) -> None:
        """Bring this tree's files (what git knows or would add) to every host and set the environment up there. Raises LaunchError."""
        with tempfile.TemporaryDirectory() as folder:
            archive = pathlib.Path(folder) / f"{PROJECT}.tar.gz"
            self._pack(archive)
            copied = [str(archive), str(ROOT / "launch/tpu_vm/unpack.sh"), str(ROOT / "launch/worker.py")]
            self._reach([self._gcloud("scp", *copied, f"{self._name}:", "--worker=all")], timeout_s=COPY_S)
        self._reach([self._ssh("all", ["bash", "unpack.sh", archive.name, PROJECT])], timeout_s=SETUP_S)

    def start(self, training: Training, *, resume: bool) -> int:
        """Start the trainer on every host; returns how many there are. One that runs already is left alone. Raises LaunchError."""
        accelerator = self._pod.wanted.accelerator_type
        hosts = slice_of(accelerator).hosts if self._commands.dry_run and accelerator else 1
        addresses = self._pod.addresses(self._zone, pretend=hosts)
        self._commands.say(
            f"start: {len(addresses)} processes, coordinator {addresses[0]}:{COORDINATOR_PORT}{', --resume' if resume else ''}"
        )
        commands = [self._ssh(str(i), self._start_words(training, addresses, i, resume)) for i in range(len(addresses))]
        self._reach(commands, timeout_s=SSH_S)
        return len(addresses)

    def states(self) -> dict[int, HostState]:
        """How each host's trainer is; hosts that do not answer are missing."""
        argv = self._ssh("all", ["python3", "worker.py", "status", "--folder", self.folder])
        try:
            done = self._commands.run(argv, timeout_s=SSH_S, check=False, quiet=True)
        except LaunchError as error:
            self._commands.say(f"hosts of {self._name}: {error}")
            return {}
        return read_states(done.out)

    def stop(self, *, grace_s: float) -> None:
        """End the trainer on every host: SIGTERM, so that it saves; SIGKILL after ``grace_s``."""
        words = ["python3", "worker.py", "stop", "--folder", self.folder, "--grace-s", f"{grace_s:g}"]
        try:
            self._commands.run(self._ssh("all", words), timeout_s=grace_s + SSH_S, check=False)
        except LaunchError as error:
            self._commands.say(f"hosts of {self._name}: {error}")

    def log(self, worker: int, *, lines: int) -> str:
        """The end of one host's log. Raises LaunchError."""
        words = ["tail", "-n", str(lines), f"{self.folder}/log"]
        return self._commands.run(self._ssh(str(worker), words), timeout_s=SSH_S, quiet=True).out

    def _reach(self, commands: list[list[str]], *, timeout_s: float) -> None:
        """Runs commands that may be repeated; those that could not connect are, a few times: a new host is ACTIVE before it lets one in."""
        for attempt in range(1, ATTEMPTS + 1):
            results = self._commands.run_all(commands, timeout_s=timeout_s)
            failed = [(commands[i], done) for i, done in enumerate(results) if done.code != 0]
            if not failed:
                return
            argv, done = next(((a, d) for a, d in failed if d.code != NO_CONNECTION), failed[0])
            if done.code != NO_CONNECTION or attempt == ATTEMPTS:
                raise LaunchError(f"exit code {done.code} from: {written(argv)}\n{done.last_words}")
            commands = [argv for argv, _ in failed]
            self._time.sleep(RETRY_S)

    def _start_words(self, training: Training, addresses: list[str], process_id: int, resume: bool) -> list[str]:
        runs = training.runs if training.runs.startswith("/") else f"{PROJECT}/{training.runs}"
        mirrored = ["--bucket", training.bucket, "--runs", runs] if training.bucket else []
        return [
            *("python3", "worker.py", "start", "--folder", self.folder, "--cwd", PROJECT),
            *("--process-id", str(process_id), "--processes", str(len(addresses))),
            *("--coordinator", f"{addresses[0]}:{COORDINATOR_PORT}"),
            *("--stall-s", f"{training.stall_s:g}", "--grace-s", f"{training.grace_s:g}", *mirrored),
            *("--", *training.words(resume=resume)),
        ]

    def _ssh(self, worker: str, words: list[str]) -> list[str]:
        return self._gcloud("ssh", self._name, f"--worker={worker}", f"--command={shlex.join(words)}")

    def _gcloud(self, verb: str, *words: str) -> list[str]:
        internal = ["--internal-ip"] if self._pod.wanted.internal_ip else []
        return self._pod.gcloud("tpu-vm", verb, *words, *internal, zone=self._zone)

    def _pack(self, archive: pathlib.Path) -> None:
        argv = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = self._commands.run(argv, timeout_s=60, quiet=True).out
        if self._commands.dry_run:
            self._commands.say(f"pack these files into {archive.name}")
            return
        with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
            for name in sorted(filter(None, listed.split("\0"))):
                if os.path.lexists(ROOT / name):  # deleted, but not yet in a commit
                    tar.add(ROOT / name, arcname=name, recursive=False)
