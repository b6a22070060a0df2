"""The shop as an environment: pages, what can be clicked, invalid replies, buying, and the same episode everywhere."""

import hashlib
import random
import re
import subprocess
import sys
import time

import pytest

pytest.importorskip("bm25s")
pytest.importorskip("rapidfuzz")

from envs import registry
from envs.api import TextEnv
from envs.webshop import actions, pages

# Digests of whole episodes (every observation) of the task of seed 1 and 2 under random clicks, by style.
GOLDEN = {("full", 1): "187bf0fe683a3799", ("full", 2): "a446473b69a52f89", ("sep", 1): "e737599639e2c1a2", ("sep", 2): "03d4b42973a2475e"}
TASK = "goal-0004"


def make(**options):
    return registry.make("webshop/shop", **{"grammar": "bare", **options})


def play(env, seed, task=""):
    """The observations of an episode of random clicks."""
    draw, seen = random.Random(seed), env.reset(seed, task)
    texts, possible = [seen.text], seen.actions
    while True:
        searching = possible == ("search[<keywords>]",)
        said = f"search[{' '.join(seen.text.split()[6:9])}]" if searching else possible[int(draw.random() * len(possible))]
        step = env.step(said)
        assert step.valid
        texts.append(step.observation)
        possible = step.actions
        if step.done:
            return texts


def digest(texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def at_product(env, task=TASK):
    """The first product of a search is open; its id and the step."""
    env.reset(0, task)
    found = env.step("search[bed sheet]")
    first = next(action for action in found.actions if action.startswith("click[b0"))
    return first[6:-1], env.step(first)


def test_N03_an_episode_follows_from_seed_and_task_byte_for_byte():
    assert {(style, seed): digest(play(make(style=style), seed)) for style, seed in GOLDEN} == GOLDEN
    code = (
        "import sys; sys.path.insert(0, 'tests/envs'); import test_webshop_env as t;"
        "assert t.digest(t.play(t.make(style='sep'), 1)) == t.GOLDEN['sep', 1]; assert t.make().reset(5) == t.make().reset(5)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONHASHSEED": "3", "PYTHONPATH": "."})


def test_a_seed_draws_a_training_goal_and_the_info_names_it():
    env, train = make(), {task.id for task in registry.tasks("webshop/shop")}
    drawn = []
    for seed in range(60):
        env.reset(seed)
        drawn.append(env.step("").info["task"])
    assert set(drawn) <= train
    assert len(set(drawn)) > 40
    with pytest.raises(KeyError, match="goal-99999"):
        env.reset(0, "goal-99999")


def test_the_start_page_in_both_styles():
    goal = next(task.goal for task in registry.tasks("webshop/shop") if task.id == TASK)
    full, sep = make().reset(0, TASK), make(style="sep").reset(0, TASK)
    assert full.text == f"WebShop\nInstruction:\n{goal}\n[button] Search [button_]"
    assert sep.text == f"WebShop [SEP] Instruction: [SEP] {goal} [SEP] Search"
    assert full.actions == sep.actions == ("search[<keywords>]",)


def test_results_in_the_originals_layout():
    env = make(style="sep")
    assert isinstance(env, TextEnv)
    env.reset(0, TASK)
    parts = env.step("search[black bed sheet]").observation.split(" [SEP] ")
    assert parts[0] == "Instruction:"
    assert parts[2:5] == ["Back to Search", "Page 1 (Total results: 50)", "Next >"]
    assert len(parts) == 5 + 10 * 3
    products = env.shop.stock.products
    assert all(products[asin].title == title for asin, title in zip(parts[5::3], parts[6::3], strict=True))
    second = env.step("click[next >]")
    assert second.observation.split(" [SEP] ")[2:6] == ["Back to Search", "Page 2 (Total results: 50)", "< Prev", "Next >"]
    assert second.actions[:3] == ("click[back to search]", "click[< prev]", "click[next >]")
    assert env.step("click[< Prev]").observation.split(" [SEP] ") == parts
    for _ in range(5):
        last = env.step("click[Next >]")
    assert last.observation.endswith(
        "Page 6 (Total results: 50) [SEP] < Prev [SEP] Next >"
    )  # as the original, which has it on the last page too


def test_a_search_without_hits_is_a_page_without_products():
    env = make(style="sep")
    env.reset(0, TASK)
    assert env.step("search[qqqq]").observation.endswith("Back to Search [SEP] Page 1 (Total results: 0) [SEP] Next >")


