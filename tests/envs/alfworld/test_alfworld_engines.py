"""Both engines say the same, list the same commands in the same order, and see the goal reached at the same moment."""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

import pytest
import transcripts

from envs.alfworld import engine, games, generate, native
from envs.alfworld.plan import plan
from envs.api import EnvUnavailable

RECORDED = [json.loads(line) for line in transcripts.FILE.read_text(encoding="utf-8").splitlines()]
official = pytest.mark.skipif(not engine.official_installed(), reason="textworld is not installed (pip install 'crl-jax[alfworld]')")
OLD = (("move {o} to {r}", "put {o} in/on {r}"), ("You move the {o.name} to the {r.name}.", "You put the {o.name} in/on the {r.name}."))


def test_transcripts_cover_types_and_rooms():
    entries = {entry.id: entry for entry in games.listed()}
    seen = [entries[line["game"]] for line in RECORDED]
    assert {entry.kind for entry in seen} == set(generate.KINDS)
    assert {entry.scene // 100 for entry in seen} == {0, 2, 3, 4}
    assert len({entry.id for entry in seen}) >= 12


@pytest.mark.parametrize("line", RECORDED, ids=lambda line: f"{line['game'].split('/')[0]}-{len(line['said'])}")
def test_native_engine_says_what_the_official_one_said(line):
    player = native.NativeEngine()
    views = [player.start(str(games.path_of(line["game"]))), *map(player.do, line["said"])]
    assert [transcripts.digest(view) for view in views] == line["digests"]


def old_game(folder, entry):
    """A game with the wording of the first releases."""
    game = json.loads(games.path_of(entry.id).read_text(encoding="utf-8"))
    for new, old in OLD:
        assert new in game["grammar"]
        game["grammar"] = game["grammar"].replace(new, old)
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps(game), encoding="utf-8")
    return path


def test_old_wording_is_played_as_the_game_words_it(tmp_path):
    path = old_game(tmp_path, games.listed()[0])
    commands = plan(native.compiled(str(path)))
    player = native.NativeEngine()
    views = [player.start(str(path)), *map(player.do, commands)]
    assert commands[-1].startswith("put ")
    assert " in/on " in commands[-1]
    assert views[-1].said.startswith("You put the ")
    assert views[-1].won


@official
def test_engines_agree_on_games_that_no_transcript_has(tmp_path):
    with_official, with_native = engine.make_engine("official"), engine.make_engine("native")
    try:
        paths = [games.path_of(entry.id) for entry in games.listed()[60:240:45]]
        for seed, path in enumerate([*paths, old_game(tmp_path, games.listed()[9])]):
            said, theirs = transcripts.wander(with_official, path, seed, 30)
            assert [with_native.start(str(path)), *map(with_native.do, said)] == theirs
    finally:
        with_official.close()
        with_official.close()


@official
def test_official_engines_in_threads_do_not_mix_their_games():
    def replay(line):
        player = engine.make_engine("official")
        views = [player.start(str(games.path_of(line["game"]))), *map(player.do, line["said"][:8])]
        player.close()
        return [transcripts.digest(view) for view in views]

    lines = RECORDED[1:6:2]
    with concurrent.futures.ThreadPoolExecutor(len(lines)) as pool:
        assert list(pool.map(replay, lines)) == [line["digests"][:9] for line in lines]


@official
def test_official_engine_leaves_the_process_as_it_was():
    before = (sys.argv, sys.stdout)
    player = engine.make_engine("official")
    player.start(str(games.path_of(games.listed()[0].id)))
    player.close()
    assert (sys.argv, sys.stdout) == before


def test_official_engine_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(engine, "official_installed", lambda: False)
    assert engine.make_engine("auto").name == "native"
    with pytest.raises(EnvUnavailable, match=r"crl-jax\[alfworld\]"):
        engine.make_engine("official")


def test_damaged_game_files_are_named(tmp_path):
    path = tmp_path / "game.tw-pddl"
    for text, told in (("{", "no game file"), ("[]", "has no pddl_domain"), ('{"grammar": "", "pddl_domain": ""}', "has no pddl_problem")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=told):
            engine.read_game(str(path))


def test_N03_a_game_does_not_depend_on_the_hash_seed():
    line = RECORDED[0]
    code = (
        "import sys; from envs.alfworld import native, games;"
        "p = native.NativeEngine(); v = p.start(str(games.path_of(sys.argv[1]))); print(v);"
        "[print(p.do(said)) for said in sys.argv[2:]]"
    )
    command = [sys.executable, "-c", code, line["game"], *line["said"][:12]]
    said = [
        subprocess.run(command, env={"PYTHONHASHSEED": seed, **_paths()}, capture_output=True, text=True, check=True, timeout=60).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]


def _paths():
    return {"PYTHONPATH": str(pathlib.Path(__file__).parents[3]), "CRL_CACHE": os.environ["CRL_CACHE"], "PATH": os.environ["PATH"]}
