"""Sokoban: the rules, rooms that can be solved and are proved to be, the split by room, and the players."""

import hashlib
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from envs import registry
from envs.players import play
from envs.sokoban import players, words
from envs.sokoban.generate import make_room, split_of
from envs.sokoban.room import ACTIONS, Room, solve

DRAWING = ["WWWWWW", "W.G..W", "W.B..W", "W.BA.W", "W..G.W", "WWWWWW"]


def room_of(drawing):
    def at(symbols):
        return frozenset(i for i, symbol in enumerate("".join(drawing)) if symbol in symbols)

    return Room(len(drawing), at("W"), at("GC@"), next(iter(at("A@"))), at("BC"))


def after(room, *actions):
    state = room.start
    for action in actions:
        state = room.step(state, action)
    return state


def test_walking_pushing_and_what_stops_it():
    room = room_of(DRAWING)
    assert after(room, "up") == (room.player - 6, room.boxes), "walks"
    assert after(room, "left") == (room.player - 1, room.boxes - {20} | {19}), "pushes"
    assert after(room, "left", "left") == after(room, "left"), "a box at the wall stays"
    assert after(room, "left", "right") == (room.player, room.boxes - {20} | {19}), "never pulls"
    assert after(room, "down", "left", "up") == (25 + 1, room.boxes), "two boxes in a row stay"
    assert after(room, "right", "right") == after(room, "right"), "walls stop"


def test_every_symbol_and_word():
    room = room_of(DRAWING)
    won = (21, frozenset({8, 27}))
    assert words.full(room, room.start).startswith("Room:\n" + "\n".join(DRAWING))
    assert words.full(room, won).splitlines()[1:7] == ["WWWWWW", "W.C..W", "W....W", "W..A.W", "W..C.W", "WWWWWW"]
    assert "W.@..W" in words.full(room, (8, room.boxes))
    assert words.compact(room, room.start) == " you 3 3 box 2 2 box 2 3 goal 2 1 goal 3 4"
    assert words.compact(room, won, blocked=True) == " you 3 3 done 2 1 done 3 4 blocked"
    said = {word for seed in range(50) for word in words.compact(*(lambda room: (room, room.start))(make_room(seed, "train").room)).split()}
    assert said <= set(words.words(6))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_room_is_solved_forward_in_the_moves_that_were_found_backward(split):
    for seed in range(40):
        made = make_room(seed, split)
        moves = players.shortest(made.room)
        assert len(moves) == made.moves <= 30
        state, pushes = made.room.start, 0
        for move in moves:
            before, state = state, made.room.step(state, move)
            pushes += before[1] != state[1]
        assert made.room.solved(state)
        assert pushes >= made.pushes >= 4, "never trivial"
        assert not made.room.boxes & made.room.targets


def test_a_state_is_dead_exactly_when_forward_search_finds_no_way():
    dead = alive = 0
    for seed in range(12):
        room = make_room(seed, "train").room
        known, draw, state = solve(room.size, room.walls, room.targets), np.random.default_rng(seed), room.start
        for _ in range(12):
            state = room.step(state, ACTIONS[draw.integers(4)])
            here = Room(room.size, room.walls, room.targets, *state)
            if state in known.moves:
                alive += 1
                assert len(players.shortest(here)) == known.moves[state]
            else:
                dead += 1
                with pytest.raises(ValueError, match="cannot be solved"):
                    players.shortest(here)
    assert dead > 10
    assert alive > 10


def test_dead_is_told_in_info_only_and_the_episode_goes_on():
    env = registry.make("sokoban/boxes_2", grammar="bare")
    for seed in range(40):
        env.reset(seed)
        steps = [env.step(ACTIONS[(seed + 7 * turn) % 4]) for turn in range(20)]
        if steps[-1].info["dead"]:
            assert not steps[-1].done
            assert steps[-1].info["moves_left"] == -1
            assert "dead" not in steps[-1].observation
            return
    pytest.fail("no dead end in 40 rooms")


