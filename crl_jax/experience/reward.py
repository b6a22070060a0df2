"""What an episode is worth to the generations behind what it read: the extractor's reward, and the options around it.

Owns: the arithmetic from a batch of whole groups to one number per (episode, generation). Promises: pure; only what was shown is credited
with an episode's outcome; the outcome is the success flag, never the environment's reward; every fallback is counted. Does not: keep
evidence (``buffer``), centre or weigh (``losses``).

Reward of one episode for one generation, with the options in the order in which they add up:

    direct     r = +1 for success, -1 for failure                                                        (paper, the default)
    relative   r = (+1 or -1) - mean of (+1 or -1) over the free half of the episode's group             (paper, appendix B.2)
    critic     r + s_c, s_c = 1 accept, 0.5 refine, 0 reject                                             (paper Eq. 8)
    bonus      r + w f(dH), dH = H(actor | query) - H(actor | query, lesson)                             (paper, appendix B.2)

Eq. 8 where the gate rejected: the episode never read the entry, so there is no outcome to credit it with. What is left of the sum is
s_c = 0, and that is the entry's evidence. Without the critic a rejected entry gets no evidence at all. An answer of the gate that could
not be read says nothing about the entry, and counts for nothing.

The entropies of the bonus are estimated from what was sampled anyway: H is the mean of -log p over the sampled tokens of the moves
(questions to the bank left out), over all tokens of the free half for H(actor | query) and over the episode's own for
H(actor | query, lesson). The log-probs are those of sampling, at its temperature and among the allowed actions. Each half is measured at
the situations it came into itself, so this is an estimate of the difference with the noise of one sample, in nats per token.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from crl_jax.experience.buffer import credited, outcome
from crl_jax.records import Condition, Decision, Episode, Experience, Status

Base = Literal["direct", "relative"]
Bonus = Literal["off", "relative", "tanh", "sigmoid", "asymmetric", "log"]

CRITIC_SCORE = {Decision.ACCEPT: 1.0, Decision.REFINE: 0.5, Decision.REJECT: 0.0}


@dataclasses.dataclass(frozen=True)
class RewardRule:
    """The options; the default is the paper's reward."""

    base: Base = "direct"
    critic: bool = False
    bonus: Bonus = "off"
    bonus_weight: float = 1.0


class Credit(NamedTuple):
    """What one episode is worth to one generation."""

    episode_id: str
    generation_id: str
    reward: float


def credits_of(
    episodes: Sequence[Episode], find: Callable[[str], Experience | None], rule: RewardRule
) -> tuple[list[Credit], Counter[str]]:
    """The credits of finished episodes, in their order, and how often an option had nothing to compare with.

    ``episodes`` are whole groups (members are matched by group id). ``find`` knows entries, live or gone. Episodes with an environment
    error credit nobody and are in no mean.
    """
    counts: Counter[str] = Counter()
    scored = [episode for episode in episodes if episode.status is not Status.ENV_ERROR]
    free: dict[str, list[Episode]] = defaultdict(list)
    for episode in scored:
        if episode.condition is Condition.FREE:
            free[episode.group_id].append(episode)
    credits: list[Credit] = []
    for episode in scored:
        ids = credited(episode, find)
        scores = _critic_scores(episode, find) if rule.critic else {}
        if ids:
            reward = _base(episode, free[episode.group_id], rule, counts) + _bonus(episode, free[episode.group_id], rule, counts)
            credits += [Credit(episode.id, i, reward + scores.get(i, 0.0)) for i in ids]
        credits += [Credit(episode.id, i, score) for i, score in scores.items() if i not in ids]
    return credits, counts


def _base(episode: Episode, free: Sequence[Episode], rule: RewardRule, counts: Counter[str]) -> float:
    if rule.base == "direct":
        return outcome(episode.success)
    if not free:
        counts["reward_without_free_half"] += 1
        return outcome(episode.success)
    return outcome(episode.success) - sum(outcome(other.success) for other in free) / len(free)


def _critic_scores(episode: Episode, find: Callable[[str], Experience | None]) -> dict[str, float]:
    """s_c by generation: the mean over the entries it wrote among those shown; 0 where all of them were rejected."""
    shown: dict[str, list[float]] = defaultdict(list)
    rejected: list[str] = []
    for verdict in episode.verdicts:
        entry = find(verdict.experience_id)
        if entry is None or not entry.generation_id or verdict.decision is Decision.NONE:
            continue
        if verdict.shows:
            shown[entry.generation_id].append(CRITIC_SCORE[verdict.decision])
        else:
            rejected.append(entry.generation_id)
    return dict.fromkeys(rejected, CRITIC_SCORE[Decision.REJECT]) | {i: sum(found) / len(found) for i, found in shown.items()}


def _bonus(episode: Episode, free: Sequence[Episode], rule: RewardRule, counts: Counter[str]) -> float:
    if rule.bonus == "off":
        return 0.0
    without, guided = token_entropy(free), token_entropy([episode])
    if without is None or guided is None:
        counts["reward_without_entropy"] += 1
        return 0.0
    return rule.bonus_weight * entropy_form(rule.bonus, without - guided, without)


def token_entropy(episodes: Sequence[Episode]) -> float | None:
    """Mean of -log p over the sampled tokens of the episodes' moves, nats; None without any."""
    spans = [episode.log.logps[turn.span[0] : turn.span[1]] for episode in episodes for turn in episode.turns if not turn.tool]
    logps = np.concatenate(spans) if spans else np.zeros(0)
    return -float(np.mean(logps, dtype=np.float64)) if len(logps) else None


def entropy_form(form: Bonus, drop: float, before: float) -> float:
    """f(dH) for the entropy ``drop`` dH from ``before``, both in nats. Every form is 0 at 0 and grows with the drop.

    ``relative``: dH / H in [-1, 1]. ``tanh``: tanh(dH). ``sigmoid``: 2 sigmoid(dH / 1) - 1. ``asymmetric``: dH in [-0.2, 1].
    ``log``: sgn(dH) log(1 + |dH|). The bounds act before the weight.
    """
    match form:
        case "off":
            return 0.0
        case "relative":
            return min(max(drop / max(before, 1e-6), -1.0), 1.0)  # from no entropy at all there is only up: 0 or -1
        case "tanh":
            return math.tanh(drop)
        case "sigmoid":
            return math.tanh(drop / 2)  # = 2 / (1 + exp(-dH)) - 1, without its overflow
        case "asymmetric":
            return min(max(drop, -0.2), 1.0)
        case "log":
            return math.copysign(math.log1p(abs(drop)), drop)
