"""What the names in a configuration stand for: environments, prompts, tokenizers, models and weights.

Owns: looking all of them up, before a folder is made or anything starts. Promises: a name or option that does not exist, or parts that do
not fit together, is a ConfigError that names the key. Does not: start or train anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence

import jax

from crl_jax.config.check import task_sets, undivided_rows
from crl_jax.config.parse import ConfigError
from crl_jax.config.roles import MeshConfig, RoleConfig
from crl_jax.config.schema import Config, TaskSetConfig
from crl_jax.experience.extractor import DEFAULT_PROMPTS, ExtractorPrompts
from crl_jax.experience.verdict import DEFAULT_GATE_PROMPTS, GatePrompts
from crl_jax.models.attention import check_kernel
from crl_jax.models.codec import ChatCodec
from crl_jax.models.config import ModelConfig
from crl_jax.models.forward import check_scan
from crl_jax.models.load import load_codec, load_config, load_params
from crl_jax.models.params import Params
from crl_jax.records import Task
from crl_jax.rollout.agent import ActorPrompts
from crl_jax.rollout.collector import EnvSettings
from crl_jax.rollout.tasks import Goal, Mixture, TaskStream, fixed_tasks
from crl_jax.seeds import derive_seed
from crl_jax.sharding.mesh import DATA, FSDP, make_mesh
from crl_jax.sharding.reshard import own_part, serving_mesh
from crl_jax.sharding.rules import check_divisible, param_shardings
from envs import registry
from envs.api import EnvTask
from envs.parse import parse_action

ACTOR_PROMPTS = pathlib.Path(__file__).parent / "rollout" / "actor_prompts.json"


@dataclasses.dataclass(frozen=True)
class RoleParts:
    """What the settings of one role name. ``serve_mesh`` has the devices of ``mesh``, those of all processes of the job."""

    codec: ChatCodec
    model: ModelConfig
    mesh: jax.sharding.Mesh
    serve_mesh: jax.sharding.Mesh
    params: Params


@dataclasses.dataclass(frozen=True)
class RunTasks:
    """What a run plays: the stream it trains on, the fixed sets it is evaluated on, and its environments by name."""

    stream: TaskStream | Mixture
    eval_sets: dict[str, list[Task]]  # known, and heldout where a family keeps tasks back
    envs: dict[str, EnvSettings]


def run_tasks(config: Config) -> RunTasks:
    """The tasks of ``config``. Raises ConfigError for environments or options that do not exist."""
    seed, sets = config.run.seed, task_sets(config)
    each = config.run.eval_episodes // len(sets)
    streams: list[TaskStream] = []
    evaluated: dict[str, list[list[Task]]] = {}
    envs: dict[str, EnvSettings] = {}
    for part, chosen in sets.items():
        trained, kept = _tasks_of(chosen, f"env.mixture.{part}" if part else "env")
        behind = f"/{part}" if part else ""
        goals = _goals(trained)
        streams.append(TaskStream(tuple(goals), seed, f"train{behind}"))
        for name, tasks in (("known", goals), ("heldout", _goals(kept))):
            if tasks:
                evaluated.setdefault(name, []).append(fixed_tasks(tasks, each, seed, f"eval/{name}{behind}"))
        found = _env_settings(config, part, chosen, {task.env for task in (*trained, *kept)})
        if twice := found.keys() & envs.keys():
            raise ConfigError(f"`env.mixture.{part}`: {sorted(twice)} are in another part already: an environment belongs to one part")
        envs |= found
    stream = streams[0] if len(streams) == 1 else Mixture(tuple(streams))
    return RunTasks(stream, {name: [*itertools.chain(*lists)] for name, lists in evaluated.items()}, envs)


def _tasks_of(chosen: TaskSetConfig, key: str) -> tuple[list[EnvTask], list[EnvTask]]:
    """The tasks to train on, and those of the family that are kept back."""
    with _about(f"{key}.family" if chosen.family else f"{key}.names"):
        wanted = (chosen.family,) if chosen.family else chosen.names
        splits = [(registry.tasks(what, "train"), registry.tasks(what, "heldout")) for what in wanted]
        # A family without the split, or an environment named that is kept back, stands with the tasks it has.
        found = [task for train, heldout in splits for task in (heldout or train if chosen.split == "heldout" else train or heldout)]
        kept = [task for _, heldout in splits for task in heldout if task not in found]
    if chosen.count > len(found):
        raise ConfigError(f"`{key}.count`: {chosen.count}, but there are {len(found)} tasks: use 1 to {len(found)}, or 0 for all")
    return found[: chosen.count] if chosen.count else found, kept


def _env_settings(config: Config, part: str, chosen: TaskSetConfig, names: set[str]) -> dict[str, EnvSettings]:
    key = f"env.mixture.{part}" if part else "env"
    options = {"style": chosen.style, "grammar": config.env.action_format, "max_turns": chosen.max_turns, **chosen.options}
    with _about(key):
        specs = {name: registry.spec(name, **options) for name in sorted(names)}
    how = {"options": options, "max_turns": chosen.max_turns, "part": part}
    return {
        name: EnvSettings(**how, timeout_reward=spec.timeout_reward, system_prompt=spec.system_prompt, call_timeout_s=spec.call_timeout_s)
        for name, spec in specs.items()
    }


def actor_prompts(variant: str) -> ActorPrompts:
    """The actor's prompt texts of a variant. Raises ConfigError naming the known ones."""
    table = json.loads(ACTOR_PROMPTS.read_text(encoding="utf-8"))
    if variant not in table:
        raise ConfigError(f"actor.prompt={variant!r} is unknown: use one of {sorted(table)}")
    texts = dict(table[variant])
    return ActorPrompts(**{**texts, "examples": tuple(tuple(pair) for pair in texts.get("examples", ()))})


