"""Relations between fields that no single type can express.

Owns: ``check``, a list of rules over a finished ``Config``.
Promises: every problem is reported (not only the first), names the keys and says what to write instead.
Does not: open files or ask for devices, so a recipe for a pod is checked on a laptop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from crl_jax.config.roles import LORA_TARGETS, RoleConfig
from crl_jax.config.schema import Config, TaskSetConfig


@dataclasses.dataclass(frozen=True)
class ConfigProblem:
    """One contradiction: the key it is about and the message with the fix."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"`{self.key}`: {self.message}"


def check(config: Config) -> list[ConfigProblem]:
    """All problems of ``config``; an empty list means it can be run."""
    found = [
        *_positive(config),
        *_group(config),
        *_names(config),
        *_tasks(config),
        *_bank(config),
        *_extractor(config),
        *_telemetry(config),
    ]
    found += [*_gate(config), *_reward(config)]
    for name, role in (("actor", config.actor), ("extractor", config.extractor)):
        found += _role(name, role)
        if name == "actor" or config.run.method != "baseline":  # data 0 depends on the machine: `lookup` checks again
            found += [(f"{name}.mesh", text) for text in [undivided_rows(config, name, role.mesh.data * role.mesh.fsdp)] if text]
    return [ConfigProblem(key, message) for key, message in found]


def rows_of_step(c: Config, name: str) -> int:
    """Samples of one update of the role called ``name``."""
    return c.run.groups_per_step * c.run.group_size if name == "actor" else c.extractor.batch_size


def undivided_rows(c: Config, name: str, shards: int) -> str:
    """What is wrong when a padded batch of the role called ``name`` does not divide over its micro-batches and ``shards``, the mesh's
    data x fsdp; else empty. Packed batches take a number of rows that does.
    """
    role, rows = c.actor if name == "actor" else c.extractor, rows_of_step(c, name)
    parts = role.microbatches * shards
    if role.packing != "padded" or shards < 2 or parts < 1 or rows % parts == 0:
        return ""
    size = "run.groups_per_step x run.group_size" if name == "actor" else "extractor.batch_size"
    over = f"{role.microbatches} micro-batches x {shards} shards (data x fsdp)"
    return f"the {rows} rows of an update do not divide over {over}: change {size}, or pack rows"


Found = Iterator[tuple[str, str]]


def _positive(c: Config) -> Found:
    for key, value in (
        ("run.steps", c.run.steps),
        ("run.groups_per_step", c.run.groups_per_step),
        ("run.keep_last", c.run.keep_last),
        ("run.collect_timeout_s", c.run.collect_timeout_s),
        ("env.call_timeout_s", c.env.call_timeout_s),
        ("ask.timeout_s", c.ask.timeout_s),
        ("bank.capacity", c.bank.capacity),
        ("bank.candidate_multiplier", c.bank.candidate_multiplier),
        ("bank.query_batch", c.bank.query_batch),
        ("bank.query_batch_limit", c.bank.query_batch_limit),
        ("bank.query_max_open", c.bank.query_max_open),
        ("extractor.batch_size", c.extractor.batch_size),
        ("extractor.concurrency", c.extractor.concurrency),
        ("extractor.max_ops", c.extractor.max_ops),
    ):
        if value <= 0:
            yield key, f"must be positive, got {value}"
    for key, value in (
        ("run.seed", c.run.seed),
        ("run.max_lag", c.run.max_lag),
        ("run.eval_every", c.run.eval_every),
        ("run.save_every", c.run.save_every),
        ("run.deadline_s", c.run.deadline_s),
        ("run.keep_best.count", c.run.keep_best.count),
        ("run.preempt_grace_s", c.run.preempt_grace_s),
        ("run.step_timeout_s", c.run.step_timeout_s),
        ("env.workers", c.env.workers),
        ("env.episode_timeout_s", c.env.episode_timeout_s),
        ("env.worker_memory_mib", c.env.worker_memory_mib),
        ("bank.warmup_steps", c.bank.warmup_steps),
        ("bank.merge_every", c.bank.merge_every),
        ("bank.search_workers", c.bank.search_workers),
        ("bank.query_wait_ms", c.bank.query_wait_ms),
        ("bank.snapshots", c.bank.snapshots),
        ("ask.max_uses", c.ask.max_uses),
    ):
        if value < 0:
            yield key, f"must be 0 or more, got {value}"


