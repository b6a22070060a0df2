"""What the ``bank:`` section of a configuration means to the parts of the bank.

Owns: which field sets which part. Promises: training and the tools that look at a stored bank rank, write and merge by the same rules. Does
not: build the parts (``build``).
"""

from __future__ import annotations

from crl_jax.config.schema import BankConfig
from crl_jax.experience.eviction import Eviction
from crl_jax.experience.merging import MergePolicy
from crl_jax.experience.retrieve import Diversity
from crl_jax.experience.writer import WritePolicy


def diversity_of(b: BankConfig) -> Diversity:
    """How picks are made."""
    return Diversity(
        k=b.top_k,
        oversample=b.candidate_multiplier,
        lambda_count=b.lambda_count,
        recent_steps=b.recent_steps,
        min_similarity=b.min_similarity,
        utility_weight=b.utility_weight,
        min_utility=b.min_utility,
        explore_p=b.explore_share,
        contrast=b.contrast,
        foreign_penalty=b.foreign_penalty,
    )


def write_policy_of(b: BankConfig) -> WritePolicy:
    """How many entries there are, which of them leave, and which are duplicates."""
    return WritePolicy(
        capacity=b.capacity,
        eviction=Eviction(b.eviction),
        protect_rare=b.protect_rare,
        dedup_cosine=b.dedup_threshold or 2.0,
        keep_better=b.dedup_keep == "better",
    )


def merge_policy_of(b: BankConfig) -> MergePolicy:
    """When namespaces are merged, and how."""
    return MergePolicy(b.merge_every, b.merge_chunk, b.merge_redundancy, b.merge_cosine)
