"""The frozen records that flow between the parts of crl_jax.

Owns: the vocabulary of the system (task, turn, episode, experience, generation, bank operation, training batch, sum).
Promises: every record is immutable and holds token ids, never text that would have to be tokenised again; the loss mask is derived from
provenance; log-probabilities are natural logs of the full softmax *at the sampling temperature* (over the allowed ids where a constraint
was active).
Does not: know about JAX devices, files, or clocks.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

# ---------------------------------------------------------------------------------------------------------------------- tokens


class Provenance(enum.IntEnum):
    """Where one token of an episode came from. Only ``ACTION`` tokens were sampled, so only they are trained."""

    PROMPT = 0  # system prompt, task text
    EXPERIENCE = 1  # a retrieved lesson placed in the prompt
    OBSERVATION = 2  # text of the environment
    ACTION = 3  # sampled by the policy (the stop token it emitted included)
    TOOL_RESULT = 4  # an answer of search-and-ask
    TEMPLATE = 5  # role headers and separators of the chat template


class Finish(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample one completion.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch truncation off; ``min_p`` drops every token less likely
    than that fraction of the likeliest one. ``forbidden_ids`` are never sampled. ``seed`` belongs to this request alone: the same seed
    gives the same tokens whatever else is in the batch. ``constrained`` restricts sampling to the action trie the sampler was built with.

    Sampling ends after an id of ``stop_ids``, or after the token with which the text of the sampled ids first contains one of
    ``stop_strings``: a token that holds more than the end of the string is kept whole.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    constrained: bool = False
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    forbidden_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """Tokens sampled for one request; all tuples have the same length and the stop id, when emitted, is the last entry.

    ``logps[i]`` is log softmax(logits / temperature) of ``ids[i]`` (greedy: at temperature 1), over the allowed ids of ``states[i]`` if
    that is not 0: what a learner can recompute. ``sampling_logps[i]`` is its log-probability in the distribution it was drawn from, after
    top-k, top-p, min-p and forbidden ids (greedy: 0); empty when a sampler does not know it. ``versions[i]`` is the weight version that
    sampled the token. ``states[i]`` is the constraint state it was sampled in (0 = unconstrained).
    """

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    versions: tuple[int, ...]
    states: tuple[int, ...]
    finish: Finish
    sampling_logps: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class TokenLog:
    """The append-only token record of one episode (or of one generation): five columns of equal length ``T``."""

    ids: Int[np.ndarray, " T"]  # int32
    provenance: Int[np.ndarray, " T"]  # int8, values of Provenance
    logps: Float[np.ndarray, " T"]  # float32, 0 where not ACTION
    versions: Int[np.ndarray, " T"]  # int32, -1 where not ACTION
    states: Int[np.ndarray, " T"]  # int32 constraint state, 0 where unconstrained

    @staticmethod
    def empty() -> TokenLog:
        """A log of no tokens, to append to."""
        return TokenLog(np.zeros(0, np.int32), np.zeros(0, np.int8), np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def loss_mask(self) -> Bool[np.ndarray, " T"]:
        """True exactly at the sampled tokens."""
        return self.provenance == Provenance.ACTION

    def append_context(self, ids: list[int] | tuple[int, ...], provenance: Provenance) -> TokenLog:
        """A new log with tokens the policy did not sample. Raises ValueError for ACTION provenance."""
        if provenance == Provenance.ACTION:
            raise ValueError("ACTION tokens carry log-probs: append them with append_completion")
        n = len(ids)
        return self._extend(ids, [provenance] * n, [0.0] * n, [-1] * n, [0] * n)

    def append_completion(self, completion: Completion) -> TokenLog:
        """A new log with the sampled tokens of ``completion``. Raises ValueError if its columns differ in length."""
        n = len(completion.ids)
        return self._extend(completion.ids, [Provenance.ACTION] * n, completion.logps, completion.versions, completion.states)

    def _extend(self, ids: Any, provenance: Any, logps: Any, versions: Any, states: Any) -> TokenLog:
        lengths = [len(column) for column in (ids, logps, versions, states)]
        if len(set(lengths)) > 1:
            raise ValueError(f"ids, log-probs, versions and states of a completion have {lengths} entries: a sampler gives one of each")

        def join(old: np.ndarray, new: Any) -> np.ndarray:
            return np.concatenate([old, np.asarray(new, old.dtype).reshape(-1)])

        return TokenLog(
            join(self.ids, ids),
            join(self.provenance, provenance),
            join(self.logps, logps),
            join(self.versions, versions),
            join(self.states, states),
        )


# ---------------------------------------------------------------------------------------------------------------------- acting


class Condition(enum.Enum):
    """Which half of its group an episode belongs to."""

    GUIDED = "guided"
    FREE = "free"


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing to do: the environment to make, its seed, and the words that name the goal (also the retrieval query)."""

    env: str  # registry name, e.g. "dungeon/amber_cellar"
    seed: int
    goal: str
    namespace: str  # scope of the bank: experiences are read and written only inside it
    id: str = ""  # which of the environment's tasks; "" where the seed alone fixes the episode


