"""The settings of an experience manager.

Owns: ``ManagerOptions`` and the deadlines that no setting changes. Does not: read a configuration (``bank_settings``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

from crl_jax.experience.index import Index
from crl_jax.experience.merging import MergePolicy
from crl_jax.experience.protocols import Embedder
from crl_jax.experience.reader import Routing
from crl_jax.experience.retrieve import Diversity
from crl_jax.experience.reward import RewardRule
from crl_jax.experience.search import BATCH_LIMIT, SearchService
from crl_jax.experience.writer import WritePolicy
from crl_jax.records import SamplingParams

IO_S = 60.0  # the default deadline of one call on the bank's thread, of a search, and of a place in the queue
LOAD_S, CLOSE_S = 600.0, 180.0  # deadlines: loading (and indexing, perhaps embedding) a bank; the end of an index build at closing


@dataclasses.dataclass(frozen=True)
class ManagerOptions:
    """Settings of the service. Times are seconds, sizes are items.

    ``decay`` is (first, last, steps): what a step leaves of an entry's recent counts, from first to last by a cosine over so many training
    steps; None lets nothing fade. ``snapshots`` of the store file are kept, one made with each checkpoint.
    """

    sampling: SamplingParams
    diversity: Diversity = dataclasses.field(default_factory=Diversity)
    write: WritePolicy = dataclasses.field(default_factory=WritePolicy)
    max_ops: int = 3
    max_chars: int = 2000
    votes: bool = False  # whether the extractor may vote on the entries it was shown
    reward: RewardRule = dataclasses.field(default_factory=RewardRule)
    max_prompt_tokens: int = 57_344
    queue_size: int = 1024
    distil_concurrency: int = 4
    merge: MergePolicy = dataclasses.field(default_factory=MergePolicy)
    routing: Routing = Routing.TASK
    decay: tuple[float, float, int] | None = None
    snapshots: int = 0
    query_batch: int = 16
    query_batch_limit: int = BATCH_LIMIT  # while every worker is busy
    query_wait_s: float = 0.001
    query_max_open: int = 8192
    search_workers: int = 0  # 0 = one for each core
    cache_size: int = 1000
    submit_timeout_s: float = IO_S
    sample_timeout_s: float = 600.0
    ask_timeout_s: float = 60.0  # an episode waits for the answer, so shorter than what a batch of episodes may take
    io_timeout_s: float = IO_S
    seed: int = 0
    in_turn: bool = False  # nothing that is written depends on timing: merges, then distillations in turn (synchronous runs)
    purpose: str = ""  # logged as the reason of what this manager's extractor writes

    def search_service(
        self, embedder: Embedder, index: Callable[[], Index], counts: Counter[str], clock: Callable[[], float]
    ) -> SearchService:
        """The search of a manager with these settings."""
        return SearchService(
            embedder=embedder,
            index=index,
            counts=counts,
            clock=clock,
            batch_size=self.query_batch,
            batch_limit=self.query_batch_limit,
            max_wait_s=self.query_wait_s,
            workers=self.search_workers,
            cache_size=self.cache_size,
            max_open=self.query_max_open,
            timeout_s=self.io_timeout_s,
        )
