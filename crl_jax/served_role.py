"""The model of one role, ready to be served.

Owns: which weights they are: those of the configuration, of a file, or of a run's checkpoint. Promises: the same model, tokenizer, mesh and
engine sizes as in training; a checkpoint of other adapters is refused; only the sampler's copy of the weights stays in memory. Does not:
open sockets.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from crl_jax import lookup
from crl_jax.build import action_trie
from crl_jax.checkpoint import store as checkpoints
from crl_jax.config.parse import ConfigError
from crl_jax.config.roles import RoleConfig
from crl_jax.config.schema import Config
from crl_jax.learner.placement import state_shardings
from crl_jax.learner.state import init_state
from crl_jax.lookup import RoleParts
from crl_jax.models.codec import ChatCodec
from crl_jax.models.config import ModelConfig
from crl_jax.models.lora import init_adapters
from crl_jax.models.params import Params
from crl_jax.models.pieces import pieces
from crl_jax.models.safetensors_io import load_params
from crl_jax.role_sampler import served_params
from crl_jax.role_settings import engine_options, lora_of, optimizer_of
from crl_jax.run_state import adapters_of, require_adapters
from crl_jax.serving.constraint import ActionTrie
from crl_jax.serving.publisher import Serving
from crl_jax.sharding.adapters import adapter_shardings, make_merge
from crl_jax.sharding.reshard import make_copy, serving_layout
from crl_jax.sharding.rules import param_shardings, replicated

_WIDER = {"max_stop_ids": 16, "max_forbidden_ids": 64, "stop_states": 256}  # of one request, of all: training needs fewer


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the weights come from: ``weights`` (as in the configuration), or the checkpoint of ``step`` (None: the newest) of the run in
    ``run``; neither: the configuration's.
    """

    weights: str = ""
    run: pathlib.Path | None = None
    step: int | None = None


@dataclasses.dataclass(frozen=True)
class ServedRole:
    """A role's model. ``params`` are as the sampler wants them (``serving``) and ``load`` brings a safetensors file there."""

    name: str
    codec: ChatCodec
    model: ModelConfig
    serving: Serving
    params: Any
    version: int
    trie: ActionTrie | None
    engine_options: dict[str, Any]
    host_bytes: int  # for keys and values of idle sessions
    drain_timeout_s: float  # longest wait of new weights for running requests; 0 = they change in the middle

    def load(self, path: pathlib.Path) -> Any:
        """Parameters of a safetensors file (dotted names, see ``models.safetensors_io``). Raises ValueError when they do not fit."""
        shardings = param_shardings(self.model, self.serving.mesh) if self.serving.mesh.size > 1 else None
        return make_copy(self.serving.dtype, self.serving.layout)(load_params(self.model, path, shardings=shardings))


def load_role(config: Config, name: str, source: Source) -> ServedRole:
    """The role called ``name`` (actor or extractor). Raises ConfigError or CheckpointError."""
    role: RoleConfig = config.actor if name == "actor" else config.extractor
    if source.weights:
        role = dataclasses.replace(role, weights=source.weights)
        config = dataclasses.replace(config, **{name: role})
    trie = None
    parts = lookup.role_parts(config, name)
    if name == "actor" and config.env.constrained:
        goals = lookup.run_tasks(config).stream.goals
        lookup.check_actions(config, goals, parts.codec)
        trie = action_trie(config, goals, parts.codec)
    serving = Serving(parts.serve_mesh, role.serve_dtype, serving_layout(parts.mesh))
    if source.run is None:
        params, version = served_params(parts, serving), 0
    else:
        params, version = checkpoint_weights(config, name, role, parts, serving, source.run / "checkpoints", source.step)
    options = engine_options(role, parts.serve_mesh) | _WIDER | {"trie": trie, "pieces": pieces(parts.codec.tokenizer)}
    drain_s = role.publish.drain_timeout_s if role.publish.drain else 0.0
    return ServedRole(name, parts.codec, parts.model, serving, params, version, trie, options, role.host_cache_mib * 2**20, drain_s)


def checkpoint_weights(
    config: Config, name: str, role: RoleConfig, parts: RoleParts, serving: Serving, root: pathlib.Path, step: int | None
) -> tuple[Params, int]:
    """The weights of a checkpoint as ``serving`` wants them, adapters merged, and their version. ``step`` None: the newest complete one.

    Raises ConfigError where there is none, CheckpointError for one that cannot be used.
    """
    step = checkpoints.latest(root) if step is None else step
    if step is None:
        raise ConfigError(f"{root} holds no complete checkpoint: correct --run, e.g. --run runs/quickstart, or train first")
    saved = checkpoints.read_records(root, step)["run"]
    require_adapters(root, name, saved.get("adapters", {}).get(name), adapters_of(config, name))
    lora, mesh = lora_of(role), serving.mesh
    shardings = param_shardings(parts.model, mesh)
    if lora is None:
        served = make_copy(serving.dtype, serving.layout)
        trained = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), parts.params)
    else:
        base = jax.device_put(parts.params, shardings)
        where = shardings if mesh.size > 1 else replicated(mesh)
        served = make_merge(lora, serving.dtype, base, serving.layout, where=where)
        trained = jax.eval_shape(lambda key: init_adapters(base, lora, key), jax.random.key(0))
        shardings = adapter_shardings(trained, mesh)
    optimizer = optimizer_of(config, name, role)
    state = jax.eval_shape(lambda params: init_state(params, optimizer), trained)
    places = state_shardings(state, optimizer, shardings, mesh)
    like = jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state, places)
    return served(checkpoints.restore_tree(root, step, name, like).params), int(saved["versions"][name])
