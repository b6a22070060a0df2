"""The methods of the bank's service: from a message to the manager and back.

Owns: what each call of ``bank.proto`` means, the checks of its sizes. Promises: a call that changes something is done once for each
request id; without an extractor what needs one is refused with the reason. Does not: know connections, tokens, deadlines or status codes
(``door``, ``server``).
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from crl_jax.bank_service import bank_pb2 as pb
from crl_jax.bank_service import codec
from crl_jax.bank_service.durable import DurableManager
from crl_jax.bank_service.limits import Limits, Refused, key_of, named
from crl_jax.bank_service.once import Once, Recent
from crl_jax.experience.store import Store
from crl_jax.records import Experience, Usage

_SUBMIT_WAIT_S = 30.0  # for room in the inbox


class BankService:
    """The methods have the names of the protocol's. ``store`` is the manager's, ``extractor`` gives the counters of its sampler."""

    def __init__(
        self, manager: DurableManager, store: Store, limits: Limits, *, extractor: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        self._manager = manager
        self._store = store
        self._limits = limits
        self._extractor = extractor
        self.door: Callable[[], dict[str, float]] = dict  # the counters of the server in front
        self._recent: Recent[Any] = Recent(lambda reply: reply.ByteSize())
        self._once: Once[Any] = Once(self._recent.find, manager.counts)

    # ---------------------------------------------------------------------------------------------------------------- reading

    async def Retrieve(self, r: pb.RetrieveRequest) -> pb.RetrieveReply:
        """All queries of a call are searched together."""
        self._limits.check_count("queries", len(r.queries), self._limits.queries)
        for query in r.queries:
            named("the namespace of a query", query.namespace)
            self._limits.check_text("a query", query.text)

        async def work() -> pb.RetrieveReply:
            found = await asyncio.gather(*(self._manager.retrieve(q.namespace, q.text, peek=r.peek) for q in r.queries))
            return pb.RetrieveReply(lessons=map(codec.shown_to_proto, found))

        if r.peek:
            return await work()
        return await self._in_memory(key_of("Retrieve", r.request_id), work)

    async def Ask(self, r: pb.AskRequest) -> pb.AskReply:
        """Search-and-ask; nothing is stored with ``peek``."""
        self._need_extractor("Ask")
        named("namespace", r.namespace)
        self._limits.check_text("a question", r.query)
        if r.peek:
            answer = await self._manager.ask(r.namespace, r.query, episode_id=r.episode_id, number=r.number, peek=True)
        else:
            key = key_of("Ask", r.request_id)
            answer = await self._manager.ask_once(key, r.namespace, r.query, episode_id=r.episode_id, number=r.number)
        if answer is None:
            return pb.AskReply(found=False)
        return pb.AskReply(found=True, text=answer.text, generation_id=answer.generation_id or "", experience_id=answer.experience_id)

    async def Get(self, r: pb.GetRequest) -> pb.GetReply:
        """Entries by id, also retired ones."""
        self._limits.check_count("ids", len(r.ids), self._limits.page)
        found = await asyncio.to_thread(lambda: [self._store.experience(i) for i in r.ids])
        return pb.GetReply(entries=[self._entry(e) for e in found if e is not None])

    async def List(self, r: pb.ListRequest) -> pb.ListReply:
        """A page of live entries, by namespace and id: an entry that is there all the time comes exactly once."""
        limits, state = self._limits, self._manager.state
        if r.limit < 0 or r.limit > limits.page:
            raise Refused("RESOURCE_EXHAUSTED", f"a page of {r.limit} entries, {limits.page} at most: ask for several pages")
        limit = r.limit or limits.page
        if r.newest_first:
            newest = [e for n, space in state.spaces.items() if r.namespace in ("", n) for e in space.newest(limit)]
            newest.sort(key=lambda e: e.id, reverse=True)
            return pb.ListReply(entries=map(self._entry, newest[:limit]), revision=state.revision)
        reply, room = pb.ListReply(revision=state.revision), limits.message_bytes // 2
        for entry in self._from(r.namespace, r.after):
            message = self._entry(entry)
            room -= message.ByteSize() + 16
            if reply.entries and (room < 0 or len(reply.entries) == limit):
                last = reply.entries[-1].experience
                reply.next = json.dumps([last.namespace, last.id])
                break
            reply.entries.append(message)
        return reply

    async def Stats(self, r: pb.StatsRequest) -> pb.StatsReply:
        """Counters and gauges of the manager, of the server under ``server_...``, and of its extractor's servers under ``extractor_...``;
        ``step`` is the newest one the asking run began."""
        door = {f"server_{name}": value for name, value in self.door().items()}
        extractor = {f"extractor_{name}": value for name, value in self._extractor().items()}
        return pb.StatsReply(values=self._manager.stats() | {"step": self._manager.step_of(r.run)} | door | extractor)

    # ---------------------------------------------------------------------------------------------------------------- learning

    async def Submit(self, r: pb.SubmitRequest) -> pb.SubmitReply:
        """The episodes are on disk when this returns."""
        self._need_extractor("Submit")
        self._limits.check_count("episodes", len(r.episodes), self._limits.episodes)
        key, episodes = key_of("Submit", r.request_id), [codec.episode_from_proto(e) for e in r.episodes]
        await self._manager.submit_once(key, episodes, timeout_s=_SUBMIT_WAIT_S)
        return pb.SubmitReply()

    async def Observe(self, r: pb.ObserveRequest) -> pb.ObserveReply:
        """Usage and credit of finished training episodes."""
        self._limits.check_count("episodes", len(r.episodes), self._limits.episodes)
        key = key_of("Observe", r.request_id)
        await self._manager.observe_once(key, [codec.episode_from_proto(e) for e in r.episodes])
        return pb.ObserveReply()

    async def OnStep(self, r: pb.OnStepRequest) -> pb.OnStepReply:
        """The trainer is at this step; what several processes of a run say begins it once."""
        await self._manager.step_once(key_of("OnStep", r.request_id), r.step, run=r.run)
        return pb.OnStepReply()

    async def Drain(self, r: pb.DrainRequest) -> pb.DrainReply:
        """Wait for the distillations."""
        return pb.DrainReply(pending=await self._manager.drain(min(max(0.0, r.deadline_s), self._limits.call_timeout_s)))

    async def Merge(self, r: pb.MergeRequest) -> pb.MergeReply:
        """Merge one namespace now."""
        self._need_extractor("Merge")
        named("namespace", r.namespace)

        async def work() -> pb.MergeReply:
            return pb.MergeReply(written=await self._manager.merge(r.namespace))

        return await self._in_memory(key_of("Merge", r.request_id), work)

    # ---------------------------------------------------------------------------------------------------------------- training

    async def PopBatch(self, r: pb.PopBatchRequest) -> pb.PopBatchReply:
        """The next batch for the extractor's learner; its generations are fetched with `Generations`."""
        batch = await self._manager.pop_once(key_of("PopBatch", r.request_id))
        return pb.PopBatchReply(full=batch is not None, samples=[pb.Evidence(**sample) for sample in batch or ()])

    async def Generations(self, r: pb.GenerationsRequest) -> pb.GenerationsReply:
        """The first of the generations asked for, as many as fit a message."""
        self._limits.check_count("ids", len(r.ids), self._limits.page)
        return await asyncio.to_thread(self._generations, list(r.ids))

    async def RecordTrained(self, r: pb.RecordTrainedRequest) -> pb.RecordTrainedReply:
        """The extractor was trained on these generations."""
        await self._manager.record_once(key_of("RecordTrained", r.request_id), r.generation_ids, r.step)
        return pb.RecordTrainedReply()

    async def Checkpoint(self, r: pb.CheckpointRequest) -> pb.CheckpointReply:
        """What a training checkpoint keeps of the bank."""

        async def work() -> pb.CheckpointReply:
            return pb.CheckpointReply(saved=json.dumps(await self._manager.checkpoint()))

        return await self._in_memory(key_of("Checkpoint", r.request_id), work)

    async def Restore(self, r: pb.RestoreRequest) -> pb.RestoreReply:
        """Resume at a checkpoint."""
        saved = codec.checkpoint_from_text(r.saved) if r.saved else None
        key = key_of("Restore", r.request_id)
        try:
            await self._manager.restore_once(key, saved, rewind=r.rewind, timeout_s=self._limits.call_timeout_s / 2, run=r.run)
        except ValueError as error:  # the bank never was there
            raise Refused("FAILED_PRECONDITION", str(error)) from error
        return pb.RestoreReply()

    # ---------------------------------------------------------------------------------------------------------------- by hand

    async def Write(self, r: pb.WriteRequest) -> pb.WriteReply:
        """Operations of a person or another agent, one batch, one transaction."""
        self._limits.check_count("operations", len(r.ops), self._limits.ops)
        for op in r.ops:
            self._limits.check_text("a lesson", op.text)
        key = key_of("Write", r.request_id)
        done = await self._manager.write_once(key, named("namespace", r.namespace), [codec.op_from_proto(op) for op in r.ops])
        problems = [pb.Problem(code=code, detail=detail) for code, detail in done.pop("problems")]
        return pb.WriteReply(**done, problems=problems)

    # ---------------------------------------------------------------------------------------------------------------- inside

    async def _in_memory(self, key: str, work: Any) -> Any:
        async def kept() -> Any:
            return self._recent.keep(key, await work())

        return await self._once.do(key, kept)

    def _need_extractor(self, method: str) -> None:
        if not self._manager.learns:
            fix = "start `crl bank serve` without --no-extractor, on a recipe with extractor.server.url"
            raise Refused("FAILED_PRECONDITION", f"{method} needs an extractor, and this bank is served without one: {fix}")

    def _entry(self, entry: Experience) -> pb.Entry:
        state = self._manager.state
        usage = codec.usage_to_proto(state.usage.get(entry.id, Usage()))
        return pb.Entry(experience=codec.experience_to_proto(entry), usage=usage, live=entry.id in state.space(entry.namespace))

    def _from(self, namespace: str, after: str) -> Iterator[Experience]:
        try:
            last_namespace, last_id = json.loads(after) if after else ("", "")
        except (ValueError, TypeError, RecursionError):
            raise Refused("INVALID_ARGUMENT", "`after` is no page's `next`: send it as it was, or nothing for the first page") from None
        state = self._manager.state
        for name in sorted(state.spaces):
            if name < str(last_namespace) or namespace not in ("", name):
                continue
            ids: Iterator[str] = iter(state.space(name))
            if name == last_namespace:
                ids = itertools.dropwhile(lambda i: i <= str(last_id), ids)
            yield from (state.space(name)[i] for i in ids)

    def _generations(self, ids: list[str]) -> pb.GenerationsReply:
        reply, room = pb.GenerationsReply(), self._limits.message_bytes // 2
        for i in ids:
            try:
                message = codec.generation_to_proto(self._store.generation(i))
            except KeyError:
                raise Refused("NOT_FOUND", f"the bank has no generation {i[:40]!r}: it may have been compacted away") from None
            room -= message.ByteSize() + 16
            if room < 0 and reply.generations:
                break
            reply.generations.append(message)
        return reply