def extractor_prompts(variant: str) -> ExtractorPrompts:
    """The extractor's prompt texts of a variant. Raises ConfigError naming the known ones."""
    path = DEFAULT_PROMPTS if variant == "default" else DEFAULT_PROMPTS.with_name(f"extractor_prompts_{variant}.json")
    if not path.exists():
        known = sorted(p.stem.removeprefix("extractor_prompts_") for p in path.parent.glob("extractor_prompts_*.json"))
        raise ConfigError(f"extractor.prompt={variant!r} is unknown: use default or one of {known}")
    return ExtractorPrompts.load(path)


def gate_prompts(variant: str) -> GatePrompts:
    """The texts of the gate's question. Raises ConfigError naming the known ones."""
    path = DEFAULT_GATE_PROMPTS if variant == "default" else DEFAULT_GATE_PROMPTS.with_name(f"gate_prompts_{variant}.json")
    if not path.exists():
        known = sorted(p.stem.removeprefix("gate_prompts_") for p in path.parent.glob("gate_prompts_*.json"))
        raise ConfigError(f"actor.gate.prompt={variant!r} is unknown: use default" + (f" or one of {known}" if known else ""))
    return GatePrompts.load(path)


def run_parts(config: Config, names: Sequence[str]) -> dict[str, RoleParts]:
    """The parts of the roles called ``names``, in this order. Roles that train adapters over the same weights get one copy of them."""
    found: dict[str, RoleParts] = {}
    for name in names:
        shared = found["actor"].params if found and shares_base(config) else None
        found[name] = role_parts(config, name, shared)
    return found


def shares_base(config: Config) -> bool:
    """Whether both roles train adapters over the same weights in the same place."""
    a, e = config.actor, config.extractor
    same = (a.model, a.weights, a.mesh) == (e.model, e.weights, e.mesh) and a.weights != "random"
    same &= a.model != "micro" or a.tokenizer == e.tokenizer  # the micro model is as large as its vocabulary
    return same and a.lora.rank > 0 and e.lora.rank > 0


