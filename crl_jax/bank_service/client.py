"""A bank on another machine, with the methods of the one in this process.

Owns: the way from records to calls, request ids, how lists are cut to the size of a call. Promises: concurrent queries share calls; a call
whose answer was lost is repeated with its id and has its effect once; the client goes on when the server was started again. Does not:
decide what may be repeated (``edge``) or what is shown (the server).
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import random
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

from crl_jax.bank_service import bank_pb2 as pb
from crl_jax.bank_service import codec
from crl_jax.bank_service.edge import Address, BankRefused, Edge, Retry
from crl_jax.bank_service.gather import Gather
from crl_jax.bank_service.limits import MESSAGE_BYTES
from crl_jax.bank_service.run_steps import prefix_of
from crl_jax.config.parse import ConfigError
from crl_jax.config.schema import BankServerConfig
from crl_jax.experience.buffer import Sample
from crl_jax.experience.editor import Answer
from crl_jax.experience.reader import Shown
from crl_jax.records import BankOp, Condition, Episode, Experience, Generation, Status, Task, TokenLog, Usage

_PIECE = 256  # episodes, ids or entries of one call


class Entry(NamedTuple):
    """One entry with its counters; ``live`` is False once it was retired or replaced."""

    experience: Experience
    usage: Usage
    live: bool


class HandWritten(NamedTuple):
    """What a batch of operations did."""

    written: tuple[str, ...]
    retired: tuple[str, ...]
    duplicates: int
    evicted: int
    problems: tuple[tuple[str, str], ...]


class RemoteBank:
    """Mutable client for the event loop it is made on. Every method raises BankRefused, BankUnavailable and TimeoutError as `Edge.call`.

    ``run`` comes before the ids of episodes, so that runs that share a bank do not take each other's; the processes of one run have the
    same, and ids of their own. ``timeout_s`` bounds every call, all its attempts together.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        address: Address | None = None,
        run: str = "",
        timeout_s: float = 120.0,
        retry: Retry | None = None,
        batch: int = 256,
        batch_wait_s: float = 0.002,
        message_bytes: int = MESSAGE_BYTES,
        most_calls: int = 64,
        seed: int = 0,
    ) -> None:
        self._edge = Edge(
            address or Address.of(url), token=token, retry=retry, message_bytes=message_bytes, most=most_calls, rng=random.Random(seed)
        )
        self._message_bytes, self._timeout_s, self._run = message_bytes, timeout_s, run
        self._ids = (f"{uuid.uuid4().hex}-{n}" for n in itertools.count())
        self._queries = {
            peek: Gather[tuple[str, str], list[Shown]](functools.partial(self._search, peek), most=batch, wait_s=batch_wait_s)
            for peek in (False, True)
        }
        self._entries = Gather[str, Entry | None](self._find, most=batch, wait_s=batch_wait_s)

    async def __aenter__(self) -> RemoteBank:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave the server; what has not been answered is cancelled."""
        for queries in (*self._queries.values(), self._entries):
            queries.close()
        await self._edge.aclose()

    # ---------------------------------------------------------------------------------------------------------------- reading

    async def retrieve(self, namespace: str, text: str, *, peek: bool = False) -> list[Shown]:
        """As `ExperienceManager.retrieve`; queries asked at about the same time share a call."""
        return (await self._queries[peek].ask([(namespace, text)]))[0]

    async def ask(self, namespace: str, query: str, *, episode_id: str, number: int = 0, peek: bool = False) -> Answer | None:
        """As `ExperienceManager.ask`."""
        request = pb.AskRequest(
            request_id=next(self._ids),
            namespace=namespace,
            query=query,
            episode_id=prefix_of(self._run) + episode_id,
            number=number,
            peek=peek,
        )
        found = await self._call("Ask", request, pb.AskReply, attempt_s=self._timeout_s)
        return Answer(found.text, found.generation_id or None, found.experience_id) if found.found else None

    async def get(self, ids: Sequence[str]) -> list[Entry]:
        """Entries by id, live or retired; ids that never were entries are left out."""
        found: list[Entry] = []
        for piece in _pieces(ids):
            found += map(_entry, (await self._call("Get", pb.GetRequest(ids=piece), pb.GetReply)).entries)
        return found

    async def usage(self, experience_id: str) -> Usage:
        """The counters of one entry, none for one that is gone; what is asked at about the same time shares a call."""
        (found,) = await self._entries.ask([experience_id])
        return Usage() if found is None else found.usage

    async def entries(self, namespace: str = "") -> AsyncIterator[Entry]:
        """All live entries (of one namespace), page by page: one that is there all the time comes exactly once."""
        after = ""
        while True:
            page = await self._call("List", pb.ListRequest(namespace=namespace, after=after), pb.ListReply)
            for entry in page.entries:
                yield _entry(entry)
            if not (after := page.next):
                return

    async def newest(self, limit: int, namespace: str = "") -> list[Entry]:
        """The newest live entries, newest first."""
        request = pb.ListRequest(namespace=namespace, limit=limit, newest_first=True)
        return [_entry(entry) for entry in (await self._call("List", request, pb.ListReply)).entries]

    async def stats(self) -> dict[str, float]:
        """The server's counters and gauges, and this client's under ``client_...``; ``client_queue`` are queries and calls that wait.
        ``step`` is the newest that any process of this run gave to `on_step`, 0 before its first since it started or was restored."""
        found = dict((await self._call("Stats", pb.StatsRequest(run=self._run), pb.StatsReply)).values)
        return found | {f"client_{name}": value for name, value in self.counters().items()}

    def counters(self) -> dict[str, float]:
        """This client's own counters, without a call."""
        queries = self._queries.values()
        gauges = {
            "queue": sum(q.waiting for q in queries) + self._edge.waiting,
            "running": self._edge.running,
            "retrieve_calls": sum(q.batches for q in queries),
            "queries": sum(q.items for q in queries),
        }
        return {**self._edge.counts, **gauges}

    # ---------------------------------------------------------------------------------------------------------------- learning

    async def on_step(self, step: int) -> None:
        """As `ExperienceManager.on_step`. In a run with a name the first process that comes to a step begins it, the others' calls change
        nothing."""
        await self._call("OnStep", pb.OnStepRequest(request_id=next(self._ids), step=step, run=self._run), pb.OnStepReply)

    async def observe(self, episodes: Sequence[Episode]) -> None:
        """As `ExperienceManager.observe`; a group is never cut."""
        groups: dict[str, list[pb.Episode]] = {}
        for e in episodes:
            groups.setdefault(e.group_id, []).append(self._named(codec.observed_to_proto(e)))
        for piece in self._cut(list(groups.values())):
            await self._call("Observe", pb.ObserveRequest(request_id=next(self._ids), episodes=piece), pb.ObserveReply)

    async def report(self, shown: Sequence[Shown], *, namespace: str, episode_id: str, success: bool, reward: float | None = None) -> None:
        """What came of work that read these experiences (none: work without experience, the other side of the comparison). For callers
        that have no `Episode`; ``reward`` is 1 or 0 by success when not given."""
        worth = float(success) if reward is None else reward
        task = Task("", 0, "", namespace)
        condition = Condition.GUIDED if shown else Condition.FREE
        ids = tuple(entry.id for entry in shown)
        done = Episode(episode_id, episode_id, condition, task, TokenLog.empty(), (), "", Status.TERMINATED, success, worth, ids)
        await self.observe([done])

    async def submit(self, *episodes: Episode) -> bool:
        """Episodes for distillation; they are on the server's disk when this returns True. False if its inbox stays full."""
        for piece in self._cut([[self._named(codec.episode_to_proto(e))] for e in episodes]):
            try:
                await self._call(
                    "Submit", pb.SubmitRequest(request_id=next(self._ids), episodes=piece), pb.SubmitReply, attempt_s=self._timeout_s
                )
            except BankRefused as error:
                if error.code != "RESOURCE_EXHAUSTED":
                    raise
                return False
        return True

    async def drain(self, deadline_s: float) -> int:
        """As `ExperienceManager.drain`."""
        request, longest_s = pb.DrainRequest(deadline_s=deadline_s), deadline_s + 10
        found = await self._call("Drain", request, pb.DrainReply, attempt_s=longest_s, timeout_s=longest_s + self._timeout_s)
        return int(found.pending)

    async def merge(self, namespace: str) -> int:
        """As `ExperienceManager.merge`."""
        request = pb.MergeRequest(request_id=next(self._ids), namespace=namespace)
        return int((await self._call("Merge", request, pb.MergeReply, attempt_s=self._timeout_s)).written)

    # ---------------------------------------------------------------------------------------------------------------- training

    async def pop_batch(self) -> list[Sample] | None:
        """As `ExperienceManager.pop_batch`."""
        popped = await self._call("PopBatch", pb.PopBatchRequest(request_id=next(self._ids)), pb.PopBatchReply)
        if not popped.full:
            return None
        found: dict[str, Generation] = {}
        while missing := [s.generation_id for s in popped.samples if s.generation_id not in found]:
            reply = await self._call("Generations", pb.GenerationsRequest(ids=missing[:_PIECE]), pb.GenerationsReply)
            found |= {m.id: codec.generation_from_proto(m) for m in reply.generations}
        return [codec.sample_of(found[s.generation_id], dict(s.values)) for s in popped.samples]

    async def record_trained(self, generation_ids: Sequence[str], *, step: int) -> None:
        """As `TrainingBuffer.record_trained`."""
        request = pb.RecordTrainedRequest(request_id=next(self._ids), generation_ids=generation_ids, step=step)
        await self._call("RecordTrained", request, pb.RecordTrainedReply)

    async def checkpoint(self) -> dict[str, Any]:
        """As `ExperienceManager.checkpoint`."""
        found = await self._call("Checkpoint", pb.CheckpointRequest(request_id=next(self._ids)), pb.CheckpointReply)
        return json.loads(found.saved)

    async def restore(self, saved: dict[str, Any], *, rewind: bool = True) -> None:
        """As `ExperienceManager.restore`, for all processes of the run: one of them calls it, before any other changes the bank. Without
        ``rewind`` episodes of the run that still wait may be played and submitted again; the first of each is distilled."""
        await self._restore(json.dumps(saved), rewind)

    async def restart(self, *, rewind: bool = True) -> None:
        """As `ExperienceManager.restart`."""
        await self._restore("", rewind)

    # ---------------------------------------------------------------------------------------------------------------- by hand

    async def write(self, namespace: str, ops: Sequence[BankOp]) -> HandWritten:
        """One batch of operations in one transaction, without a model."""
        request = pb.WriteRequest(request_id=next(self._ids), namespace=namespace, ops=map(codec.op_to_proto, ops))
        done = await self._call("Write", request, pb.WriteReply)
        problems = tuple((p.code, p.detail) for p in done.problems)
        return HandWritten(tuple(done.written), tuple(done.retired), int(done.duplicates), int(done.evicted), problems)

    # ---------------------------------------------------------------------------------------------------------------- inside

    async def _call(self, method: str, request: Any, reply: Any, *, attempt_s: float | None = None, timeout_s: float | None = None) -> Any:
        return await self._edge.call(method, request, reply, timeout_s=timeout_s or self._timeout_s, attempt_s=attempt_s)

    async def _search(self, peek: bool, queries: list[tuple[str, str]]) -> list[list[Shown]]:
        asked = [pb.Query(namespace=namespace, text=text) for namespace, text in queries]
        request = pb.RetrieveRequest(queries=asked, peek=peek, request_id=next(self._ids))
        return [codec.shown_from_proto(m) for m in (await self._call("Retrieve", request, pb.RetrieveReply)).lessons]

    async def _find(self, ids: list[str]) -> list[Entry | None]:
        found = {entry.experience.id: entry for entry in await self.get(ids)}
        return [found.get(i) for i in ids]

    async def _restore(self, saved: str, rewind: bool) -> None:
        request = pb.RestoreRequest(request_id=next(self._ids), saved=saved, rewind=rewind, run=self._run)
        await self._call("Restore", request, pb.RestoreReply, attempt_s=self._timeout_s)

    def _named(self, message: pb.Episode) -> pb.Episode:
        message.id = prefix_of(self._run) + message.id
        return message

    def _cut(self, groups: list[list[pb.Episode]]) -> Iterator[list[pb.Episode]]:
        """Whole groups that fit a call together; one that does not fit alone is refused by the edge."""
        piece: list[pb.Episode] = []
        size = 0
        for group in groups:
            more = sum(message.ByteSize() + 16 for message in group)
            if piece and (len(piece) + len(group) > _PIECE or size + more > self._message_bytes // 2):
                yield piece
                piece, size = [], 0
            piece = [*piece, *group]
            size += more
        if piece:
            yield piece


async def connect(server: BankServerConfig, *, token: str = "", run: str = "", seed: int = 0) -> RemoteBank:
    """The bank of a run's configuration, once it answers. Raises ConfigError for an address or a certificate that cannot be used,
    BankUnavailable for a server that is not there."""
    try:
        address = Address.of(server.url, pathlib.Path(server.tls_root) if server.tls_root else None)
        bank = RemoteBank(
            server.url,
            address=address,
            token=token,
            run=run,
            timeout_s=server.timeout_s,
            retry=Retry(attempts=server.attempts),
            message_bytes=server.message_mib * 2**20,
            seed=seed,
        )
    except ValueError as error:
        raise ConfigError(f"`bank.server.url`: {error}") from error
    try:
        await bank.stats()
    except BaseException:
        await bank.aclose()
        raise
    return bank


def _pieces(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (ids[n : n + _PIECE] for n in range(0, len(ids), _PIECE))


def _entry(m: pb.Entry) -> Entry:
    return Entry(codec.experience_from_proto(m.experience), codec.usage_from_proto(m.usage), m.live)
