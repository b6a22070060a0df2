"""From finished episodes to the two kinds of training samples.

Actor: advantages inside (group, condition), paper Eq. 5; episodes without a reward are left out and counted.
Extractor: advantage = mean reward of the generation minus the batch mean, times the training-count weight of Eq. 7.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crl_jax.experience.buffer import Sample
from crl_jax.losses.advantages import Normalise, batch_advantages, subgroup_advantages
from crl_jax.losses.reweight import count_weights
from crl_jax.records import Completion, Condition, Episode, Finish, Generation, Group, Provenance, TokenLog, TrainSample


def actor_samples(groups: Sequence[Group], *, normalise: Normalise, split: bool = True) -> tuple[list[TrainSample], dict[str, int]]:
    """Training samples of a batch of groups and counts of what was left out.

    ``normalise``: "mean_std" (paper) or "mean" (released configuration). ``split`` False pools both halves of a group (the cross-group
    ablation).
    """
    episodes = [episode for group in groups for episode in group.episodes]
    numbers = {group.id: i for i, group in enumerate(groups)}
    if len(numbers) != len(groups):
        raise ValueError("two groups of one batch share an id; group ids are rollout request ids and must be unique")
    rewards = np.array([np.nan if e.reward is None else e.reward for e in episodes], np.float32)
    group_ids = np.array([numbers[e.group_id] for e in episodes], np.int32)
    conditions = np.array([int(e.condition is Condition.GUIDED) if split else 0 for e in episodes], np.int32)
    advantages = np.asarray(subgroup_advantages(rewards, group_ids, conditions, normalise=normalise))
    kept = [i for i, e in enumerate(episodes) if not np.isnan(rewards[i]) and e.log.loss_mask.any()]
    samples = [TrainSample(episodes[i].log, float(advantages[i])) for i in kept]
    return samples, {"episodes": len(episodes), "unscored": len(episodes) - len(kept), "zero_advantage": int((advantages[kept] == 0).sum())}


def success_rate(episodes: Sequence[Episode], condition: Condition | None = None) -> tuple[int, int]:
    """(successes, scored episodes) of ``condition`` (both halves when None)."""
    scored = [e for e in episodes if e.reward is not None and condition in (None, e.condition)]
    return sum(e.success for e in scored), len(scored)


def extractor_samples(
    evidence: Sequence[Sample], *, step: int, alpha: float, cooldown_steps: int, version: int = 0, max_lag: int | None = None
) -> tuple[list[TrainSample], list[float]]:
    """Training samples of one extractor batch, and their weights of Eq. 7; 0 for what weights more than ``max_lag`` before ``version``
    wrote.

    ``evidence``: the generations popped from the buffer with their mean reward, in [-1, 1] without the options of `experience.reward`.
    Weights multiply the advantages after centring.
    """
    rewards = np.array([sample.reward for sample in evidence], np.float32)
    advantages = batch_advantages(rewards, np.ones(len(evidence), np.bool_))
    weights = count_weights(
        np.array([sample.train_count for sample in evidence], np.int64),
        np.array([sample.last_trained_step for sample in evidence], np.int64),
        step,
        alpha=alpha,
        cooldown=cooldown_steps,
    )
    if max_lag is not None:
        weights *= [version - sample.generation.versions[0] <= max_lag for sample in evidence]
    samples = [TrainSample(generation_log(s.generation), float(a * w)) for s, a, w in zip(evidence, advantages, weights, strict=True)]
    return samples, [float(w) for w in weights]


def generation_log(generation: Generation) -> TokenLog:
    """The token log of one generation: its prompt as context, its response as sampled, with the behaviour log-probs it was sampled at."""
    n = len(generation.response_ids)
    response = Completion(generation.response_ids, generation.logps, generation.versions, (0,) * n, Finish.STOP)
    return TokenLog.empty().append_context(generation.prompt_ids, Provenance.PROMPT).append_completion(response)
