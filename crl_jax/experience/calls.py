"""Calls to the extractor model: messages to prompt ids, a completion with a deadline, and the record of the generation.

Owns: prompt length (long episodes lose turns from their middle), sampling seeds, `Generation` records without an id. Promises: the seed
of a call depends on what it is about and on nothing that timing could change; ids and behaviour log-probs are kept as sampled; a prompt
that does not fit is counted, a whole step of them is an error. Does not: parse or store.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from crl_jax.errors import UserError
from crl_jax.experience import extractor
from crl_jax.experience.extractor import ExtractorPrompts
from crl_jax.experience.protocols import Completer, Decode, Message, Render
from crl_jax.records import Episode, Generation, GenerationKind, SamplingParams
from crl_jax.seeds import derive_seed


class ExtractorPromptTooLong(UserError, RuntimeError):
    """No episode of a step fits into the extractor's prompt, so the run would go on without lessons."""


class Draft(NamedTuple):
    """A generation that has no id yet, and its response as text (without the stop token)."""

    generation: Generation
    response: str


@dataclasses.dataclass
class ExtractorCalls:
    """Mutable only through ``counts`` and the tally of long prompts. ``params.seed`` is the base seed; a call that takes longer than
    ``timeout_s`` (a question: ``ask_timeout_s``) is given up and counted."""

    sampler: Completer
    render: Render
    decode: Decode
    prompts: ExtractorPrompts
    params: SamplingParams
    counts: Counter[str]
    max_ops: int
    max_prompt_tokens: int
    timeout_s: float
    ask_timeout_s: float = 60.0
    too_long_in_row: int = 0  # distillation prompts that did not fit since the last one that did
    longest: tuple[int, int] = (0, 0)  # tokens of the longest of these: without any turn of the episode, and with all of them

    async def distil(self, episode: Episode, entries: Sequence[str], *, step: int) -> Draft | None:
        """Lessons from one episode; ``entries`` are the texts it had read. None after a timeout or if no prompt is short enough."""

        def messages(keep_turns: int | None) -> list[Message]:
            return extractor.distil_messages(
                self.prompts,
                goal=episode.task.goal,
                success=episode.success,
                turns=episode.turns,
                final_observation=episode.final_observation,
                entries=entries,
                max_ops=self.max_ops,
                keep_turns=keep_turns,
            )

        def prompt() -> tuple[Sequence[int], int]:
            ids, keep = self.render(messages(None)), len(episode.turns)
            whole = len(ids)
            while len(ids) > self.max_prompt_tokens and keep > 0:
                keep //= 2
                ids = self.render(messages(keep))
            return ids, whole

        ids, whole = await asyncio.to_thread(prompt)  # a long transcript takes a while to tokenise; searches go on
        self.counts["transcripts_shortened"] += whole > self.max_prompt_tokens
        if len(ids) > self.max_prompt_tokens:
            self.too_long_in_row += 1
            self.longest = (max(self.longest[0], len(ids)), max(self.longest[1], whole))
        else:
            self.too_long_in_row, self.longest = 0, (0, 0)
        return await self._complete(GenerationKind.DISTIL, ids, step, "distil", episode.id)

    def require_room(self, episodes: int) -> None:
        """Raise ExtractorPromptTooLong once the prompts of ``episodes`` distillations in a row, those of a step, did not fit; a single one
        stays counted."""
        if self.too_long_in_row < max(2, episodes):
            return
        reply = self.params.max_new_tokens
        shortest, whole = (tokens + reply for tokens in self.longest)
        raise ExtractorPromptTooLong(
            f"no episode of a step could be distilled: {self.too_long_in_row} prompts in a row leave no room for a reply of {reply} in "
            f"extractor.max_length {self.max_prompt_tokens + reply}: set extractor.max_length to {shortest} or more ({whole} for episodes "
            "with all their turns), or extractor.sampling.max_new_tokens lower"
        )

    async def merge(self, entries: Sequence[str], *, step: int, name: str) -> Draft | None:
        """One chunk of texts to merge; ``name`` tells this call from others of the same step."""
        ids = self.render(extractor.merge_messages(self.prompts, entries=entries, max_ops=self.max_ops))
        return await self._complete(GenerationKind.MERGE, ids, step, "merge", step, name)

    async def ask(self, query: str, entry: str, *, step: int, name: str) -> Draft | None:
        """An answer to an actor's question; ``name`` is the episode and the number of its question."""
        ids = self.render(extractor.ask_messages(self.prompts, query=query, entry=entry))
        return await self._complete(GenerationKind.ASK, ids, step, "ask", name, timeout_s=min(self.ask_timeout_s, self.timeout_s))

    async def _complete(
        self, kind: GenerationKind, ids: Sequence[int], step: int, *seed_parts: int | str, timeout_s: float | None = None
    ) -> Draft | None:
        if len(ids) > self.max_prompt_tokens:
            self.counts["prompts_too_long"] += 1
            return None
        params = dataclasses.replace(self.params, seed=derive_seed(self.params.seed, *seed_parts))
        try:
            async with asyncio.timeout(timeout_s or self.timeout_s):
                done = await self.sampler.complete(ids, params)
        except TimeoutError:
            self.counts["sample_timeouts"] += 1
            return None
        self.counts[f"generations_{kind.value}"] += 1
        spoken = done.ids[:-1] if done.ids and done.ids[-1] in params.stop_ids else done.ids
        generation = Generation("", kind, tuple(ids), tuple(done.ids), tuple(done.logps), tuple(done.versions), step)
        return Draft(generation, self.decode(spoken))
