"""The generated catalogue: 1,000 products in the original's files.

Owns: what is for sale when ``WEBSHOP_DATA`` is not set. Every kind of product has five series of four that are nearly alike: one as it
should be, one with two attributes exchanged, one without some values of an option, and a dearer one. So every part of the reward matters.
Promises: ``files(seed)`` is the same on every machine; each attribute of a product can be read on its pages, and no other attribute of its
group can; it takes well under a second.
Does not: read or write a disk, know the reward rule, or make goals (it writes the instructions that goals are made of).
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import yaml

from envs.webshop.draw import Draw

SERIES, ALIKE = 5, 4  # series per kind, products per series
ASKED = 0.7  # share of the products for which somebody wrote an instruction; a third of them has two
TEMPLATED = 0.3  # share of the products that have an instruction by rule
_SIGNS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SIZE = "size of "


@functools.cache
def words() -> dict[str, Any]:
    """The word lists."""
    return yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))


def files(seed: int = 0) -> dict[str, Any]:
    """The four documents by file name: products, attributes, instructions by people, and reviews."""
    items: list[dict[str, Any]] = []
    attributes: dict[str, Any] = {}
    people: dict[str, Any] = {}
    reviews: list[dict[str, Any]] = []
    for group in words()["groups"]:
        for kind in group["kinds"]:
            for series in range(SERIES):
                for plan in _series(group, kind, Draw("series", seed, kind, series)):
                    draw = Draw("product", seed, kind, series, plan["variant"])
                    item = _item(plan, draw)
                    asin = item["asin"]
                    items.append(item)
                    asked = [*plan["is"], *plan["has"]]
                    attributes[asin] = {"attributes": asked, **_templated(plan, draw)}
                    if draw.chance(ASKED):
                        people[asin] = [_by_person(plan, draw) for _ in range(2 if draw.chance(1 / 3) else 1)]
                    reviews.append(_reviews(asin, plan, draw))
    order = Draw("order", seed)
    return {
        "items_shuffle.json": order.sample(items, len(items)),
        "items_ins_v2.json": attributes,
        "items_human_ins.json": people,
        "reviews.json": reviews,
    }


def option_name(key: str) -> str:
    """What the shop calls the option ``key`` of the word lists."""
    return "size" if key.startswith(_SIZE) else key


def option_values(key: str) -> list[str]:
    """All values that the option ``key`` of the word lists can have."""
    return words()["palette"] if key == "color" else words()["options"][key]


def _series(group: dict[str, Any], kind: str, draw: Draw) -> list[dict[str, Any]]:
    """Plans of four products that are nearly alike."""
    entry = group["kinds"][kind]
    is_, has = (
        draw.sample(entry.get(how) or group[how], 5) for how in ("is", "has")
    )  # the last of each is what the second product has instead
    full = {key: _in_order(draw.sample(option_values(key), 5), option_values(key)) for key in entry["options"]}
    price = round(draw.between(*entry["price"])) - draw.pick((0.01, 0.5, 0.05, 0.0))
    model, plans = draw.pick(words()["models"]), []
    for variant in range(ALIKE):
        plan = {
            "variant": variant,
            "kind": kind,
            "a": entry["a"],
            "category": group["category"],
            "path": f"{group['path']} › {entry['leaf']}",
            "use": draw.pick(group["for"]),
            "brand": draw.pick(words()["brands"]),
            "model": model,
            "is": is_[:3],
            "has": has[:3],
            "options": dict(full),
            "price": price,
        }
        if variant == 1:
            plan["is"], plan["has"] = [*is_[1:3], is_[4]], [*has[1:3], has[4]]
        elif variant == 2:
            key = draw.pick(entry["options"])
            plan["options"][key] = _in_order(draw.sample(full[key], max(1, len(full[key]) - 2)), option_values(key))
        elif variant == 3:
            plan["price"] = price + 41 + draw.below(20)  # above every bound that a goal on the others can have
        plans.append(plan)
    return plans


def _in_order(chosen: list[str], everything: list[str]) -> list[str]:
    return [value for value in everything if value in chosen]


def _item(plan: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """One entry of items_shuffle.json."""
    asin = "B0" + "".join(draw.pick(_SIGNS) for _ in range(8))
    said = [("is", it) for it in plan["is"]] + [("has", it) for it in plan["has"]]
    said = draw.sample(said, len(said))
    (_, headline), in_description, in_bullets = said[0], said[1:3], said[3:]
    title = draw.pick(
        ("{brand} {model} {kind}, {it}, for {use}", "{brand} {it} {kind} for {use} - {model}", "{brand} {kind} {model} for {use} ({it})")
    )
    sentences = words()["sentences"]
    description = [draw.pick(sentences["about"]), *(_say(draw, how, it) for how, it in in_description), draw.pick(sentences["close"])]
    price = f"${plan['price']:.2f}"
    if draw.chance(0.15):
        price += f" to ${plan['price'] + draw.pick((2, 5, 8)):.2f}"
    return {
        "asin": asin,
        "name": _title_case(_fill(title, plan, headline)),
        "category": plan["category"],
        "query": plan["kind"],
        "product_category": plan["path"],
        "full_description": " ".join(_fill(sentence, plan) for sentence in description),
        "small_description": [_say(draw, how, it) for how, it in in_bullets],
        "pricing": price,
        "customization_options": {
            option_name(key): [{"value": value, "image": None} for value in values] for key, values in plan["options"].items()
        },
        "images": [f"images/{asin}.jpg"],
    }


def _say(draw: Draw, how: str, it: str) -> str:
    return draw.pick(words()["sentences"][how]).replace("{it}", it)


def _fill(sentence: str, plan: dict[str, Any], it: str = "") -> str:
    for slot in ("brand", "model", "kind", "use"):
        sentence = sentence.replace(f"{{{slot}}}", plan[slot])
    return sentence.replace("{it}", it)


def _title_case(text: str) -> str:
    small = {"for", "and", "the", "to", "with", "a", "on"}
    return " ".join(word if word in small else re.sub(r"\b[a-z]", lambda first: first[0].upper(), word, count=1) for word in text.split())


def _reviews(asin: str, plan: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """One entry of reviews.json."""
    good, bad = words()["sentences"]["good"], words()["sentences"]["bad"]
    found = []
    for _ in range(1 + draw.below(3)):
        happy = draw.chance(0.7)
        title, body = draw.pick(good if happy else bad)
        found.append({"stars": str(4.0 + draw.below(2) if happy else 2.0 + draw.below(2)), "title": title, "review": _fill(body, plan)})
    return {"asin": asin, "reviews": found, "average_rating": f"{sum(float(r['stars']) for r in found) / len(found):.1f}"}


def _templated(plan: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """The instruction to which the options and the price are added by rule; as in the original, not every product has one."""
    if not draw.chance(TEMPLATED):
        return {"instruction": None, "instruction_attributes": None}
    asked = draw.sample([*plan["is"], *plan["has"]], 1 + draw.below(3))
    return {"instruction": f"Find me {', '.join(asked)} {plan['kind']}", "instruction_attributes": asked}


def _by_person(plan: dict[str, Any], draw: Draw) -> dict[str, Any]:
    """An instruction as a person would write it, and what it asks for."""
    is_, has = draw.sample(plan["is"], draw.below(3)), draw.sample(plan["has"], draw.below(2))
    if not is_ + has:
        is_ = [draw.pick(plan["is"])]
    options = {key: draw.pick(values) for key, values in plan["options"].items() if draw.chance(0.75)}
    sentences = words()["sentences"]
    clauses = []
    if is_:
        clauses.append(draw.pick(sentences["ask_is"]).replace("{it}", " and ".join(is_)))
    clauses += [draw.pick(sentences["ask_has"]).replace("{it}", it) for it in has]
    clauses += [draw.pick(sentences["ask_option"][option_name(key)]).replace("{it}", value) for key, value in options.items()]
    clauses = draw.sample(clauses, len(clauses))
    clauses.sort(key=lambda clause: clause[0] == ".")  # what goes on with the sentence comes before new sentences
    return {
        "instruction": draw.pick(sentences["ask"]).replace("{a}", plan["a"]) + "".join(clauses),
        "instruction_attributes": [*is_, *has],
        "instruction_options": list(options.values()),
    }
