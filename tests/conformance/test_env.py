"""The conformance suite of environments: it finds every fault it is made for, and every registered family passes it."""

import json
import pathlib

import broken_envs
import pytest

from envs import registry
from envs.api import EnvUnavailable
from envs.check import check
from envs.conformance.process import examine

CACHE = pathlib.Path(__file__).resolve().parents[2] / ".cache" / "jax-tests"
ALONE = {"hang", "crash", "orphan"}  # rules about the process: these need one
EPISODES, TURNS = 4, 6  # of each real environment here; `crl envs check --all --episodes 1000` plays more


def found_in_this_process(name, episodes=12):
    told = []
    plan = {"source": "broken_envs", "name": f"toy/{name}", "options": {}, "episodes": episodes, "phase": "all"}
    examine(plan, lambda line: told.append(json.loads(json.dumps(line))))
    return [(line["rule"], line["message"]) for line in told if "rule" in line]


@pytest.fixture(autouse=True)
def no_leftovers(monkeypatch, tmp_path):
    monkeypatch.setattr(broken_envs, "kept", [])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_a_sound_environment_passes():
    report = check("toy/Sound", source="broken_envs", episodes=8)
    assert report.findings == ()
    assert (report.passed, report.episodes) == (True, 8)
    assert found_in_this_process("Sound") == []


@pytest.mark.parametrize("name", [name for name, (_, rule, said) in broken_envs.BROKEN.items() if rule not in ALONE and "HASH" not in said])
def test_a_broken_promise_is_found(name):
    _, rule, said = broken_envs.BROKEN[name]
    found = found_in_this_process(name)
    assert [message for kind, message in found if kind == rule and said in message], found


@pytest.mark.parametrize("name", [name for name, (_, rule, said) in broken_envs.BROKEN.items() if rule in ALONE or "HASH" in said])
def test_what_only_a_process_of_its_own_survives_or_shows_is_found(name):
    _, rule, said = broken_envs.BROKEN[name]
    report = check(f"toy/{name}", source="broken_envs", episodes=4, timeout_s=2.0)
    assert [f for f in report.findings if f.rule == rule and said in f.message], report.findings


def test_what_cannot_be_examined_raises():
    with pytest.raises(EnvUnavailable, match="pip install nothing"):
        check("toy/Missing", source="broken_envs")
    with pytest.raises(KeyError, match="dungeon/amber_cellar"):
        check("dungeon/amber_celar")
    with pytest.raises(ValueError, match="use one of"):
        check("dungeon/amber_cellar", {"style": "zzz"})


def some_environments():
    """The first environment of every family."""
    for family in registry.families():
        yield f"{family}/{registry.module_of(family).names()[0]}"


@pytest.mark.parametrize("name", some_environments())
def test_N03_every_family_keeps_its_promises(name, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(CACHE))  # both processes of a game in JAX compile the same programs
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    try:
        report = check(name, {"max_turns": TURNS}, episodes=EPISODES)
    except EnvUnavailable as missing:
        pytest.skip(str(missing))
    assert report.passed, report.findings
