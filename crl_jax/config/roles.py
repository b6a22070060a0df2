"""Settings of the two language models: the actor and the extractor.

Owns: the frozen dataclasses below ``actor:`` and ``extractor:``.
Promises: plain data with the paper's values as defaults where the paper gives one; ranges over several fields are checked in ``check``.
Does not: name a device or open a weight file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Aggregate = Literal["token_mean", "seq_mean_token_mean"]


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How one model samples during training. Log-probabilities are recorded at ``temperature``."""

    temperature: float = 1.0
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    max_new_tokens: int = 64  # per turn (actor), per generation (extractor)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule. The schedule is as long as ``run.steps``, never a default length."""

    lr: float = 1e-6
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip_norm: float = 1.0  # global norm of the final gradient; 0 = no clipping
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0  # optimiser steps of linear warm-up from 0


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the device mesh axes; their product is the number of devices the role trains on. 0 for ``data`` takes all that are left."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True, kw_only=True)
class ActorLossConfig:
    """GRPO (paper Eq. 5): the clipped surrogate with advantages over the guided and the free half of each group."""

    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = 0.2  # ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    correction: Literal["ratio", "none", "tis", "icepop"] = "ratio"  # for older weights and another engine; ratio = the clipped ratio is it
    correction_low: float = 0.5  # icepop: tokens (sequences, with ratio=sequence) whose ratio lies outside [low, high] teach nothing
    correction_high: float = 2.0  # tis: the ratio is truncated here
    aggregate: Aggregate = "seq_mean_token_mean"
    normalise: Literal["mean", "mean_std"] = "mean_std"  # mean: A = r - mean; mean_std: divided by the standard deviation too
    advantage_over: Literal["subgroup", "group"] = "subgroup"  # group = the cross-group ablation


@dataclass(frozen=True, kw_only=True)
class ExtractorLossConfig:
    """CISPO (paper Eq. 3) with the training-count reweighting of Eq. 7, ``w = (1 + count)^-alpha``."""

    eps_low: float = 0.1  # the stopped weight is clip(ratio, 1 - eps_low, 1 + eps_high): eps_high is relative, not the cap itself
    eps_high: float = 0.1
    aggregate: Aggregate = "token_mean"
    alpha: float = 0.5
    cooldown_steps: int = 1  # a generation trained less than this many steps ago has weight 0
    max_lag: int | None = None  # a generation of weights more than this many versions old has weight 0; null = no bound


LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters instead of all weights. Roles with the same model, weights and mesh share one frozen copy of the weights."""

    rank: int = 0  # 0 = train all weights
    alpha: float = 16.0  # the change is alpha / rank times the product of the adapter's two matrices
    targets: tuple[str, ...] = LORA_TARGETS  # matrices of each layer that get an adapter


@dataclass(frozen=True, kw_only=True)
class PublishConfig:
    """How new weights come into the sampler. Tokens carry the version that sampled them either way."""

    drain: bool = False  # true: running requests end with the weights they began with; false: all go on with the new ones at once
    drain_timeout_s: float = 60.0  # longest wait for running requests to end; no other starts meanwhile
    checksum: bool = True  # compare every leaf that arrived with the learner's, bit for bit


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """A server that samples for the role instead of an engine in this process: a `crl serve`, or vLLM and what speaks its API."""

    url: str = ""  # e.g. http://host:8000, or several with commas between; "" = an engine in this process
    model: str = ""  # its name there; "" = the only one
    token_file: str = ""  # its first line is sent as bearer token
    weights_folder: str = ""  # new weights go there, and the server is told (it was started with --weights-folder on the same folder)
    logprobs: Literal["raw", "processed"] = "raw"  # what a server other than `crl serve` reports: see serving.remote_wire
    attempts: int = 5  # of one request, for connection errors and 429, 502, 503, 504

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers of ``url``, in order."""
        return tuple(part.strip().rstrip("/").removesuffix("/v1") for part in self.url.split(",")) if self.url else ()


