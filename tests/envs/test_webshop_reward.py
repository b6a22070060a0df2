"""The reward rule: every branch by hand, and against a second implementation written without its library."""

import dataclasses
import random

import pytest

pytest.importorskip("rapidfuzz")

from envs.webshop import catalogue, goals, products, reward
from envs.webshop.goals import Goal
from envs.webshop.products import Product


def product(
    title="Norvale Wool Hat", *, query="wool hat", path="Clothing › Hats › Wool", attributes=(), price=20.0, bullets=(), description=""
):
    return Product(
        asin="B000000001",
        title=title,
        category="fashion",
        query=query,
        product_category=path,
        description=description,
        bullets=tuple(bullets),
        options={},
        attributes=tuple(attributes),
        price=price,
        price_tag=f"${price}",
        rating="N.A.",
        reviews=(),
        levels=tuple(level.strip() for level in path.split("›")),
        texts=(title.lower(), " ".join(bullets).lower(), description.lower()),
    )


def goal(target, attributes=("soft", "hand washed"), options=("red", "m"), bound=30.0):
    return Goal(target, "", tuple(attributes), tuple(options), bound)


HAT = product(attributes=("soft", "hand washed"))


def test_all_that_was_asked_for_is_1():
    result = reward.score(goal(HAT), HAT, ["m", "red"])
    assert dataclasses.asdict(result) == {"score": 1.0, "r_type": 1.0, "r_att": 1.0, "r_option": 1.0, "r_price": True, "title": 1.0}


@pytest.mark.parametrize(
    ("bought", "options", "score"),
    [
        (product(attributes=("soft",)), ["m", "red"], 4 / 5),  # one attribute less
        (product(), ["m", "red"], 3 / 5),  # both
        (HAT, ["m"], 4 / 5),  # one option not chosen
        (HAT, ["m", "blue"], 4 / 5),  # chosen wrongly
        (HAT, [], 3 / 5),
        (product(attributes=("soft", "hand washed"), price=30.0), ["m", "red"], 1.0),  # the bound itself is kept
        (product(attributes=("soft", "hand washed"), price=30.01), ["m", "red"], 4 / 5),
        (product(price=99.0), [], 0.0),
        (product(bullets=["Very SOFT inside"], description="can be hand washed cold"), ["m", "red"], 1.0),  # read in the texts
        (product(title="Soft Wool Hat", attributes=("hand wash",)), ["m", "red"], 1.0),  # in the title; and nearly the same words
    ],
)
def test_attributes_options_and_price_count_equally(bought, options, score):
    assert reward.score(goal(HAT), bought, options).score == pytest.approx(score)


def test_without_options_only_attributes_and_price_count():
    result = reward.score(goal(HAT, attributes=("soft", "blue light"), options=()), HAT, ["red"])
    assert result.r_option is None
    assert result.score == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("wanted", "bought", "r_type", "share"),
    [
        (HAT, product("Solvik Wool Hat"), 1.0, 2 / 3),
        (HAT, product("Solvik Cap"), 0.0, 0.0),  # same query and path, but no word in common
        (product("One Two Three Four Five"), product("One", query="cap"), 1.0, 0.2),  # two levels of the path are shared
        (
            product("One Two Three Four Five"),
            product("One", query="cap", path="Hats › Toys › Rope"),
            0.5,
            0.2,
        ),  # one: and 0.2 is not more than a fifth
        (product("One Two Three Four"), product("One", query="cap", path="Toys › Rope › Blue"), 1.0, 0.25),
        (product("One Two Three Four Five"), product("One", path="Toys › Rope › Blue"), 1.0, 0.2),  # the query
        (product("a b c d e f g h i j k l".replace(" ", "x ") + "x"), product("ax", path="Toys"), 0.1, 1 / 12),  # below a tenth
        (product("For the and 12 34"), product("Anything", query="cap", path="Toys"), 0.5, 0.2),  # a title without nouns counts as 0.2
        (product("For the and 12 34"), product("Anything"), 1.0, 0.2),
    ],
)
def test_type_factor(wanted, bought, r_type, share):
    result = reward.score(goal(wanted, attributes=("soft",), options=()), dataclasses.replace(bought, attributes=("soft",)), [])
    assert (result.r_type, result.title) == (r_type, pytest.approx(share))
    assert result.score == pytest.approx(r_type)


def test_the_order_of_category_levels_and_repeats_do_not_count():
    title = "One Two Three Four Five"
    there = [product("One", query="cap", path=path) for path in ("Wool › Clothing", "Toys › Hats › Hats")]
    assert [reward.score(goal(product(title)), bought, []).r_type for bought in there] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("value", "base"),
    [("navy blue", "blue"), ("dark red", "dark"), ("rosegold", "gold"), ("light", "light"), ("xx-large", "xx-large"), ("a-12", "a-12")],
)
def test_a_value_is_reduced_to_the_first_base_colour_of_the_alphabet_in_it(value, base):
    assert reward.base_colour(value) == base


