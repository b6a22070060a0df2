"""The family ``webshop``: find and buy what an instruction asks for, as in WebShop.

Owns: the two environments, ``shop`` (instructions that people wrote; in the generated catalogue, as people would) and ``shop_templates``
(instructions made by rule with every combination of options, of which the original's small set of 1,000 products has thousands where it
has few written ones), and their options:
    style       "full" (a line per item, buttons marked) or "sep" (the original's one line, joined by [SEP])
    grammar     "tagged" or "bare"
    max_turns   turns before truncation (15; the paper names 30 for its mixtures)
    reward      "binary" (1 for a score of 1, else 0: the paper) or "score" (the original's score)
    attributes  "hidden" or "shown": whether a product's page has the button Attributes (off in the original unless asked for)
Data: ``WEBSHOP_DATA`` names a folder with the original's items_shuffle.json, items_ins_v2.json and items_human_ins.json (or their _1000
forms; reviews.json if there). Without it the catalogue is generated; ``info["data_source"]`` tells.
Does not: fall back to generated data when the folder is wrong.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, Literal

from envs.api import EnvSpec, EnvTask, EnvUnavailable, Split
from envs.options import choose
from envs.parse import Grammar
from envs.prompts import system_prompt
from envs.webshop import shop as shops
from envs.webshop.goals import Kind

if TYPE_CHECKING:
    from envs.webshop.env import WebShop

_KINDS: dict[str, Kind] = {"shop": "human", "shop_templates": "template"}
_GOALS = {
    "shop": "buy the product that the instruction describes",
    "shop_templates": "buy the product with the listed attributes and options",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one environment; every field may be given to ``make`` and ``spec``."""

    style: Literal["full", "sep"] = "full"
    grammar: Grammar = "tagged"
    max_turns: int = 15
    reward: Literal["binary", "score"] = "binary"
    attributes: Literal["hidden", "shown"] = "hidden"


def names() -> tuple[str, ...]:
    """Environment names, without the family."""
    return tuple(_KINDS)


def kind_of(env: str) -> Kind:
    """The kind of goals of an environment, named with or without the family. Raises KeyError."""
    return _KINDS[env.removeprefix("webshop/")]


def spec(name: str, **options: Any) -> EnvSpec:
    """Describe an environment. Raises TypeError for an unknown option, ValueError for a value it cannot have."""
    chosen = choose(Options, options)
    return EnvSpec(
        name=f"webshop/{name}",
        family="webshop",
        goal=_GOALS[name],
        namespace="webshop",
        actions=(),
        max_turns=chosen.max_turns,
        system_prompt=system_prompt("webshop", chosen.style, chosen.grammar, (), chosen.max_turns, example="search[red cotton shirt]"),
    )


def tasks(split: Split) -> tuple[EnvTask, ...]:
    """Every goal of a split, of both environments; the kind is the product's category. Raises ``EnvUnavailable`` as ``make``."""
    found: list[EnvTask] = []
    for name, kind in _KINDS.items():
        shop = shops.shop(kind)
        goals = ((number, shop.goals[number]) for number in shop.members(split))
        found += [
            EnvTask(f"webshop/{name}", shop.task_id(number), goal.instruction, goal.product.category, shop.weights[number])
            for number, goal in goals
        ]
    return tuple(found)


def prepare() -> None:
    """Load the products and build the index. Raises ``EnvUnavailable`` when a package or a data file is missing."""
    _environment()
    shops.shop("human").stock.prepare()


def make(name: str, **options: Any) -> WebShop:
    """A customer in the shared shop. Raises ``EnvUnavailable`` when a package or a data file is missing or broken."""
    chosen = choose(Options, options)
    environment = _environment()
    shop = shops.shop(kind_of(name))
    shop.stock.prepare()
    return environment(
        shop, style=chosen.style, grammar=chosen.grammar, max_turns=chosen.max_turns, pay=chosen.reward, attributes=chosen.attributes
    )


def _environment() -> type[WebShop]:
    try:
        return importlib.import_module("envs.webshop.env").WebShop
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] == "envs":
            raise
        raise EnvUnavailable(f"{shops.INSTALL} ({missing.name} is missing)") from missing
