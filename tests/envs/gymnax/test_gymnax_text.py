"""Gymnax games: words from arrays alone, one device batch whatever its size, gymnax' own steps, and the players."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from envs import registry
from envs.api import EnvUnavailable, Observation
from envs.gymnax import players, tasks, words
from envs.gymnax.games import GAMES, load

pytest.importorskip("gymnax")

SEEDS = (3, 4, 2**40 + 5)
pytestmark = pytest.mark.usefixtures("compiled_in_haste")


def grid(shape, *cells):
    array = np.zeros((1, *shape), np.float32)
    for cell in cells:
        array[(0, *cell)] = 1
    return array


@pytest.mark.parametrize(
    ("game", "observation", "text"),
    [
        ("four_rooms", np.array([[4, 1, 8, 9]]), " you row 4 column 1 goal row 8 column 9"),
        ("meta_maze", np.array([[1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0.0, 7]]), " open up right"),
        ("meta_maze", np.array([[1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 10.0, 7]]), " goal"),
        ("deep_sea", grid((8, 8), (3, 2)), " depth 3 column 2"),
        ("deep_sea", grid((8, 8)), " bottom"),
        ("memory_chain", np.array([[1.0, 0, 1, -1, 1]]), " wait 4 bits one zero one"),
        ("memory_chain", np.array([[0.6, 0, 0, 0, 0]]), " wait 2"),
        ("memory_chain", np.array([[0.2, 2, 0, 0, 0]]), " wait 0 say bit third"),
        ("catch", grid((10, 5), (2, 4), (9, 1)), " ball column 4 height 7 paddle column 1"),
        ("catch", grid((10, 5), (9, 1)), " ball down"),
        ("umbrella_chain", np.array([[1, 0, 0.7, 0, 1, 0, 1]]), " forecast rain umbrella no way 7 dog cart"),
        (
            "breakout",
            grid((10, 10, 4), (9, 4, 0), (5, 8, 1), (4, 9, 2), (1, 0, 3), (3, 5, 3)),
            " ball column 8 height 4 from column 9 height 5 paddle column 4 bricks 1 0 1",
        ),
    ],
)
def test_words_follow_from_the_observation_alone_for_every_row_of_a_batch(game, observation, text):
    tell = getattr(words, game)
    assert GAMES[game].tell is tell
    assert tell(np.repeat(observation, 3, axis=0)) == [text] * 3
    assert tell(observation[:0]) == []


def test_describing_and_preparing_imports_neither_jax_nor_gymnax():
    code = (
        "import sys; from envs import registry; from envs.gymnax import tasks; tasks.prepare();"
        "[registry.spec(f'gymnax/{n}', max_turns=5) for n in tasks.names()];"
        "assert not {'jax', 'gymnax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert len(tasks.names()) >= 6


def test_missing_package_names_the_install_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvUnavailable, match="pip install 'crl-jax'"):
        registry.make("gymnax/catch")
    with pytest.raises(EnvUnavailable, match="pip install 'crl-jax'"):
        tasks.prepare()


def test_loading_gymnax_leaves_no_stand_in_behind():
    load("catch")
    assert "seaborn" not in sys.modules or hasattr(sys.modules["seaborn"], "heatmap")


def alone(name, seed, replies):
    env = registry.make(f"gymnax/{name}", grammar="bare")
    return [env.reset(seed).text, *[repr(env.step(reply)) for reply in replies]]


@pytest.mark.parametrize("name", ["four_rooms", "umbrella_chain"])
def test_N03_an_episode_is_the_same_alone_and_in_any_slot_of_a_busy_batch(name):
    """Three episodes in slots 5, 0 and 2 of a batch, begun one after the other: dispatches step some, reset one and skip the rest."""
    actions = GAMES[name].actions
    replies = {seed: [actions[(seed + turn) % len(actions)] if turn != 2 else "fly" for turn in range(7)] for seed in SEEDS}
    batch = tasks.make_batch(name, 8 if name == "four_rooms" else 16, grammar="bare")
    told = {seed: [] for seed in SEEDS}
    for tick in range(10):
        resets, steps, who = {}, {}, {}
        for late, (slot, seed) in enumerate(zip((5, 0, 2), SEEDS, strict=True)):
            turn, who[slot] = tick - late - 1, seed
            if turn == -1:
                resets[slot] = (seed, "")
            elif 0 <= turn < 7:
                steps[slot] = replies[seed][turn]
        for slot, answer in batch.advance(resets, steps).items():
            told[who[slot]].append(answer.text if isinstance(answer, Observation) else repr(answer))
        if tick == 4:
            batch.grow(16)  # episodes under way go on
    for seed in SEEDS:
        assert told[seed] == alone(name, seed, replies[seed])
    assert len({told[seed][0] for seed in SEEDS}) > 1


def test_the_steps_are_gymnaxs_own():
    """Catch, stepped by hand with the keys that the module promises."""
    import jax

    env, params = load("catch")
    reset_env, step_env = jax.jit(env.reset_env), jax.jit(env.step_env)
    seed, actions = 2**33 + 9, (0, 2, 2, 1, 0, 0, 1, 2, 2)
    key = jax.random.wrap_key_data(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), impl="threefry2x32")
    seen, state = reset_env(jax.random.fold_in(key, 0), params)
    theirs = words.catch(np.asarray(seen)[None])
    for turn, action in enumerate(actions, start=1):
        seen, state, reward, ended, _ = step_env(jax.random.fold_in(key, turn), state, action, params)
        theirs += words.catch(np.asarray(seen)[None])
    game = registry.make("gymnax/catch", style="compact", grammar="bare")
    ours = [game.reset(seed).text]
    steps = [game.step(GAMES["catch"].actions[action]) for action in actions]
    assert ours + [step.observation for step in steps] == theirs
    assert bool(ended) == steps[-1].terminated is True
    assert steps[-1].success == (float(reward) > 0)
    with pytest.raises(RuntimeError, match="no episode is running"):
        game.step("stay")


def test_golden_transcript():
    told = alone("catch", 77, ["left", "Right", "fly", "stay", ""])
    assert hashlib.sha256("\n".join(told).encode()).hexdigest()[:16] == "35a131168259b4d0"


def test_a_mistake_stands_in_its_holders_place_only():
    batch = tasks.make_batch("catch", 16, grammar="bare")
    answers = batch.advance({0: (1, ""), 1: (1, "x"), 2: (-1, ""), 3: (2**63, "")}, {4: "stay"})
    assert isinstance(answers[0], Observation)
    assert [type(answers[slot]) for slot in (1, 2, 3, 4)] == [KeyError, ValueError, ValueError, RuntimeError]
    with pytest.raises(ValueError, match="use each at most once"):
        batch._batch.advance({0: 1}, {0: 1})


@pytest.mark.parametrize("reply", ["", "left left", "\0left", "\ud800", "u" * 2_000_000, "<action>left</action>" * 20_000])
def test_N01_hostile_replies_are_invalid_and_counted(reply):
    env = registry.make("gymnax/catch", grammar="bare")
    env.reset(1)
    step = env.step(reply)
    assert (step.valid, step.reward, step.done, step.info["turn"], step.info["invalid"]) == (False, 0.0, False, 1, 1)
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.reset(1)


def wins(batch, task, kind, *, right=True, episodes=16):
    """The share of won episodes, all played at once."""
    made = {}
    for seed in range(episodes):
        lesson = players.lesson(task, seed, right=right)
        made[seed] = players.make_player(kind, task, seed=seed, options={"grammar": "bare"}, lesson=lesson)
    answers, won = batch.advance({seed: (seed, "") for seed in made}, {}), 0
    texts = {seed: (answer.text, answer.actions) for seed, answer in answers.items()}
    while texts:
        steps = batch.advance({}, {seed: made[seed](*text) for seed, text in texts.items()})
        won += sum(step.success for step in steps.values())
        assert all(step.reward == float(step.success) for step in steps.values())
        texts = {seed: (step.observation, step.actions) for seed, step in steps.items() if not step.done}
    return won / episodes


@pytest.mark.parametrize("name", list(GAMES))
def test_expert_wins_and_a_lesson_is_worth_having(name):
    (task,) = registry.tasks(f"gymnax/{name}")
    batch = tasks.make_batch(name, 16, grammar="bare")
    right, wrong = wins(batch, task, "follow"), wins(batch, task, "follow", right=False)
    assert wins(batch, task, "expert") >= 0.95
    assert right >= 0.95 > 0.6 >= wrong
    assert wins(batch, task, "random") < 0.8
    with pytest.raises(ValueError, match="says nothing"):
        players.make_player("follow", task, seed=0, options={}, lesson="be brave")
