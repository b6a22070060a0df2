"""The generated games: the same everywhere, of every type in every room, different from each other, and won by their plans."""

import hashlib
import importlib.util
import json
import subprocess
import sys
from collections import Counter

import pytest

from envs.alfworld import catalogue, games, generate, wheel
from envs.alfworld.native import Compiled
from envs.alfworld.plan import plan
from envs.api import EnvUnavailable


def compile_listed(entry):
    game = generate.design(entry.kind, entry.scene, entry.seed)
    assert (game.id, game.goal) == (entry.id, entry.goal)
    return Compiled(json.loads(generate.contents(game)["game.tw-pddl"]))


def test_every_listed_game_is_won_by_its_plan():
    lengths = []
    for entry in games.listed():
        game = compile_listed(entry)
        state = game.world.start()
        assert not game.world.reached(state)
        commands = plan(game)
        for i, command in enumerate(commands):
            state.apply(game.commands(state)[command])
            assert game.world.reached(state) == (i == len(commands) - 1), (entry.id, i)
        lengths.append(len(commands))
    assert max(lengths) <= catalogue.LONGEST_PLAN


def test_games_are_as_they_were():
    """A change here changes the games: raise generate.FORMAT, make games.jsonl and the transcripts anew."""
    found = hashlib.sha256()
    for kind, scene in zip(generate.KINDS, (201, 301, 401, 2, 5, 425), strict=True):
        for name, text in generate.contents(generate.design(kind, scene, 7)).items():
            found.update(f"{name}\n{text}\n".encode())
    assert found.hexdigest()[:16] == "3aa9dead7bbdd3d1"


def test_splits_have_their_sizes_types_and_rooms():
    listed = games.listed()
    assert Counter(entry.split for entry in listed) == catalogue.SIZES
    assert len({entry.id for entry in listed}) == len(listed)
    assert len({entry.goal for entry in listed}) == len(listed)
    for split in catalogue.SIZES:
        count = Counter(entry.kind for entry in listed if entry.split == split)
        assert set(count) == set(generate.KINDS)
        assert max(count.values()) - min(count.values()) <= 1
    rooms = {(entry.kind, wheel.scene(entry.scene).room) for entry in listed}
    assert {room for kind, room in rooms if kind == "pick_and_place_simple"} == {"kitchen", "living room", "bedroom", "bathroom"}
    assert {room for kind, room in rooms if kind == "pick_two_obj_and_place"} == {"kitchen", "living room", "bedroom", "bathroom"}
    assert {room for kind, room in rooms if kind == "look_at_obj_in_light"} == {"living room", "bedroom"}
    assert {room for kind, room in rooms if kind == "pick_clean_then_place_in_recep"} == {"kitchen", "bathroom"}


def test_heldout_games_are_in_rooms_that_training_never_sees():
    scenes = {split: {entry.scene for entry in games.listed() if entry.split == split} for split in catalogue.SIZES}
    assert not scenes["train"] & scenes["heldout"]
    assert len(scenes["heldout"]) >= 12


def test_a_game_is_made_once_and_its_file_holds_its_plan():
    entry = games.listed()[3]
    path = games.path_of(entry.id)
    before = path.stat().st_mtime_ns
    assert games.path_of(entry.id) == path
    assert path.stat().st_mtime_ns == before
    held = json.loads(path.read_text(encoding="utf-8"))
    assert held["solvable"] is True
    assert catalogue.lost([entry], "native") == []
    assert path.with_name("traj_data.json").is_file()


def test_a_plan_that_does_not_win_is_found(monkeypatch, tmp_path):
    entry = games.listed()[3]
    held = json.loads(games.path_of(entry.id).read_text(encoding="utf-8"))
    path = tmp_path / "game.tw-pddl"
    monkeypatch.setattr(games, "path_of", lambda game: path)
    for commands in (held["walkthrough"][:-1], [*held["walkthrough"], "look"]):
        path.write_text(json.dumps({**held, "walkthrough": commands}), encoding="utf-8")
        assert catalogue.lost([entry], "native") == [entry.id]


def test_a_room_without_the_tool_has_no_such_game():
    assert generate.design("pick_heat_then_place_in_recep", 401, 0) is None
    assert generate.design("look_at_obj_in_light", 401, 0) is None
    with pytest.raises(KeyError, match="no scene 31"):
        generate.design("pick_and_place_simple", 31, 0)


def test_without_the_package_the_line_that_installs_it_is_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wheel._folder.cache_clear()
    with pytest.raises(EnvUnavailable, match="pip install --no-deps alfworld"):
        wheel._folder()
    monkeypatch.undo()
    wheel._folder.cache_clear()
    assert wheel._folder().is_dir()


def test_the_package_is_read_without_being_imported(tmp_path):
    code = (
        "import os, sys; from envs.alfworld import games, native, tasks;"
        "native.compiled(str(games.path_of(games.listed()[0].id)));"
        "assert not {'alfworld', 'textworld', 'torch', 'jax'} & set(sys.modules), sorted(sys.modules);"
        "assert 'ALFWORLD_DATA' not in os.environ; assert not os.path.exists(os.path.expanduser('~/.cache/alfworld'))"
    )
    where = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", code], env=where, check=True, timeout=60)


def test_all_are_made_ahead_of_time_for_a_folder_that_cannot_be_written_later(monkeypatch):
    from envs.alfworld import tasks

    asked = []
    monkeypatch.setattr(games, "path_of", asked.append)
    assert tasks.build() == "250 games"
    assert len(set(asked)) == 250
