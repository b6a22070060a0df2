"""What customers want: goals, which of them are kept back, and how often each is drawn.

Owns: ``Goal`` and the two ways the original makes goals: from instructions that people wrote (``human``), and from one instruction per
product with every combination of its options (``template``).
Promises: goals come in the order of the original's shuffle (seed 233) and are numbered by it; a goal's price bound is drawn from a
generator named by the product and its number there, never from the global one (the original's bounds differ from run to run); a goal's
weight is the mean of 1 / (goals that ask for it) over its attributes (the original weighs so only those made by rule, and written ones
equally). A record without one of its fields is an error that names it.
Does not: score anything.

The split: of the original's goals the first 500 are held out, the next 1,000 are for development (in neither split) and the rest is for
training; where there are no more than 1,500, which the original does not split, the first fifth is held out. Generated goals are split by
the kind of product (bath towels, gel pens), so that no held-out instruction, and nothing nearly like it, is a training one.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from envs.api import Split
from envs.webshop.draw import Draw
from envs.webshop.products import ATTRIBUTES, PEOPLE, Files, Product, broken

Kind = Literal["human", "template"]
NO_BOUND = 1_000_000.0
HELDOUT, DEVELOPMENT = 500, 1000  # of the original's goals
SHARE = 0.15  # of the kinds of generated products held out, about
_SHUFFLE = 233


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """What is to be bought. ``product`` is one that fits; ``price_upper`` in dollars."""

    product: Product
    instruction: str
    attributes: tuple[str, ...]  # at least one
    options: tuple[str, ...]  # values
    price_upper: float


def goals(files: Files, products: Mapping[str, Product], kind: Kind) -> tuple[Goal, ...]:
    """All goals of a kind, in their order. Raises ``EnvUnavailable`` for a missing file, a record without a field, and no goals at all."""
    found = list(_human(files, products) if kind == "human" else _template(files, products))
    if not found:
        raise broken(files.names[PEOPLE if kind == "human" else ATTRIBUTES], "it holds no goal for any product that is for sale")
    random.Random(_SHUFFLE).shuffle(found)
    return tuple(found)


def weights(found: Iterable[Goal]) -> list[float]:
    """How often each goal is to be drawn, relative to the others."""
    found = list(found)
    count = collections.Counter(attribute for goal in found for attribute in goal.attributes)
    return [sum(1 / count[attribute] for attribute in goal.attributes) / len(goal.attributes) for goal in found]


def members(found: tuple[Goal, ...], split: Split, source: str) -> list[int]:
    """The numbers of the goals in a split (see the module's docstring)."""
    heldout = split == "heldout"
    if source == "generated":
        kept = {kind: Draw("split", kind).chance(SHARE) for kind in dict.fromkeys(goal.product.query for goal in found)}
        return [number for number, goal in enumerate(found) if kept[goal.product.query] == heldout]
    if len(found) <= HELDOUT + DEVELOPMENT:
        fifth = len(found) // 5
        return list(range(fifth) if heldout else range(fifth, len(found)))
    return list(range(HELDOUT) if heldout else range(HELDOUT + DEVELOPMENT, len(found)))


def price_bound(product: Product, number: int) -> float:
    """The larger of two of the next four multiples of 10 dollars above the price; no bound from 980 dollars on."""
    first = int(product.price // 10) + 1
    above = [10.0 * tens for tens in range(first, min(first + 4, 100))]
    return max(Draw("bound", product.asin, number).sample(above, 2)) if len(above) >= 2 else NO_BOUND


def _human(files: Files, products: Mapping[str, Product]) -> Iterable[Goal]:
    if files.people is None:
        raise broken(files.names[PEOPLE], "it is missing")
    for asin, product in products.items():
        for number, record in enumerate(files.people.get(asin, ())):
            where = f"{asin}, instruction {number}"
            instruction, attributes, options = (
                _field(files.names[PEOPLE], where, record, name)
                for name in ("instruction", "instruction_attributes", "instruction_options")
            )
            if attributes:  # the original leaves out those that ask for no attribute
                values = options.values() if isinstance(options, Mapping) else options
                yield _goal(product, instruction.strip("."), attributes, values, number)


def _template(files: Files, products: Mapping[str, Product]) -> Iterable[Goal]:
    for asin, product in products.items():
        record = files.attributes.get(asin)
        if record is None or record.get("instruction") is None:
            continue
        attributes = _field(files.names[ATTRIBUTES], asin, record, "instruction_attributes")
        names = sorted(product.options)
        for number, values in enumerate(itertools.product(*(product.options[name] for name in names))):
            chosen = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
            yield _goal(product, record["instruction"] + (f" with {chosen}" if chosen else ""), attributes, values, number)


def _goal(product: Product, instruction: str, attributes: Iterable[str], options: Iterable[str], number: int) -> Goal:
    bound = price_bound(product, number)
    price = f", and price lower than {bound:.2f} dollars" if bound < NO_BOUND else ""
    return Goal(product, instruction + price, tuple(attributes), tuple(options), bound)


def _field(name: str, where: str, record: Any, field: str) -> Any:
    if not isinstance(record, Mapping) or record.get(field) is None:
        raise broken(name, f"{where} has no {field!r}")
    return record[field]
