"""One episode: the actor reads, answers, and may ask the bank; everything it read and said becomes one append-only token log.

Owns: the order of tokens in an episode and their provenance; when a reply is a search-and-ask turn; when an episode ends.
Promises: sampled ids are never re-tokenised; only a guided episode can reach the bank; an environment error (a reward that is no finite
number, too) ends this episode alone, without reward; a lesson cannot close the delimiters it stands between. Does not: retry anything,
know where weights live, or decide what is learned from the episode.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from crl_jax.experience.extractor import as_data
from crl_jax.records import Completion, Condition, Episode, Finish, Provenance, SamplingParams, Status, Task, TokenLog, Turn, Verdict
from crl_jax.seeds import derive_seed
from envs.parse import without_reasoning

ASK = re.compile(r"<search_and_ask>(.*?)</search_and_ask>", re.DOTALL)


class EpisodeEnv(Protocol):
    """What the agent needs of an environment (an ``EnvPool`` lease has it)."""

    async def reset(self, seed: int, task: str = "") -> Observed: ...
    async def step(self, text: str) -> Stepped: ...


class Observed(Protocol):
    """First observation."""

    @property
    def text(self) -> str: ...


class Stepped(Protocol):
    """Result of one environment step."""

    @property
    def observation(self) -> str: ...
    @property
    def reward(self) -> float: ...
    @property
    def terminated(self) -> bool: ...
    @property
    def truncated(self) -> bool: ...
    @property
    def success(self) -> bool: ...
    @property
    def valid(self) -> bool: ...


class EpisodeSampler(Protocol):
    """The part of ``serving.Sampler`` an episode uses."""

    max_length: int
    version: int

    async def open(self) -> str: ...
    async def generate(self, session: str, new_ids: Sequence[int], params: SamplingParams) -> Completion: ...
    async def close(self, session: str) -> None: ...


class Codec(Protocol):
    """Text to ids and back, with the chat template's role markers (``models.codec.ChatCodec`` is one)."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def open(self, role: str, after: str | None = None) -> list[int]: ...
    def close(self, role: str = "user") -> list[int]: ...
    def reply(self) -> list[int]: ...
    def after_reply(self) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class ActorPrompts:
    """The words around an episode. ``system`` may hold ``{env}``. ``lesson`` and ``ask_hint`` are only ever shown to guided episodes;
    ``{text}`` and ``{uses}`` are
    filled in."""

    system: str = ""
    examples: tuple[tuple[str, str], ...] = ()  # (observation, action) pairs shown before the episode
    lesson: str = "{text}"
    ask_hint: str = ""
    nothing_found: str = "nothing found"


@dataclasses.dataclass(frozen=True)
class Answer:
    """A search-and-ask answer and the generation to credit for it (empty: nobody, the answer is a raw entry)."""

    text: str
    generation_id: str = ""


Ask = Callable[[Task, str, str, int], Awaitable[Answer | None]]
"""``ask(task, query, episode id, number of the question)``: an answer from the bank, or None when nothing was found."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that fixes one episode before it starts."""

    id: str
    group_id: str
    condition: Condition
    task: Task
    sampling: SamplingParams  # its seed is replaced at every turn
    max_turns: int
    timeout_reward: float = 0.0  # added when the episode is cut off here, where the environment did not count it as its own last turn
    system: str = ""  # the environment's own system prompt, where the prompt texts have ``{env}``
    lessons: tuple[tuple[str, str], ...] = ()  # (experience id, text), guided only
    ask_uses: int = 0  # how often this episode may ask the bank; 0 outside the guided half
    verdicts: tuple[Verdict, ...] = ()  # of the gate on what was retrieved; ``lessons`` are what is left

    def __post_init__(self) -> None:
        if self.condition is Condition.FREE and (self.lessons or self.ask_uses or self.verdicts):
            raise ValueError(f"episode {self.id} is experience-free and must have neither lessons nor asks")


async def run_episode(
    plan: Plan,
    *,
    env: EpisodeEnv,
    sampler: EpisodeSampler,
    codec: Codec,
    prompts: ActorPrompts,
    ask: Ask | None,
    env_errors: tuple[type[Exception], ...] = (),
) -> Episode:
    """Play ``plan`` to its end and return the episode.

    ``ask`` answers from the bank; it is only called for plans with ``ask_uses``. Exceptions of ``env_errors`` end the episode with
    ``Status.ENV_ERROR`` and no reward; every other exception propagates.
    """
    session = await sampler.open()
    play = _Play(plan, sampler, session, codec, prompts, ask)
    try:
        return await play.run(env)
    except env_errors as error:
        return play.finish(Status.ENV_ERROR, success=False, reward=None, final=f"environment error: {error}")
    finally:
        await sampler.close(session)


