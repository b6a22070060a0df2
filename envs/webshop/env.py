"""One customer in the shop.

Owns: where the customer is, what was searched, opened and chosen, and what a click does.
Promises: only what is on the page can be clicked, and only the page with the search bar takes a search; all else is invalid and changes
nothing. Buying ends the episode; success is a score of 1 whatever the reward is. ``info`` always has ``score`` (0 until something was
bought), after buying also its parts, what was bought and what was wanted.
Does not: render (``pages``) or score (``reward``).

As in the original, chosen options are forgotten on the way back to the results, and "Next >" is on the last page of results too.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from envs import parse
from envs.api import Observation, Step
from envs.turns import Played, TurnBased
from envs.webshop import actions, pages, reward
from envs.webshop.actions import Asked
from envs.webshop.goals import Goal
from envs.webshop.pages import Page
from envs.webshop.products import Product
from envs.webshop.shop import Shop

Pay = Literal["binary", "score"]
Button = Literal["hidden", "shown"]
_SEARCH = ("search[<keywords>]",)
_PARTS = {name.lower(): name for name in (pages.DESCRIPTION, pages.FEATURES, pages.REVIEWS, pages.ATTRIBUTES)}
_BACK, _NEXT, _PREVIOUS, _BUY = (name.lower() for name in (pages.BACK, pages.NEXT, pages.PREVIOUS, pages.BUY))


class WebShop(TurnBased[Asked]):
    """The text environment. ``pay``: reward 1 for a score of 1 and else 0 ("binary"), or the score itself."""

    family: ClassVar[str] = "webshop"

    def __init__(
        self, shop: Shop, *, style: pages.Style, grammar: parse.Grammar, max_turns: int, pay: Pay = "binary", attributes: Button = "hidden"
    ) -> None:
        super().__init__(style=style, grammar=grammar, max_turns=max_turns, data_source=shop.stock.source)
        self.shop: Shop = shop
        self._style: pages.Style = style
        self._pay, self._attributes = pay, attributes == "shown"
        self._goal: Goal = shop.goals[0]
        self._open("", ())

    def drawn(self, seed: int) -> str:
        """A training goal, by weight."""
        return self.shop.draw(seed)

    def begin(self, seed: int, task: str) -> Observation:
        """As ``TurnBased.begin``. The episode follows from the task; nothing in it is random."""
        self._goal = self.shop.goal(task)
        self._open("", ())
        text, possible = self._show(pages.start(self._goal.instruction))
        return Observation(text, possible)

    def step(self, text: str) -> Step:
        """As ``TextEnv.step``."""
        step = super().step(text)
        return step if "score" in step.info else dataclasses.replace(step, info={**step.info, "score": 0.0})

    def said(self, reply: str) -> str | None:
        """As ``actions.said``."""
        return actions.said(reply, self.grammar)

    def read(self, said: str) -> Asked | None:
        """As ``TurnBased.read``: None for a click on what is not here, and for a search where there is no search bar."""
        asked = actions.read(said)
        if asked is None or (asked.verb == "search") != (self._at == "start"):
            return None
        return asked if asked.verb == "search" or asked.what in self._clickable else None

    def play(self, action: Asked) -> Played:
        """As ``TurnBased.play``."""
        if action.verb == "search":
            self._open("results", tuple(self.shop.stock.search(action.what)))
            return self._played(self._results())
        if action.what == _BACK:
            self._open("", ())
            return self._played(pages.start(self._goal.instruction))
        if self._at == "results":
            return self._in_results(action.what)
        return self._in_product(self._product, action.what)

    def free(self) -> None:
        """Nothing is held: the shop is shared."""

    def _open(self, at: str, found: tuple[Product, ...]) -> None:
        """Begin a search, or stand before one."""
        self._at: str = at or "start"
        self._found, self._page = found, 1
        self._product: Product = self._goal.product
        self._chosen: dict[str, str] = {}
        if at == "":
            self._opened: set[str] = set()

    def _in_results(self, what: str) -> Played:
        if what in (_NEXT, _PREVIOUS):
            self._page += 1 if what == _NEXT else -1
            return self._played(self._results())
        self._product = next(product for product in self._shown() if product.asin.lower() == what)
        self._opened.add(self._product.asin)
        return self._played(self._item())

    def _in_product(self, product: Product, what: str) -> Played:
        if what == _PREVIOUS:
            if self._at != "item":
                return self._played(self._item())
            self._chosen = {}
            return self._played(self._results())
        name = next((name for name, values in reversed(list(product.options.items())) if what in values), None)
        if self._at == "item" and name is not None:
            changed = self._chosen.get(name) != what
            self._chosen[name] = what
            return self._played(self._item(), effective=changed)
        if what == _BUY:
            return self._buy(product)
        self._at = "part"
        return self._played(pages.part(self._goal.instruction, product, _PARTS[what]))

    def _buy(self, product: Product) -> Played:
        result = reward.score(self._goal, product, self._chosen.values())
        success = result.score == 1.0
        info = {**dataclasses.asdict(result), "bought": product.asin, "wanted": self._goal.product.asin, "options": dict(self._chosen)}
        text, _ = self._show(pages.done(product, self._chosen, result.score))
        return Played(text, float(success) if self._pay == "binary" else result.score, terminated=True, success=success, info=info)

    def _shown(self) -> tuple[Product, ...]:
        return self._found[(self._page - 1) * pages.PER_PAGE : self._page * pages.PER_PAGE]

    def _results(self) -> Page:
        self._at = "results"
        return pages.results(self._goal.instruction, self._shown(), self._page, len(self._found), self._opened)

    def _item(self) -> Page:
        self._at = "item"
        return pages.item(self._goal.instruction, self._product, self._chosen, attributes=self._attributes)

    def _played(self, page: Page, *, effective: bool = True) -> Played:
        text, possible = self._show(page)
        return Played(text, effective=effective, actions=possible)

    def _show(self, page: Page) -> tuple[str, tuple[str, ...]]:
        self._clickable = page.clickable
        possible = _SEARCH if self._at == "start" else tuple(f"click[{what}]" for what in page.clickable)
        return pages.write(page, self._style), possible
