"""JetStream's Driver over our engine: its prefill, transfer, generate and detokenize threads, made fit for a server that runs for days.

Owns: what is changed for that, by overriding. (1) The Driver ends its process when a slot becomes free between two looks at the slots by
its generate thread; here slots become free only when a step begins. (2) Prompts go to the engine as they are: no begin-of-text id is put
in front, nothing is cut to a padded length. (3) The queue of prompts is bounded. (4) A request whose client has gone ends at its next step.
(5) Importing JetStream leaves the root logger as it was.
Promises: one exception of the engine still ends the process (JetStream's design), so requests must be checked before they are placed.
Does not: know gRPC.

Importing this module imports JetStream.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from crl_jax.seeds import derive_seed
from crl_jax.serving import programs
from crl_jax.serving.jetstream_engine import JetStreamEngine
from crl_jax.serving.jetstream_import import import_jetstream

if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree.map  # type: ignore[attr-defined]  # removed from JAX; JetStream 0.2.2 still calls it


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    """JetStream sets the root logger to DEBUG and adds a handler when it is imported."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


with _root_logger_kept():
    orchestrator: Any = import_jetstream("jetstream.core.orchestrator")

placed_requests: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("placed_requests")
"""Where ``place_request_on_prefill_queue`` notes the request it was given, for the task that called it."""


class ServedEngine(JetStreamEngine):
    """Every prompt gets a seed of its own (JetStream's requests have none); ``before_step`` is called when a generate step begins."""

    def __init__(self, *args: Any, seed: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.before_step: Callable[[], None] = lambda: None
        self._seed, self._prompts = seed, itertools.count()

    def generate(self, params: Any, decode_state: Any, slots: Sequence[int] | None = None, steps: int = 1) -> Any:
        """As the base."""
        self.before_step()
        return super().generate(params, decode_state, slots, steps)

    def _ready(self, length: int, last: int, room: int) -> programs.SlotFields:
        self.defaults = dataclasses.replace(self.defaults, seed=derive_seed(self._seed, "prompt", next(self._prompts)))
        return super()._ready(length, last, room)


class Tokens:
    """The part of JetStream's tokenizer interface that the Driver asks for; text is made elsewhere, from ids."""

    def __init__(self, stop_ids: Sequence[int]) -> None:
        self.stop_tokens = frozenset(stop_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Nothing."""
        del ids
        return ""


class _Slots(queue.Queue[int]):
    """Free slots. What other threads than the owner put back is there only after ``release``."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        for slot in range(count):
            super().put(slot, block=False)
        self.owner = 0
        self._freed: list[int] = []

    def put(self, item: int, block: bool = True, timeout: float | None = None) -> None:
        """At once for the owner, else at the next ``release``."""
        if threading.get_ident() == self.owner:
            super().put(item, block, timeout)
        else:
            self._freed.append(item)

    def release(self) -> None:
        """Makes free what was put back."""
        while self._freed:
            super().put(self._freed.pop(0), block=False)


class ServingDriver(orchestrator.Driver):  # type: ignore[misc, name-defined]
    """See the module. ``queue_limit`` prompts may wait; a further one raises queue.Full, which clients see as RESOURCE_EXHAUSTED."""

    def __init__(self, prefill: Sequence[ServedEngine], generate: Sequence[ServedEngine], params: Any, *, queue_limit: int = 256) -> None:
        self._guard, self._queue_limit = threading.Lock(), queue_limit  # the base starts its threads while it is made
        super().__init__(
            prefill_engines=list(prefill),
            generate_engines=list(generate),
            prefill_params=[params] * len(prefill),
            generate_params=[params] * len(generate),
            interleaved_mode=list(prefill) == list(generate),
        )

    def place_request_on_prefill_queue(self, request: Any) -> None:
        """Queues one request. Raises queue.Full."""
        if self._prefill_backlog.qsize() >= self._queue_limit:
            raise queue.Full
        placed_requests.get([]).append(request)
        super().place_request_on_prefill_queue(request)

    def _process_prefill_content(self, request: Any, tokenizer: Any, is_bos: bool, max_prefill_length: int) -> tuple[np.ndarray, int]:
        del tokenizer, is_bos, max_prefill_length
        ids = np.asarray(request.prefill_content, np.int32)
        return ids, len(ids)

    def _generate_thread(self, idx: int) -> None:
        slots = self._own_slots(idx)
        slots.owner = threading.get_ident()
        self._generate_engines[idx].before_step = slots.release
        super()._generate_thread(idx)

    def _detokenize_thread(self, idx: int) -> None:
        self._own_slots(idx)
        super()._detokenize_thread(idx)

    def _own_slots(self, idx: int) -> _Slots:
        """Puts our queue of free slots in place, before either thread that uses it looks."""
        with self._guard:
            if not isinstance(self._generate_slots[idx], _Slots):
                self._generate_slots[idx] = _Slots(self._generate_engines[idx].max_concurrent_decodes)
            return self._generate_slots[idx]


def end_request(request: Any) -> None:
    """The request ends at its next step and its slot becomes free; harmless for one that has ended."""
    request.max_tokens = -1