class _Play:
    """The mutable side of one episode in progress."""

    def __init__(
        self,
        plan: Plan,
        sampler: EpisodeSampler,
        session: str,
        codec: Codec,
        prompts: ActorPrompts,
        ask: Ask | None,
    ) -> None:
        self.plan, self.sampler, self.session, self.codec, self.prompts, self.ask = plan, sampler, session, codec, prompts, ask
        self.log, self.sent = TokenLog.empty(), 0
        self.turns: list[Turn] = []
        self.asks: list[str] = []
        self.version = sampler.version
        self.role: str | None = None  # of the newest message, which decides what the template puts before the next

    async def run(self, env: EpisodeEnv) -> Episode:
        observation = (await env.reset(self.plan.task.seed, self.plan.task.id)).text
        self._open_prompt()
        role, provenance, reward = "user", Provenance.OBSERVATION, 0.0
        while True:
            self._message(role, observation, provenance)
            if len(self.log) + self.plan.sampling.max_new_tokens > self.sampler.max_length:
                return self._cut(reward, observation)
            reply, span = await self._reply()
            query = self._ask_query(reply)
            if query is not None:
                self.turns.append(Turn(observation, reply, span, tool=True))
                role, provenance, observation = "tool", Provenance.TOOL_RESULT, await self._answer(query)
                if len(self.turns) >= self.plan.max_turns:
                    return self._cut(reward, observation)
                continue
            step = await env.step(reply)
            if not math.isfinite(step.reward):
                return self.finish(Status.ENV_ERROR, success=False, reward=None, final=f"environment error: reward {step.reward}")
            reward += step.reward
            self.turns.append(Turn(observation, reply, span, valid=step.valid))
            role, provenance, observation = "user", Provenance.OBSERVATION, step.observation
            if step.terminated:
                return self.finish(Status.TERMINATED, success=step.success, reward=reward, final=observation)
            if step.truncated:
                return self.finish(Status.TRUNCATED, success=step.success, reward=reward, final=observation)
            if len(self.turns) >= self.plan.max_turns:  # questions took turns that the environment has not seen
                return self._cut(reward, observation)

    def _cut(self, reward: float, final: str) -> Episode:
        """The end by a limit that the environment does not know; it is worth what the environment's own limit is."""
        return self.finish(Status.TRUNCATED, success=False, reward=reward + self.plan.timeout_reward, final=final)

    def finish(self, status: Status, *, success: bool, reward: float | None, final: str) -> Episode:
        plan = self.plan
        return Episode(
            id=plan.id,
            group_id=plan.group_id,
            condition=plan.condition,
            task=plan.task,
            log=self.log,
            turns=tuple(self.turns),
            final_observation=final,
            status=status,
            success=success,
            reward=reward,
            shown=tuple(entry for entry, _ in plan.lessons),
            asks=tuple(self.asks),
            started_version=self.version,
            verdicts=plan.verdicts,
        )

    # ------------------------------------------------------------------------------------------------------------ tokens

    def _context(self, ids: list[int], provenance: Provenance) -> None:
        if ids:
            self.log = self.log.append_context(ids, provenance)

    def _open(self, role: str) -> None:
        self._context(self.codec.open(role, self.role), Provenance.TEMPLATE)
        self.role = role

    def _message(self, role: str, text: str, provenance: Provenance) -> None:
        """One whole message and the header of the assistant's reply to it."""
        self._open(role)
        if role == "user" and not self.turns:
            hint = self.prompts.ask_hint if self.plan.ask_uses else ""
            gap = "" if text[:1].isspace() else "\n\n"  # compact observations begin with a space of their own
            self._context(self.codec.encode(self.plan.task.goal + hint + gap), Provenance.PROMPT)
        self._context(self.codec.encode(text), provenance)
        self._context(self.codec.close(role) + self.codec.reply(), Provenance.TEMPLATE)
        self.role = "assistant"

    def _open_prompt(self) -> None:
        lessons = [self.prompts.lesson.replace("{text}", as_data(text)) for _, text in self.plan.lessons]
        system = self.prompts.system.replace("{env}", self.plan.system)
        if system or lessons:
            self._open("system")
            self._context(self.codec.encode(system), Provenance.PROMPT)
            for lesson in lessons:
                self._context(self.codec.encode(lesson), Provenance.EXPERIENCE)
            self._context(self.codec.close("system"), Provenance.TEMPLATE)
        for observation, action in self.prompts.examples:
            for role, text in (("user", observation), ("assistant", action)):
                self._open(role)
                self._context(self.codec.encode(text), Provenance.PROMPT)
                self._context(self.codec.close(role), Provenance.TEMPLATE)

    async def _reply(self) -> tuple[str, tuple[int, int]]:
        seed = derive_seed(self.plan.sampling.seed, self.plan.id, len(self.turns))
        new_ids = self.log.ids[self.sent :].tolist()
        completion = await self.sampler.generate(self.session, new_ids, dataclasses.replace(self.plan.sampling, seed=seed))
        start = len(self.log)
        self.log = self.log.append_completion(completion)
        self.sent = len(self.log)
        stopped = completion.finish is Finish.STOP
        self._context(self.codec.after_reply() if stopped else self.codec.close("assistant"), Provenance.TEMPLATE)
        said = list(completion.ids[:-1] if stopped else completion.ids)
        return self.codec.decode(said), (start, start + len(completion.ids))

    # ------------------------------------------------------------------------------------------------------------ search and ask

    def _ask_query(self, reply: str) -> str | None:
        """The query of a search-and-ask reply while this episode may still ask; otherwise None and the reply goes to the environment."""
        if self.ask is None or sum(turn.tool for turn in self.turns) >= self.plan.ask_uses:
            return None
        found = ASK.search(without_reasoning(reply))
        return found.group(1).strip() if found else None

    async def _answer(self, query: str) -> str:
        assert self.ask is not None
        answer = await self.ask(self.plan.task, query, self.plan.id, sum(turn.tool for turn in self.turns))
        if answer is None:
            return self.prompts.nothing_found
        if answer.generation_id:
            self.asks.append(answer.generation_id)
        return answer.text
