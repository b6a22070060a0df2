"""A run's extractor and bank without the run: for merging and distilling offline.

Owns: how one role and the bank's manager start on a run's folder, and end. Promises: the same model (the newest checkpoint's, or the
recipe's before there is one), prompts, sampling and limits as in training; what is written carries the given reason; the training buffer is
kept. Does not: decide what is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from crl_jax.bank_tools.place import BankInputError, Place, writing
from crl_jax.experience import store_rows as rows
from crl_jax.experience.store import Store

if TYPE_CHECKING:
    from crl_jax.config.schema import Config
    from crl_jax.experience.manager import ExperienceManager
    from crl_jax.rollout.shell import Shell


class Offline(NamedTuple):
    """A started manager, the loop it lives on, and the longest wait for one of its calls."""

    manager: ExperienceManager
    shell: Shell
    deadline_s: float
    weights: str


def recipe(place: Place, config: Config | None) -> Config:
    """The configuration given, or the run's own. Raises BankInputError when there is neither."""
    found = config or place.config()
    if found is None:
        raise BankInputError(f"{place.path} lies in no run's folder, so there is no extractor to ask: give a recipe with --config FILE")
    if found.run.method == "baseline":
        raise BankInputError("a baseline run has no extractor: give the recipe of another run with --config FILE")
    return found


@contextlib.contextmanager
def opened(place: Place, config: Config, *, purpose: str) -> Iterator[Offline]:
    """The bank's manager with the run's extractor behind it. Raises ConfigError, also while another process writes the
    bank, and CheckpointError."""
    from crl_jax import build, lookup
    from crl_jax.checkpoint import store as checkpoints
    from crl_jax.rollout.shell import Shell
    from crl_jax.served_role import Source, load_role
    from crl_jax.serving.engine import SlotEngine
    from crl_jax.serving.sampler import EngineSampler

    trained = place.folder is not None and checkpoints.latest(place.folder / "checkpoints") is not None
    build.keep_compiled_programs(config.run.compile_cache)
    with contextlib.ExitStack() as stack:
        store: Store = stack.enter_context(writing(place))
        role = load_role(config, "extractor", Source(run=place.folder if trained else None))
        shell = stack.enter_context(Shell())
        engine = SlotEngine(role.model, **role.engine_options)
        sampler = EngineSampler(
            engine, role.params, version=role.version, host_bytes=role.host_bytes, request_timeout_s=config.run.collect_timeout_s
        )
        stack.callback(lambda: shell.call(sampler.aclose(), 30.0, "stopping the extractor's sampler"))
        prompts = lookup.extractor_prompts(config.extractor.prompt)
        config = dataclasses.replace(config, bank=dataclasses.replace(config.bank, merge_every=0, merge_redundancy=0.0))
        manager = build.manager_of(config, store, prompts, sampler, role.codec, purpose=purpose)
        shell.call(manager.start(), 120.0, "opening the experience bank")
        stack.callback(lambda: shell.call(manager.aclose(), 60.0, "closing the experience bank"))
        manager.step = store.read(rows.newest_step)
        name = f"weights version {role.version}" if trained else "the recipe's first weights"
        yield Offline(manager, shell, config.run.collect_timeout_s, name)
