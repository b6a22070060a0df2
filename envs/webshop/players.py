"""Scripted players of the shop.

Owns:
    random  clicks anything on the page; where there is a search bar, searches for three words of the instruction
    expert  knows the goal behind the instruction: searches for its product's title, opens it, chooses its options, buys
    follow  does what a lesson says: 'search for "..", open B0.., choose "..", choose "..", then buy'
Promises: deterministic given the seed; ``follow`` reads only the lesson and what can be clicked.
Does not: shop around.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from envs.api import EnvTask
from envs.players import Player
from envs.webshop import pages, reward, shop, tasks
from envs.webshop.draw import Draw
from envs.webshop.goals import Goal
from envs.webshop.products import Product

KINDS = ("random", "expert", "follow")
_PAGES = 5  # of results, at most
_SEARCH, _BUY = "search[<keywords>]", "click[buy now]"
_BACK, _NEXT, _PREVIOUS = "click[back to search]", "click[next >]", "click[< prev]"
_WORD = re.compile(r"[a-z]{3,}")
_STEPS = re.compile(r'search for "(?P<words>.+?)", open (?P<asin>\w+)(?P<rest>.*), then buy')
_CHOICE = re.compile(r', choose "(.*?)"(?=, choose "|$)')


def make_player(kind: str, task: EnvTask, *, seed: int, options: Mapping[str, Any], lesson: str = "") -> Player:
    """A player for the episode of ``seed``. Raises ValueError for an unknown kind and for a lesson without its three parts."""
    if kind == "random":
        act = _random(Draw("random player", task.id, seed))
    elif kind == "expert":
        goal = _goal(task, seed)
        act = _Buyer(goal.product.title, goal.product.asin, _fitting(goal, goal.product)).act
    elif kind == "follow":
        said = _STEPS.search(lesson)
        if said is None:
            raise ValueError(f'webshop lesson {lesson!r}: say \'search for "words", open NUMBER, choose "option", then buy\'')
        act = _Buyer(said["words"], said["asin"], _CHOICE.findall(said["rest"])).act
    else:
        raise ValueError(f"no player {kind!r}: use one of {', '.join(KINDS)}")
    if options.get("grammar", "tagged") == "bare":
        return act
    return lambda text, actions: f"<action>{act(text, actions)}</action>"


def lesson(task: EnvTask, seed: int, *, right: bool = True) -> str:
    """How to get what the goal asks for; not ``right``: how to get something that is nearly it (the best one with a score below 1)."""
    goal = _goal(task, seed)
    product = goal.product if right else _nearly(goal, shop.shop(tasks.kind_of(task.env)).stock.products.values())
    choices = "".join(f', choose "{value}"' for value in _fitting(goal, product))
    title = product.title.replace('"', " ")
    return f'search for "{title}", open {product.asin}{choices}, then buy'


def _goal(task: EnvTask, seed: int) -> Goal:
    there = shop.shop(tasks.kind_of(task.env))
    return there.goal(task.id or there.draw(seed))


def _fitting(goal: Goal, product: Product) -> list[str]:
    """The product's option values that the goal asks for, one per name of an option at most."""
    found: dict[str, str] = {}
    for wanted in goal.options:
        for name, values in product.options.items():
            exact = wanted in values
            like = [value for value in values if value == wanted or (not exact and reward.alike(*map(reward.base_colour, (value, wanted))))]
            if like and name not in found:
                found[name] = like[0]
                break
    return list(found.values())


def _nearly(goal: Goal, products: Iterable[Product]) -> Product:
    """Of the products of the same kind (else of all) the one with the highest score below 1; the first of equal ones."""
    everything = [product for product in products if product is not goal.product]
    same = [product for product in everything if product.query == goal.product.query]
    for some in (same, everything):
        scored = [(reward.score(goal, product, _fitting(goal, product)).score, product) for product in some]
        below = [pair for pair in scored if pair[0] < 1]
        if below:
            return max(below, key=lambda pair: pair[0])[1]
    return everything[0] if everything else goal.product


def _random(draw: Draw) -> Callable[[str, tuple[str, ...]], str]:
    def act(text: str, actions: tuple[str, ...]) -> str:
        if _SEARCH not in actions:
            return draw.pick(actions)
        words = _WORD.findall(pages.instruction_of(text).lower()) or ["gift"]
        return f"search[{' '.join(draw.sample(words, 3))}]"

    return act


class _Buyer:
    """Searches, turns pages until the product is there (else opens another), chooses, buys."""

    def __init__(self, words: str, asin: str, choices: Iterable[str]) -> None:
        self._search, self._open = f"search[{' '.join(words.split())}]", f"click[{asin.lower()}]"
        self._left = [f"click[{value}]" for value in choices]
        self._turned, self._settled = 0, False  # settled: for the first product of the first page, since the right one is on none

    def act(self, text: str, actions: tuple[str, ...]) -> str:
        """The next action."""
        if _SEARCH in actions:
            return self._search
        if self._open in actions:
            return self._open
        if _BUY in actions:
            while self._left:
                choice = self._left.pop(0)
                if choice in actions:
                    return choice
            return _BUY
        here = [action for action in actions if action not in (_BACK, _NEXT, _PREVIOUS)]
        if here and (self._settled or self._turned == _PAGES - 1):
            return here[0]
        if here:
            self._turned += 1
            return _NEXT
        self._settled = True
        return _BACK
