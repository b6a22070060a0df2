"""The bank of a run: a manager in this process, or a server that several runs and people share.

Owns: the two with the same methods, and how either is opened. Promises: one process writes a bank's file; a run that is only looked at
(``crl eval``) never changes a shared bank. Does not: make a manager of a configuration (``build``).
"""

from __future__ import annotations

import contextlib
import pathlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax

from crl_jax import bank_lock
from crl_jax.config.schema import Config
from crl_jax.experience.buffer import Sample
from crl_jax.experience.editor import Answer
from crl_jax.experience.manager import ExperienceManager
from crl_jax.experience.reader import Shown
from crl_jax.experience.recover import open_or_recover
from crl_jax.experience.store import Store
from crl_jax.records import Episode, Experience, Usage
from crl_jax.rollout.shell import Shell
from crl_jax.run_closing import at_end
from crl_jax.token_file import read_token

if TYPE_CHECKING:
    from crl_jax.bank_service.client import RemoteBank


class RunBank(Protocol):
    """What a run needs of its bank: the methods of `ExperienceManager`, all of them asynchronous."""

    async def retrieve(self, namespace: str, text: str, *, peek: bool = False) -> list[Shown]:
        """Experiences for a query."""
        ...

    async def ask(self, namespace: str, query: str, *, episode_id: str, number: int = 0, peek: bool = False) -> Answer | None:
        """The extractor's answer to a question."""
        ...

    async def on_step(self, step: int) -> None:
        """A training step begins."""
        ...

    async def observe(self, episodes: Sequence[Episode]) -> None:
        """Usage and credit of finished training episodes."""
        ...

    async def submit(self, episode: Episode) -> bool:
        """Take an episode for distillation."""
        ...

    async def drain(self, deadline_s: float) -> int:
        """Wait for the distillations; returns how many are left."""
        ...

    async def pop_batch(self) -> list[Sample] | None:
        """The next batch for the extractor's learner."""
        ...

    async def record_trained(self, generation_ids: Sequence[str], *, step: int) -> None:
        """The extractor was trained on these."""
        ...

    async def find(self, ids: Sequence[str]) -> list[Experience]:
        """Those of the entries that are in the bank."""
        ...

    async def newest(self, limit: int) -> list[Experience]:
        """The newest entries, newest first."""
        ...

    async def usage(self, experience_id: str) -> Usage:
        """The counters of an entry."""
        ...

    async def stats(self) -> dict[str, float]:
        """Counters and gauges."""
        ...

    async def checkpoint(self) -> dict[str, Any]:
        """What a training checkpoint keeps."""
        ...

    async def snapshot_made(self) -> None:
        """Wait for what the newest checkpoint wants beside it on disk."""
        ...

    async def finish(self, deadline_s: float) -> int:
        """The run ends now: wait for the distillations, at most so long; returns how many are lost."""
        ...

    async def restore(self, saved: dict[str, Any], *, rewind: bool = True) -> None:
        """Resume at a checkpoint."""
        ...

    async def restart(self, *, rewind: bool = True) -> None:
        """Begin at step 0."""
        ...


class LocalBank:
    """The bank of this process."""

    def __init__(self, manager: ExperienceManager) -> None:
        self.manager = manager
        self.retrieve, self.ask, self.observe, self.submit = manager.retrieve, manager.ask, manager.observe, manager.submit
        self.drain, self.pop_batch = manager.drain, manager.pop_batch
        self.checkpoint, self.restore, self.restart = manager.checkpoint, manager.restore, manager.restart
        self.snapshot_made, self.finish = manager.snapshot_made, manager.finish

    async def on_step(self, step: int) -> None:
        """As the manager's."""
        self.manager.on_step(step)

    async def record_trained(self, generation_ids: Sequence[str], *, step: int) -> None:
        """As the buffer's."""
        self.manager.buffer.record_trained(list(generation_ids), step=step)

    async def find(self, ids: Sequence[str]) -> list[Experience]:
        """Those of the entries that are in the bank."""
        return [entry for entry in map(self.manager.state.find, ids) if entry is not None]

    async def newest(self, limit: int) -> list[Experience]:
        """The newest entries, newest first."""
        found = [entry for space in self.manager.state.spaces.values() for entry in space.newest(limit)]
        return sorted(found, key=lambda entry: entry.id, reverse=True)[:limit]

    async def usage(self, experience_id: str) -> Usage:
        """The counters of an entry; none for one that is gone."""
        return self.manager.state.usage.get(experience_id, Usage())

    async def stats(self) -> dict[str, float]:
        """As the manager's."""
        return self.manager.stats()


