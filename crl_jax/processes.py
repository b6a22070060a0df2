"""The processes of a job: who this one is, and how all of them come to the same decision.

Owns: the start of JAX's distributed service, and small values that every process tells every other. Promises: every process gets the same
answers in the same order; every wait has a deadline; a process that fails says so, and the others raise `PeerFailed` with its words within
seconds instead of waiting for it; the exchange goes through the service's key-value store, so it never stands between the programs of the
devices. Does not: move arrays (``sharding``), or start processes (``launch``).

All processes must ask the same questions in the same order, from one thread each: that of the trainer, or one with a `Processes.channel`.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable
from typing import Any, Protocol

from crl_jax.errors import UserError

PIECE = 2**20  # characters of one answer at most
POLL_S = 1.0  # between looks at whether another process failed
HEARTBEAT_S = 60  # a process that was not heard of for so long is dead: JAX then ends the others
START_S = 300  # all processes must have started by then


class PeerFailed(UserError, RuntimeError):
    """Another process of the job failed: its own log says more."""


class Misplaced(UserError, ValueError):
    """What the launcher says of this process cannot be."""

    exit_code = 2  # another start would end the same way


class FailureNotice(str):
    """Of `Processes.stop_notice`: another process failed, which is no preemption."""


class Store(Protocol):
    """What is needed of the distributed service's client."""

    def key_value_set(self, key: str, value: str, /) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int, /) -> str: ...
    def key_value_delete(self, key: str, /) -> None: ...
    def key_value_dir_get(self, key: str, /) -> list[tuple[str, str]]: ...


@dataclasses.dataclass(frozen=True)
class Topology:
    """What the launcher says: where the processes of the job meet, which of how many this one is."""

    coordinator: str = ""
    process_id: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise Misplaced(f"--processes {self.processes}: a job has 1 or more")
        if not 0 <= self.process_id < self.processes:
            raise Misplaced(f"--process-id {self.process_id} of --processes {self.processes}: ids are 0 to {self.processes - 1}")
        where = "HOST:PORT, where process 0 listens, e.g. 10.0.0.7:8476"
        if self.processes > 1 and not self.coordinator:
            raise Misplaced(f"--processes above 1 needs --coordinator {where}")
        host, _, port = self.coordinator.rpartition(":")
        if self.coordinator and not (host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 2**16):
            raise Misplaced(f"--coordinator {self.coordinator}: give {where}")


