"""The generated catalogue and its goals: the original's form, a fair split, near misses, and every goal can be met."""

import collections
import dataclasses
import hashlib
import json
import subprocess
import sys

import pytest

pytest.importorskip("rapidfuzz")

from envs.webshop import catalogue, goals, products, reward

GOLDEN = "3187258916102978"


@pytest.fixture(scope="module")
def files():
    return products.read("")


@pytest.fixture(scope="module")
def stock(files):
    return products.products(files)


@pytest.fixture(scope="module", params=["human", "template"])
def found(request, files, stock):
    return goals.goals(files, stock, request.param)


def test_a_thousand_products_in_the_originals_form(files, stock):
    assert len(files.items) == len(stock) == 1000
    assert len({item["query"] for item in files.items}) == 50
    assert len({item["category"] for item in files.items}) == 10
    for item in files.items:
        assert len(item["asin"]) == 10
        assert item["product_category"].count(" › ") == 2
        assert item["pricing"].startswith("$")
        assert isinstance(item["small_description"], list)
        assert all(set(choice) == {"value", "image"} for choices in item["customization_options"].values() for choice in choices)
    assert set(files.attributes) == set(stock)
    assert any(record["instruction"] for record in files.attributes.values())
    assert all(1 <= len(product.reviews) <= 3 and 0 < float(product.rating) <= 5 for product in stock.values())
    assert any("to" in product.price_tag for product in stock.values())


def test_N03_the_catalogue_is_the_same_in_any_process(files):
    code = (
        "import hashlib, json; from envs.webshop import catalogue;"
        "print(hashlib.sha256(json.dumps(catalogue.files()).encode()).hexdigest()[:16])"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True, env={"PYTHONHASHSEED": "7"}
    )
    assert there.stdout.strip() == hashlib.sha256(json.dumps(catalogue.files()).encode()).hexdigest()[:16] == GOLDEN
    assert catalogue.files(1)["items_shuffle.json"] != files.items


def test_an_attribute_can_be_read_on_the_pages_of_a_product_exactly_when_it_has_it(stock):
    groups = {kind: (group, entry) for group in catalogue.words()["groups"] for kind, entry in group["kinds"].items()}
    for product in stock.values():
        group, entry = groups[product.query]
        pool = [it for how in ("is", "has") for it in entry.get(how) or group[how]]
        assert set(product.attributes) <= set(pool)
        for it in pool:
            readable = any(it in text for text in product.texts)
            assert readable == (it in product.attributes) == reward.has_attribute(product, it), (product.asin, it)


def test_no_two_values_that_a_product_may_offer_are_alike_to_the_reward():
    for group in catalogue.words()["groups"]:
        for entry in group["kinds"].values():
            values = [reward.base_colour(value) for key in entry["options"] for value in catalogue.option_values(key)]
            assert len(set(values)) == len(values)
            assert not [(a, b) for a in values for b in values if a != b and reward.alike(a, b)]


def test_every_goal_is_reached_with_score_1_by_buying_its_product(found):
    assert len(found) >= 500
    for goal in found:
        result = reward.score(goal, goal.product, goal.options)
        assert (result.score, result.r_type, result.r_price) == (1.0, 1.0, True), goal
        assert set(goal.options) <= {value for values in goal.product.options.values() for value in values}


def test_an_instruction_says_everything_that_is_asked_for(found):
    assert len({goal.instruction for goal in found}) > 0.95 * len(found)
    for goal in found:
        assert all(it in goal.instruction for it in (*goal.attributes, *goal.options))
        assert goal.product.query in goal.instruction
        assert goal.instruction.endswith(f", and price lower than {goal.price_upper:.2f} dollars")
        assert goal.product.price < goal.price_upper <= goal.product.price + 40


def test_near_misses_make_every_part_of_the_reward_matter(files, stock):
    """For most goals some product of the same kind fails in exactly one part."""
    found = goals.goals(files, stock, "human")[:150]
    fails = collections.Counter()
    for goal in found:
        parts = set()
        for product in stock.values():
            if product.query == goal.product.query:
                offered = {value for values in product.options.values() for value in values}
                result = reward.score(goal, product, [value for value in goal.options if value in offered])
                wrong = [name for name in ("r_att", "r_option", "r_price") if getattr(result, name) not in (1, None)]
                parts |= {wrong[0]} if len(wrong) == 1 and result.r_type == 1 else set()
        fails.update(parts)
    with_options = sum(bool(goal.options) for goal in found)
    assert fails["r_att"] > 0.8 * len(found)
    assert fails["r_price"] > 0.5 * len(found)
    assert fails["r_option"] > 0.6 * with_options


def test_held_out_goals_are_of_other_kinds_than_training_ones_and_never_said_alike(files, stock):
    for kind in ("human", "template"):
        found = goals.goals(files, stock, kind)
        train, heldout = (goals.members(found, split, "generated") for split in ("train", "heldout"))
        assert sorted(train + heldout) == list(range(len(found)))
        assert len(heldout) >= 100
        assert not {found[n].product.query for n in train} & {found[n].product.query for n in heldout}
        assert not {found[n].instruction for n in train} & {found[n].instruction for n in heldout}


def test_the_originals_goals_are_split_by_their_place_after_the_shuffle(found):
    many = (found * 9)[:2000]
    assert goals.members(many, "heldout", "real") == list(range(500))
    assert goals.members(many, "train", "real") == list(range(1500, 2000))
    assert goals.members(many[:100], "heldout", "real") == list(range(20))
    assert goals.members(many[:100], "train", "real") == list(range(20, 100))


def test_weights_are_higher_for_goals_that_ask_for_rare_attributes(stock):
    product = next(iter(stock.values()))
    some = [goals.Goal(product, "", attributes, (), 1.0) for attributes in (("a",), ("a", "b"), ("a", "c"), ("a", "c"))]
    assert goals.weights(some) == pytest.approx([1 / 4, (1 / 4 + 1) / 2, (1 / 4 + 1 / 2) / 2, (1 / 4 + 1 / 2) / 2])


def test_price_bound_is_one_of_the_next_four_multiples_of_ten_and_never_the_lowest(stock):
    product = next(iter(stock.values()))
    seen = {goals.price_bound(dataclasses.replace(product, price=40.0), number) for number in range(60)}
    assert seen == {60.0, 70.0, 80.0}  # the larger of two of 50, 60, 70, 80
    assert goals.price_bound(dataclasses.replace(product, price=975.0), 0) == 990.0
    assert goals.price_bound(dataclasses.replace(product, price=985.0), 0) == goals.NO_BOUND