class SharedBank:
    """A bank on a server. With ``read_only`` the bank is as it is now, whatever checkpoint the run is at."""

    def __init__(self, remote: RemoteBank, *, read_only: bool) -> None:
        self._remote = remote
        self._read_only = read_only
        self.retrieve, self.ask, self.observe, self.on_step = remote.retrieve, remote.ask, remote.observe, remote.on_step
        self.drain, self.pop_batch, self.record_trained = remote.drain, remote.pop_batch, remote.record_trained
        self.stats, self.checkpoint, self.usage = remote.stats, remote.checkpoint, remote.usage

    async def submit(self, episode: Episode) -> bool:
        """As the client's."""
        return await self._remote.submit(episode)

    async def find(self, ids: Sequence[str]) -> list[Experience]:
        """Those of the entries that are in the bank."""
        return [entry.experience for entry in await self._remote.get(ids) if entry.live]

    async def newest(self, limit: int) -> list[Experience]:
        """The newest entries, newest first."""
        return [entry.experience for entry in await self._remote.newest(limit)]

    async def snapshot_made(self) -> None:
        """The server sees to its own file; what it acknowledged is on its disk."""

    async def finish(self, deadline_s: float) -> int:
        """Nothing is lost: the server goes on with what it took."""
        del deadline_s
        return 0

    async def restore(self, saved: dict[str, Any], *, rewind: bool = True) -> None:
        """As the client's; nothing if the run is only looked at."""
        if not self._read_only:
            await self._remote.restore(saved, rewind=rewind)

    async def restart(self, *, rewind: bool = True) -> None:
        """As the client's; nothing if the run is only looked at."""
        if not self._read_only:
            await self._remote.restart(rewind=rewind)


def own_bank(path: pathlib.Path, stack: contextlib.ExitStack) -> Store:
    """The file of a run's own bank, written by nobody else. Raises ConfigError when somebody does."""
    stack.enter_context(bank_lock.writing(path))
    store = open_bank(path)
    store.begin_run()
    return store


def shared_bank(config: Config, shell: Shell, stack: contextlib.ExitStack, *, read_only: bool) -> SharedBank:
    """The bank at ``bank.server.url``. Raises ConfigError and BankUnavailable when it cannot be used."""
    from crl_jax.bank_service.client import connect  # imports gRPC

    s = config.bank.server
    token = read_token(pathlib.Path(s.token_file) if s.token_file else None)
    connecting = connect(
        s, token=token, run=s.run or config.run.name, seed=config.run.seed + jax.process_index()
    )  # processes retry at other moments
    remote = shell.call(connecting, s.timeout_s + 5, f"connecting to the bank at {s.url}")
    at_end(stack, "the bank", lambda: shell.finish(remote.aclose(), 30.0, "leaving the bank"))
    return SharedBank(remote, read_only=read_only)


def open_bank(path: pathlib.Path) -> Store:
    """The run's bank; of a damaged file the last good state, with a warning that says what became of it."""
    store, recovery = open_or_recover(path)
    if recovery is not None:
        what = f"{path} was damaged; its last good state, revision {recovery.revision} from {recovery.source}, is used"
        warnings.warn(f"{what}; the damaged file is kept as {recovery.damaged.name}", RuntimeWarning, stacklevel=2)
    return store
