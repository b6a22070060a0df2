"""A seed and the actions fix an episode: in any process, on any day."""

import ast
import datetime
import hashlib
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("nle")

from envs import registry

# Observations of seed 1 under actions drawn from seed 1, at most 20 turns: levels with monsters, clouds, lava, questions, an early end.
GOLDEN = {
    "room_trap_15x15": "f37c064011b1a282",
    "mazewalk_15x15": "d4a0d3bc7e0f80e9",
    "keyroom_s15": "b4ba34e63858a185",
    "river_monster": "cf5e2c96c574f944",
    "corridor_battle_dark": "0d27fc7bfb9a78a0",
    "hidenseek": "0641d7b0061707ae",
    "hidenseek_lava": "8b62965138a2a6ef",
    "memento_f4": "bbcf739c94fc7590",
    "lavacross_ring_pickup": "13d72befc06fae26",
    "lavacross_full": "b48bd3e8740826a9",
}

_DIGESTS = "import sys; import test_minihack_seeds as t; print({name: t.digest(name) for name in (sys.argv[1:] or t.GOLDEN)})"
_CLOCK = """
#include <stdlib.h>
#include <time.h>
time_t time(time_t *out) { time_t now = (time_t)atoll(getenv("FAKE_NOW")); if (out) *out = now; return now; }
"""


def digest(name, seed=1, turns=20):
    env = registry.make(f"minihack/{name}", grammar="bare", style="full", max_turns=turns)
    draw, seen = random.Random(seed), env.reset(seed)
    texts, actions, done = [seen.text], seen.actions, False
    while not done:
        step = env.step(actions[int(draw.random() * len(actions))])
        texts.append(step.observation)
        actions, done = step.actions, step.done
    env.close()
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def elsewhere(*names, **environment):
    """The digests made in a process of its own."""
    here = pathlib.Path(__file__)
    paths = os.pathsep.join([str(here.parent), str(here.parents[2])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _DIGESTS, *names],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_N03_golden_digests():
    assert {name: digest(name) for name in GOLDEN} == GOLDEN


def test_N03_other_process_and_hash_seed_give_the_same_bytes():
    names = ("memento_f4", "lavacross_full", "room_trap_15x15")
    assert elsewhere(*names, PYTHONHASHSEED="7") == {name: GOLDEN[name] for name in names}


@pytest.mark.parametrize("day", ["2026-11-09 00:10", "2026-10-26 12:00"])
def test_N03_the_day_does_not_matter(tmp_path, day):
    """New moon after midnight, full moon at noon: the game would take luck and darkness from them."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("setting another clock needs a C compiler and Linux")
    (tmp_path / "clock.c").write_text(_CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(tmp_path / "clock.so"), str(tmp_path / "clock.c")], check=True, timeout=60)
    now = int(datetime.datetime.fromisoformat(day).replace(tzinfo=datetime.UTC).timestamp())
    names = ("river_monster", "hidenseek")
    found = elsewhere(*names, LD_PRELOAD=str(tmp_path / "clock.so"), FAKE_NOW=str(now), TZ="UTC")
    assert found == {name: GOLDEN[name] for name in names}
