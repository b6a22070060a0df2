"""Model FLOPs utilisation (MFU) of the learner's step on one GPU: Qwen2.5-1.5B's shape with random weights, packed rows of 4096 tokens.

Usage:  bash launch/bench_gpu.sh [--out docs/results/bench_gpu.json]     sets an environment with CUDA up and runs this
        python tests/bench/bench_gpu.py --tiny --allow-cpu               the whole script at toy size on a CPU, to see that it runs

It trains ``learner.step.make_train_step`` as roles do: GRPO, bfloat16 compute, float32 masters and moments, micro-batches. The value is the
MFU with the library's own attention kernel for the card; ``gpu_attention`` has candidates that are checked and timed beside it. FLOPs are
those of ``crl_jax.aot.needed`` (per matrix entry 6 per token that passes it, so the head counts for trained tokens only; attention counts
each visible pair once; recomputation counts nothing) over the card's dense bfloat16 peak. ``mfu_6n`` in the details uses the usual 6 N per
token with all parameters N instead. Prints one JSON object (``crl_jax.telemetry.result``) as its last line.

Exit status: 0 measured (see "pass"), 1 the library's own kernel failed (see "error"), 2 not a machine to measure on.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).resolve().parent)]

import jax  # noqa: E402  (the source tree must be found first)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from gpu_attention import agreement, variants  # noqa: E402

from crl_jax.aot.needed import attention_flops, forward_flops  # noqa: E402
from crl_jax.learner import objective  # noqa: E402
from crl_jax.learner.optimizer import make_optimizer  # noqa: E402
from crl_jax.learner.packing import pack_batch  # noqa: E402
from crl_jax.learner.state import init_state  # noqa: E402
from crl_jax.learner.step import make_train_step  # noqa: E402
from crl_jax.models import transformer  # noqa: E402
from crl_jax.models.config import ModelConfig  # noqa: E402
from crl_jax.models.forward import Execution  # noqa: E402
from crl_jax.models.presets import QWEN2_5_0_5B, TINY  # noqa: E402
from crl_jax.records import Completion, Finish, Provenance, TokenLog, TrainBatch, TrainSample  # noqa: E402
from crl_jax.telemetry.result import Result, emit  # noqa: E402

GOAL = 0.40
QWEN2_5_1_5B = dataclasses.replace(QWEN2_5_0_5B, name="qwen2.5-1.5b", d_model=1536, n_layers=28, n_heads=12, head_dim=128, d_ff=8960)

# Dense bfloat16 tensor-core peaks of the vendor's data sheets, TFLOP/s (halves of the numbers "with sparsity"), by a part of JAX's
# ``device_kind``; the longest that fits counts.
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 80GB HBM3": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "B200": 2250.0,
    "GB200": 2500.0,
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """One optimiser step: ``rows`` packed rows of ``sequences`` sequences, each a prompt and trained tokens."""

    config: ModelConfig
    rows: int
    microbatches: int
    sequences: int
    prompt: int
    trained: int

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.sequences * (self.prompt + self.trained)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length

    def batch(self, seed: int) -> TrainBatch:
        """Random tokens; behaviour log-probs of a uniform policy; advantages of both signs."""
        rng, vocabulary = np.random.default_rng(seed), self.config.vocab_size
        samples = []
        for _ in range(self.rows * self.sequences):
            log = TokenLog.empty().append_context(rng.integers(0, vocabulary, self.prompt).tolist(), Provenance.PROMPT)
            ids, n = tuple(rng.integers(0, vocabulary, self.trained).tolist()), self.trained
            log = log.append_completion(Completion(ids, (-float(np.log(vocabulary)),) * n, (0,) * n, (0,) * n, Finish.STOP))
            samples.append(TrainSample(log, float(rng.normal())))
        sizes = {"row_buckets": (self.rows,), "length_buckets": (self.length,), "sequence_buckets": (self.sequences,)}
        return pack_batch(samples, **sizes, token_buckets=(self.trained,))

    def pairs(self) -> float:
        """(query, visible key) pairs of a step per layer and head."""
        size = self.prompt + self.trained
        return self.rows * self.sequences * size * (size + 1) / 2

    def needed_flops(self) -> float:
        """Forward and backward of a step."""
        trained = self.rows * self.sequences * self.trained
        return 3.0 * forward_flops(self.config, tokens=self.tokens, pairs=self.pairs(), logits=trained)

    def usual_flops(self) -> float:
        """6 N per token, and attention."""
        return 6.0 * transformer.count_params(self.config) * self.tokens + 3.0 * attention_flops(self.config, self.pairs())

    def chunk(self, logit_bytes: int) -> int:
        """Trained tokens per sequence whose float32 logits fit: all sequences of a micro-batch are unembedded together."""
        alive = 4 * self.config.vocab_size * self.rows * self.sequences // self.microbatches
        parts = -(-self.trained * alive // logit_bytes)
        return -(-self.trained // parts)


def peak_tflops(kind: str) -> float:
    """The peak of a card by its ``device_kind``. Raises ValueError for one that is not in the table, or a slice of one."""
    found = [name for name in PEAK_TFLOPS if name.lower() in kind.lower()]
    if not found or "MIG" in kind:
        raise ValueError(f"no peak is known for `{kind}`: pass --peak-tflops, dense bfloat16 TFLOP/s (known: {sorted(PEAK_TFLOPS)})")
    return PEAK_TFLOPS[max(found, key=len)]


def measure(w: Workload, how: Execution, steps: int, warmup: int, logit_bytes: int) -> dict[str, Any]:
    """Seconds per step after ``warmup`` steps, each waited for. Raises RuntimeError when a step was refused."""
    optimizer = make_optimizer(1e-6)
    state = init_state(jax.jit(transformer.init, static_argnums=0)(w.config, jax.random.key(0)), optimizer)
    chunk = w.chunk(logit_bytes)
    options = {"temperature": 1.0, "allowed": None, "microbatches": w.microbatches, "how": how, "logit_chunk": chunk}
    step = make_train_step(w.config, optimizer, objective.actor(), **options)
    batches, seconds, losses = [jax.device_put(w.batch(seed)) for seed in (0, 1)], [], []
    for i in range(warmup + steps):
        began = time.perf_counter()
        state, sums = jax.block_until_ready(step(state, batches[i % 2]))
        seconds.append(time.perf_counter() - began)
        losses.append(sums["loss"].mean())
    if int(state.step) != warmup + steps:
        raise RuntimeError(f"{int(state.skipped)} of {warmup + steps} steps were refused (losses {losses}): the numbers mean nothing")
    timed = seconds[warmup:]
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "first_step_s": seconds[0],
        "median_step_s": statistics.median(timed),
        "steps_s": timed,
        "tokens_per_s": w.tokens / statistics.median(timed),
        "peak_gib": memory.get("peak_bytes_in_use", 0) / 2**30 or None,  # of the process so far
        "logit_chunk": chunk,
        "losses": losses,
    }


def try_variant(name: str, w: Workload, args: argparse.Namespace, peak: float | None) -> dict[str, Any]:
    """Check and measure one way to attend; what goes wrong is a part of the result, so that one bad kernel does not cost the others."""
    attend, whole_rows = variants(jax.devices()[0].platform)[name]
    found: dict[str, Any] = {}
    try:
        found["error_against_einsum"] = agreement(attend, w.config)
        how = Execution(args.remat, args.scan_layers, jnp.dtype(jnp.bfloat16), attend, whole_rows)
        found |= measure(w, how, args.steps, args.warmup, args.logit_mib * 2**20)
    except (RuntimeError, ValueError, NotImplementedError) as error:  # XLA's errors are RuntimeErrors
        return found | {"error": f"{type(error).__name__}: {error}"[:2000]}
    if peak is not None:
        attainable = found["median_step_s"] * peak * 1e12
        found |= {"mfu": w.needed_flops() / attainable, "mfu_6n": w.usual_flops() / attainable}
    return found


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(variants("gpu"))
    parser.add_argument("--attention", nargs="+", choices=names, default=names, help="what to time; the library's own always")
    parser.add_argument("--rows", type=int, default=16, help="packed rows of 4096 tokens in a step")
    parser.add_argument("--microbatches", type=int, help="must divide the rows; default: 2 rows each on a card of 120 GB or more, 1 below")
    parser.add_argument("--remat", choices=("none", "full", "dots", "attention"), default="none", help="none keeps 17 GiB per row alive")
    parser.add_argument("--scan-layers", action="store_true", help="one compiled layer in a loop")
    parser.add_argument("--logit-mib", type=int, default=2048, help="float32 logits alive at a time")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones; the first compiles")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16 peak of the card, where the table does not know it")
    parser.add_argument("--tiny", action="store_true", help="toy dimensions and two steps")
    parser.add_argument("--allow-cpu", action="store_true", help="run where there is no GPU; the result has no value (needs --tiny)")
    parser.add_argument("--out", type=pathlib.Path, help="also write the result here")
    args = parser.parse_args(argv)
    if args.microbatches and args.rows % args.microbatches:
        parser.error(f"--microbatches {args.microbatches} does not divide --rows {args.rows}")
    if args.allow_cpu and not args.tiny:
        parser.error("--allow-cpu needs --tiny: a step of the full shape takes hours on a CPU")
    return args


def main(argv: list[str] | None = None) -> int:
    args = options(argv)
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    if not on_gpu and not args.allow_cpu:
        print(
            f"bench_gpu: JAX sees no GPU here, only {device.device_kind} ({device.platform}). With an NVIDIA card (driver 525 or newer, "
            "`nvidia-smi -L` lists it) run `bash launch/bench_gpu.sh`, which installs jax[cuda12]; unset JAX_PLATFORMS if it says cpu. "
            "To try the script without a card: --tiny --allow-cpu",
            file=sys.stderr,
        )
        return 2
    total = (device.memory_stats() or {}).get("bytes_limit", 0)  # the share of the card that JAX may use
    microbatches = args.microbatches or (args.rows // 2 if total >= 100 * 2**30 and args.rows % 2 == 0 else args.rows)
    w = Workload(QWEN2_5_1_5B, args.rows, microbatches, sequences=4, prompt=128, trained=896)
    if args.tiny:
        config = dataclasses.replace(TINY, name="tiny-qwen2", d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=16, qkv_bias=True)
        w, args.steps, args.warmup = Workload(config, 2, 2, sequences=2, prompt=4, trained=12), 1, 1
    peak = args.peak_tflops
    try:
        peak = peak or (peak_tflops(device.device_kind) if on_gpu else None)
    except ValueError as error:
        print(f"bench_gpu: {error}", file=sys.stderr)
        return 2
    found: dict[str, Any] = {}
    for name in dict.fromkeys(["library", *args.attention] if on_gpu else ["library"]):
        found[name] = try_variant(name, w, args, peak)
        shown = {k: round(v, 4) for k, v in found[name].items() if isinstance(v, float)}
        print(f"{name}: {found[name].get('error') or shown}", flush=True)
    mfu = found["library"].get("mfu")
    details = {
        "device": device.device_kind,
        "peak_tflops": peak,
        "memory_limit_gib": total / 2**30,
        "model": w.config.name,
        "parameters": transformer.count_params(w.config),
        "workload": {k: getattr(w, k) for k in ("rows", "microbatches", "sequences", "prompt", "trained", "length", "tokens")},
        "remat": args.remat,
        "scan_layers": args.scan_layers,
        "compute": "bfloat16, float32 masters and moments",
        "needed_tflop": w.needed_flops() / 1e12,
        "attention": found,
    }
    passed = mfu is not None and mfu >= GOAL
    unit = "model FLOPs utilisation of the update" if peak else "model FLOPs utilisation of the update (no peak known: toy run)"
    emit(Result("bench_gpu", mfu, unit, f">= {GOAL}", passed, details=details), args.out)
    return 1 if "error" in found["library"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
