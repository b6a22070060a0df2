"""Shared sizes, timing and reporting for the peer benchmarks (no framework imports here).

Every peer runs the same workload so numbers are comparable:
  random-init Llama, L=4 D=256 F=1024 H=8 K=4 Dh=32 V=1024, tied embeddings, fp32
  8 prompts x 4 generations, prompt 64 tokens, completion 64 tokens (never stops early)
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import statistics
import sys
import time


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes of the benchmark. All lengths are in tokens."""

    num_layers: int = 4
    embed_dim: int = 256
    hidden_dim: int = 1024
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    vocab_size: int = 1024
    rope_theta: int = 10_000
    norm_eps: float = 1e-5
    num_prompts: int = 8
    num_generations: int = 4
    prompt_len: int = 64
    completion_len: int = 64
    learning_rate: float = 1e-4

    @property
    def batch(self) -> int:
        return self.num_prompts * self.num_generations

    @property
    def completion_tokens(self) -> int:
        return self.batch * self.completion_len

    @property
    def total_tokens(self) -> int:
        return self.batch * (self.prompt_len + self.completion_len)


def workload_from_env() -> Workload:
    """PEER_WORKLOAD='{"num_prompts": 4}' overrides single fields."""
    return Workload(**json.loads(os.environ.get("PEER_WORKLOAD", "{}")))


def prompt_words(w: Workload, i: int) -> str:
    """A prompt of exactly `prompt_len` in-vocabulary words; ids 0..2 are pad/bos/eos, so start at 8."""
    return " ".join(f"w{8 + (i * 131 + j * 17) % (w.vocab_size - 8)}" for j in range(w.prompt_len))


def calibrate() -> float:
    """Seconds for a fixed single-threaded pure-Python loop; >1x of the idle value means a busy box."""
    t = time.perf_counter()
    s = 0
    for i in range(1_000_000):
        s += i * i % 7
    assert s
    return time.perf_counter() - t


class Stopwatch:
    """Collects wall and CPU seconds per named phase."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}
        self.load: list[float] = []
        self.calib: list[float] = []

    def time(self, name: str):
        return _Span(self, name)

    def mark_box(self) -> None:
        self.load.append(os.getloadavg()[0])
        self.calib.append(calibrate())

    def summary(self, name: str, tokens: int, skip: int = 1) -> dict:
        """Statistics of one phase; the first `skip` calls hold compilation and warm-up and are reported apart."""
        wall, cpu = self.wall[name][skip:], self.cpu[name][skip:]
        med, best = statistics.median(wall), min(wall)
        return {
            "first_call_s": round(self.wall[name][0], 3),
            "reps": len(wall),
            "median_s": round(med, 4),
            "min_s": round(best, 4),
            "max_s": round(max(wall), 4),
            "median_cpu_s": round(statistics.median(cpu), 4),
            "min_cpu_s": round(min(cpu), 4),  # a busy box only ever adds CPU time, so the minimum is the fair figure
            "tok_per_cpu_s": round(tokens / min(cpu), 1),
            "tok_per_s_median": round(tokens / med, 1),
            "tok_per_s_best": round(tokens / best, 1),
        }


class _Span:
    def __init__(self, sw: Stopwatch, name: str) -> None:
        self._sw, self._name = sw, name

    def __enter__(self):
        self._w, self._c = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exc):
        self._sw.wall.setdefault(self._name, []).append(time.perf_counter() - self._w)
        self._sw.cpu.setdefault(self._name, []).append(time.process_time() - self._c)


def report(
    peer: str, versions: dict[str, str], w: Workload, sw: Stopwatch, phases: dict[str, int], extra: dict | None = None, skip: int = 1
) -> None:
    out = {
        "peer": peer,
        "python": sys.version.split()[0],
        "versions": versions,
        "machine": {"cpus": os.cpu_count(), "affinity": len(os.sched_getaffinity(0)), "arch": platform.machine()},
        "workload": dataclasses.asdict(w) | {"batch": w.batch},
        "phases": {k: sw.summary(k, tok, skip) for k, tok in phases.items()},
        "box": {
            "load1_min": round(min(sw.load), 2) if sw.load else None,
            "load1_max": round(max(sw.load), 2) if sw.load else None,
            "calib_min_s": round(min(sw.calib), 4) if sw.calib else None,
            "calib_median_s": round(statistics.median(sw.calib), 4) if sw.calib else None,
        },
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    } | (extra or {})
    text = json.dumps(out, indent=1)
    print(text)
    path = os.environ.get("PEER_OUT")
    if path:
        with open(path, "w") as f:
            f.write(text + "\n")