@dataclasses.dataclass(frozen=True)
class Turn:
    """One exchange: what the actor read and what it said. ``span`` is the half-open range of its sampled tokens in the episode's log."""

    observation: str
    reply: str
    span: tuple[int, int]
    tool: bool = False  # a search-and-ask turn, not an environment step
    valid: bool = True  # False when the reply was no action the environment knows


class Status(enum.Enum):
    """How an episode ended. ``ENV_ERROR`` episodes carry no reward and are never trained or credited."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    ENV_ERROR = "env_error"


class Decision(enum.Enum):
    """What the actor decided about an experience it was offered, before its episode began (the gate, off by default)."""

    ACCEPT = "accept"
    REFINE = "refine"
    REJECT = "reject"
    NONE = "none"  # no decision: the answer could not be read, came too late, or the question did not fit


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One decision of the gate. ``text`` is what was shown instead of the entry's own words (refine only)."""

    experience_id: str
    decision: Decision
    text: str = ""

    @property
    def shows(self) -> bool:
        """Whether the episode read the entry, in its own or in refined words."""
        return self.decision in (Decision.ACCEPT, Decision.REFINE)


@dataclasses.dataclass(frozen=True)
class Episode:
    """One finished episode. ``reward`` is None when nothing scored it (environment error)."""

    id: str
    group_id: str  # rollout request id: never the prompt text
    condition: Condition
    task: Task
    log: TokenLog
    turns: tuple[Turn, ...]
    final_observation: str
    status: Status
    success: bool
    reward: float | None
    shown: tuple[str, ...] = ()  # experience ids placed in the prompt
    asks: tuple[str, ...] = ()  # generation ids of the search-and-ask answers given
    started_version: int = 0  # actor weight version when the episode started
    verdicts: tuple[Verdict, ...] = ()  # of the gate, one for each entry retrieved; empty without a gate

    @property
    def handed(self) -> tuple[str, ...]:
        """Entries retrieved for the episode: those it was shown and those the gate kept from it."""
        return (*self.shown, *(verdict.experience_id for verdict in self.verdicts if not verdict.shows))


@dataclasses.dataclass(frozen=True)
class Group:
    """K episodes of one task instance, guided and free."""

    id: str
    episodes: tuple[Episode, ...]


# ---------------------------------------------------------------------------------------------------------------------- experience


class GenerationKind(enum.Enum):
    """What the extractor was asked to write."""

    DISTIL = "distil"
    ASK = "ask"
    MERGE = "merge"


@dataclasses.dataclass(frozen=True)
class Generation:
    """One extractor generation, whole: its prompt, its response and the behaviour log-probs.

    ``parse_error`` is empty when it was well formed.
    """

    id: str
    kind: GenerationKind
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logps: tuple[float, ...]
    versions: tuple[int, ...]
    step: int  # training step of the actor when it was made
    parse_error: str = ""


