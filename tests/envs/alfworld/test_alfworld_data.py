"""A folder in the layout of the original data is played by the same code; one that is not is an error that says what is missing."""

import json

import pytest

from envs import registry
from envs.alfworld import games, generate
from envs.alfworld.native import Compiled
from envs.alfworld.plan import plan
from envs.api import EnvUnavailable

SCENES = {"train": (1, 201, 301), "valid_seen": (1,), "valid_unseen": (10, 308)}


def write(root, split, kind, scene, *, trial="trial_T20190906_201019_000001", folder=None, solvable=True):
    """One game where the original data would have it. Returns its id, or None where the scene has none."""
    game = generate.design(kind, scene, 3)
    if game is None:
        return None
    files = generate.contents(game, plan(Compiled(json.loads(generate.contents(game)["game.tw-pddl"]))))
    name = f"{folder or game.id.split('/')[0]}/{trial}"
    where = root / "json_2.1.1" / split / name
    where.mkdir(parents=True)
    for file, text in files.items():
        if file == "game.tw-pddl":
            text = json.dumps({**json.loads(text), "solvable": solvable})
        (where / file).write_text(text, encoding="utf-8")
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small data set, with what the official loader skips; and the playable ids by split."""
    root = tmp_path_factory.mktemp("data")
    ids = {
        split: sorted(name for kind in generate.KINDS for scene in scenes if (name := write(root, split, kind, scene)) is not None)
        for split, scenes in SCENES.items()
    }
    write(root, "train", "pick_and_place_simple", 2, solvable=False)
    write(root, "train", "pick_and_place_simple", 3, folder="pick_and_place_simple-AppleSliced-None-Fridge-3")
    write(root, "train", "pick_and_place_simple", 4, folder="pick_and_place_with_movable_recep-Pen-Bowl-Desk-4")
    return root, ids


@pytest.fixture
def data(folder, monkeypatch):
    """The ids, with the variable set."""
    games._original.cache_clear()
    monkeypatch.setenv(games.DATA, str(folder[0]))
    return folder[1]


def test_the_original_splits_are_used(data):
    assert [task.id for task in registry.tasks("alfworld")] == data["train"]
    assert [task.id for task in registry.tasks("alfworld", "heldout")] == data["valid_unseen"]
    task = registry.tasks("alfworld/pick_heat_then_place_in_recep", "heldout")[0]
    assert task.kind == "pick_heat_then_place_in_recep"
    assert "some" in task.goal or "hot" in task.goal


@pytest.mark.parametrize("split", ["train", "valid_seen", "valid_unseen"])
def test_original_games_are_played_and_say_that_they_are_real(data, split):
    game = data[split][0]
    env = registry.make(f"alfworld/{game.split('-')[0]}", engine="native", grammar="bare")
    seen = env.reset(0, game)
    path = games.path_of(game)
    for command in json.loads(path.read_text(encoding="utf-8"))["walkthrough"]:
        step = env.step(command)
    assert "Your task is to: " in seen.text
    assert (step.success, step.reward, step.info["data_source"]) == (True, 1.0, "real")


def test_training_games_can_be_listed_by_a_file(data, tmp_path, monkeypatch):
    wanted = [data["train"][4], data["train"][1]]
    default = games.data_folder() / "train_ids.txt"
    default.write_text("\n".join(f'{{"path": "x/{game}/game.tw-pddl"}}' for game in wanted), encoding="utf-8")
    assert [task.id for task in registry.tasks("alfworld")] == wanted
    default.unlink()
    other = tmp_path / "other.txt"
    monkeypatch.setenv(games.TRAIN_IDS, str(other))
    with pytest.raises(EnvUnavailable, match="is no file"):
        registry.tasks("alfworld")
    other.write_text(f"{wanted[0]}\nnothing here\n", encoding="utf-8")
    games._original.cache_clear()
    assert [task.id for task in registry.tasks("alfworld")] == wanted[:1]
    assert len(registry.tasks("alfworld", "heldout")) == len(data["valid_unseen"])
    other.write_text("pick_and_place_simple-Pen-None-Desk-99/trial_T1\n", encoding="utf-8")
    games._original.cache_clear()
    with pytest.raises(EnvUnavailable, match="1 of 1 listed training games are not in"):
        registry.tasks("alfworld")


def test_empty_or_wrong_folders_say_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv(games.DATA, str(tmp_path))
    for call in (lambda: registry.tasks("alfworld"), lambda: registry.make("alfworld/look_at_obj_in_light", engine="native")):
        with pytest.raises(EnvUnavailable, match=r"lacks json_2.1.1/train and json_2.1.1/valid_unseen: run alfworld-download"):
            call()
    for split in ("train", "valid_unseen"):
        (tmp_path / "json_2.1.1" / split).mkdir(parents=True)
    with pytest.raises(EnvUnavailable, match="holds no solvable"):
        registry.tasks("alfworld")
    with pytest.raises(EnvUnavailable, match="holds no solvable"):
        registry.make("alfworld/look_at_obj_in_light", engine="native").reset(0)


@pytest.mark.parametrize(
    "game", ["../../x-1/trial_1", "/etc/x-1/trial_1", "a-1/../../b-1/trial_1", "", "x", "pick_and_place_simple-A-None-B-1/trial_9"]
)
def test_Z06_an_id_does_not_lead_out_of_the_folder(data, game):
    with pytest.raises(KeyError, match="no ALFWorld game"):
        games.path_of(game)


def test_a_file_that_is_no_text_is_named(tmp_path, monkeypatch):
    for split in ("train", "valid_unseen"):
        write(tmp_path, split, "pick_and_place_simple", 1)
    broken = next((tmp_path / "json_2.1.1" / "train").glob("*/*/game.tw-pddl"))
    broken.write_bytes(b"\xff\xfe")
    games._original.cache_clear()
    monkeypatch.setenv(games.DATA, str(tmp_path))
    with pytest.raises(EnvUnavailable, match=r"game\.tw-pddl cannot be read"):
        registry.tasks("alfworld")