@pytest.mark.parametrize(
    ("one", "other", "like"),
    [
        ("essential oils", "essential oil", True),
        ("powder snow", "Cool Powder Snow!", True),  # all words of one in the other
        ("12 pack", "24 pack", True),  # 85.7, rounded 86: as the original counts
        ("2 pack", "4 pack", False),
        ("water resistant", "stain resistant", False),
        ("", "", False),
        ("", "red", False),
        ("é", "é", False),  # nothing is left of it
        ("crème red", "red", True),
    ],
)
def test_alike(one, other, like):
    assert reward.alike(one, other) is like
    assert oracle_alike(one, other) is like


def test_N16_a_goal_record_without_a_field_is_an_error_that_names_it():
    files = products.read("")
    stock = products.products(files)
    asin, records = next(iter(files.people.items()))
    for field in ("instruction", "instruction_attributes", "instruction_options"):
        bad = {**records[0]}
        del bad[field]
        with pytest.raises(Exception, match=f"items_human_ins.json: {asin}, instruction 0 has no '{field}'"):
            goals.goals(dataclasses.replace(files, people={asin: [bad]}), stock, "human")


def test_N15_one_purchase_has_one_score_however_many_rules_it_meets():
    """An attribute that is listed, and in the title, the bullets and the description, counts once."""
    everywhere = product("Soft Wool Hat", attributes=("soft", "very soft", "soft"), bullets=["soft", "soft"], description="soft soft")
    result = reward.score(goal(everywhere, options=("red",)), everywhere, ["red", "red wine", "dark red", "red"])
    assert (result.r_att, result.r_option, result.score) == (1 / 2, 1.0, pytest.approx(3 / 4))


def test_scores_are_those_of_a_second_implementation():
    files = products.read("")
    stock = list(products.products(files).values())
    found = goals.goals(files, products.products(files), "human")
    draw, seen = random.Random(5), set()
    for _ in range(400):
        one = draw.choice(found)
        near = [p for p in stock if p.query == one.product.query] if draw.random() < 0.6 else stock
        bought = draw.choice(near)
        options = [draw.choice(values) for values in bought.options.values() if draw.random() < 0.8]
        mine = reward.score(one, bought, options).score
        assert mine == pytest.approx(oracle_score(one, bought, options), abs=1e-12)
        seen.add(round(mine, 3))
    assert len(seen) >= 12
    phrases = [it for group in catalogue.words()["groups"] for it in (*group["is"], *group["has"])]
    for _ in range(1500):
        one, other = draw.choice(phrases), draw.choice(phrases)
        assert reward.alike(one, other) == oracle_alike(one, other)


def oracle_score(wanted, bought, options):
    """The rule again, from its description, with lists and loops."""
    matched = 0
    for attribute in wanted.attributes:
        hit = False
        for own in bought.attributes:
            hit = hit or oracle_alike(attribute, own)
        everything = "\0".join([bought.title, " ".join(bought.bullets), bought.description]).lower()
        matched += 1 if hit or attribute in everything else 0
    for option in wanted.options:
        matched += 1 if [o for o in options if oracle_alike(oracle_colour(option), oracle_colour(o))] else 0
    matched += 0 if bought.price > wanted.price_upper else 1
    fraction = matched / (1 + len(wanted.attributes) + len(wanted.options))
    nouns = [oracle_nouns(title) for title in (wanted.product.title, bought.title)]
    share = len(set(nouns[0]).intersection(nouns[1])) / len(nouns[0])
    same_path = sum(
        level in [x.strip() for x in bought.product_category.split("›")] for level in wanted.product.product_category.split(" › ")
    )
    factor = 1.0
    if wanted.product.query != bought.query and same_path < 2 and share <= 0.2:
        factor = 0.5
    factor = 0.1 if share < 0.1 else factor
    return fraction * (0.0 if share == 0 else factor)


def oracle_nouns(title):
    cleaned = "".join(c if c.isalpha() else " " for c in title.lower()).split()
    return [word for word in cleaned if word not in {"a", "an", "and", "for", "the", "to", "with", "of", "in", "on", "is", "it", "no"}]


def oracle_colour(value):
    return min((colour for colour in reward.COLOURS if value.find(colour) >= 0), default=value)


def oracle_alike(one, other):
    a, b = ({*"".join(c if c.isalnum() else " " for c in t.lower() if c.isascii()).split()} for t in (one, other))
    if not a or not b:
        return False
    both, left, right = sorted(a & b), sorted(a - b), sorted(b - a)
    if both and (not left or not right):
        return True
    best = oracle_ratio(" ".join(both + left), " ".join(both + right))
    if both:
        best = max(best, *(oracle_ratio(" ".join(both), " ".join(both + more)) for more in (left, right)))
    return int(best + 0.5) > 85


def oracle_ratio(one, other):
    """200 x the longest common subsequence / the two lengths."""
    row = [0] * (len(other) + 1)
    for x in one:
        before = row
        row = [0]
        for place, y in enumerate(other):
            row.append(before[place] + 1 if x == y else max(before[place + 1], row[-1]))
    return 200 * row[-1] / (len(one) + len(other)) if one or other else 0.0