def _group(c: Config) -> Found:
    run = c.run
    if run.group_size < 2:
        yield "run.group_size", f"{run.group_size} makes every advantage 0 (the baseline is the group's mean): use 2 or more"
    if not 0 <= run.guided_fraction <= 1:
        yield "run.guided_fraction", f"is a share, 0 to 1, got {run.guided_fraction}"
    elif run.method != "baseline":
        guided = run.guided_fraction * run.group_size
        halves = (round(guided), run.group_size - round(guided))
        if abs(guided - round(guided)) > 1e-6:
            yield "run.group_size", f"{run.group_size} x guided_fraction {run.guided_fraction} is no whole number: use an even group_size"
        elif c.actor.loss.advantage_over == "subgroup" and 1 in halves:
            yield (
                "run.group_size",
                f"a half of one episode always has advantage 0 (halves {halves}): make both 2 or more",
            )
    if run.sync and run.max_lag > 0:
        yield "run.max_lag", f"a synchronous run has lag 0, got {run.max_lag}: set run.max_lag=0 or run.sync=false"
    loss = c.actor.loss
    if loss.correction == "none" and run.max_lag > 0:
        yield (
            "actor.loss.correction",
            f"none, but episodes may be {run.max_lag} versions old (run.max_lag): use ratio, tis or icepop, or set run.max_lag=0",
        )
    if not 0 <= loss.correction_low <= 1 <= loss.correction_high:
        yield "actor.loss.correction_low", "correction_low and correction_high are values of the ratio: 0 <= low <= 1 <= high"
    if c.actor.sampling.temperature == 0 and run.group_size > 1:
        yield (
            "actor.sampling.temperature",
            "0 makes all episodes of a group equal, so nothing is learned: use e.g. 1.0",
        )
    if c.actor.optimizer.warmup_steps >= run.steps > 0:
        yield (
            "actor.optimizer.warmup_steps",
            f"{c.actor.optimizer.warmup_steps} updates of warm-up do not end within run.steps={run.steps}: use fewer",
        )
    episodes = run.groups_per_step * run.group_size
    if c.actor.microbatches > 0 and episodes % c.actor.microbatches:
        yield "actor.microbatches", f"{c.actor.microbatches} does not divide the {episodes} episodes of a step: use a divisor"
    metric = run.keep_best.metric
    if metric.startswith("eval/") and metric.rpartition("/")[2] not in (*run.eval_modes, "turns", "read"):
        yield "run.keep_best.metric", f"{metric} is never measured: run.eval_modes has {', '.join(run.eval_modes)}"
    if run.eval_every and run.eval_episodes <= 0:
        yield "run.eval_episodes", "must be positive when run.eval_every is set"


def _names(c: Config) -> Found:
    name = c.run.name
    if not name or name in (".", "..") or any(ch in name for ch in "/\\\0"):
        yield "run.name", f"{name!r} is no plain folder name: the run's files must stay inside run.dir"
    if ".." in c.run.dir.replace("\\", "/").split("/") or not c.run.dir:
        yield "run.dir", f"{c.run.dir!r}: name a folder without `..`"
    if c.env.constrained and c.env.action_format == "tagged":
        yield (
            "env.action_format",
            "a constrained reply is the action alone, without tags: set env.action_format=bare or env.constrained=false",
        )


def task_sets(c: Config) -> dict[str, TaskSetConfig]:
    """The sets of tasks by the name of their part of the mixture; one set without a name when there is no mixture."""
    return c.env.mixture or {"": c.env}


def _tasks(c: Config) -> Found:
    parts = len(c.env.mixture)
    if parts and (c.env.names or c.env.family):
        yield "env.mixture", "goes instead of env.names and env.family: set env.names=[] and env.family= (they may come from `base`)"
    for name, tasks in task_sets(c).items():
        key = f"env.mixture.{name}" if name else "env"
        if name and not (name.isidentifier() and name.isascii()):
            yield "env.mixture", f"{name!r}: name a part with letters, digits and _; it becomes part of metric names"
        if bool(tasks.names) == bool(tasks.family):
            yield f"{key}.names", f"give either {key}.names (a list) or {key}.family, not both and not neither"
        for task in tasks.names:
            if task.startswith("/") or ".." in task.split("/"):
                yield f"{key}.names", f"{task!r} is no registry name"
        if tasks.max_turns <= 0:
            yield f"{key}.max_turns", f"must be positive, got {tasks.max_turns}"
        if tasks.count < 0:
            yield f"{key}.count", f"must be 0 or more, got {tasks.count}"
        for option in {"style", "grammar", "max_turns"} & set(tasks.options):
            yield f"{key}.options", f"{option} is a setting of its own: {'env.action_format' if option == 'grammar' else f'{key}.{option}'}"
    if parts and c.run.groups_per_step % parts:
        yield "run.groups_per_step", f"{c.run.groups_per_step} groups do not divide over the {parts} parts of env.mixture: use a multiple"
    if parts and c.run.eval_every and c.run.eval_episodes % parts:
        yield "run.eval_episodes", f"{c.run.eval_episodes} episodes do not divide over the {parts} parts of env.mixture: use a multiple"
    if parts and c.env.constrained:
        yield "env.constrained", "a constraint knows one list of actions: set env.constrained=false for a mixture"


