"""Calls to the extractor model: messages to prompt ids, a completion with a deadline, and the record of the generation.

Owns: prompt length (long episodes lose turns from their middle), sampling seeds, `Generation` records without an id. Promises: the seed
of a call depends on what it is about and on nothing that timing could change; ids and behaviour log-probs are kept as sampled. Does not:
parse or store.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from crl_jax.experience import extractor
from crl_jax.experience.extractor import ExtractorPrompts
from crl_jax.experience.protocols import Completer, Decode, Message, Render
from crl_jax.records import Episode, Generation, GenerationKind, SamplingParams
from crl_jax.seeds import derive_seed


class Draft(NamedTuple):
    """A generation that has no id yet, and its response as text (without the stop token)."""

    generation: Generation
    response: str


@dataclasses.dataclass
class ExtractorCalls:
    """Mutable only through ``counts``. ``params.seed`` is the base seed; a call that takes longer than ``timeout_s`` is given up and
    counted."""

    sampler: Completer
    render: Render
    decode: Decode
    prompts: ExtractorPrompts
    params: SamplingParams
    counts: Counter[str]
    max_ops: int
    max_prompt_tokens: int
    timeout_s: float

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

        def prompt() -> tuple[Sequence[int], bool]:
            ids, keep = self.render(messages(None)), len(episode.turns)
            shortened = len(ids) > self.max_prompt_tokens
            while len(ids) > self.max_prompt_tokens and keep > 0:
                keep //= 2
                ids = self.render(messages(keep))
            return ids, shortened

        ids, shortened = await asyncio.to_thread(prompt)  # a long transcript takes a while to tokenise; searches go on
        self.counts["transcripts_shortened"] += shortened
        return await self._complete(GenerationKind.DISTIL, ids, step, "distil", episode.id)

    async def merge(self, entries: Sequence[str], *, step: int, name: str) -> Draft | None:
        """One chunk of texts to merge; ``name`` tells this call from others of the same step."""
        ids = self.render(extractor.merge_messages(self.prompts, entries=entries, max_ops=self.max_ops))
        return await self._complete(GenerationKind.MERGE, ids, step, "merge", step, name)

    async def ask(self, query: str, entry: str, *, step: int, name: str) -> Draft | None:
        """An answer to an actor's question; ``name`` is the episode and the number of its question."""
        ids = self.render(extractor.ask_messages(self.prompts, query=query, entry=entry))
        return await self._complete(GenerationKind.ASK, ids, step, "ask", name)

    async def _complete(self, kind: GenerationKind, ids: Sequence[int], step: int, *seed_parts: int | str) -> Draft | None:
        if len(ids) > self.max_prompt_tokens:
            self.counts["prompts_too_long"] += 1
            return None
        params = dataclasses.replace(self.params, seed=derive_seed(self.params.seed, *seed_parts))
        try:
            done = await asyncio.wait_for(self.sampler.complete(ids, params), self.timeout_s)
        except TimeoutError:
            self.counts["sample_timeouts"] += 1
            return None
        self.counts[f"generations_{kind.value}"] += 1
        spoken = done.ids[:-1] if done.ids and done.ids[-1] in params.stop_ids else done.ids
        generation = Generation("", kind, tuple(ids), tuple(done.ids), tuple(done.logps), tuple(done.versions), step)
        return Draft(generation, self.decode(spoken))
