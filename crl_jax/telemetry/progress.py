"""The one line a person reads per training step.

Owns: its format. Promises: fixed columns, missing numbers shown as ``-``, at most one line per call. Does not: compute anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from crl_jax.telemetry.tracker import Scalar, displayed


def progress_line(step: int, steps: int, metrics: Mapping[str, Scalar], phases_s: Mapping[str, float]) -> str:
    """E.g. ``step  12/40  guided 0.44 free 0.31  bank   87  lag 0.8  tok/s   512   3.2s = rollout 2.1 learn 0.9 other 0.2``.

    Reads ``success/guided``, ``success/free``, ``bank/size``, ``lag/mean``, ``rollout/tokens_per_s`` of ``metrics``; phases are in seconds,
    and those under 5 % of the step are added to ``other``.
    """
    numbers = displayed(metrics)

    def show(key: str, form: str, width: int) -> str:
        return format(numbers[key], form).rjust(width) if key in numbers else "-".rjust(width)

    width = len(str(steps))
    return (
        f"step {step:>{width}}/{steps}  guided {show('success/guided', '.2f', 4)} free {show('success/free', '.2f', 4)}"
        f"  bank {show('bank/size', '.0f', 4)}  lag {show('lag/mean', '.1f', 3)}  tok/s {show('rollout/tokens_per_s', '.0f', 5)}"
        f"  {_phases(phases_s)}"
    )


def _phases(phases_s: Mapping[str, float]) -> str:
    total = sum(phases_s.values())
    large = {name: s for name, s in phases_s.items() if name != "other" and s >= 0.05 * total}
    parts = [f"{name} {s:.1f}" for name, s in sorted(large.items(), key=lambda item: -item[1])]
    parts.append(f"other {total - sum(large.values()):.1f}")
    return f"{total:.1f}s = " + " ".join(parts)