def _role(name: str, r: RoleConfig) -> Found:
    s, o = r.sampling, r.optimizer
    if s.temperature < 0 or 0 < s.temperature < 1e-6:
        yield f"{name}.sampling.temperature", f"must be 0 (greedy) or 1e-6 or more, got {s.temperature}"
    if not 0 < s.top_p <= 1:
        yield f"{name}.sampling.top_p", f"must be in (0, 1], got {s.top_p}"
    if not 0 <= s.top_k < 2**31:
        yield f"{name}.sampling.top_k", f"must be 0 (off) or more, and below 2^31, got {s.top_k}"
    if r.max_length < 2:
        yield f"{name}.max_length", f"{r.max_length} leaves no room for a prompt and a reply: use 2 or more"
    elif s.max_new_tokens <= 0 or s.max_new_tokens >= r.max_length:
        yield (
            f"{name}.sampling.max_new_tokens",
            f"{s.max_new_tokens} leaves no room for a prompt in {name}.max_length {r.max_length}: use 1 to {r.max_length - 1}",
        )
    if o.lr < 0 or o.eps <= 0 or o.weight_decay < 0 or o.clip_norm < 0 or o.warmup_steps < 0:
        yield f"{name}.optimizer", "lr, weight_decay, clip_norm and warmup_steps must be 0 or more, eps above 0"
    if not (0 <= o.b1 < 1 and 0 <= o.b2 < 1):
        yield f"{name}.optimizer", f"b1 and b2 must be in [0, 1), got {o.b1} and {o.b2}"
    if not r.chunk_buckets or min(*r.row_buckets, *r.chunk_buckets, 1) < 1:
        yield (
            f"{name}.chunk_buckets",
            "sizes of a prefill dispatch: chunk_buckets needs one or more, and all (of row_buckets, too) positive",
        )
    if r.microbatches <= 0 or r.slots <= 0:
        yield name, "microbatches and slots must be positive"
    if r.host_cache_mib < 0:
        yield f"{name}.host_cache_mib", f"must be 0 or more, got {r.host_cache_mib}"
    if r.publish.drain_timeout_s <= 0:
        yield (
            f"{name}.publish.drain_timeout_s",
            f"must be positive, got {r.publish.drain_timeout_s}: to wait for nothing set {name}.publish.drain=false",
        )
    if r.serve_tensor < 0:
        yield f"{name}.serve_tensor", f"must be 0 (the learner's placement) or more, got {r.serve_tensor}"
    yield from _server(name, r)
    if r.lora.rank < 0 or r.lora.alpha <= 0:
        yield f"{name}.lora", f"rank must be 0 (off) or more and alpha above 0, got {r.lora.rank} and {r.lora.alpha}"
    unknown = [target for target in r.lora.targets if target not in LORA_TARGETS]
    if unknown or not r.lora.targets:
        yield f"{name}.lora.targets", f"{unknown or 'an empty list'}: use one or more of {list(LORA_TARGETS)}"
    tensor, row = r.mesh.tensor, r.row_length or r.max_length
    if r.sequence_parallel and tensor == 1:
        yield f"{name}.sequence_parallel", f"splits activations over {name}.mesh.tensor, which is 1: raise it, or set this to false"
    elif r.sequence_parallel and tensor > 1 and row % tensor:
        yield f"{name}.sequence_parallel", f"rows of {row} tokens do not divide over tensor={tensor}: use a multiple of {tensor}"
    if r.packing == "padded" and r.row_length:
        yield f"{name}.row_length", f"{r.row_length} has no meaning for rows of one sequence: set it to 0, or {name}.packing=sequences"
    elif r.row_length and r.row_length < r.max_length:
        yield f"{name}.row_length", f"a row must hold the longest sequence: use {name}.max_length ({r.max_length}) or more"
    if r.attention == "splash" and r.packing == "prefixes":
        yield f"{name}.attention", f"splash cannot share beginnings between sequences: use {name}.packing=sequences, or einsum"
    if r.attention == "cudnn" and r.compute_dtype != "bfloat16":
        yield f"{name}.attention", f"cudnn needs half precision: set {name}.compute_dtype=bfloat16"
    if r.mesh.data < 0 or r.mesh.fsdp < 1 or r.mesh.tensor < 1:
        yield f"{name}.mesh", "axis sizes must be positive (data may be 0: all devices that are left)"


