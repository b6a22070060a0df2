"""Demonstrations of a person, distilled like episodes by an extractor that a script stands for."""

import contextlib
import json

import pytest
from manager_toys import NOTHING, build, echo

from crl_jax import cli
from crl_jax.bank_tools import offline
from crl_jax.bank_tools.lessons import read_demonstrations
from crl_jax.bank_tools.seeding import episodes
from crl_jax.config.schema import Config
from crl_jax.experience.store import Store
from crl_jax.experience.verify import verify
from crl_jax.rollout.shell import Shell

ONE = {
    "goal": "find the exit",
    "namespace": "maze",
    "success": True,
    "turns": [{"observation": "a fork in the way", "reply": "go left"}, {"observation": "a door", "reply": "open it"}],
    "final_observation": "daylight",
}


def bank(*words):
    return cli.main(["bank", *map(str, words)])


@pytest.fixture
def scripted(monkeypatch, small):
    def use(reply):
        @contextlib.contextmanager
        def opened(place, config, *, purpose):
            store = Store.open(place.path)
            with Shell() as shell:
                manager = build(reply, store=store, purpose=purpose)
                shell.call(manager.start(), 20, "start")
                yield offline.Offline(manager, shell, 20.0, "scripted")
                shell.call(manager.aclose(), 20, "end")
            store.close()

        monkeypatch.setattr(offline, "opened", opened)
        monkeypatch.setattr(offline, "recipe", lambda place, config: Config())

    return use


def test_demonstrations_are_distilled_and_logged_as_seed(scripted, tmp_path, capsys):
    scripted(echo)
    file = tmp_path / "played.jsonl"
    file.write_text(json.dumps(ONE) + "\n" + json.dumps(ONE | {"success": False, "namespace": "cave"}))
    assert bank("seed", tmp_path / "b.sqlite", file, "--demonstrations") == 0
    assert "2 demonstrations read by the extractor (scripted): 2 lessons written, +2 entries" in capsys.readouterr().out
    store = Store.open(tmp_path / "b.sqlite", read_only=True)
    assert not verify(store).faults
    found = [entry for space in store.load().spaces.values() for entry in space.values()]
    assert {(e.namespace, e.text, e.outcome) for e in found} == {("maze", "a fork in the way", True), ("cave", "a fork in the way", False)}
    assert [row["reason"] for row in store.log()] == ["seed", "seed"]
    assert {e.episode_ids for e in found} == {(e.id,) for e in episodes(read_demonstrations(file))}
    assert store.generation(found[0].generation_id).kind.value == "distil"
    store.close()


def test_an_extractor_that_says_nothing_ends_with_1(scripted, tmp_path, capsys):
    scripted(lambda prompt: NOTHING)
    file = tmp_path / "played.jsonl"
    file.write_text(json.dumps(ONE))
    assert bank("seed", tmp_path / "b.sqlite", file, "--demonstrations") == 1
    assert "0 lessons written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"goal": None}, "goal must be a text"),
        ({"success": "yes"}, "success must be true or false"),
        ({"turns": []}, "turns must be a list"),
        ({"turns": [{"observation": "a"}]}, "a turn has the fields observation and reply"),
        ({"mood": "good"}, "unknown field 'mood'"),
    ],
)
def test_a_bad_demonstration_is_named_and_no_model_is_started(change, said, scripted, tmp_path, capsys):
    scripted(lambda prompt: pytest.fail("asked"))
    file = tmp_path / "played.jsonl"
    file.write_text(json.dumps(ONE) + "\n" + json.dumps(ONE | change))
    assert bank("seed", tmp_path / "b.sqlite", file, "--demonstrations") == 2
    assert f"played.jsonl:2: {said}" in capsys.readouterr().err
    assert not (tmp_path / "b.sqlite").exists()


def test_without_a_run_or_a_recipe_there_is_no_extractor_to_ask(tmp_path, capsys):
    file = tmp_path / "played.jsonl"
    file.write_text(json.dumps(ONE))
    assert bank("seed", tmp_path / "b.sqlite", file, "--demonstrations") == 2
    assert "give a recipe with --config FILE" in capsys.readouterr().err