def role_parts(config: Config, name: str, params: Params | None = None) -> RoleParts:
    """Tokenizer, model, mesh and weights of the ``actor`` or the ``extractor``; ``params``: weights to use instead of loading them.

    Raises ConfigError when one is missing or does not fit.
    """
    role: RoleConfig = config.actor if name == "actor" else config.extractor
    with _about(f"{name}.tokenizer"):
        codec = load_codec(role.tokenizer)
    with _about(f"{name}.model"):
        model = load_config(
            role.model, vocab_size=codec.tokenizer.vocab_size if role.weights == "random" or role.model == "micro" else None
        )
    if codec.tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"`{name}.tokenizer`: {role.tokenizer} has {codec.tokenizer.vocab_size} ids, model {role.model} only {model.vocab_size}: "
            "use the tokenizer the weights were trained with"
        )
    with _about(f"{name}.mesh"):
        mesh = _mesh(role.mesh)
        check_divisible(model, mesh)
        if wrong := undivided_rows(config, name, mesh.shape[DATA] * mesh.shape[FSDP]):
            raise ValueError(wrong)
    with _about(f"{name}.serve_tensor"):
        serve_mesh = serving_mesh(mesh, role.serve_tensor) if role.serve_tensor else mesh
        if jax.process_count() > 1 and not role.serve_tensor:
            raise ValueError(f"0, but each process samples on its own {jax.local_device_count()} devices: set how many share a copy")
        check_divisible(model, serve_mesh)
        replicas = own_part(serve_mesh).size // role.serve_tensor if role.serve_tensor else 1
        if role.slots % replicas:
            raise ValueError(f"{name}.slots={role.slots} does not divide over {replicas} replicas: use a multiple of {replicas}")
    with _about(f"{name}.scan_layers"):
        if role.scan_layers:
            check_scan(model)
    with _about(f"{name}.attention"):
        if role.attention != "auto":
            check_kernel(role.attention, mesh.devices.flat[0].platform)
    with _about(f"{name}.weights"):
        if params is None:
            shardings = param_shardings(model, mesh) if mesh.size > 1 else None
            params = load_params(role.weights, model, seed=derive_seed(config.run.seed, name, "init"), shardings=shardings)
    return RoleParts(codec, model, mesh, serve_mesh, params)


def check_actions(config: Config, goals: Sequence[Goal], codec: ChatCodec) -> None:
    """Raises ConfigError when the actor's tokenizer has no way to write an action that the environments would read."""
    env, tokenizer = config.env, config.actor.tokenizer
    for action in dict.fromkeys(action for goal in goals for action in registry.spec(goal.env).actions):

        def read(text: str, action: str = action) -> bool:
            return parse_action(codec.decode(codec.encode(text)), (action,), env.action_format) == action

        if env.constrained and not read(env.action_prefix + action):
            raise ConfigError(
                f"`env.action_prefix`: tokenizer {tokenizer} cannot write {env.action_prefix + action!r}, so the environment would read no "
                'constrained action: give the text its words begin with, e.g. env.action_prefix=" "'
            )
        tags = ("<action>", "</action>") if env.action_format == "tagged" else ("", "")
        if not env.constrained and not any(read(lead + action + tags[1]) for lead in (tags[0], tags[0] + " ")):
            raise ConfigError(
                f"`env.action_format`: tokenizer {tokenizer} cannot write {tags[0] + action + tags[1]!r}, so no action would be valid: use "
                f"{'bare' if env.action_format == 'tagged' else 'a tokenizer made for these environments'}"
            )


@contextlib.contextmanager
def _about(key: str) -> Iterator[None]:
    """What looking up the value of ``key`` raises is a mistake in the configuration."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OSError, ImportError) as error:
        raise ConfigError(f"`{key}`: {error.args[0] if isinstance(error, KeyError) else error}") from error


def _goals(tasks: Sequence[EnvTask]) -> list[Goal]:
    namespaces = {name: registry.spec(name).namespace for name in {task.env for task in tasks}}
    return [Goal(task.env, task.goal, namespaces[task.env], task.id, task.weight) for task in tasks]


def _mesh(m: MeshConfig) -> jax.sharding.Mesh:
    """The first devices that the axes need; ``data`` 0 takes all that are left. Several processes use all, each with whole rows."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id)) if jax.process_count() > 1 else jax.devices()
    data = m.data or max(1, len(devices) // (m.fsdp * m.tensor))
    used = data * m.fsdp * m.tensor
    if jax.process_count() > 1 and (used != len(devices) or jax.local_device_count() % m.tensor):
        raise ValueError(
            f"data={data} x fsdp={m.fsdp} x tensor={m.tensor}, but {jax.process_count()} processes have {len(devices)} devices, "
            f"{jax.local_device_count()} each: use all of them, with a tensor that divides {jax.local_device_count()}"
        )
    return make_mesh(data, m.fsdp, m.tensor, devices[:used])