def _server(name: str, r: RoleConfig) -> Found:
    s = r.server
    if not s.url:
        return
    for url in s.urls:
        scheme, _, host = url.partition("://")
        if scheme not in ("http", "https") or not host or any(c.isspace() for c in host):
            fix = "write http://HOST:PORT (several with commas between), or leave it empty to sample in this process"
            yield f"{name}.server.url", f"{url!r}: {fix}"
    if twice := sorted({url for url in s.urls if s.urls.count(url) > 1}):
        yield f"{name}.server.url", f"{', '.join(twice)} is named twice: name every server once"
    if not s.weights_folder and name == "actor":  # the extractor's servers may be its own training processes
        yield (
            f"{name}.server.weights_folder",
            "the server must get this run's weights: name a folder both can read, and start the server with --weights-folder on it",
        )
    if s.attempts < 1:
        yield f"{name}.server.attempts", f"must be 1 or more, got {s.attempts}"
    if r.serve_tensor or r.publish.drain:
        yield f"{name}.server.url", f"{name}.serve_tensor and {name}.publish.drain are settings of the server: give them to its `crl serve`"


def _extractor(c: Config) -> Found:
    e = c.extractor
    for key, low, high in (
        ("actor.loss.clip", c.actor.loss.clip_low, c.actor.loss.clip_high),
        ("extractor.loss.eps", e.loss.eps_low, e.loss.eps_high),
    ):
        if not 0 <= low <= 1 or high < 0:
            yield f"{key}_low", f"the ratio is clipped to [1 - {low}, 1 + {high}]: low must be in [0, 1], high must be 0 or more"
        if high >= 1:
            yield f"{key}_high", f"is relative: the cap is 1 + {high} = {1 + high}; for a cap of {high} write {high - 1:g}"
    if c.run.method == "baseline":
        return
    if c.run.method != "static" and e.sampling.temperature == 0:
        yield "extractor.sampling.temperature", "0 gives the learner no log-probabilities to weigh: use e.g. 1.0"
    if e.batch_size > e.buffer_capacity:
        yield "extractor.buffer_capacity", f"{e.buffer_capacity} can never hold a batch of {e.batch_size}: use {e.batch_size} or more"
    if e.microbatches > 0 and e.batch_size % e.microbatches:
        yield "extractor.microbatches", f"{e.microbatches} does not divide batch_size {e.batch_size}: use a divisor"
    if not -1 <= e.parse_failure_reward <= 1:
        yield "extractor.parse_failure_reward", f"rewards of a generation lie in [-1, 1], got {e.parse_failure_reward}"
    if e.max_age_steps < 1:
        yield "extractor.max_age_steps", f"must be 1 or more, got {e.max_age_steps}"
    if e.loss.alpha < 0 or e.loss.cooldown_steps < 0:
        yield "extractor.loss", "alpha and cooldown_steps must be 0 or more"
    if e.loss.max_lag is not None and e.loss.max_lag < 1:
        yield (
            "extractor.loss.max_lag",
            f"lessons are read after they were written, so {e.loss.max_lag} teaches nothing: use 1 or more, or null",
        )


def _bank_server(c: Config) -> Found:
    s = c.bank.server
    if not s.url:
        return
    scheme, _, target = s.url.partition("://")
    if scheme not in ("grpc", "grpcs") or not target or "/" in target.rstrip("/"):
        yield "bank.server.url", f"{s.url!r}: write grpc://HOST:PORT (grpcs:// with TLS), or leave it empty for a bank in this process"
    if s.tls_root and scheme != "grpcs":
        yield "bank.server.tls_root", f"a root certificate goes with TLS: write bank.server.url=grpcs://{target}"
    if s.attempts < 1 or s.timeout_s <= 0 or not 1 <= s.message_mib <= 1024:
        yield "bank.server", "attempts must be 1 or more, timeout_s above 0, message_mib 1 to 1024"