@dataclasses.dataclass(frozen=True)
class Experience:
    """One lesson of the bank. ``generation_id`` and ``op_index`` say which operation of which generation wrote it.

    ``outcome`` is whether the episode it was distilled from succeeded; None when it comes from no episode, or from several (merges).
    """

    id: str
    namespace: str
    text: str
    generation_id: str
    op_index: int
    author_version: int
    step: int
    episode_ids: tuple[str, ...] = ()
    parents: tuple[str, ...] = ()  # entries this one replaced (update, merge)
    outcome: bool | None = None


@dataclasses.dataclass(frozen=True)
class Usage:
    """Counters of one experience. ``shown`` counts episodes that read it, ``succeeded`` those of them that succeeded.

    ``recent_shown`` and ``recent_succeeded`` are the same, but every training step makes older episodes count less (the decay that was in
    force when they were counted; without one they equal the counts). ``votes`` is what the extractor gave it, up less down.
    """

    shown: int = 0
    succeeded: int = 0
    last_shown_step: int = -1
    recent_shown: float = 0.0
    recent_succeeded: float = 0.0
    votes: int = 0


class OpKind(enum.Enum):
    """Operations on the bank (method: add, update, return, and votes as an option; merge and retire are the manager's own)."""

    ADD = "add"
    UPDATE = "update"
    NOOP = "return"
    MERGE = "merge"
    RETIRE = "retire"
    UPVOTE = "upvote"
    DOWNVOTE = "downvote"


@dataclasses.dataclass(frozen=True)
class BankOp:
    """One operation: ``targets`` are entry ids to replace (update, merge) or drop (retire).

    ``text`` is the new entry's text (add, update, merge).
    """

    kind: OpKind
    text: str = ""
    targets: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------------------------- learning


@dataclasses.dataclass(frozen=True)
class TrainSample:
    """One sequence to learn from: its token log and one advantage for every sampled token in it."""

    log: TokenLog
    advantage: float


class TrainBatch(NamedTuple):
    """Arrays of one optimiser step: ``B`` rows of ``T`` tokens, and ``S`` sequences of at most ``N`` trained tokens.

    Only the trained positions are unembedded: ``token_index[s, n] = t`` says that token t of its row is the n-th sampled token of
    sequence s. Padding rows and slots have ``mask`` False, so they add nothing to any sum.

    Unpacked batches have one sequence per row (S = B, sequence s in row s) and leave the last three fields None: a token is scored from
    the hidden state before it. In packed batches S = B * P, and sequences s = b * P ... b * P + P - 1 lie in row b; ``segments``
    numbers the sequences of a row, ``prefixes`` names the sequence a token continues (its own when it continues none, None when no row
    shares a prefix), and ``source_index[s, n]`` is the position whose hidden state scores the token.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]  # -1 at padding
    token_index: Int[Array, "S N"]  # >= 1 where mask
    mask: Bool[Array, "S N"]
    behaviour_logps: Float[Array, "S N"]
    advantages: Float[Array, "S N"]
    states: Int[Array, "S N"]  # constraint state, 0 = full softmax
    source_index: Int[Array, "S N"] | None = None
    segments: Int[Array, "B T"] | None = None  # -1 at padding
    prefixes: Int[Array, "B T"] | None = None  # -1 at padding


class Sum(NamedTuple):
    """A total and the count it is over.

    Sums add exactly over micro-batches, steps and hosts; means are made only where they are displayed.
    """

    total: Any
    count: Any

    def __add__(self, other: Sum) -> Sum:  # type: ignore[override]
        return Sum(self.total + other.total, self.count + other.count)

    def mean(self) -> float:
        """total / count as a Python float; nan for a zero count."""
        return float(self.total) / float(self.count) if float(self.count) else float("nan")
