"""``crl envs prepare``: make now what families otherwise make at first use.

Owns: asking the families. A family that makes something has a function ``build()``, which makes it unless it is there and returns a line
about it. Does not: install packages.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from crl_jax.env_tools.pick import family_of
from envs import registry
from envs.api import EnvUnavailable


def prepare_envs(families: Sequence[str]) -> int:
    """Prepare the named families, or all; a line for each. 1 when a named one is not installed. Raises WrongWords."""
    wanted = [family_of(word) for word in families] or list(registry.families())
    missing = 0
    for family in wanted:
        module, started = registry.module_of(family), time.monotonic()
        build = getattr(module, "build", None)
        try:
            module.prepare()
            made = "nothing to make" if build is None else build() or "made"
        except EnvUnavailable as reason:
            missing += 1
            print(f"{family:<12} not installed: {reason}", file=sys.stderr if families else sys.stdout, flush=True)
        else:
            print(f"{family:<12} {made} ({time.monotonic() - started:.1f} s)", flush=True)
    return int(bool(families) and missing > 0)
