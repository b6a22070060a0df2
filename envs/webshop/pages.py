"""The shop's pages as text.

Owns: what stands on each page and what can be clicked there, in the original's order and words, and two ways to write it:
    full  a line per item; what can be clicked is written ``[button] x [button_]``, or ``[clicked button] x [clicked button_]`` where it was
          clicked before (a chosen option, a product that was opened)
    sep   one line, items joined by `` [SEP] ``; buttons look like text, and so do chosen options
Promises: no HTML on the way; equal pages are equal texts. ``instruction_of`` reads the instruction back from any page of either form, and
from those of older recordings.
Does not: decide what a click does.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from envs.webshop.products import Product

Style = Literal["full", "sep"]
SEP = " [SEP] "
PER_PAGE = 10
BACK, NEXT, PREVIOUS, BUY = "Back to Search", "Next >", "< Prev", "Buy Now"
DESCRIPTION, FEATURES, REVIEWS, ATTRIBUTES = "Description", "Features", "Reviews", "Attributes"

# A page's items, each a text and, where it can be clicked, True; None where it was clicked already and can be again.
Item = tuple[str, bool | None]
_HEADER = re.compile(r"instruction:\s*(?:\[sep\]\s*)?", re.IGNORECASE)
_END = re.compile(r"\s*(?:\[SEP\]|\[button\]|\n)")


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """A page. ``chosen``: option values picked on it, from the bottom up (as the original tells them)."""

    items: tuple[Item, ...]
    chosen: tuple[str, ...] = ()

    @property
    def clickable(self) -> tuple[str, ...]:
        """What can be clicked, in lower case, each once."""
        return tuple(dict.fromkeys(text.lower() for text, click in self.items if click is not False))


def write(page: Page, style: Style) -> str:
    """``page`` as text."""
    if style == "sep":
        return SEP.join(text for text, _ in page.items)
    lines = [f"You have clicked {value}." for value in page.chosen]
    lines += [text if click is False else _button("clicked button" if click is None else "button", text) for text, click in page.items]
    return "\n".join(lines)


def start(instruction: str) -> Page:
    """The page with the search bar. Its button is no click: a search has words."""
    return Page((("WebShop", False), ("Instruction:", False), (instruction, False), ("Search", True)))


def results(instruction: str, shown: Sequence[Product], page: int, total: int, opened: Collection[str]) -> Page:
    """Page ``page`` (from 1) of a search that found ``total`` products."""
    items = [*_head(instruction), (f"Page {page} (Total results: {total})", False)]
    items += [(PREVIOUS, True)] if page > 1 else []
    items.append((NEXT, True))
    for product in shown:
        items += [(product.asin, None if product.asin in opened else True), (product.title, False), (product.price_tag, False)]
    return Page(tuple(items))


def item(instruction: str, product: Product, chosen: Mapping[str, str], *, attributes: bool) -> Page:
    """A product's page; ``chosen`` holds option values by name; ``attributes``: with the button of that page."""
    items: list[Item] = [*_head(instruction), (PREVIOUS, True)]
    for name, values in product.options.items():
        items.append((name, False))
        items += [(value, None if chosen.get(name) == value else True) for value in values]
    items += [(product.title, False), (f"Price: {product.price_tag}", False), (f"Rating: {product.rating}", False)]
    items += [(DESCRIPTION, True), (FEATURES, True), (REVIEWS, True), *([(ATTRIBUTES, True)] if attributes else []), (BUY, True)]
    return Page(tuple(items), tuple(chosen[name] for name in reversed(list(product.options)) if name in chosen))


def part(instruction: str, product: Product, name: str) -> Page:
    """One of the pages under a product's page. Raises KeyError for another ``name``."""
    texts = {
        DESCRIPTION: lambda: [product.description],
        FEATURES: lambda: list(product.bullets),
        REVIEWS: lambda: [text for r in product.reviews for text in (f'"{r.title}"', r.stars, r.body)],
        ATTRIBUTES: lambda: [*product.attributes, product.category, product.query, product.product_category],
    }[name]()
    return Page((*_head(instruction), (PREVIOUS, True), *((text, False) for text in texts if text)))


def done(product: Product, chosen: Mapping[str, str], score: float) -> Page:
    """The page after buying."""
    texts = [
        "Thank you for shopping with us!",
        "Purchased",
        "asin",
        product.asin,
        "options",
        json.dumps(dict(chosen), ensure_ascii=False, sort_keys=True),
    ]
    return Page(tuple((text, False) for text in (*texts, "Your score (min 0.0, max 1.0)", str(score))))


def instruction_of(text: str) -> str:
    """The instruction on a page, without its header ("WebShop" or "Amazon Shopping Game", then "Instruction:"; or the latter alone)."""
    header = _HEADER.search(text)
    body = text[header.end() :] if header else text
    end = _END.search(body)
    return (body[: end.start()] if end else body).strip()


def _head(instruction: str) -> tuple[Item, ...]:
    return ("Instruction:", False), (instruction, False), (BACK, True)


def _button(kind: str, text: str) -> str:
    return f"[{kind}] {text} [{kind}_]"