def _bank(c: Config) -> Found:
    b = c.bank
    if b.top_k < 1 or b.top_k > b.capacity:
        yield "bank.top_k", f"must be 1 to bank.capacity ({b.capacity}), got {b.top_k}"
    if (b.merge_every or b.merge_redundancy) and b.merge_chunk < 2:
        yield "bank.merge_chunk", f"a merge needs 2 or more entries, got {b.merge_chunk}"
    if not -1 <= b.min_similarity <= 1 or not 0 <= b.dedup_threshold <= 1:
        yield "bank.min_similarity", "cosines: min_similarity in [-1, 1], dedup_threshold in [0, 1] (0 = off)"
    if b.lambda_count < 0 or b.recent_steps < 0:
        yield "bank.lambda_count", "lambda_count and recent_steps must be 0 or more"
    for name, share in (("explore_share", b.explore_share), ("min_utility", b.min_utility), ("merge_redundancy", b.merge_redundancy)):
        if not 0 <= share < 1:
            yield f"bank.{name}", f"a share from 0 to below 1 (0 = off), got {share}"
    if b.contrast and b.top_k < 2:
        yield "bank.contrast", f"a lesson of a success and one of a failure need bank.top_k of 2 or more, got {b.top_k}"
    if b.utility_decay is not None and not all(0 < share <= 1 for share in b.utility_decay):
        yield "bank.utility_decay", f"two shares above 0 and up to 1, first and last, e.g. [0.99, 0.95], got {list(b.utility_decay)}"
    if min(b.utility_weight, b.foreign_penalty) < 0 or not 0 <= b.protect_rare <= 1 or not -1 <= b.merge_cosine <= 1:
        yield "bank.utility_weight", "utility_weight and foreign_penalty must be 0 or more, protect_rare in [0, 1], merge_cosine in [-1, 1]"
    yield from _bank_server(c)
    if c.ask.enabled and c.run.method == "baseline":
        yield "ask.enabled", "the baseline has no bank to ask: set ask.enabled=false or another run.method"
    if c.ask.enabled and c.env.constrained:
        yield (
            "ask.enabled",
            "a question is no environment action, so constrained sampling cannot produce it: set env.constrained=false",
        )


def _gate(c: Config) -> Found:
    gate, room = c.actor.gate, c.actor.max_length
    if not gate.enabled:
        return
    if c.run.method == "baseline":
        yield "actor.gate.enabled", "the baseline has no bank, so nothing is retrieved: set actor.gate.enabled=false or another run.method"
    if not 0 < gate.max_new_tokens < room:
        yield (
            "actor.gate.max_new_tokens",
            f"{gate.max_new_tokens} leaves no room for a question in actor.max_length {room}: use 1 to {room - 1}",
        )
    if gate.timeout_s <= 0:
        yield "actor.gate.timeout_s", f"must be positive, got {gate.timeout_s}"


def _reward(c: Config) -> Found:
    e = c.extractor
    if e.critic_reward and not c.actor.gate.enabled:
        yield "extractor.critic_reward", "there is no critic: set actor.gate.enabled=true, or extractor.critic_reward=false"
    compared = [key for key, on in (("reward", e.reward == "relative"), ("entropy_bonus", e.entropy_bonus != "off")) if on]
    if compared and c.run.guided_fraction >= 1:
        for key in compared:
            yield f"extractor.{key}", f"compares with the free half of a group: set run.guided_fraction below 1 ({c.run.guided_fraction})"
    if not math.isfinite(e.entropy_weight):
        yield "extractor.entropy_weight", f"must be a finite number, got {e.entropy_weight}"


def _telemetry(c: Config) -> Found:
    window = c.telemetry.profile_steps
    if window is not None and not 0 <= window[0] < window[1]:
        yield "telemetry.profile_steps", f"[first, end) must not be empty, got {list(window)}"
    for key in ("profile_signal_steps", "profile_signal_s"):
        if not 0 <= (value := getattr(c.telemetry, key)) < math.inf:
            yield f"telemetry.{key}", f"must be 0 or more, got {value}"
    if c.telemetry.text_every < 0:
        yield "telemetry.text_every", f"must be 0 or more, got {c.telemetry.text_every}"
