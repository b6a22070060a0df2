"""The folder of a run: whose it is and what may be done with it.

Owns: ``dir/name``, its ``config.yaml`` and its lock. Promises: one process trains in a folder at a time, also after a kill (the lock goes
with the process) and says which; a start that failed leaves the folder free for the next try. Does not: know what the files hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import pathlib
import socket
from collections.abc import Iterator

from crl_jax.checkpoint.store import latest
from crl_jax.config.load import to_yaml
from crl_jax.config.parse import ConfigError
from crl_jax.config.roles import ListenConfig
from crl_jax.config.schema import Config
from crl_jax.errors import UserError
from crl_jax.processes import Processes
from crl_jax.run_files import CONFIG

LOCK = "lock"


def of(config: Config) -> pathlib.Path:
    """Where the files of the run lie."""
    return pathlib.Path(config.run.dir) / config.run.name


@contextlib.contextmanager
def claim(config: Config, processes: Processes | None = None, *, resume: bool) -> Iterator[pathlib.Path]:
    """The run's folder, made if needed and locked inside the block; in a job of several processes by the first of them.

    Raises ConfigError when it cannot be written, another run trains in it, it holds a run and ``resume`` is False, or another process of
    the job does not see it.
    """
    folder, processes = of(config), processes or Processes.alone()
    with contextlib.ExitStack() as stack:
        if processes.first:
            stack.enter_context(_claimed(folder, resume=resume))
        settings = dataclasses.replace(config, extractor=dataclasses.replace(config.extractor, listen=ListenConfig()))
        everyones = processes.gather(hashlib.sha256(to_yaml(settings).encode()).hexdigest(), "the configuration")
        if len(set(everyones)) > 1:
            raise ConfigError("the processes of the job have different configurations: start all with the same file and settings")
        seen = processes.gather((folder / LOCK).exists(), "the run's folder")  # so that none goes on alone
        if not all(seen):
            raise ConfigError(
                f"{folder} of process 0 is not there in process {seen.index(False)}: set run.dir to a folder that all hosts mount, for a "
                "checkpoint is written by all"
            )
        yield folder


@contextlib.contextmanager
def _claimed(folder: pathlib.Path, *, resume: bool) -> Iterator[None]:
    if not resume and holds_run(folder):
        raise ConfigError(f"{folder} already holds a run: add --resume to continue it, choose another run.name, or delete the folder")
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / LOCK).open("a"))
        except OSError as error:
            raise ConfigError(f"cannot write in {folder} ({error.strerror}): set run.dir to a folder you may write in") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is training in {folder}: wait for its end or choose another run.name") from error
        lock.truncate(0)
        print(os.getpid(), socket.gethostname(), file=lock, flush=True)
        yield


def trainer_of(folder: pathlib.Path) -> int:
    """The id of the process that trains in ``folder``. Raises UserError when none does, or it is on another machine."""
    try:
        with (folder / LOCK).open(encoding="utf-8") as lock:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                raise UserError(f"no process trains in {folder}: start the run, or give the folder of one that runs")
            number, _, host = lock.read().strip().partition(" ")
    except OSError as error:
        raise UserError(f"{folder} is no folder of a run that runs ({error.strerror}): give one, e.g. runs/quickstart") from error
    if not number.isdigit():
        raise UserError(f"the process that trains in {folder} is only starting: try again in a moment")
    if host != socket.gethostname():
        raise UserError(f"the process that trains in {folder} is {number} on {host}: give the same command there")
    return int(number)


def existing(config: Config) -> pathlib.Path:
    """The run's folder, to read a checkpoint from. Raises ConfigError when there is none."""
    folder = of(config)
    if latest(folder / "checkpoints") is None:
        raise ConfigError(f"{folder} holds no complete checkpoint: train the run first, or correct run.dir and run.name")
    return folder


def write_config(folder: pathlib.Path, config: Config) -> None:
    """Keep the resolved configuration. From then on the folder holds a run, so call it when everything has started."""
    (folder / CONFIG).write_text(to_yaml(config), encoding="utf-8")


def holds_run(folder: pathlib.Path) -> bool:
    """Whether a run has begun in ``folder``."""
    metrics = folder / "metrics.jsonl"
    return (folder / CONFIG).exists() or (metrics.exists() and metrics.stat().st_size > 0)