def test_product_page_and_its_parts_in_the_originals_layout():
    env = make(style="sep", attributes="shown")
    asin, step = at_product(env)
    product = env.shop.stock.products[asin.upper()]
    options = [text for name, values in product.options.items() for text in (name, *values)]
    info = [product.title, f"Price: {product.price_tag}", f"Rating: {product.rating}"]
    head, buttons = step.observation.split(" [SEP] ")[:2], ["Description", "Features", "Reviews", "Attributes", "Buy Now"]
    assert step.observation.split(" [SEP] ") == [*head, "Back to Search", "< Prev", *options, *info, *buttons]
    head += ["Back to Search", "< Prev"]
    for name, texts in {
        "description": [product.description],
        "features": list(product.bullets),
        "reviews": [text for r in product.reviews for text in (f'"{r.title}"', r.stars, r.body)],
        "attributes": [*product.attributes, product.category, product.query, product.product_category],
    }.items():
        part = env.step(f"click[{name}]")
        assert part.observation.split(" [SEP] ") == [*head, *texts]
        assert part.actions == ("click[back to search]", "click[< prev]")
        assert env.step("click[< prev]").observation == step.observation


def test_attributes_have_no_button_unless_asked_for():
    env = make()
    _, step = at_product(env)
    assert "Attributes" not in step.observation
    assert not env.step("click[attributes]").valid


def test_chosen_options_are_marked_kept_on_sub_pages_and_forgotten_on_the_way_back():
    env = make()
    asin, step = at_product(env)
    product = env.shop.stock.products[asin.upper()]
    (color, *others), sizes = product.options["color"], product.options["size"]
    chosen = env.step(f"choose[{color.upper()}]")
    assert chosen.info["effective"]
    assert f"[clicked button] {color} [clicked button_]" in chosen.observation
    assert chosen.observation.startswith(f"You have clicked {color}.\nInstruction:")
    assert not env.step(f"click[{color}]").info["effective"]  # chosen already
    env.step(f"click[{sizes[0]}]")
    env.step("click[features]")
    back = env.step("click[< prev]")
    assert f"[clicked button] {color} [clicked button_]" in back.observation
    assert f"[clicked button] {sizes[0]} [clicked button_]" in back.observation
    changed = env.step(f"click[{others[0]}]")
    assert f"[button] {color} [button_]" in changed.observation
    results = env.step("click[< prev]")
    assert f"[clicked button] {product.asin} [clicked button_]" in results.observation  # it was opened
    assert env.step(f"click[{asin}]").observation == step.observation


def test_buying_ends_the_episode_with_the_score_and_its_parts():
    env = make()
    at_product(env)
    last = env.step("click[buy now]")
    assert (last.terminated, last.truncated, last.actions) == (True, False, ())
    assert {"score", "r_type", "r_att", "r_option", "r_price", "bought", "wanted", "options", "task"} <= set(last.info)
    assert last.observation.startswith("Thank you for shopping with us!")
    assert last.observation.endswith(f"Your score (min 0.0, max 1.0)\n{last.info['score']}")
    with pytest.raises(RuntimeError, match="reset"):
        env.step("click[buy now]")


@pytest.mark.parametrize("pay", ["binary", "score"])
def test_reward_is_binary_or_the_score_and_success_is_a_score_of_1_in_both(pay):
    env = make(reward=pay)
    goal = env.shop.goal(TASK)
    for miss in (False, True):
        env.reset(0, TASK)
        steps = [env.step(f"search[{goal.product.title}]"), env.step(f"click[{goal.product.asin}]")]
        steps += [env.step(f"click[{value}]") for value in goal.options[miss:]]
        last = env.step("click[buy now]")
        assert all(step.valid and step.reward == 0 and step.info["score"] == 0 for step in steps)
        asked = len(goal.attributes) + len(goal.options) + 1
        score = (asked - 1) / asked if miss else 1.0
        assert last.info["score"] == pytest.approx(score)
        assert (last.success, last.reward) == (not miss, pytest.approx(score if pay == "score" else float(not miss)))


