"""What is for sale: the original's files, or the generated ones in the same form.

Owns: finding the four files, and the record of a product.
Promises: with ``WEBSHOP_DATA`` set, that folder is read and nothing else; a missing, broken or empty file is ``EnvUnavailable`` naming the
file, what is wrong with it and the fix. A price that is a range becomes one price from a generator of its own, named by the product.
Does not: keep pictures, or make goals.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.api import EnvUnavailable
from envs.webshop import catalogue
from envs.webshop.draw import Draw

VARIABLE = "WEBSHOP_DATA"
ITEMS, ATTRIBUTES, PEOPLE, REVIEWS = "items_shuffle.json", "items_ins_v2.json", "items_human_ins.json", "reviews.json"
_FIX = f"put the original's file there, or unset {VARIABLE} to use the generated catalogue"
_NO_PRICE = 100.0  # of a product without one, as in the original
_NEEDED = ("asin", "name", "category", "query", "product_category", "full_description", "small_description", "customization_options")


@dataclasses.dataclass(frozen=True, slots=True)
class Review:
    """What a customer wrote; ``stars`` from 0 to 5."""

    title: str
    stars: str
    body: str


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """One product. ``price`` is what it costs, ``price_tag`` what its page says (a range, where it is one)."""

    asin: str
    title: str
    category: str
    query: str
    product_category: str
    description: str
    bullets: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]  # by name, in the order of the page
    attributes: tuple[str, ...]  # not on the page
    price: float
    price_tag: str
    rating: str
    reviews: tuple[Review, ...]
    levels: tuple[str, ...]  # of product_category
    texts: tuple[str, str, str]  # title, bullets and description in lower case


@dataclasses.dataclass(frozen=True)
class Files:
    """The parsed files. ``people`` is None where that file is missing (the generated catalogue always has it)."""

    source: str  # "real" or "generated"
    items: list[Any]
    attributes: Mapping[str, Any]
    people: Mapping[str, Any] | None
    reviews: list[Any]
    names: Mapping[str, str]  # path of each document, for errors


def data_folder() -> str:
    """The folder of the original's files; "" for the generated catalogue."""
    return os.environ.get(VARIABLE, "")


def read(folder: str) -> Files:
    """The files of ``folder``, or the generated ones for "". Raises ``EnvUnavailable``."""
    if not folder:
        made = catalogue.files()
        return Files("generated", made[ITEMS], made[ATTRIBUTES], made[PEOPLE], made[REVIEWS], {name: f"generated {name}" for name in made})
    root = Path(folder)
    if not root.is_dir():
        raise EnvUnavailable(f"webshop: {VARIABLE}={folder} is no folder: {_FIX}")
    paths = {name: _find(root, name) for name in (ITEMS, ATTRIBUTES, PEOPLE, REVIEWS)}
    for name in (ITEMS, ATTRIBUTES):
        if paths[name] is None:
            raise EnvUnavailable(f"webshop: {root / name} is missing (and so is its _1000 form): {_FIX}")
    found = {name: _load(path, list if name in (ITEMS, REVIEWS) else dict) for name, path in paths.items() if path}
    names = {name: str(path or root / name) for name, path in paths.items()}
    return Files("real", found[ITEMS], found[ATTRIBUTES], found.get(PEOPLE), found.get(REVIEWS, []), names)


def broken(name: str, what: str) -> EnvUnavailable:
    """The error for a file that cannot be used."""
    return EnvUnavailable(f"webshop: {name}: {what}: {_FIX}")


def products(files: Files) -> dict[str, Product]:
    """Every product by its id, in the order of the file. As in the original, ids that are "nan", longer than ten signs or seen before are
    left out. Raises ``EnvUnavailable`` naming a product and the field it lacks.
    """
    reviews = {entry["asin"]: entry for entry in files.reviews if isinstance(entry, dict) and "asin" in entry}
    found: dict[str, Product] = {}
    for number, item in enumerate(files.items):
        lacking = [field for field in _NEEDED if not isinstance(item, dict) or field not in item]
        if lacking:
            asin = item.get("asin", "?") if isinstance(item, dict) else "?"
            raise broken(files.names[ITEMS], f"product {number} ({asin}) has no {lacking[0]!r}")
        asin = item["asin"]
        if asin == "nan" or len(asin) > 10 or asin in found:
            continue
        try:
            found[asin] = _product(item, files.attributes.get(asin), reviews.get(asin, {}))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise broken(files.names[ITEMS], f"product {number} ({asin}) is not in the original's form: {error!r}") from error
    if not found:
        raise broken(files.names[ITEMS], "it holds no products")
    return found


def _product(item: Mapping[str, Any], known: Mapping[str, Any] | None, reviews: Mapping[str, Any]) -> Product:
    bullets = item["small_description"]
    bullets = tuple(map(str, bullets)) if isinstance(bullets, list) else (str(bullets or ""),)
    title, description = item["name"], item["full_description"] or ""
    price, tag = _price(item["asin"], item.get("pricing"))
    return Product(
        asin=item["asin"],
        title=title,
        category=item["category"],
        query=item["query"].lower().strip(),
        product_category=item["product_category"],
        description=description,
        bullets=bullets,
        options=_options(item["customization_options"] or {}),
        attributes=tuple((known or {}).get("attributes", ())),
        price=price,
        price_tag=tag,
        rating=str(reviews.get("average_rating", "N.A.")),
        reviews=tuple(Review(r["title"], str(r.get("stars", r.get("score", ""))), r.get("review", "")) for r in reviews.get("reviews", ())),
        levels=tuple(level.strip() for level in item["product_category"].split("›")),
        texts=(title.lower(), " ".join(bullets).lower(), description.lower()),
    )


def _price(asin: str, pricing: str | None) -> tuple[float, str]:
    """The price and its tag; of a range, a price inside it that follows from the product's id."""
    amounts = [float(re.sub(r"[^\d.]", "", part)) for part in (pricing or "").split("$")[1:]]
    if not amounts:
        return _NO_PRICE, f"${_NO_PRICE}"
    if len(amounts) == 1:
        return amounts[0], f"${amounts[0]}"
    return Draw("price", asin).between(amounts[0], amounts[1]), f"${amounts[0]} to ${amounts[1]}"


def _options(customization: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Option values by name, in lower case and on one line each; "/" is written " | ", as in the original. Empty ones are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for name, contents in customization.items():
        values = (" ".join(content["value"].replace("/", " | ").lower().split()) for content in contents or ())
        found[name.lower()] = tuple(value for value in values if value)
    return {name: values for name, values in found.items() if values}


def _find(root: Path, name: str) -> Path | None:
    small = name.replace(".json", "_1000.json")
    return next((root / form for form in (name, small) if (root / form).is_file()), None)


def _load(path: Path, kind: type) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise broken(str(path), f"it cannot be read as JSON ({error})") from error
    if not isinstance(found, kind):
        raise broken(str(path), f"it holds a {type(found).__name__} where the original has a {kind.__name__}")
    return found
