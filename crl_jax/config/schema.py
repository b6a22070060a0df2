"""The whole configuration of a run as one frozen value.

Owns: the dataclasses below ``run:``, ``env:``, ``bank:``, ``ask:`` and ``telemetry:``, and ``Config`` that holds all sections.
Promises: every field has a type that ``load`` enforces and a default; the hyper-parameters' defaults are the paper's where it gives them.
Does not: check relations between fields (``check``) or read files (``load``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from crl_jax.config.roles import ActorConfig, ExtractorConfig

Method = Literal["baseline", "static", "exp_only", "complementary"]


@dataclass(frozen=True, kw_only=True)
class KeepBestConfig:
    """Checkpoints that are kept because of a metric, beside the newest ``run.keep_last``."""

    metric: str = ""  # e.g. eval/known/with/sampled; a checkpoint that was saved without it (no evaluation at its step) is not compared
    count: int = 1
    lowest: bool = False  # True: a low value is a good one


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What to run, for how long, and where its files go.

    ``method``: ``baseline`` = GRPO without a bank; ``static`` = the bank grows but the extractor is not trained; ``exp_only`` = the
    extractor is trained but the actor is not; ``complementary`` = both are trained.
    """

    name: str = "run"
    dir: str = "runs"  # run files lie in dir/name
    seed: int = 42
    steps: int = 128  # actor steps
    groups_per_step: int = 16  # one group = one task instance
    group_size: int = 8  # episodes of one group
    guided_fraction: float = 0.5  # share of each group that reads experiences
    max_lag: int = 1  # newest weight version minus the version an episode started with, at most; 0 = on-policy
    method: Method = "complementary"
    sync: bool = False  # True: collect, learn and distil in turn; a seed then fixes every number
    eval_every: int = 16  # steps, besides the start and the end; 0 = only then
    eval_episodes: int = 64
    eval_modes: tuple[Literal["greedy", "sampled"], ...] = ("greedy", "sampled")
    save_every: int = 16  # steps; 0 = only at the end
    keep_last: int = 3  # checkpoints kept
    keep_best: KeepBestConfig = field(default_factory=KeepBestConfig)
    collect_timeout_s: float = 600.0  # one batch of episodes, one generation, one bank call: longer is an error, not a wait
    compile_cache: str = "~/.cache/crl_jax/xla"  # compiled programs are kept here between runs; "" = not at all
    deadline_s: float = 0.0  # stop cleanly (save, report) after this long; 0 = no limit
    preempt_file: str = ""  # when this file appears, the run ends as by SIGTERM: saved, with exit code 75
    preempt_grace_s: float = 60.0  # from the signal to the saved checkpoint; after it the run ends without
    step_timeout_s: float = 0.0  # a step (with its evaluation) that takes longer ends the run with all stacks; 0 = no limit


@dataclass(frozen=True, kw_only=True)
class TaskSetConfig:
    """Tasks, and how they are shown. They are the tasks of the environments called ``names``, or those of a ``family``."""

    names: tuple[str, ...] = ()
    family: str = ""
    split: Literal["train", "heldout"] = "train"
    count: int = 0  # the first so many of these tasks; 0 = all
    style: str = "compact"  # of the observations: full (sentences), compact (a few words), or another that the family has
    max_turns: int = 30
    options: dict[str, bool | int | float | str] = field(default_factory=dict[str, bool | int | float | str])  # the family's own


@dataclass(frozen=True, kw_only=True)
class EnvConfig(TaskSetConfig):
    """Which tasks, how they are shown, and how their processes are run.

    Either one set of tasks, or a ``mixture`` of several, each under a name of its own: every step and every evaluation then has as many
    groups of one as of another.
    """

    mixture: dict[str, TaskSetConfig] = field(default_factory=dict[str, TaskSetConfig])
    workers: int = 1  # environment processes
    call_timeout_s: float = 10.0  # one reset or step
    episode_timeout_s: float = 0.0  # an episode from its reset to its end, the model's thinking included; 0 = none
    worker_memory_mib: int = 0  # above this a worker is replaced, at 1.5 times it is killed; 0 = no limit
    action_format: Literal["bare", "tagged"] = "bare"
    action_prefix: str = ""  # text before every action of the constraint, e.g. a space the tokenizer wants
    constrained: bool = False  # sample only actions the environment knows