def test_N01_what_is_not_on_the_page_is_invalid_counted_and_changes_nothing():
    env = make(max_turns=30)
    first = env.reset(0, TASK)
    for said in (
        "click[search]",
        "click[buy now]",
        "click[b0]",
        "search[]",
        "search[ ]",
        "buy now",
        "search red",
        "click[next >",
        "fly[x]",
        "",
    ):
        step = env.step(said)
        assert (step.valid, step.reward, step.done, step.info["effective"], step.info["score"]) == (False, 0.0, False, False, 0.0), said
        assert step.observation.endswith(first.text)
        assert step.actions == first.actions
    assert step.info["invalid"] == step.info["turn"] == 10
    found = env.step("search[hat]")
    for said in ("search[cap]", "click[buy now]", "click[< prev]", "click[next]", "click[red]", "CLICK [ Next  > ] please"):
        step = env.step(said)
        assert not step.valid, said
        assert step.observation.endswith(found.observation)
    assert env.step("CLICK [ Next  > ]").valid


def test_turns_that_run_out_are_truncation_without_reward():
    env = make(max_turns=2, reward="score")
    env.reset(0, TASK)
    env.step("search[hat]")
    last = env.step("click[next >]")
    assert (last.terminated, last.truncated, last.success, last.reward, last.info["score"]) == (False, True, False, 0.0, 0.0)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("<think>it is <action>click[a]</action></think><action>click[Next >]</action>", "click[Next >]"),
        ("<action>click[< Prev]</action>", "click[< Prev]"),
        ("<action>click[a]</action> or <action>click[b]</action>", "click[b]"),
        ("<action><action>click[a]</action>", "click[a]"),
        ("<action>click[a]</think>", None),
        ("click[a]", None),
        ("</action>click[a]</action>", None),
    ],
)
def test_N14_tagged_actions_may_hold_angle_brackets(reply, said):
    assert actions.said(reply, "tagged") == said


def test_hostile_replies_are_invalid_in_bounded_time():
    tagged, bare = make(grammar="tagged", max_turns=10**6), make(max_turns=10**6)
    began = time.process_time()
    for env in (tagged, bare):
        env.reset(0, TASK)
        for reply in (
            "<action>" * 100_000,
            "<think>" * 100_000,
            "<action></action>" * 50_000,
            "click[" * 200_000,
            "search[" + "] " * 500_000 + "x",
            "[" * 1_000_000,
            "click[\0\ud800]",
            " " * 2_000_000 + "x",
            "search" + " " * 1_000_000 + "x",
        ):
            assert not env.step(reply).valid
    assert bare.step("search[" + "\ud800\0 a" * 500_000 + "]").valid
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "header", ["Amazon Shopping Game\nInstruction:", "WebShop\nInstruction: ", "WebShop [SEP] Instruction: [SEP] ", "Instruction:\n", ""]
)
@pytest.mark.parametrize("end", ["\n[button] search [button]", "\n[button] Search [button_]", " [SEP] Search", ""])
def test_N08_every_header_gives_the_same_clean_instruction(header, end):
    wanted = "i want a hat, and price lower than 20.00 dollars"
    assert pages.instruction_of(header + wanted + end) == wanted
    assert pages.instruction_of((header + wanted + end).upper().replace("[BUTTON]", "[button]")) == wanted.upper()


@pytest.mark.parametrize("style", ["full", "sep"])
def test_N08_the_instruction_can_be_read_from_every_page(style):
    env = make(style=style)
    goal = env.shop.goal(TASK).instruction
    _, step = at_product(env)
    texts = [env.reset(0, TASK).text, env.step("nothing").observation, step.observation]
    at_product(env)
    texts += [env.step(action).observation for action in ("click[description]", "click[< prev]")]
    texts.append(env.step(next(a for a in env.step("nothing").actions if "prev" not in a and "back" not in a)).observation)
    assert {pages.instruction_of(text) for text in texts} == {goal}


@pytest.mark.parametrize("grammar", ["bare", "tagged"])
@pytest.mark.parametrize("style", ["full", "sep"])
def test_the_system_prompt_tells_the_syntax(style, grammar):
    spec = registry.spec("webshop/shop", style=style, grammar=grammar)
    assert spec.actions == ()
    assert spec.max_turns == 15
    assert all(word in spec.system_prompt for word in ("search[", "click[buy now]", "15 turns"))
    assert ("<action>search[red cotton shirt]</action>" in spec.system_prompt) == (grammar == "tagged")


def test_the_example_of_the_system_prompt_can_be_said_first():
    example = re.findall(r"<action>.*?</action>", registry.spec("webshop/shop").system_prompt)[-1]
    env = make(grammar="tagged")
    env.reset(0, TASK)
    assert env.step(example).valid


def test_random_play_never_raises_and_closing_twice_is_fine():
    env = make(attributes="shown")
    lengths = [len(play(env, seed)) for seed in range(150)]
    assert max(lengths) <= 16
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.reset(0)
