"""The shop's scripted players: the expert always succeeds, chance almost never, and a lesson is worth what it says."""

import pytest

pytest.importorskip("bm25s")
pytest.importorskip("rapidfuzz")

from envs import players, registry

SHOP = players.players_of("webshop")


def outcomes(env, tasks, kind, **more):
    found = []
    for seed, task in enumerate(tasks):
        lesson = SHOP.lesson(task, seed, right=more["right"]) if "right" in more else ""
        player = SHOP.make_player(kind, task, seed=seed, options={"grammar": env.grammar, "style": env.style}, lesson=lesson)
        found.append(players.play(env, player, seed, task.id))
    return found


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_expert_reaches_every_goal_within_the_turns(split):
    env = registry.make("webshop/shop", style="sep", grammar="bare")
    played = outcomes(env, registry.tasks("webshop/shop", split), "expert")
    assert len(played) > 100
    assert all(p.success and p.reward == 1.0 for p in played)
    assert all(p.last.info["bought"] == p.last.info["wanted"] for p in played)


def test_the_expert_reaches_goals_made_by_rule_in_tags():
    env = registry.make("webshop/shop_templates")
    assert all(p.success for p in outcomes(env, registry.tasks("webshop/shop_templates")[::40], "expert"))


@pytest.mark.parametrize("style", ["full", "sep"])
def test_random_clicks_hardly_ever_succeed_and_are_never_invalid(style):
    env = registry.make("webshop/shop", style=style)
    played = outcomes(env, registry.tasks("webshop/shop")[:150], "random")
    assert sum(p.success for p in played) < 0.08 * len(played)
    assert all(p.last.info["invalid"] == 0 for p in played)
    assert sum(p.last.terminated for p in played) > 10


def test_a_right_lesson_succeeds_and_a_wrong_one_buys_something_that_is_nearly_it():
    env = registry.make("webshop/shop")
    tasks = registry.tasks("webshop/shop", "heldout")[:60]
    right, wrong = (outcomes(env, tasks, "follow", right=right) for right in (True, False))
    assert all(p.success for p in right)
    assert not any(p.success for p in wrong)
    assert all(0 < p.last.info["score"] < 1 for p in wrong)


def test_players_are_deterministic_and_the_seed_alone_names_the_goal_where_no_task_is_given():
    env = registry.make("webshop/shop", grammar="bare")
    task = registry.tasks("webshop/shop")[0]
    for kind in ("random", "expert"):
        one, two = (outcomes(env, [task], kind)[0].transcript for _ in range(2))
        assert one == two
    drawn = players.EnvTask("webshop/shop", "", "")
    for seed in range(10):
        player = SHOP.make_player("expert", drawn, seed=seed, options={"grammar": "bare"})
        assert players.play(env, player, seed).success


def test_a_lesson_that_says_nothing_is_an_error_and_so_is_an_unknown_kind():
    task = registry.tasks("webshop/shop")[0]
    with pytest.raises(ValueError, match="search for"):
        SHOP.make_player("follow", task, seed=0, options={}, lesson="be careful")
    with pytest.raises(ValueError, match="random, expert, follow"):
        SHOP.make_player("shopper", task, seed=0, options={})


def test_a_lesson_names_what_to_search_open_and_choose():
    task = next(t for t in registry.tasks("webshop/shop") if t.id == "goal-0004")
    said = SHOP.lesson(task, 0)
    goal = registry.make("webshop/shop").shop.goal(task.id)
    assert said.startswith(f'search for "{goal.product.title}", open {goal.product.asin}')
    assert all(f'choose "{value}"' in said for value in goal.options)
    assert said.endswith(", then buy")


def test_following_a_lesson_whose_product_cannot_be_found_still_ends():
    env = registry.make("webshop/shop", grammar="bare")
    task = registry.tasks("webshop/shop")[0]
    player = SHOP.make_player("follow", task, seed=0, options={"grammar": "bare"}, lesson='search for "lamp", open B000000000, then buy')
    assert players.play(env, player, 0, task.id).last.terminated
    player = SHOP.make_player("follow", task, seed=0, options={"grammar": "bare"}, lesson='search for "qqqq", open B000000000, then buy')
    assert players.play(env, player, 0, task.id).last.truncated
