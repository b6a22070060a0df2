"""The actor-critic gate: before a guided episode begins, the actor accepts, refines or rejects what was retrieved for it (off by default).

Owns: the request, its deadline, what follows from a verdict, the counters of what it costs. Promises: an entry is shown only after an
accept or a refine; a verdict that is late, does not fit or cannot be read shows nothing and is counted; the request is a completion of its
own, whose tokens are in no log and are never trained; free episodes and those without lessons ask nothing; evaluation is gated the same
and counted nowhere. Does not: know the bank, or what a verdict is worth (``experience.reward``).

A refined text is shown in place of the entry's, for this episode alone: the bank keeps its own. The entry stands in ``Episode.shown`` and
is credited with the outcome, because the refined text came from it; the critic score of Eq. 8 (0.5 instead of 1) is what tells the two
apart.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from crl_jax.errors import UserError
from crl_jax.experience.bank import utility
from crl_jax.experience.protocols import Completer, Message
from crl_jax.experience.verdict import GatePrompts, gate_messages, parse_verdict
from crl_jax.records import Decision, SamplingParams, Usage, Verdict
from crl_jax.rollout.agent import Plan
from crl_jax.seeds import derive_seed


class GateQuestionTooLong(UserError, RuntimeError):
    """No question of a batch fits into the actor's length, so nobody would ever read an experience."""


class GateSampler(Completer, Protocol):
    """The part of ``serving.Sampler`` the gate uses."""

    max_length: int


class GateCodec(Protocol):
    """Chat messages to prompt ids and ids to text (``models.codec.ChatCodec`` is one)."""

    def render(self, messages: Sequence[Message], /) -> Sequence[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...


@dataclasses.dataclass(frozen=True)
class GateSettings:
    """``max_new_tokens`` and ``timeout_s`` of one verdict, ``max_chars`` of a refined text, ``system`` prompt of the actor (with
    ``{env}``)."""

    prompts: GatePrompts
    max_new_tokens: int
    timeout_s: float
    max_chars: int = 2000
    system: str = ""


class Gate:
    """Mutable only in ``counts`` (requests, verdicts by kind, why there was none, tokens and seconds, all of them sums) and the tally of
    long questions.

    ``usage`` looks up the counters of an entry. Verdicts are sampled as the episode is (temperature, top-p, seed), without its constraint.
    """

    def __init__(
        self,
        sampler: GateSampler,
        codec: GateCodec,
        settings: GateSettings,
        usage: Callable[[str], Usage | Awaitable[Usage]],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sampler, self._codec, self._settings, self._usage, self._clock = sampler, codec, settings, usage, clock
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        self._too_long_in_row = 0  # questions that did not fit since the last one that did
        self._longest = 0  # tokens of the longest of these

    async def judge(self, plan: Plan, *, count: bool = True) -> Plan:
        """``plan`` with what the actor wants to read of its lessons, and the verdicts. All its lessons are asked about together."""
        if not plan.lessons:
            return plan
        started = self._clock()
        tally: Counter[str] = Counter()
        verdicts = await asyncio.gather(*(self._verdict(plan, i, text, tally, count) for i, text in plan.lessons))
        if count:
            self.counts.update(tally)
            self.seconds += self._clock() - started
        kept = tuple((i, v.text or text) for (i, text), v in zip(plan.lessons, verdicts, strict=True) if v.shows)
        return dataclasses.replace(plan, lessons=kept, verdicts=tuple(verdicts))

    def require_room(self, questions: int) -> None:
        """Raise GateQuestionTooLong once ``questions`` in a row, those of a batch, did not fit; a single one stays counted."""
        if self._too_long_in_row < max(2, questions):
            return
        needed = self._longest + self._settings.max_new_tokens
        raise GateQuestionTooLong(
            f"no question of the gate fits: {self._longest} tokens leave no room for a verdict of {self._settings.max_new_tokens} in "
            f"actor.max_length {self._sampler.max_length}: set actor.max_length to {needed} or more, or actor.gate.max_new_tokens lower"
        )

    def carry(self) -> list[int]:
        """The tally of long questions, for a checkpoint."""
        return [self._too_long_in_row, self._longest]

    def go_on(self, carried: Sequence[int]) -> None:
        """Take up a tally of `carry`."""
        self._too_long_in_row, self._longest = carried

    def stats(self) -> dict[str, float]:
        """The counters; ``seconds`` is the time episodes waited before they could begin, summed over episodes."""
        return {**self.counts, "seconds": self.seconds}

    async def _verdict(self, plan: Plan, experience_id: str, text: str, tally: Counter[str], count: bool) -> Verdict:
        s = self._settings
        found = self._usage(experience_id)
        usage = found if isinstance(found, Usage) else await found  # the bank may be on another machine
        task = "\n".join(part for part in (s.system.replace("{env}", plan.system), plan.task.goal) if part)
        prompt = self._codec.render(gate_messages(s.prompts, task=task, lesson=text, usage=usage, success=utility(usage)))
        if len(prompt) + s.max_new_tokens > self._sampler.max_length:
            if count:
                self._too_long_in_row += 1
                self._longest = max(self._longest, len(prompt))
            tally["too_long"] += 1
            tally[Decision.NONE.value] += 1
            return Verdict(experience_id, Decision.NONE)
        if count:
            self._too_long_in_row = self._longest = 0
        tally.update(requests=1, prompt_tokens=len(prompt))
        params = self._params(plan.sampling, plan.id, experience_id)
        try:
            done = await asyncio.wait_for(self._sampler.complete(prompt, params), s.timeout_s)
        except TimeoutError:
            tally["timeouts"] += 1
            tally[Decision.NONE.value] += 1
            return Verdict(experience_id, Decision.NONE)
        tally["sampled_tokens"] += len(done.ids)
        said = done.ids[:-1] if done.ids and done.ids[-1] in params.stop_ids else done.ids
        verdict, reason = parse_verdict(self._codec.decode(said), experience_id, max_chars=s.max_chars)
        tally["unreadable"] += bool(reason)
        tally[verdict.decision.value] += 1
        return verdict

    def _params(self, sampling: SamplingParams, episode_id: str, experience_id: str) -> SamplingParams:
        seed = derive_seed(sampling.seed, episode_id, "gate", experience_id)
        return dataclasses.replace(sampling, max_new_tokens=self._settings.max_new_tokens, constrained=False, seed=seed)
