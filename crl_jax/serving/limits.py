"""What an engine was built for, and the check that a request is within it.

Owns: the ranges of sampling parameters. Promises: what passes can be put into the compiled programs as it is. Does not: look at prompts.
"""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple

from crl_jax.records import SamplingParams

MIN_TEMPERATURE = 1e-6  # below it, logits divided by the temperature leave the range of float32
_INT32 = 2**31  # what the compiled programs hold


class Limits(NamedTuple):
    """Sizes of an engine, as the scheduler needs them. ``prefill_tokens`` is how many tokens of input, padding counted, are computed before
    the requests that sample go on; ``min_shared`` the shortest beginning worth copying; ``host_tokens`` the positions kept on the host.
    """

    max_slots: int
    max_length: int
    max_stop_ids: int
    vocab_size: int
    max_forbidden_ids: int = 8
    row_buckets: tuple[int, ...] = (8, 32)
    chunk_buckets: tuple[int, ...] = (16, 64, 256)
    prefill_tokens: int = 8192
    min_shared: int = 8
    host_tokens: int = 0


def check_params(params: SamplingParams, limits: Limits, *, constrainable: bool, stoppable: bool) -> None:
    """Raises ValueError or TypeError saying what is wrong with ``params`` and what would do.

    ``constrainable``: the sampler has an action trie; ``stoppable``: it knows the bytes of its tokens.
    """
    p = params
    warm = p.temperature == 0 or MIN_TEMPERATURE <= p.temperature < math.inf
    narrow = 0 < p.top_p <= 1 and 0 <= p.top_k < _INT32 and 0 <= p.min_p <= 1
    if p.max_new_tokens < 1 or not warm or not narrow:
        ranges = (
            f"max_new_tokens >= 1, temperature 0 (greedy) or >= {MIN_TEMPERATURE:g}, top_p in (0, 1], top_k in [0, 2^31), min_p in [0, 1]"
        )
        raise ValueError(f"out of range ({ranges}): {p}")
    if not all(isinstance(i, numbers.Integral) for i in (p.max_new_tokens, p.top_k, p.seed, *p.stop_ids, *p.forbidden_ids)):
        raise ValueError(f"max_new_tokens, top_k, seed, stop_ids and forbidden_ids must be whole numbers: {p}")
    if not all(0 <= i < _INT32 for i in p.stop_ids):
        raise ValueError(f"stop ids {p.stop_ids} are no token ids")
    if len(p.stop_ids) > limits.max_stop_ids:
        raise ValueError(f"{len(p.stop_ids)} stop ids, but the engine was built with max_stop_ids={limits.max_stop_ids}")
    if not all(0 <= i < limits.vocab_size for i in p.forbidden_ids):
        raise ValueError(f"forbidden ids {p.forbidden_ids} are not in 0..{limits.vocab_size - 1}")
    if len(p.forbidden_ids) > limits.max_forbidden_ids:
        most = limits.max_forbidden_ids
        raise ValueError(f"{len(p.forbidden_ids)} forbidden ids, but the engine was built with max_forbidden_ids={most}")
    if p.constrained and p.forbidden_ids:
        raise ValueError("constrained sampling takes no forbidden ids: leave the action out of the trie")
    if len(set(p.forbidden_ids)) == limits.vocab_size:
        raise ValueError("every token is forbidden: nothing can be sampled")
    if isinstance(p.stop_strings, str) or not all(isinstance(text, str) for text in p.stop_strings):
        raise ValueError(f"stop_strings={p.stop_strings!r} is no tuple of strings: write ({p.stop_strings!r},)")
    if p.constrained and not constrainable:
        raise ValueError("constrained sampling needs a sampler built with an action trie")
    if p.stop_strings and not stoppable:
        raise ValueError("stop strings need an engine that knows its tokens: build it with pieces=crl_jax.models.pieces.pieces(tokenizer)")
