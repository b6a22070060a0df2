"""From a configuration to the parts of a run, and their orderly end.

Owns: which concrete part stands behind each name of the configuration, and the order in which parts start and stop.
Promises: everything that can be wrong with a configuration is found before an environment or a model starts; whatever was started is
stopped when the run ends or fails, in reverse order. Does not: train.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from crl_jax import lookup, run_folder
from crl_jax.bank_settings import diversity_of, merge_policy_of, write_policy_of
from crl_jax.checkpoint.background import Saver
from crl_jax.checkpoint.retention import Keep
from crl_jax.config.roles import RoleConfig
from crl_jax.config.schema import Config
from crl_jax.experience.buffer import Sample, TrainingBuffer
from crl_jax.experience.extractor import ExtractorPrompts
from crl_jax.experience.index import ExactIndex, Index
from crl_jax.experience.manager import ExperienceManager
from crl_jax.experience.manager_options import CLOSE_S, LOAD_S, ManagerOptions
from crl_jax.experience.protocols import Completer, Words
from crl_jax.experience.reader import Routing
from crl_jax.experience.reward import RewardRule
from crl_jax.experience.scann_index import ScannIndex
from crl_jax.experience.snapshot import copy_of
from crl_jax.experience.store import Store
from crl_jax.experience.verdict import GatePrompts
from crl_jax.host_memory import keep_freed_memory
from crl_jax.lookup import RoleParts
from crl_jax.models import transformer
from crl_jax.models.codec import ChatCodec
from crl_jax.models.embedder import MiniLM
from crl_jax.records import Episode, Experience, SamplingParams, Task
from crl_jax.role import Role
from crl_jax.role_sampler import open_sampler
from crl_jax.role_settings import buckets_of, execution, lora_of, objective_of, optimizer_of
from crl_jax.rollout.bank import ManagedBank
from crl_jax.rollout.collector import Collector, CollectSettings
from crl_jax.rollout.gate import Gate, GateSettings
from crl_jax.rollout.pools import Pools
from crl_jax.rollout.shell import Shell
from crl_jax.rollout.tasks import Goal, Mixture, TaskStream
from crl_jax.run_bank import LocalBank, RunBank, own_bank, shared_bank
from crl_jax.run_files import BANK_FILE
from crl_jax.run_state import RunCounters
from crl_jax.seeds import derive_seed
from crl_jax.serving.constraint import ActionTrie
from crl_jax.serving.sampler import Sampler
from crl_jax.telemetry.profiler import ProfilerWindow
from crl_jax.telemetry.totals import Totals
from crl_jax.telemetry.tracker import FanOut, open_trackers
from envs import registry

Managed = TypeVar("Managed", bound=ExperienceManager)

SAVED_WITHIN_S = 60.0  # at the end of a run: the longest wait for a checkpoint that is being written


@dataclasses.dataclass
class Run:
    """A started run: every part of it, ready to be used by ``train`` and ``evaluate``."""

    config: Config
    folder: pathlib.Path
    shell: Shell
    collector: Collector
    stream: TaskStream | Mixture
    eval_sets: dict[str, list[Task]]
    actor: Role
    extractor: Role | None
    manager: RunBank | None
    trackers: FanOut
    profiler: ProfilerWindow
    saver: Saver
    clock: Callable[[], float] = time.monotonic
    extractor_updates: int = 0
    totals: Totals = dataclasses.field(default_factory=Totals)
    counters: RunCounters = dataclasses.field(default_factory=RunCounters)  # of the steps that are finished, whose rows are written
    scores: dict[str, float] = dataclasses.field(default_factory=dict[str, float])  # metrics of the last of them, for its checkpoint

    @property
    def trains_actor(self) -> bool:
        """False for the method that only grows experience."""
        return self.config.run.method != "exp_only"

    @property
    def trains_extractor(self) -> bool:
        """False without a bank and for the method whose extractor stays frozen."""
        return self.config.run.method in ("exp_only", "complementary")

    @property
    def collect_deadline_s(self) -> float:
        """The longest wait for one batch, one generation or one call of the bank, in seconds."""
        return self.config.run.collect_timeout_s

    def guided_per_group(self, step: int) -> int:
        """How many episodes of each group read the bank at ``step``: none before the bank's warm-up is over."""
        run = self.config.run
        warm = self.manager is not None and step >= self.config.bank.warmup_steps
        return round(run.guided_fraction * run.group_size) if warm else 0

    def feed_bank(self, episodes: Sequence[Episode], step: int) -> None:
        """Usage, credit and distillation of finished episodes. In a synchronous run it waits until all of them are distilled."""
        if self.manager is not None:
            deadline_s = self.collect_deadline_s + 10  # the drain inside names what is late, so it may end first
            self.shell.call(self._feed(self.manager, episodes, step), deadline_s, f"feeding the bank at step {step}")

    async def _feed(self, manager: RunBank, episodes: Sequence[Episode], step: int) -> None:
        await manager.on_step(step)
        await manager.observe(episodes)
        which = self.config.extractor.submit
        for episode in episodes:
            wanted = which == "all" or (which == "guided" and episode.shown) or (which == "success" and episode.success)
            if wanted and episode.reward is not None:
                await manager.submit(episode)
        if self.config.run.sync and (left := await manager.drain(self.collect_deadline_s)):
            late = f"{left} episodes of step {step} were not distilled within {self.collect_deadline_s:.0f} s"
            raise TimeoutError(f"{late} (raise run.collect_timeout_s)")

    def pop_evidence(self, step: int) -> list[Sample] | None:
        """The next full extractor batch, or None."""
        assert self.manager is not None
        return self.shell.call(self.manager.pop_batch(), self.collect_deadline_s, "the extractor's batch")

    def record_training(self, evidence: Sequence[Sample], weights: Sequence[float], step: int) -> None:
        """The extractor was just trained on ``evidence``; those of weight 0 do not count as trained."""
        assert self.manager is not None
        self.extractor_updates += 1
        trained = [s.generation.id for s, w in zip(evidence, weights, strict=True) if w > 0]
        self.shell.call(self.manager.record_trained(trained, step=step), self.collect_deadline_s, "recording the extractor's batch")

    def lesson_texts(self, episode: Episode) -> list[str]:
        """Texts of the lessons the episode read that are still in the bank."""
        if self.manager is None:
            return []
        refined = {verdict.experience_id: verdict.text for verdict in episode.verdicts if verdict.text}
        found = self.shell.call(self.manager.find(episode.shown), self.collect_deadline_s, "reading lessons")
        return [refined.get(entry.id, entry.text) for entry in found]

    def by_part(self, episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
        """The episodes of each part of the mixture, in the recipe's order; empty without a mixture."""
        envs = self.collector.settings.envs
        return {part: [e for e in episodes if envs[e.task.env].part == part] for part in self.config.env.mixture}

    def newest_lessons(self, limit: int) -> list[Experience]:
        """The newest entries of the bank, newest first."""
        return [] if self.manager is None else self.shell.call(self.manager.newest(limit), self.collect_deadline_s, "reading lessons")

    def metrics(self) -> dict[str, Any]:
        """Counters (of the whole run, also of its earlier processes) and gauges of the environments, the bank, the samplers, the
        checkpoints and this process."""
        return self.totals.of(self.counted()) | {f"checkpoint/{name}": value for name, value in self.saver.stats().items()}

    def counted(self) -> dict[str, Any]:
        """The same of this process alone."""
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found: dict[str, Any] = {"extractor/updates": self.extractor_updates, "host/peak_rss_gib": peak_kib / 2**20}
        found |= {f"env/{name}": value for name, value in dataclasses.asdict(self.collector.pool.stats()).items()}
        if self.manager is not None:
            stats = self.shell.call(self.manager.stats(), self.collect_deadline_s, "counting in the bank")
            found |= {f"bank/{name}": value for name, value in stats.items()}
            found["bank/size"] = found["bank/entries"]
        if self.collector.gate is not None:
            found |= {f"gate/{name}": value for name, value in self.collector.gate.stats().items()}
        for role in (self.actor, self.extractor):
            if role is not None:
                found |= {f"serve/{role.name}/{name}": value for name, value in role.sampler.stats().items()}
                found |= {f"publish/{role.name}/{name}": value for name, value in role.published.metrics().items()}
        return found

    def describe(self, first_step: int) -> str:
        """One line for the start of the run."""
        c, n = self.config, transformer.count_params
        roles = f"actor {c.actor.model} ({n(self.actor.model_config) / 1e6:.2f} M)"
        if self.extractor is not None:
            roles += f", extractor {c.extractor.model} ({n(self.extractor.model_config) / 1e6:.2f} M)"
        devices = f"{jax.device_count()} {jax.default_backend()} device(s)"
        what = f"run {c.run.name}: {c.run.method}, seed {c.run.seed}, {roles}, {len(self.stream.goals)} tasks, {devices}"
        return f"{what}, from step {first_step} of {c.run.steps}; files in {self.folder}"


@contextlib.contextmanager
def open_run(config: Config, *, resume: bool, read_only: bool = False) -> Iterator[Run]:
    """Build and start everything ``config`` names. Raises ConfigError before anything starts when the configuration cannot be run here.

    ``read_only`` is for looking at a run that has a checkpoint: nothing in its folder changes, and the bank is a copy in memory.
    """
    keep_compiled_programs(config.run.compile_cache)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    tasks = lookup.run_tasks(config)
    goals = tasks.stream.goals
    prompts, lessons = lookup.actor_prompts(config.actor.prompt), lookup.extractor_prompts(config.extractor.prompt)
    gate_texts = lookup.gate_prompts(config.actor.gate.prompt)
    with contextlib.ExitStack() as stack:
        folder = run_folder.existing(config) if read_only else stack.enter_context(run_folder.claim(config, resume=resume))
        parts = lookup.run_parts(config, _roles(config))
        actor_codec = parts["actor"].codec
        lookup.check_actions(config, goals, actor_codec)
        trie = action_trie(config, goals, actor_codec) if config.env.constrained else None
        sinks = dataclasses.replace(config.telemetry, jsonl=False, tensorboard=False, profile_steps=None) if read_only else config.telemetry
        saver = _saver(config, folder)
        stack.callback(saver.wait, SAVED_WITHIN_S)
        trackers = open_trackers(folder, jsonl=sinks.jsonl, tensorboard=sinks.tensorboard)
        stack.callback(trackers.close)
        profiler = ProfilerWindow(folder / "tensorboard", sinks.profile_steps)
        stack.callback(profiler.close)
        shell = stack.enter_context(Shell())
        actor = _role(config, "actor", config.actor, parts["actor"], trie, shell, stack)
        extractor, manager = None, None
        if "extractor" in parts:
            extractor = _role(config, "extractor", config.extractor, parts["extractor"], None, shell, stack)
            if config.bank.server.url:
                manager = shared_bank(config, shell, stack, read_only=read_only)
            else:
                store = copy_of(folder / BANK_FILE) if read_only else own_bank(folder / BANK_FILE, stack)
                stack.callback(store.close)
                own = manager_of(config, store, lessons, extractor.sampler, parts["extractor"].codec)
                shell.call(own.start(), LOAD_S + 60, "opening the experience bank")
                stack.callback(close_bank, shell, own)
                manager = LocalBank(own)
        pool = Pools(
            workers=max(1, config.env.workers),
            call_timeout_s=max(config.env.call_timeout_s, *(env.call_timeout_s for env in tasks.envs.values())),
            families=sorted({name.partition("/")[0] for name in tasks.envs}),
            episode_timeout_s=config.env.episode_timeout_s,
            worker_memory_mib=config.env.worker_memory_mib,
        )
        shell.call(pool.__aenter__(), 120.0, "starting the environment workers")
        stack.callback(lambda: shell.call(pool.close(), 30.0, "stopping the environment workers"))
        settings = CollectSettings(
            group_size=config.run.group_size,
            guided=round(config.run.guided_fraction * config.run.group_size),
            sampling=_sampling(config.actor, actor_codec, seed=derive_seed(config.run.seed, "actor"), constrained=config.env.constrained),
            ask_uses=config.ask.max_uses if config.ask.enabled else 0,
            envs=tasks.envs,
        )
        gate = None if manager is None else _gate(config, gate_texts, manager, actor.sampler, actor_codec, prompts.system)
        collector = Collector(pool, actor.sampler, actor_codec, prompts, None if manager is None else ManagedBank(manager), settings, gate)
        if not read_only:
            run_folder.write_config(folder, config)
        yield Run(config, folder, shell, collector, tasks.stream, tasks.eval_sets, actor, extractor, manager, trackers, profiler, saver)


def close_bank(shell: Shell, manager: ExperienceManager) -> None:
    """Ends the bank of a run; episodes that were not distilled in time are named in a warning (the bank's counts end with it)."""
    if lost := shell.call(manager.aclose(), CLOSE_S + 60, "closing the experience bank"):
        warnings.warn(f"the run ended before {lost} of its episodes were distilled: they teach nothing", RuntimeWarning, stacklevel=2)


def _saver(config: Config, folder: pathlib.Path) -> Saver:
    run, best = config.run, config.run.keep_best
    keep = Keep(run.keep_last, best.count if best.metric else 0, best.metric, best.lowest)
    return Saver(folder / "checkpoints", keep, wait_s=run.collect_timeout_s)


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


def _roles(config: Config) -> tuple[str, ...]:
    return ("actor",) if config.run.method == "baseline" else ("actor", "extractor")


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


def _role(
    config: Config, name: str, role: RoleConfig, parts: RoleParts, trie: ActionTrie | None, shell: Shell, stack: contextlib.ExitStack
) -> Role:
    model, mesh, params = parts.model, parts.mesh, parts.params
    optimizer = optimizer_of(config, name, role)
    sampler, serving = open_sampler(name, role, parts, trie, shell, request_timeout_s=config.run.collect_timeout_s)
    stack.callback(lambda: shell.call(sampler.aclose(), 30.0, f"stopping the {name}'s sampler"))
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
            seed=derive_seed(config.run.seed, "bank"),
            in_turn=config.run.sync,
            purpose=purpose,
        ),
    )