def layouts(split, seeds):
    """Walls and targets of each room as a picture that is the same for all eight turns and mirrors, by another way than the split's own."""
    found = set()
    for seed in seeds:
        room = make_room(seed, split).room
        grid = np.zeros(36, np.uint8)
        grid[list(room.walls)], grid[list(room.targets)] = 1, 2
        turned = [np.rot90(image, k) for image in (grid.reshape(6, 6), grid.reshape(6, 6).T) for k in range(4)]
        found.add(min(image.tobytes() for image in turned))
        assert split_of(6, room.walls, room.targets) == split
    return found


def test_training_and_heldout_rooms_share_no_walls_and_targets():
    train, heldout = layouts("train", range(150)), layouts("heldout", range(150))
    assert not train & heldout
    assert len(train) > 130
    assert len(heldout) > 110


def test_generation_is_quick_and_never_hangs():
    started = time.process_time()
    for seed in range(50):
        make_room(seed, "heldout")
    assert (time.process_time() - started) / 50 < 0.020
    with pytest.raises(ValueError, match="use a size of 6 to 8"):
        registry.make("sokoban/boxes_2", size=5)
    with pytest.raises(ValueError, match="use 12 or more"):
        registry.spec("sokoban/boxes_2", longest=4)
    assert make_room(0, "train", size=8, boxes=2).room.size == 8


def transcript(style="full"):
    env = registry.make("sokoban/boxes_2", style=style, grammar="bare")
    told = []
    for seed, task in ((0, ""), (2**62, "heldout")):
        told.append(env.reset(seed, task).text)
        told += [repr(env.step(reply)) for reply in ("up", "Left", "fly", "down", "RIGHT", "")]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def test_N03_golden_transcript_also_in_another_process():
    assert (transcript("full"), transcript("compact")) == ("e7596ef5423ad8d5", "10e012b19c7c11a8")
    code = "from test_sokoban import transcript; print(transcript())"
    path = os.pathsep.join([os.path.dirname(__file__), os.getcwd()])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "e7596ef5423ad8d5"


@pytest.mark.parametrize("reply", ["", "up up", "\0up", "\ud800", "u" * 2_000_000, "<action>up</action>" * 20_000, "UP\nDOWN"])
def test_N01_hostile_replies_are_invalid_and_counted(reply):
    env = registry.make("sokoban/boxes_2", grammar="bare")
    first = env.reset(1).text
    step = env.step(reply)
    assert (step.valid, step.reward, step.done, step.info["turn"], step.info["invalid"]) == (False, 0.0, False, 1, 1)
    assert step.observation.endswith(first)


def rate(kind, task, *, right=True, episodes=20):
    env = registry.make(task.env)
    lessons = (players.lesson(task, seed, right=right) for seed in range(episodes))
    made = (players.make_player(kind, task, seed=seed, options={}, lesson=lesson) for seed, lesson in enumerate(lessons))
    return sum(play(env, player, seed, task.id).success for seed, player in enumerate(made)) / episodes


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_expert_always_wins_and_a_lesson_is_worth_having(split):
    (task,) = registry.tasks("sokoban/boxes_2", split)
    assert rate("expert", task) == rate("follow", task) == 1.0
    assert rate("follow", task, right=False) == 0.0
    assert rate("random", task) < 0.2


def test_unknown_task_is_an_error_and_splits_are_told():
    assert [task.id for task in registry.tasks("sokoban/boxes_2", "train")] == [""]
    assert [task.id for task in registry.tasks("sokoban/boxes_2", "heldout")] == ["heldout"]
    with pytest.raises(KeyError, match="no Sokoban task 'x'"):
        registry.make("sokoban/boxes_2").reset(0, "x")
    with pytest.raises(ValueError, match="names no move"):
        players.make_player("follow", registry.tasks("sokoban")[0], seed=0, options={}, lesson="be brave")
