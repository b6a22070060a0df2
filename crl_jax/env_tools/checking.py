"""``crl envs check``: the conformance suite over many environments.

Owns: which environments, how many episodes each, the table and the exit code. Does not: know the rules (``envs.check``).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from crl_jax.env_tools.pick import WrongWords, names_of
from envs import registry
from envs.api import EnvUnavailable
from envs.check import Report, check

_FEWEST = 4  # episodes of one environment, however many share them


def check_envs(
    what: Sequence[str],
    *,
    everything: bool = False,
    episodes: int = 20,
    strict: bool = False,
    timeout_s: float = 30.0,
    path: pathlib.Path | None = None,
) -> int:
    """Check the named environments and families, print a line for each; 1 when anything was found.

    ``episodes`` are shared out over the environments of a family. What is not installed is listed, and a failure only if ``strict``.
    Raises WrongWords.
    """
    if everything == bool(what):
        raise WrongWords("say which environments or families to check, or --all (not both)")
    if episodes < 1 or not 0 < timeout_s < float("inf"):
        raise WrongWords("--episodes and --timeout-s must be more than 0, and finite")
    reports: list[Report] = []
    missing: dict[str, str] = {}
    groups = [names_of(word) for word in (registry.families() if everything else what)]
    print(f"{'environment':<44} {'episodes':>8} {'seconds':>8}   found")
    for group in groups:
        share = max(_FEWEST, -(-episodes // len(group)))
        for name in group:
            try:
                report = check(name, episodes=share, timeout_s=timeout_s)
            except EnvUnavailable as reason:
                missing[name.partition("/")[0]] = str(reason)
                break
            reports.append(report)
            print(f"{name:<44} {report.episodes:>8} {report.seconds:>8.1f}   {len(report.findings) or 'nothing'}", flush=True)
            for finding in report.findings:
                print(f"    {finding.rule}: {finding.message}", flush=True)
    for family, reason in missing.items():
        print(f"not installed: {family} ({reason})")
    failed = sum(not report.passed for report in reports)
    print(f"{len(reports)} environments checked, {failed} with findings, {len(missing)} families not installed")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {"reports": [dataclasses.asdict(report) for report in reports], "not_installed": missing}
        path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(bool(failed) or (strict and bool(missing)))
