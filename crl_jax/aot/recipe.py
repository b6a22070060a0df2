"""The programs of a recipe, ready to be compiled for a slice.

Owns: which functions a run jits, with which shapes, types and placements. Promises: they are the functions the run itself calls
(``learner.step``, ``serving.programs``, ``models.embedder``, ``sharding.reshard``), at their largest shapes; no array is made.
Does not: compile (``compile``).

Each role has the slice to itself: its learner on the whole mesh, its sampler in replicas of ``mesh.tensor`` chips with all weights and
``slots`` sequences each. A run with ``serve_tensor`` has such replicas in one program, its slots split over them; without, it samples on
the learner's mesh.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from crl_jax.aot.needed import forward_flops, train_flops
from crl_jax.aot.topology import Topology, describe_devices, replica_mesh, topology_mesh
from crl_jax.config.roles import RoleConfig
from crl_jax.config.schema import Config
from crl_jax.learner.lora import make_lora_step
from crl_jax.learner.placement import state_shardings
from crl_jax.learner.state import LearnerState, init_state
from crl_jax.learner.step import make_train_step
from crl_jax.models import embedder, transformer
from crl_jax.models.config import ModelConfig, check_same_model
from crl_jax.models.hf_config import read_hf_config
from crl_jax.models.load import load_codec, load_config
from crl_jax.models.lora import init_adapters
from crl_jax.records import TrainBatch
from crl_jax.role import Buckets
from crl_jax.role_settings import buckets_of, execution, lora_of, objective_of, optimizer_of
from crl_jax.serving import programs
from crl_jax.serving.engine import SlotEngine
from crl_jax.sharding.adapters import adapter_shardings
from crl_jax.sharding.mesh import DATA, FSDP
from crl_jax.sharding.reshard import make_reshard, serving_mesh
from crl_jax.sharding.rules import batch_sharding, param_shardings


@dataclasses.dataclass(frozen=True)
class Program:
    """One program: ``lower()`` traces it; ``chips`` take part; ``model_flops`` is the arithmetic it needs on all of them (0: none).

    ``keeps`` names its arguments that stay in memory between calls, by group: programs of a role share what has the same name.
    """

    name: str
    role: str
    shapes: str
    chips: int
    model_flops: float
    lower: Callable[[], Any]
    keeps: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    loop_trips: int = 1  # of a loop that ends by what it computes


def recipe_programs(config: Config, topology: Topology) -> Iterator[Program]:
    """All programs of ``config`` on ``topology``: per role train step, reshard, prefill, decode; then the embedder.

    Raises AotError without libtpu, ValueError when a mesh or batch does not fit the slice.
    """
    devices = describe_devices(topology)
    roles: list[tuple[str, RoleConfig]] = [("actor", config.actor)]
    if config.run.method != "baseline":
        roles.append(("extractor", config.extractor))
    for name, role in roles:
        m = role.mesh
        data = m.data or max(1, topology.chips // (m.fsdp * m.tensor))
        try:
            mesh = topology_mesh(devices, topology, data, m.fsdp, m.tensor)
        except ValueError as error:
            raise ValueError(f"`{name}.mesh`: {error}") from error
        model = recipe_model(name, role)
        yield _step(config, name, role, model, mesh)
        yield _reshard(name, role, model, mesh)
        yield from _serving(name, role, model, replica_mesh(mesh, topology))
    if config.run.method != "baseline":
        yield _embed(devices[0])


def recipe_model(name: str, role: RoleConfig) -> ModelConfig:
    """The model that the run of this recipe would build for the role called ``name``.

    A preset needs no files. Where ``weights`` is a Hugging Face folder that exists, its config.json must describe the same model; weights
    that are not there are taken on trust. Raises ValueError that names the key when the model cannot be had.
    """
    try:
        sized = role.weights == "random" or role.model == "micro"  # the vocabulary is then the tokenizer's
        model = load_config(role.model, vocab_size=load_codec(role.tokenizer).tokenizer.vocab_size if sized else None)
        folder = pathlib.Path(role.weights)
        if (folder / "config.json").is_file():
            check_same_model(model, read_hf_config(folder), source=role.weights)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"`{name}.model`: {error}") from error
    return model


def placed(shapes: Any, shardings: Any) -> Any:
    """``shapes`` (ShapeDtypeStructs) with a sharding on each; ``shardings`` is one sharding or a tree of them."""
    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=shardings), shapes)
    return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, shardings)


def _step(config: Config, name: str, role: RoleConfig, model: ModelConfig, mesh: Mesh) -> Program:
    optimizer, buckets = optimizer_of(config, name, role), buckets_of(config, name, role, mesh)
    rows, length, trained = buckets.rows[-1], buckets.lengths[-1], buckets.tokens[-1]
    shards = mesh.shape[DATA] * mesh.shape[FSDP]
    if rows % (role.microbatches * shards):
        raise ValueError(
            f"{name}: {rows} rows do not divide over {role.microbatches} micro-batches x {shards} shards (mesh data x fsdp): "
            f"choose {name}.microbatches, {name}.mesh or the batch so that they do"
        )
    params, where = transformer.param_shapes(model), param_shardings(model, mesh)
    base, lora = placed(params, where), lora_of(role)
    if lora is not None:
        params = jax.eval_shape(lambda key: init_adapters(params, lora, key), jax.random.key(0))
        where = adapter_shardings(params, mesh)
    state = jax.eval_shape(lambda params: init_state(params, optimizer), params)
    shardings = state_shardings(state, optimizer, where, mesh)
    options: dict[str, Any] = {
        "temperature": role.sampling.temperature or 1.0,
        "allowed": None,
        "microbatches": role.microbatches,
        "how": execution(role, mesh),
        "mesh": mesh,
        "shardings": shardings,
    }
    whole: LearnerState = placed(state, shardings)
    batch = placed(_batch(buckets), batch_sharding(mesh))
    step: Any
    if lora is None:
        step, inputs = make_train_step(model, optimizer, objective_of(config, name), **options), (whole, batch)
    else:
        step, inputs = make_lora_step(model, optimizer, objective_of(config, name), lora, **options), (base, whole, batch)
    return Program(
        "step",
        name,
        f"{rows} x {length} tokens, {trained} trained per row, {role.microbatches} micro-batches",
        mesh.size,
        train_flops(model, rows=rows, length=length, trained=trained),
        lambda: step.lower(*inputs),
        {"train state": whole} if lora is None else {"adapters": whole, "frozen base": base},
    )


def _batch(buckets: Buckets) -> TrainBatch:
    """The largest batch the role compiles."""
    rows, length, trained = buckets.rows[-1], buckets.lengths[-1], buckets.tokens[-1]
    sequences = rows * (buckets.sequences[-1] if buckets.sequences else 1)
    packed = bool(buckets.sequences)

    def of_row(dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((rows, length), dtype)

    def of_sequence(dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((sequences, trained), dtype)

    return TrainBatch(
        tokens=of_row(),
        positions=of_row(),
        token_index=of_sequence(),
        mask=of_sequence(jnp.bool_),
        behaviour_logps=of_sequence(jnp.float32),
        advantages=of_sequence(jnp.float32),
        states=of_sequence(),
        source_index=of_sequence() if packed else None,
        segments=of_row() if packed else None,
        prefixes=of_row() if packed and buckets.share_prefixes else None,
    )


def _reshard(name: str, role: RoleConfig, model: ModelConfig, mesh: Mesh) -> Program:
    params = placed(transformer.param_shapes(model), param_shardings(model, mesh))
    reshard: Any = make_reshard(model, serving_mesh(mesh, role.mesh.tensor), role.serve_dtype)
    shapes = f"float32 on data x fsdp x tensor -> {role.serve_dtype} in {mesh.size // role.mesh.tensor} replicas"
    return Program("reshard", name, shapes, mesh.size, 0.0, lambda: reshard.lower(params))


def _serving(name: str, role: RoleConfig, model: ModelConfig, replica: Mesh) -> Iterator[Program]:
    """Prefill and decode of one replica."""
    dtype = jnp.dtype(role.serve_dtype)
    engine = SlotEngine(
        model,
        max_slots=role.slots,
        max_length=role.max_length,
        mesh=replica,
        row_buckets=role.row_buckets,
        chunk_buckets=role.chunk_buckets,
        cache_dtype=dtype,
    )
    served = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), transformer.param_shapes(model))
    params = placed(served, param_shardings(model, replica))
    program, whole = engine.program, NamedSharding(replica, PartitionSpec())
    empty = jax.eval_shape(lambda: programs.init_state(program._replace(cache_sharding=None), role.slots, role.max_length))
    state = programs.DecodeState(placed(empty.cache, program.cache_sharding), placed(empty.slots, whole))
    keeps = {"serving weights": params, "decode state": state}
    chunk, length, width = engine.chunk_buckets[-1], role.max_length, engine.max_steps

    for rows in sorted({engine.row_buckets[0], role.slots}):
        packed = jax.ShapeDtypeStruct((rows, programs.row_columns(engine.program) + chunk), jnp.int32, sharding=whole)
        dense = rows == role.slots
        yield Program(
            "prefill",
            name,
            f"{rows} rows x {chunk} tokens into {role.slots} slots of {length}, chunk at the end",
            replica.size,
            forward_flops(model, tokens=rows * chunk, pairs=rows * chunk * (length - chunk / 2), logits=rows),
            lambda packed=packed, dense=dense: programs.extend.lower(program, params, state, packed, dense),
            keeps,
        )
    slots = jax.ShapeDtypeStruct((role.slots,), jnp.int32, sharding=whole)
    steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    yield Program(
        "decode",
        name,
        f"{width} tokens x {role.slots} slots of {length}, full",
        replica.size,
        width * forward_flops(model, tokens=role.slots, pairs=role.slots * length, logits=role.slots),
        lambda: programs.generate.lower(program, params, state, programs.Tables(), slots, steps, width, True),
        keeps,
        loop_trips=width,
    )


def _embed(device: Any) -> Program:
    """The sentence embedder at its largest bucket, on one chip."""
    here = SingleDeviceSharding(device)
    weights = placed(embedder.weight_shapes(), here)
    rows, length = embedder.BATCH_BUCKETS[-1], embedder.LENGTH_BUCKETS[-1]
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=here)
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=here)
    matrices = sum(math.prod(s.shape) for name, s in embedder.weight_shapes().items() if "encoder" in name and len(s.shape) == 2)
    pairs = 4.0 * embedder.LAYERS * 384 * rows * length**2
    flops = 2.0 * matrices * rows * length + pairs
    return Program("embed", "bank", f"{rows} texts x {length} tokens", 1, flops, lambda: embedder.minilm.lower(weights, ids, lengths))
