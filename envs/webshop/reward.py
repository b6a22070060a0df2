"""What a purchase is worth: the original's rule with its parts.

    score = r_type x (attributes matched + options matched + price kept) / (attributes asked + options asked + 1)

Owns: that rule. An attribute is matched when it is like one of the product's (token-set ratio above 85 of 100) or stands in the title,
the bullet points or the description. An option is matched when a chosen value is like it, each reduced to its base colour where it holds
one. The price is kept when it is at most the goal's bound. ``r_type`` is 1; 0.5 when neither the query is the same, nor two levels of the
category are shared, nor more than a fifth of the goal title's nouns are in the bought title; 0.1 when fewer than a tenth are; 0 when none
is.
Promises: a score in [0, 1], 1 exactly when everything asked for was bought; no field is ever taken as missing (see ``goals``,
``products``).
Does not: use a language model for nouns. The original asks a part-of-speech tagger; here a noun is any word that is no function word.

Two things it keeps from the original on purpose, so that scores compare: a base colour is found inside a longer word ("navyblue" is
"blue"), and where the words of one value are all in another the two are alike ("large" and "x-large").
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from rapidfuzz import fuzz, utils

from envs.webshop.goals import Goal
from envs.webshop.products import Product

LIKE = 85  # of 100, after rounding to a whole number
_COLOURS = """
amber apricot aqua ash azure beige black blue blush bronze brown burgundy camel camo caramel champagne charcoal chestnut chocolate coffee
copper coral cream crystal cyan dark denim emerald espresso fuchsia gold graphite gray green grey indigo ivory khaki lavender lemon leopard
light lilac lime magenta mahogany maroon mauve mint mocha multicolor mustard natural navy nude oak olive orange peach pearl pink plum purple
rainbow red rose royal ruby rust sand sapphire silver slate steel stone tan taupe teal turquoise violet walnut wheat white wine yellow
"""
COLOURS = tuple(_COLOURS.split())  # in the order of the alphabet: the first one found in a value is its base colour
_FUNCTION = """
a an and are as at be but by each etc for from in into is it its no nor not of off on or our out over per so such than that the their them
then these they this those to under up use via was we were when which while who will with without you your
"""
_FUNCTION_WORDS = frozenset(_FUNCTION.split())
_WORD = re.compile(r"[^\W\d_]+")


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """A score and its parts. ``r_option`` is None where no option was asked for."""

    score: float
    r_type: float
    r_att: float
    r_option: float | None
    r_price: bool
    title: float  # share of the goal title's nouns in the bought title


def score(goal: Goal, bought: Product, options: Iterable[str]) -> Score:
    """The score of buying ``bought`` with the chosen option values ``options`` for ``goal``."""
    chosen = [base_colour(value) for value in options]
    attributes = sum(has_attribute(bought, wanted) for wanted in goal.attributes)
    matched = sum(any(alike(value, base_colour(wanted)) for value in chosen) for wanted in goal.options)
    price = bought.price <= goal.price_upper
    share = title_share(goal.product.title, bought.title)
    r_type = type_factor(goal.product, bought, share)
    asked = len(goal.attributes) + len(goal.options) + 1
    return Score(
        score=r_type * ((attributes + matched + price) / asked),
        r_type=r_type,
        r_att=attributes / len(goal.attributes),
        r_option=matched / len(goal.options) if goal.options else None,
        r_price=price,
        title=share,
    )


def type_factor(wanted: Product, bought: Product, share: float) -> float:
    """``r_type`` of the module's docstring; ``share`` as ``title_share``."""
    if share == 0.0:
        return 0.0
    if share < 0.1:
        return 0.1
    levels = len(set(wanted.levels) & set(bought.levels))
    return 1.0 if wanted.query == bought.query or levels >= 2 or share > 0.2 else 0.5


def title_share(wanted: str, bought: str) -> float:
    """Share of the nouns of the title ``wanted`` that are in ``bought``; 0.2 where it has none."""
    nouns = _nouns(wanted)
    return len(set(nouns) & set(_nouns(bought))) / len(nouns) if nouns else 0.2


def has_attribute(product: Product, wanted: str) -> bool:
    """Whether ``product`` has the attribute ``wanted``, in its list or in its texts."""
    return any(alike(own, wanted) for own in product.attributes) or any(wanted in text for text in product.texts)


def base_colour(value: str) -> str:
    """The base colour that ``value`` holds, else ``value`` itself."""
    return next((colour for colour in COLOURS if colour in value), value)


def alike(one: str, other: str) -> bool:
    """Whether the token-set ratio of two phrases is above 85. Letter case, punctuation and letters beyond ASCII do not count."""
    return round(fuzz.token_set_ratio(_plain(one), _plain(other))) > LIKE


def _plain(text: str) -> str:
    return utils.default_process(text.encode("ascii", "ignore").decode())


def _nouns(title: str) -> list[str]:
    return [word for word in _WORD.findall(title.lower()) if word not in _FUNCTION_WORDS]
