"""FrozenLake: maps with a way, gymnasium's own transitions, their frequencies in play, and the optimum as an oracle."""

import hashlib
import re
import sys

import numpy as np
import pytest

from envs import registry
from envs.api import EnvUnavailable
from envs.frozen_lake import players
from envs.frozen_lake.lake import ACTIONS, chances, distance, make_lake
from envs.players import play

toy_text = pytest.importorskip("gymnasium.envs.toy_text.frozen_lake")

TASK = registry.tasks("frozen_lake/slippery")[0]
FIRM = registry.tasks("frozen_lake/firm")[0]


def test_every_map_has_a_way_between_two_squares_and_one_hole_in_twenty():
    lakes = [make_lake(seed) for seed in range(600)]
    assert all(distance(lake) for lake in lakes)
    assert all(not lake.over(lake.start) and lake.goal not in lake.holes for lake in lakes)
    assert np.mean([len(lake.holes) / 34 for lake in lakes]) == pytest.approx(0.05, abs=0.006)
    assert len({lake.start for lake in lakes}) == len({lake.goal for lake in lakes}) == 36
    assert make_lake(3) == make_lake(3) != make_lake(4)


def test_a_map_without_a_way_is_followed_by_the_next():
    seeds = [seed for seed in range(3000) if make_lake(seed, 2).holes]  # two by two squares: one hole leaves a way, two may not
    assert seeds
    assert all(distance(make_lake(seed, 2)) for seed in seeds)


@pytest.mark.parametrize("slippery", [True, False])
def test_the_rules_are_gymnasiums(slippery):
    for seed in range(6):
        lake = make_lake(seed)
        table = toy_text.FrozenLakeEnv(desc=lake.rows(), is_slippery=slippery).P
        for square in (square for square in range(36) if not lake.over(square)):
            for action in range(4):
                told = sorted((end, reward, ended) for _, end, reward, ended in table[square][action])
                ours = sorted((end, float(end == lake.goal), lake.over(end)) for end in lake.outcomes(square, action, slippery=slippery))
                assert told == ours
                assert all(p == pytest.approx(1 / len(told)) for p, *_ in table[square][action])


def test_the_optimum_is_that_of_value_iteration_on_gymnasiums_table():
    for seed in range(4):
        lake = make_lake(seed)
        table = toy_text.FrozenLakeEnv(desc=lake.rows(), is_slippery=True).P
        value = np.zeros(36)
        for _ in range(30):
            value = np.array(
                [max(sum(p * (r + value[s] * (not end)) for p, s, r, end in table[at][a]) for a in range(4)) for at in range(36)]
            )
        assert chances(lake, 30, slippery=True)[30][lake.start] == pytest.approx(value[lake.start], abs=1e-12)


def test_slipping_has_its_frequencies_in_play():
    """Every move from an inner square ends on the meant side or one of its two neighbours, one third each."""
    env = registry.make("frozen_lake/slippery", style="compact", grammar="bare", max_turns=1000)
    counts = np.zeros((4, 4))
    for seed in range(120):
        step = env.reset(seed).text
        for turn in range(25):
            x, y = (int(number) for number in step.split()[1:3])
            action = (seed + turn) % 4
            done = env.step(ACTIONS[action])
            step = done.observation
            u, v = (int(number) for number in step.split()[1:3])
            if 0 < x < 5 and 0 < y < 5:
                counts[action, [(-1, 0), (0, 1), (1, 0), (0, -1)].index((u - x, v - y))] += 1
            if done.done:
                break
    for action in range(4):
        n = counts[action].sum()
        assert n > 100
        assert counts[action, (action + 2) % 4] == 0, "never backward"
        sides = counts[action, [(action - 1) % 4, action, (action + 1) % 4]]
        assert np.abs(sides / n - 1 / 3).max() < 4 * np.sqrt(2 / 9 / n)