@dataclass(frozen=True, kw_only=True)
class BankServerConfig:
    """A `crl bank serve` that keeps the bank instead of this process. Its own recipe has the bank's settings."""

    url: str = ""  # grpc://host:8100, or grpcs://host:8100 with TLS; "" = a bank in this process
    run: str = ""  # what the jobs of one run call it there; "" = run.name
    token_file: str = ""  # its first line is sent as bearer token
    tls_root: str = ""  # PEM file of who signed the server's certificate; "" = the system's
    timeout_s: float = 120.0  # the longest call, all its attempts together: also a restart of the server
    attempts: int = 20  # of one call, for lost connections and late answers
    message_mib: int = 32  # as --message-mib of the server


@dataclass(frozen=True, kw_only=True)
class BankConfig:
    """The experience bank: what it keeps, how it retrieves (paper Eq. 6), and how often entries are merged."""

    capacity: int = 20_000
    routing: Literal["task", "shared", "mixed"] = "task"  # read own family; one namespace for all; own first, others' where they help
    eviction: Literal["fifo", "lru", "utility"] = "fifo"
    protect_rare: float = 0.1  # lessons of successes are evicted last while they are at most this share of a namespace; 0 = off
    top_k: int = 1  # experiences placed in one prompt
    candidate_multiplier: int = 16  # top_k times this many candidates are re-ranked
    lambda_count: float = 0.4  # score = -rank - lambda_count * log(1 + times shown) - [shown recently]
    recent_steps: int = 1  # "recently" = in the last this many steps
    min_similarity: float = -1.0  # cosine below which nothing is shown
    explore_share: float = 0.0  # share of queries that get the least shown of their candidates
    utility_weight: float = 0.0  # ranks by which an entry moves per unit of its readers' success rate above one half
    utility_decay: tuple[float, float] | None = None  # what a step leaves of that evidence, first to last step by a cosine: [0.99, 0.95]
    min_utility: float = 0.0  # success rate of its readers below which an entry is not shown (untried: 0.5)
    contrast: bool = False  # with top_k >= 2: begin with one lesson of a success and one of a failure
    foreign_penalty: float = 16.0  # mixed routing: ranks by which a family's entries go back where they lower the success rate
    dedup_threshold: float = 0.0  # cosine from which two entries are duplicates; 0 = off
    dedup_keep: Literal["newer", "better"] = "newer"  # better = the one whose readers succeeded more often
    votes: bool = False  # the extractor may vote on the entries an episode read; its prompt must offer it (extractor.prompt=votes)
    merge_every: int = 5  # steps; 0 = never
    merge_chunk: int = 5  # entries merged by one generation
    merge_redundancy: float = 0.0  # also merge near entries when more than this share has a near neighbour; 0 = off
    merge_cosine: float = 0.85  # cosine from which two entries are near
    snapshots: int = 1  # copies of the bank's file, made with the checkpoints, that are kept beside it
    query_batch: int = 16  # queries searched together
    query_batch_limit: int = 128  # ... at most, while every worker is busy
    query_wait_ms: float = 1.0  # how long a query waits for others
    query_max_open: int = 8192  # unanswered queries from which on more are refused
    search_workers: int = 0  # threads; 0 = one for each core
    warmup_steps: int = 5  # steps in which episodes are distilled but nobody reads the bank
    server: BankServerConfig = field(default_factory=BankServerConfig)


@dataclass(frozen=True, kw_only=True)
class AskConfig:
    """Search-and-ask: the actor's question to the bank during an episode."""

    enabled: bool = False
    max_uses: int = 2  # per episode
    timeout_s: float = 60.0  # of one answer, at most half of run.collect_timeout_s; later the entry itself is it (bank/ask_fallbacks)


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Where metrics go."""

    jsonl: bool = True
    tensorboard: bool = True
    text_every: int = 10  # steps between sample transcripts; 0 = never
    profile_steps: tuple[int, int] | None = None  # [first, end): a profiler trace of these steps
    profile_signal_steps: int = 2  # SIGUSR1, or `crl profile FOLDER`: a trace of so many steps from the next one on; 0 = none
    profile_signal_s: float = 0.0  # ... of so many seconds from that moment on instead, where above 0
    profile_python: bool = False  # traces hold every Python call too: many times larger, and what is traced gets slower


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything about a run."""

    run: RunConfig = field(default_factory=RunConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    extractor: ExtractorConfig = field(default_factory=ExtractorConfig)
    bank: BankConfig = field(default_factory=BankConfig)
    ask: AskConfig = field(default_factory=AskConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