@dataclass(frozen=True, kw_only=True)
class ListenConfig:
    """Where a job of the extractor alone (``--role extractor``) serves its model, for the bank to sample from."""

    host: str = "127.0.0.1"  # another address than this machine's own needs token_file
    port: int = 8002  # 0 = a free one
    token_file: str = ""  # whoever samples must send its first line as bearer token


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """What the actor and the extractor have in common."""

    model: str = "micro"  # preset name of crl_jax.models, a Hugging Face model folder or a GGUF file
    weights: str = "random"  # "random", "builtin:NAME" (shipped, or files of an installed package), a Hugging Face folder or a file
    tokenizer: str = "builtin:micro"  # "builtin:NAME", a Hugging Face folder, a GGUF file or a saved vocabulary
    prompt: str = "default"  # prompt variant
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_length: int = 1024  # tokens of one whole sequence: prompt, observations and replies
    microbatches: int = 1  # gradient accumulation; the update is the same for every value
    remat: Literal["none", "full", "dots", "attention"] = "none"  # recomputed in the backward pass: see models.forward.Remat
    sequence_parallel: bool = False  # activations between layers split over `tensor` along the sequence: max_length must divide
    scan_layers: bool = False  # one compiled layer in a loop: smaller programs, one more copy of the weights
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # of the learner's activations; weights, moments and sums stay float32
    attention: Literal["auto", "einsum", "cudnn", "splash"] = "auto"  # the learner's kernel; auto = the platform's fastest
    packing: Literal["padded", "sequences", "prefixes"] = "padded"  # one sequence per row; several; several, equal beginnings once
    row_length: int = 0  # tokens of a packed row; 0 = max_length
    mesh: MeshConfig = field(default_factory=MeshConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    serve_dtype: Literal["float32", "bfloat16"] = "float32"  # of the sampler's weights and cache; training keeps float32 masters
    serve_tensor: int = 0  # devices that share one copy of the sampler's weights, slots split over the copies; 0 = sampled where it trains
    publish: PublishConfig = field(default_factory=PublishConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    slots: int = 16  # sequences decoded together by the engine
    host_cache_mib: int = 256  # host memory for keys and values of idle sessions that lost their slot; the rest is recomputed
    row_buckets: tuple[int, ...] = (
        8,
    )  # rows of a prefill dispatch, besides ``slots``; each pair with a chunk bucket is one compiled program
    chunk_buckets: tuple[int, ...] = (16, 64, 256)  # tokens per row of a prefill dispatch; longer prompts take several


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """Before a guided episode the actor is asked whether to accept, refine or reject the experience retrieved for it (appendix B.1).

    Every episode waits for its verdict; the paper's main experiments leave it off. Evaluation with experience is gated as well.
    """

    enabled: bool = False
    prompt: str = "default"  # prompt variant
    max_new_tokens: int = 256  # of one verdict; sampled as the episode is, never constrained, never trained
    timeout_s: float = 60.0  # a later verdict, like one that cannot be read, shows nothing and is counted


@dataclass(frozen=True, kw_only=True)
class ActorConfig(RoleConfig):
    """The policy that acts in the environments."""

    loss: ActorLossConfig = field(default_factory=ActorLossConfig)
    gate: GateConfig = field(default_factory=GateConfig)


@dataclass(frozen=True, kw_only=True)
class ExtractorConfig(RoleConfig):
    """The model that reads finished episodes and writes experiences."""

    loss: ExtractorLossConfig = field(default_factory=ExtractorLossConfig)
    batch_size: int = 64  # generations of one extractor update
    buffer_capacity: int = 256  # credited generations waiting; above it the oldest is dropped and counted
    max_ops: int = 3  # operations one generation may ask for; more is a parse failure
    max_age_steps: int = 16  # a generation that waited longer is dropped and counted
    parse_failure_reward: float = -1.0  # reward of a generation that was not well formed
    reward: Literal["direct", "relative"] = "direct"  # +-1 by success; relative: minus the mean of the free half of the same group
    critic_reward: bool = False  # Eq. 8: plus 1 accept, 0.5 refine, 0 reject (needs actor.gate.enabled; a rejected entry gets the 0 alone)
    # plus entropy_weight x f(dH), dH = H(actor | query) - H(actor | query, lesson), each H the mean of -log p over sampled tokens of moves
    # (of the free half, of the episode): relative clip(dH/H, -1, 1), tanh(dH), sigmoid 2 sigmoid(dH)-1, asymmetric clip(dH, -0.2, 1),
    # log sgn(dH) log(1+|dH|)
    entropy_bonus: Literal["off", "relative", "tanh", "sigmoid", "asymmetric", "log"] = "off"
    entropy_weight: float = 1.0
    submit: Literal["all", "guided", "success"] = "all"  # which finished episodes are distilled
    concurrency: int = 8  # distillations in flight
    listen: ListenConfig = field(default_factory=ListenConfig)
