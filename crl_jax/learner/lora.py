"""The optimiser step of adapters over a frozen base.

Owns: the step that trains adapters only. Promises: it is ``learner.step`` with another tree of parameters, so everything said there holds;
the base is an argument that is neither donated nor changed, so several learners may share one. Does not: merge or publish.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from crl_jax.learner.state import LearnerState
from crl_jax.learner.step import Sums, make_train_step
from crl_jax.models import transformer
from crl_jax.models.lora import Lora, attach
from crl_jax.models.params import Params
from crl_jax.records import TrainBatch

LoraStep = Callable[[Params, LearnerState, TrainBatch], tuple[LearnerState, Sums]]


class AdaptedModel:
    """The transformer over one base: its parameters are the adapters. ``config`` etc. are those of ``models.transformer``."""

    def __init__(self, base: Params, lora: Lora) -> None:
        self._base, self._lora = base, lora

    def hidden_states(self, config: Any, params: Any, *args: Any, **how: Any) -> tuple[Any, Any]:
        """As ``transformer.hidden_states`` with the adapted matrices in place."""
        return transformer.hidden_states(config, attach(self._base, params, self._lora), *args, **how)

    def unembed(self, config: Any, params: Any, hidden: Any) -> Any:
        """As ``transformer.unembed``: embedding and head have no adapters."""
        del params
        return transformer.unembed(config, self._base, hidden)


def make_lora_step(model_config: Any, optimizer: Any, objective: Any, lora: Lora, **options: Any) -> LoraStep:
    """``step(base, state, batch) -> (state, sums)``; ``state.params`` are adapters. ``options`` are those of ``make_train_step``.

    The passed ``state`` is deleted, the base is kept.
    """

    def step(base: Params, state: LearnerState, batch: TrainBatch) -> tuple[LearnerState, Sums]:
        # made while tracing, so that the base is an input of the compiled program and not a constant inside it
        return make_train_step(model_config, optimizer, objective, model=AdaptedModel(base, lora), **options)(state, batch)

    return jax.jit(step, donate_argnums=1)