def wins(env, kind, task, episodes):
    made = [players.make_player(kind, task, seed=seed, options={}, lesson=players.lesson(task, seed)) for seed in range(episodes)]
    return sum(play(env, player, seed).success for seed, player in enumerate(made)) / episodes


def test_the_expert_wins_as_often_as_the_optimum_says():
    env, episodes = registry.make("frozen_lake/slippery"), 40
    optimum = np.array([chances(lake, 30, slippery=True)[30][lake.start] for lake in map(make_lake, range(episodes))])
    spread = np.sqrt((optimum * (1 - optimum)).sum()) / episodes
    assert abs(wins(env, "expert", TASK, episodes) - optimum.mean()) < 4 * spread
    assert 0.65 < optimum.mean() < 0.95, "slipping caps everybody"
    assert wins(env, "random", TASK, episodes) < wins(env, "follow", TASK, episodes) < optimum.mean()


def test_on_firm_ice_the_expert_always_wins_by_the_shortest_way():
    env = registry.make("frozen_lake/firm")
    for seed in range(30):
        result = play(env, players.make_player("expert", FIRM, seed=seed, options={}), seed)
        assert (result.success, result.turns) == (True, distance(make_lake(seed)))


def ending(symbol):
    """The last step of an episode whose drawing shows ``symbol``."""
    env = registry.make("frozen_lake/slippery", grammar="bare")
    for seed in range(200):
        env.reset(seed)
        while not (step := env.step(ACTIONS[seed % 4 if seed % 3 else (seed // 3) % 4])).done:
            pass
        if symbol in step.observation.split("Legend")[0]:
            return step
    return pytest.fail(f"no {symbol} in 200 episodes")


def test_hole_and_goal_end_the_episode_and_turns_truncate_it():
    hole, goal, late = ending("X"), ending("√"), ending("P")
    assert (hole.terminated, hole.truncated, hole.success, hole.reward) == (True, False, False, 0.0)
    assert (goal.terminated, goal.truncated, goal.success, goal.reward) == (True, False, True, 1.0)
    assert (late.terminated, late.truncated, late.success, late.info["turn"]) == (False, True, False, 30)
    assert "You fell into a hole." in hole.observation
    assert "You reached the goal." in goal.observation


def test_N03_golden_transcript():
    told = []
    for style in ("full", "compact"):
        env = registry.make("frozen_lake/slippery", style=style, grammar="bare")
        told.append(env.reset(0).text)
        told += [repr(env.step(reply)) for reply in ("up", "Left", "fly", "down", "RIGHT", "")]
    assert hashlib.sha256("\n".join(told).encode()).hexdigest()[:16] == "b5fdc84483552395"


@pytest.mark.parametrize("reply", ["", "up up", "\0up", "\ud800", "u" * 2_000_000, "<action>up</action>" * 20_000])
def test_N01_hostile_replies_are_invalid_and_counted(reply):
    env = registry.make("frozen_lake/slippery", grammar="bare")
    env.reset(1)
    step = env.step(reply)
    assert (step.valid, step.reward, step.done, step.info["turn"], step.info["invalid"]) == (False, 0.0, False, 1, 1)


def test_without_gymnasium_it_is_described_and_names_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium.envs.toy_text.frozen_lake", None)
    assert registry.spec("frozen_lake/slippery").actions == ACTIONS
    with pytest.raises(EnvUnavailable, match=re.escape("pip install 'crl-jax[minihack]'")):
        registry.make("frozen_lake/slippery")


def test_errors_name_what_is_allowed():
    with pytest.raises(KeyError, match="no task 'x'"):
        registry.make("frozen_lake/firm").reset(0, "x")
    with pytest.raises(ValueError, match="use 2 to 20"):
        registry.spec("frozen_lake/firm", size=50)
    with pytest.raises(ValueError, match="names no side"):
        players.make_player("follow", FIRM, seed=0, options={}, lesson="be brave")
