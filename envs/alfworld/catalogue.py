"""``python -m envs.alfworld.catalogue``: how ``games.jsonl`` was made, and the proof that every game in it is won by its plan.

Owns: the choice of 200 training and 50 held-out games.
Promises: the scenes of the two splits are disjoint; every room and task type that go together occur, types in equal numbers; no two games
want the same (of the lamp's task, whose goals are few, no two say it in the same words); a plan has at most ``LONGEST_PLAN`` commands.
Does not: keep the games themselves (they are made when first played, see ``games``).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from envs.alfworld import games, generate, wheel
from envs.alfworld.engine import Choice, make_engine
from envs.alfworld.native import Compiled
from envs.alfworld.plan import plan
from envs.api import Split

SIZES: dict[Split, int] = {"train": 200, "heldout": 50}
LONGEST_PLAN = 16

_HELDOUT_EVERY = 5  # of the scenes of each kind of room, the 5th, 10th, ... are held out
_SEEDS = 400


def choose() -> list[games.Entry]:
    """The games of both splits. Raises RuntimeError when the scenes do not hold enough different ones."""
    taken: set[str] = set()
    return [entry for split, size in SIZES.items() for entry in _fill(split, size, taken)]


def lost(entries: Iterable[games.Entry], engine: Choice) -> list[str]:
    """The games that the plan in their file does not win, or wins before its end."""
    player, found = make_engine(engine), []
    try:
        for entry in entries:
            path = games.path_of(entry.id)
            commands = json.loads(path.read_text(encoding="utf-8"))["walkthrough"]
            views = [player.start(str(path)), *map(player.do, commands)]
            if [view.won for view in views] != [False] * len(commands) + [True]:
                found.append(entry.id)
    finally:
        player.close()
    return found


def main(argv: list[str]) -> int:
    """``--write`` makes the list anew; without, every game of the list is played by its plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="choose the games and write games.jsonl")
    parser.add_argument("--engine", choices=("native", "official"), default="native", help="what plays them (official: seconds a game)")
    options = parser.parse_args(argv)
    if options.write:
        lines = [json.dumps(dataclasses.asdict(entry)) for entry in choose()]
        Path(__file__).with_name("games.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        games.listed.cache_clear()
    failed = lost(games.listed(), options.engine)
    print(f"{len(games.listed()) - len(failed)} of {len(games.listed())} games are won by their plan (engine {options.engine})")
    print("\n".join(failed), end="\n" if failed else "")
    return 1 if failed else 0


def _fill(split: Split, size: int, taken: set[str]) -> list[games.Entry]:
    """``size`` games, types in turn, scenes in turn; ``taken`` grows by what they want."""
    scenes = [n for n in wheel.numbers() if (n % _HELDOUT_EVERY == 0) == (split == "heldout")]
    rooms = [[n for n in scenes if wheel.scene(n).room == room] for room in dict.fromkeys(wheel.scene(n).room for n in scenes)]
    mixed = [n for row in itertools.zip_longest(*rooms) for n in row if n is not None]
    supply = {kind: iter([(n, seed) for seed in range(_SEEDS) for n in mixed]) for kind in generate.KINDS}
    found: list[games.Entry] = []
    for kind in itertools.cycle(generate.KINDS):
        if len(found) == size:
            return found
        entry = next((entry for n, seed in supply[kind] if (entry := _entry(kind, n, seed, split, taken)) is not None), None)
        if entry is None:
            raise RuntimeError(f"no more different goals for {kind} in the {split} scenes: have {len(found)} games")
        taken.add(_wants(entry))
        found.append(entry)
    raise AssertionError


def _entry(kind: str, number: int, seed: int, split: Split, taken: set[str]) -> games.Entry | None:
    game = generate.design(kind, number, seed)
    if game is None:
        return None
    entry = games.Entry(game.id, kind, game.goal, split, number, seed)
    if _wants(entry) in taken:
        return None
    commands = plan(Compiled(json.loads(generate.contents(game)["game.tw-pddl"])))
    return entry if 0 < len(commands) <= LONGEST_PLAN else None


def _wants(entry: games.Entry) -> str:
    return entry.goal if entry.kind == "look_at_obj_in_light" else entry.id.rsplit("-", 1)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
