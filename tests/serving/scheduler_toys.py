"""Small limits for schedulers under test, and what an engine would have sampled."""

from crl_jax.serving.engine import Emitted
from crl_jax.serving.limits import Limits


def limits(slots=2, length=16, **options) -> Limits:
    """Sizes with row buckets 1 and all; ``options`` change them."""
    sizes = {"max_stop_ids": 2, "vocab_size": 64, "row_buckets": (1, slots), "chunk_buckets": (4, 16), "min_shared": 1}
    return Limits(slots, length, **(sizes | options))


def sampled(ids: list[int]) -> Emitted:
    """These ids with log-probs -1 and -0.5."""
    return Emitted(ids, [-1.0] * len(ids), [-0.5] * len(ids), [0] * len(ids))
