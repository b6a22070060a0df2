"""A bank state as one text: the same text for equal states, whatever order they were built in.

Owns: the text form. Promises: ``from_json(to_json(state)) == state``; floats come back to the last bit. Does not: hold vectors or
generations.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import immutables

from crl_jax.experience.bank import BankState, Tally
from crl_jax.experience.space import Space
from crl_jax.records import Experience, Usage


def to_json(state: BankState) -> str:
    """The canonical text of a state: keys sorted, no spaces, ASCII."""
    data = {
        "revision": state.revision,
        "entries": [dataclasses.asdict(entry) for _, space in sorted(state.spaces.items()) for entry in space.values()],
        "usage": {i: dataclasses.astuple(usage) for i, usage in state.usage.items()},
        "transfer": [[*pair, *tally] for pair, tally in sorted(state.transfer.items())],
    }
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def from_json(text: str) -> BankState:
    """The state that `to_json` wrote."""
    data: dict[str, Any] = json.loads(text)
    by_space: dict[str, dict[str, Experience]] = {}
    for row in data["entries"]:
        entry = Experience(**(row | {"episode_ids": tuple(row["episode_ids"]), "parents": tuple(row["parents"])}))
        by_space.setdefault(entry.namespace, {})[entry.id] = entry
    return BankState(
        spaces={name: Space(immutables.Map(entries)) for name, entries in by_space.items()},
        usage=immutables.Map({i: Usage(*row) for i, row in data["usage"].items()}),
        transfer={(reader, source): Tally(episodes, succeeded) for reader, source, episodes, succeeded in data["transfer"]},
        revision=data["revision"],
    )