class Processes:
    """The processes of this job. Made by `join`, or by `alone`; ``store`` is None for one process."""

    def __init__(
        self,
        index: int,
        count: int,
        store: Store | None,
        *,
        deadline_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        channel: str = "main",
    ) -> None:
        self.index, self.count, self.deadline_s = index, count, deadline_s
        self._store, self._clock, self._channel = store, clock, channel
        self._channels: dict[str, Processes] = {}
        self._asked = 0
        self.wait_s = 0.0  # for other processes, since the start

    @staticmethod
    def alone() -> Processes:
        """One process: every answer is its own."""
        return Processes(0, 1, None)

    def channel(self, name: str) -> Processes:
        """The same processes for another thread, whose questions have an order of their own; always the same for a name."""
        if name not in self._channels:
            more: dict[str, Any] = {"deadline_s": self.deadline_s, "clock": self._clock, "channel": name}
            self._channels[name] = Processes(self.index, self.count, self._store, **more)
        return self._channels[name]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)

    @property
    def first(self) -> bool:
        """Whether this is process 0, the one that writes what is shared."""
        return self.index == 0

    def gather(self, value: Any, what: str, *, deadline_s: float | None = None) -> list[Any]:
        """``value`` (anything JSON holds) of every process, in their order. ``what`` is for the errors, e.g. "the end of step 3".

        Raises PeerFailed, and TimeoutError when a process does not come to this question within ``deadline_s`` (None: the job's).
        """
        if self._store is None:
            return [value]
        began, self._asked = self._clock(), self._asked + 1
        limit = self.deadline_s if deadline_s is None else deadline_s
        try:
            self._store.key_value_set(f"crl/{self._channel}/{self._asked}/{self.index}", json.dumps([what, value]))
            found = [self._answer(index, what, began + limit, limit) for index in range(self.count)]
            if self._asked > 2:  # whoever is here has read everything of two questions ago
                self._store.key_value_delete(f"crl/{self._channel}/{self._asked - 2}/{self.index}")
        except PeerFailed:
            raise
        except RuntimeError as error:  # jax.errors.JaxRuntimeError
            raise PeerFailed(f"the processes of this job lost each other at {what}: {error}") from error
        self.wait_s += self._clock() - began
        return found

    def any(self, flag: bool, what: str) -> bool:
        """Whether any process says so."""
        return any(self.gather(bool(flag), what))

    def of_first(self, make: Callable[[], Any], what: str, *, deadline_s: float | None = None) -> Any:
        """What ``make`` returns in process 0, the only one that calls it; as JSON gives it back, if there are others.

        When it raises there, it raises there and is PeerFailed elsewhere.
        """
        if self._store is None:
            return make()
        try:
            made = make() if self.first else None
        except BaseException as error:  # whatever it is, the others wait for it
            self.fail(error)
            raise
        return self.gather(made, what, deadline_s=deadline_s)[0]

    def bytes_of_first(self, data: bytes, what: str) -> bytes:
        """``data`` of process 0, in every process: too much for one answer, so it travels in pieces."""
        if self._store is None:
            return data
        text = base64.b85encode(data).decode() if self.first else ""
        count = self.of_first(lambda: -(-len(text) // PIECE), what)
        pieces = [self.of_first(lambda i=i: text[i * PIECE : (i + 1) * PIECE], f"{what}, piece {i}") for i in range(count)]
        return base64.b85decode("".join(pieces))

    def meet(self, what: str, *, deadline_s: float | None = None) -> None:
        """Returns when all processes are here."""
        self.gather(None, what, deadline_s=deadline_s)

    def share(self, items: int) -> range:
        """Which of ``items`` are this process's: as many as every other's, or one more."""
        return range(items * self.index // self.count, items * (self.index + 1) // self.count)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process ends with ``error``; what is said first stands."""
        if self._store is not None:
            words = f"{type(error).__name__}: {error}"[:500]
            self._tell(f"crl/failed/{self.index}", words)

    def ask_to_stop(self, reason: str) -> None:
        """Tell the others that this process was told to stop. From any thread."""
        if self._store is not None:
            self._tell(f"crl/stop/{self.index}", reason)

    def stop_notice(self) -> str:
        """Empty, or which other process was told to stop or failed, and why. From any thread."""
        for kind, what, notice in (("failed", "failed", FailureNotice), ("stop", "was told to stop", str)):
            try:
                found = self._said(kind)
            except RuntimeError:  # what ends the wait of the trainer, or passes: whoever looks again hears of it then
                return ""
            for index, words in found:
                return notice(f"process {index} {what}: {words}")
        return ""

    def _answer(self, index: int, what: str, end: float, limit_s: float) -> Any:
        assert self._store is not None
        key = f"crl/{self._channel}/{self._asked}/{index}"
        while True:
            left_s = end - self._clock()
            try:
                said = self._store.blocking_key_value_get(key, int(1000 * max(0.01, min(POLL_S, left_s))))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            else:
                asked, value = json.loads(said)
                if asked != what:
                    raise PeerFailed(f"process {index} is at {asked!r}, this one at {what!r}: did they start with the same command?")
                return value
            self._raise_if_failed()
            if left_s <= 0:
                raise TimeoutError(f"process {index} did not come to {what} within {limit_s:g} s: its log says what it does instead")

    def _raise_if_failed(self) -> None:
        for index, words in self._said("failed"):
            raise PeerFailed(f"process {index} failed: {words}")

    def _said(self, kind: str) -> list[tuple[int, str]]:
        """What the other processes told (`_tell`), by their index; those that only heard it from another come last."""
        if self._store is None:
            return []
        told = [(int(key.rpartition("/")[2]), words) for key, words in self._store.key_value_dir_get(f"crl/{kind}")]
        heard = (PeerFailed.__name__, "process ")
        return sorted(((i, words) for i, words in told if i != self.index), key=lambda one: (one[1].startswith(heard), one[0]))

    def _tell(self, key: str, words: str) -> None:
        assert self._store is not None
        with contextlib.suppress(RuntimeError):  # said before, or nobody is there to hear it: nothing to add to what ends this process
            self._store.key_value_set(key, words)


def join(topology: Topology, *, heartbeat_s: int = HEARTBEAT_S) -> Processes:
    """Meet the other processes of the job, before anything else uses JAX. One process meets nobody. ``heartbeat_s``: when a process that
    is not heard of is dead.

    Raises UserError when they do not come.
    """
    if topology.processes == 1:
        return Processes.alone()
    import jax
    from jax._src import distributed  # its key-value store has no public name yet; checkpoints (Orbax) stand on the same one

    try:
        jax.distributed.initialize(
            topology.coordinator,
            topology.processes,
            topology.process_id,
            initialization_timeout=START_S,
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=HEARTBEAT_S,
        )
    except RuntimeError as error:
        if "Failed to start RPC server" in str(error):  # at once
            port = topology.coordinator.rpartition(":")[2]
            fix = "end it, or give all processes a --coordinator with a free port"
            raise UserError(f"process 0 cannot listen on port {port} (another program does?): {fix}") from error
        waited = f"process {topology.process_id} did not meet the {topology.processes} processes at {topology.coordinator}"
        raise UserError(f"{waited} within {START_S} s ({error}): start all of them, with the same --coordinator") from error
    client: Any = distributed.global_state.client
    return Processes(jax.process_index(), jax.process_count(), client)
