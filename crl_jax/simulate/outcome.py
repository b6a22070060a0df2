"""What came of a simulated run, as values and as a table.

Owns: ``Outcome`` and ``table``. Promises: the phases of the trainer add up to its seconds. Does not: simulate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from crl_jax.simulate.workload import Workload
from crl_jax.telemetry.histogram import Histogram

_TIMES = ("environments", "mode", "s/step", "vs sync")
_SHARES = ("sampler", "slots", "learner", "extr. sampler", "extr. learner", "envs", "learner waits")
_LAGS = ("lag mean", "lag max", "extr. lag mean", "extr. lag max")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Measured until the end of the last step; all times in seconds.

    ``busy_s``: how long each part had something to do; ``filled``: the mean share of its places that were taken (slots, environments or
    their workers); ``waits_s``: who waited for what (several can wait at once, so the last three are sums over them); ``batch_lags``:
    versions between the beginning of an episode and its update, for each batch.
    """

    workload: Workload
    seconds: float
    step_s: tuple[float, ...]
    phases_s: Mapping[str, float]
    busy_s: Mapping[str, float]
    filled: Mapping[str, float]
    waits_s: Mapping[str, float]
    batch_lags: tuple[Histogram, ...]
    token_lags: Histogram
    generation_lags: Histogram
    counts: Mapping[str, int]

    @property
    def lags(self) -> Histogram:
        """Of all episodes."""
        return sum(self.batch_lags, Histogram({}))

    def use(self, part: str) -> float:
        """The share of the time in which ``part`` had something to do."""
        return self.busy_s[part] / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        row: dict[str, Any] = {
            "environments": self.workload.environments,
            "sync": self.workload.sync,
            "max_lag": self.workload.max_lag,
            "seconds": self.seconds,
            "step_s": list(self.step_s),
            "use": {name: self.use(name) for name in self.busy_s},
        }
        for name in ("phases_s", "filled", "waits_s", "counts"):
            row[name] = dict(getattr(self, name))
        row["lags"] = {"episodes": _plain(self.lags), "tokens": _plain(self.token_lags), "generations": _plain(self.generation_lags)}
        row["batch_lags"] = [_plain(lags) for lags in self.batch_lags]
        return row


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each outcome. ``vs sync`` compares with the synchronous outcome of as many environments, if there is one."""
    in_turn = {o.workload.environments: o.seconds for o in outcomes if o.workload.sync}
    rows = [(*_TIMES, *_SHARES, *_LAGS), *(_row(o, in_turn.get(o.workload.environments)) for o in outcomes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _row(o: Outcome, sync_s: float | None) -> tuple[str, ...]:
    mode = "sync" if o.workload.sync else f"lag <= {o.workload.max_lag}"
    ratio = "-" if not sync_s else f"{o.seconds / sync_s:.2f}"
    shares = [o.use("sampler"), o.filled["sampler"], o.use("learner"), o.use("extractor_sampler"), o.use("extractor_learner")]
    shares += [o.filled["environments"], o.waits_s["learner for the rollout"] / o.seconds if o.seconds else 0.0]
    lags = [cell for lags in (o.lags, o.generation_lags) for cell in _mean_max(lags)]
    return (str(o.workload.environments), mode, f"{o.seconds / len(o.step_s):.2f}", ratio, *(f"{s:.0%}" for s in shares), *lags)


def _mean_max(lags: Histogram) -> tuple[str, str]:
    total = sum(lags.counts.values())
    return (f"{sum(v * n for v, n in lags.counts.items()) / total:.2f}", str(max(lags.counts))) if total else ("-", "-")


def _plain(lags: Histogram) -> dict[str, int]:
    return {str(value): n for value, n in sorted(lags.counts.items())}
