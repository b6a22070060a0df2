"""From a configuration to the parts of a run, and their orderly end.

Owns: which concrete part stands behind each name of the configuration, and the order in which parts start and stop.
Promises: everything that can be wrong with a configuration is found before an environment or a model starts; whatever was started is
stopped when the run ends or fails, in reverse order. Does not: train.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax

from crl_jax import lookup, run_folder
from crl_jax.bank_settings import diversity_of, merge_policy_of, write_policy_of
from crl_jax.checkpoint.background import Saver
from crl_jax.checkpoint.retention import Keep
from crl_jax.config.roles import RoleConfig
from crl_jax.config.schema import Config
from crl_jax.experience.buffer import TrainingBuffer
from crl_jax.experience.extractor import ExtractorPrompts
from crl_jax.experience.index import ExactIndex, Index
from crl_jax.experience.manager import ExperienceManager
from crl_jax.experience.manager_options import IO_S, LOAD_S, ManagerOptions
from crl_jax.experience.protocols import Completer, Words
from crl_jax.experience.reader import Routing
from crl_jax.experience.reward import RewardRule
from crl_jax.experience.scann_index import ScannIndex
from crl_jax.experience.snapshot import copy_of
from crl_jax.experience.store import Store
from crl_jax.experience.verdict import GatePrompts
from crl_jax.host_memory import keep_freed_memory
from crl_jax.job import Job
from crl_jax.lookup import RoleParts
from crl_jax.models.codec import ChatCodec
from crl_jax.models.embedder import MiniLM
from crl_jax.processes import Processes
from crl_jax.records import SamplingParams
from crl_jax.role import Role
from crl_jax.role_sampler import open_sampler
from crl_jax.role_settings import buckets_of, execution, lora_of, objective_of, optimizer_of
from crl_jax.rollout.bank import ManagedBank
from crl_jax.rollout.collector import Collector, CollectSettings
from crl_jax.rollout.gate import Gate, GateSettings
from crl_jax.rollout.pools import Pools
from crl_jax.rollout.shell import Shell
from crl_jax.rollout.tasks import Goal
from crl_jax.run import Run
from crl_jax.run_bank import LocalBank, RunBank, own_bank, shared_bank
from crl_jax.run_closing import at_end, close_bank
from crl_jax.run_files import BANK_FILE
from crl_jax.seeds import derive_seed
from crl_jax.serving.constraint import ActionTrie
from crl_jax.serving.sampler import Sampler
from crl_jax.telemetry.profiler import ProfilerWindow
from crl_jax.telemetry.tracker import FanOut, open_trackers
from envs import registry

Managed = TypeVar("Managed", bound=ExperienceManager)

SAVED_WITHIN_S = 60.0  # at the end of a run: the longest wait for a checkpoint that is being written


@contextlib.contextmanager
def open_run(config: Config, *, resume: bool, read_only: bool = False, job: Job | None = None) -> Iterator[Run]:
    """Build and start everything ``config`` names. Raises ConfigError before anything starts when the configuration cannot be run here.

    ``read_only`` is for looking at a run that has a checkpoint: nothing in its folder changes, and the bank is a copy in memory. ``job``
    says which of the models are trained here, and with which other processes.
    """
    job = job or Job()
    job.check(config)
    keep_compiled_programs(config.run.compile_cache)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    tasks = lookup.run_tasks(config)
    goals = tasks.stream.goals
    prompts, lessons = lookup.actor_prompts(config.actor.prompt), lookup.extractor_prompts(config.extractor.prompt)
    gate_texts = lookup.gate_prompts(config.actor.gate.prompt)
    with contextlib.ExitStack() as stack:
        folder = run_folder.existing(config) if read_only else stack.enter_context(run_folder.claim(config, job.processes, resume=resume))
        parts = lookup.run_parts(config, job.roles(config))
        actor_codec = parts["actor"].codec
        lookup.check_actions(config, goals, actor_codec)
        trie = action_trie(config, goals, actor_codec) if config.env.constrained else None
        saver, trackers, profiler = open_outputs(config, folder, job, stack, quiet=read_only)
        shell = Shell()
        at_end(stack, "the event loop", shell.close)
        actor = open_role(config, "actor", parts["actor"], trie, shell, stack, job.processes)
        extractor, manager = None, None
        if "extractor" in parts:
            extractor = open_role(config, "extractor", parts["extractor"], None, shell, stack, job.processes)
        if config.run.method != "baseline":
            if config.bank.server.url:
                manager = shared_bank(config, shell, stack, read_only=read_only)
            else:
                assert extractor is not None
                store = copy_of(folder / BANK_FILE) if read_only else own_bank(folder / BANK_FILE, stack)
                stack.callback(store.close)
                own = manager_of(config, store, lessons, extractor.sampler, parts["extractor"].codec)
                shell.call(own.start(), LOAD_S + 60, "opening the experience bank")
                at_end(stack, "the bank", lambda: close_bank(shell, own, config.run.collect_timeout_s))
                manager = LocalBank(own)
        pool = Pools(
            workers=max(1, config.env.workers),
            call_timeout_s=max(config.env.call_timeout_s, *(env.call_timeout_s for env in tasks.envs.values())),
            families=sorted({name.partition("/")[0] for name in tasks.envs}),
            episode_timeout_s=config.env.episode_timeout_s,
            worker_memory_mib=config.env.worker_memory_mib,
        )
        shell.call(pool.__aenter__(), 120.0, "starting the environment workers")
        at_end(stack, "environments", lambda: shell.finish(pool.close(), 30.0, "stopping the environment workers"))
        settings = CollectSettings(
            group_size=config.run.group_size,
            guided=round(config.run.guided_fraction * config.run.group_size),
            sampling=_sampling(config.actor, actor_codec, seed=derive_seed(config.run.seed, "actor"), constrained=config.env.constrained),
            ask_uses=config.ask.max_uses if config.ask.enabled else 0,
            envs=tasks.envs,
        )
        gate = None if manager is None else _gate(config, gate_texts, manager, actor.sampler, actor_codec, prompts.system)
        collector = Collector(pool, actor.sampler, actor_codec, prompts, None if manager is None else ManagedBank(manager), settings, gate)
        if not read_only and job.processes.first:
            run_folder.write_config(folder, config)
        outputs = {"trackers": trackers, "profiler": profiler, "saver": saver}
        models = {"actor": actor, "extractor": extractor, "manager": manager}
        tasked = {"stream": tasks.stream, "eval_sets": tasks.eval_sets}
        yield Run(config=config, job=job, folder=folder, shell=shell, collector=collector, **tasked, **models, **outputs)


def open_outputs(
    config: Config, folder: pathlib.Path, job: Job, stack: contextlib.ExitStack, *, quiet: bool = False
) -> tuple[Saver, FanOut, ProfilerWindow]:
    """Where a run writes: its checkpoints, its metrics (those of a job are written by its first process), its traces."""
    run, sinks, best, first = config.run, config.telemetry, config.run.keep_best, job.processes.first
    keep = Keep(run.keep_last, best.count if best.metric else 0, best.metric, best.lowest)
    saver = Saver(folder / "checkpoints", keep, processes=job.processes, wait_s=run.collect_timeout_s)
    at_end(stack, "the checkpoint", lambda: saver.end(SAVED_WITHIN_S))
    here = first and not quiet
    trackers = open_trackers(folder, jsonl=sinks.jsonl and here, tensorboard=sinks.tensorboard and here, wait_s=run.collect_timeout_s)
    at_end(stack, "the metrics", trackers.close)
    traces = folder / "tensorboard" if first else folder / "tensorboard" / f"process_{job.processes.index}"
    return saver, trackers, stack.enter_context(ProfilerWindow.of(traces, sinks, quiet=quiet))


def keep_compiled_programs(folder: str) -> None:
    """Programs compiled from now on are kept in ``folder`` and found there again ("" = not kept).

    Only a help to the next run, so a folder that cannot be written (or a user without a home) is a warning."""
    if not folder:
        return
    try:
        path = pathlib.Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"compiled programs are not kept, every run compiles: run.compile_cache={folder}: {error}", RuntimeWarning, stacklevel=2
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def action_trie(config: Config, goals: Sequence[Goal], codec: ChatCodec) -> ActionTrie:
    """What may be said in the environments of ``goals``, for constrained sampling."""
    actions = dict.fromkeys(a for env in {goal.env: None for goal in goals} for a in registry.spec(env).actions)
    lead = config.env.action_prefix
    return ActionTrie.build([[*codec.encode(lead + action), codec.stop_ids[0]] for action in actions])


def _sampling(role: RoleConfig, codec: Words, *, seed: int, constrained: bool = False) -> SamplingParams:
    s = role.sampling
    return SamplingParams(
        max_new_tokens=s.max_new_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        stop_ids=codec.stop_ids,
        seed=seed,
        constrained=constrained,
    )


def open_role(
    config: Config, name: str, parts: RoleParts, trie: ActionTrie | None, shell: Shell, stack: contextlib.ExitStack, processes: Processes
) -> Role:
    """The ``actor`` or the ``extractor``, ready to learn and to sample; ``stack`` ends it."""
    role: RoleConfig = config.actor if name == "actor" else config.extractor
    model, mesh, params = parts.model, parts.mesh, parts.params
    optimizer = optimizer_of(config, name, role)
    waits = {"request_timeout_s": config.run.collect_timeout_s, "processes": processes}
    sampler, serving = open_sampler(name, role, parts, trie, shell, **waits)
    at_end(stack, f"the {name}'s sampler", lambda: shell.finish(sampler.aclose(), 30.0, f"stopping the {name}'s sampler"))
    return Role(
        name,
        model_config=model,
        params=params,
        optimizer=optimizer,
        objective=objective_of(config, name),
        sampler=sampler,
        buckets=buckets_of(config, name, role, mesh),
        temperature=role.sampling.temperature,
        allowed=None if trie is None else trie.allowed,
        mesh=mesh,
        microbatches=role.microbatches,
        how=execution(role, mesh),
        serving=serving,
        checksum=role.publish.checksum,
        lora=lora_of(role),
        adapter_seed=derive_seed(config.run.seed, name, "lora"),
        processes=processes,
    )


def _gate(config: Config, texts: GatePrompts, manager: RunBank, sampler: Sampler, codec: ChatCodec, system: str) -> Gate | None:
    g = config.actor.gate
    if not g.enabled:
        return None
    settings = GateSettings(prompts=texts, max_new_tokens=g.max_new_tokens, timeout_s=g.timeout_s, system=system)
    return Gate(sampler, codec, settings, manager.usage)


def manager_of(
    config: Config,
    store: Store,
    prompts: ExtractorPrompts,
    sampler: Completer,
    codec: Words,
    make: Callable[..., Managed] = ExperienceManager,
    *,
    purpose: str = "",
) -> Managed:
    """The bank's manager with the options of ``config``, not started; ``make`` is its class, ``purpose`` the reason that is logged for
    what it writes."""
    b, e = config.bank, config.extractor
    embedder = MiniLM()
    # When a background build ends is a matter of timing, and of neighbours a built searcher may find others.
    make_index: functools.partial[Index] = functools.partial(ExactIndex if config.run.sync else ScannIndex, embedder.dim)
    return make(
        store=store,
        embedder=embedder,
        make_index=make_index,
        sampler=sampler,
        render=codec.render,
        decode=codec.decode,
        buffer=TrainingBuffer(
            batch_size=e.batch_size, capacity=e.buffer_capacity, max_age_steps=e.max_age_steps, parse_failure_reward=e.parse_failure_reward
        ),
        prompts=prompts,
        options=ManagerOptions(
            sampling=_sampling(e, codec, seed=derive_seed(config.run.seed, "extractor")),
            diversity=diversity_of(b),
            write=write_policy_of(b),
            max_ops=e.max_ops,
            votes=b.votes,
            reward=RewardRule(e.reward, e.critic_reward, e.entropy_bonus, e.entropy_weight),
            max_prompt_tokens=e.max_length - e.sampling.max_new_tokens,
            queue_size=4 * config.run.groups_per_step * config.run.group_size,
            distil_concurrency=e.concurrency,
            merge=merge_policy_of(b),
            routing=Routing(b.routing),
            decay=None if b.utility_decay is None else (*b.utility_decay, config.run.steps),
            snapshots=b.snapshots,
            query_batch=b.query_batch,
            query_batch_limit=b.query_batch_limit,
            query_wait_s=b.query_wait_ms / 1000,
            query_max_open=b.query_max_open,
            search_workers=b.search_workers,
            sample_timeout_s=config.run.collect_timeout_s,
            ask_timeout_s=min(config.ask.timeout_s, config.run.collect_timeout_s / 2),  # the episode that asked goes on
            io_timeout_s=min(IO_S, config.run.collect_timeout_s / 2),
            submit_timeout_s=min(IO_S, config.run.collect_timeout_s / 2),
            seed=derive_seed(config.run.seed, "bank"),
            in_turn=config.run.sync,
            purpose=purpose,
        ),
    )
