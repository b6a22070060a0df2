"""Which metrics a seed fixes in a synchronous run, and which tell of time, of memory, or of how the work happened to be batched.

Owns: the list. Promises: two synchronous runs of one recipe, killed and resumed or not, agree in everything that ``exact`` leaves, to the
last bit. Does not: compare runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TIME = r"step_s|.*_s|phase_s/.*|.*/seconds|rollout/tokens_per_s|host/.*|device/.*|profile/.*|.*memory.*|.*_[mg]ib"
_SAVING = r"checkpoint/.*"  # a run that was killed while it saved has saved once more
_PROCESSES = r"env/(messages|made|reused|restarts|drained)"  # of the environments' worker processes
_SEARCH = r"bank/(search_.*|embed_calls|cache_hits|cache_misses|index_dead|vectors_repaired)"  # which queries were searched together
_ENGINE = (  # which requests were computed together, what a slot held of the one before, when the engine looked at its inbox
    r"serve/\w+/(prefilled_tokens|recomputed_tokens|shared_tokens|restored_tokens|offloads|evictions|\w*dispatches|free_slots"
    r"|open_sessions|undelivered|swaps|retries)"
)
_INEXACT = re.compile("|".join((_TIME, _SAVING, _PROCESSES, _SEARCH, _ENGINE)))


def exact(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a row of metrics that a seed fixes."""
    return {name: value for name, value in row.items() if not _INEXACT.fullmatch(name)}
