"""Transcripts of the official engine: what was said to it, and a digest of what it answered and listed after every command.

``python -m tests.envs.alfworld.transcripts`` (with textworld installed) makes ``transcripts.jsonl`` anew; the tests read it everywhere.
"""

import hashlib
import json
import pathlib
import random

from envs.alfworld import engine, games
from envs.alfworld.native import compiled
from envs.alfworld.plan import plan

FILE = pathlib.Path(__file__).with_name("transcripts.jsonl")
NONSENSE = ("fly to moon", "go to moon 1", "take", "", "open open", "put apple 1 in/on fridge 1", "LOOK", "go to  fridge 1")
DULL = ("go", "examine", "help", "inventory", "look", "close")  # most of what is listed; chosen less often

TOUR = (  # every state that a thing can be in, and what is said of it
    "pick_heat_then_place_in_recep-Tomato-None-Fridge-12/trial_gen_000000",
    "go to sinkbasin 1; take tomato 1 from sinkbasin 1; inventory; examine tomato 1; clean tomato 1 with sinkbasin 1; examine tomato 1;"
    "go to microwave 1; heat tomato 1 with microwave 1; examine tomato 1; go to fridge 1; cool tomato 1 with fridge 1; examine tomato 1;"
    "go to countertop 1; move tomato 1 to countertop 1; look; go to sinkbasin 1; take knife 1 from sinkbasin 1; examine knife 1;"
    "go to countertop 1; slice tomato 1 with knife 1; move knife 1 to countertop 1; take tomato 1 from countertop 1; examine tomato 1;"
    "go to microwave 1; heat tomato 1 with microwave 1; examine tomato 1; help; open microwave 1; move tomato 1 to microwave 1;"
    "close microwave 1; examine microwave 1; look; inventory; go to fridge 1; open fridge 1; close fridge 1; examine fridge 1",
)


def digest(view):
    said = json.dumps([view.said, view.commands, view.won], ensure_ascii=True)
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def chosen():
    """The first game of every type in every kind of room, and of every held-out type."""
    first = {}
    for entry in games.listed():
        first.setdefault((entry.split, entry.kind, entry.scene // 100 if entry.split == "train" else 0), entry)
    return list(first.values())


def wander(player, path, seed, turns):
    """Play at random, with some nonsense; commands and views (one more)."""
    draw = random.Random(seed).random
    views, said = [player.start(str(path))], []
    for _ in range(turns):
        listed = views[-1].commands
        lively = [command for command in listed if command.split()[0] not in DULL or draw() < 0.15] or listed
        pool = NONSENSE if draw() < 0.08 else lively
        said.append(pool[int(draw() * len(pool))])
        views.append(player.do(said[-1]))
        if views[-1].won:
            break
    return said, views


def tour(player):
    game, commands = TOUR[0], [said.strip() for said in TOUR[1].split(";")]
    views = [player.start(str(games.path_of(game))), *map(player.do, commands)]
    assert not [said for said, view in zip(commands, views[1:], strict=True) if view.said == engine.NOTHING]
    return {"game": game, "said": commands, "digests": [digest(view) for view in views]}


def record():
    player = engine.make_engine("official")
    lines = []
    for n, entry in enumerate(chosen()):
        path = games.path_of(entry.id)
        said, views = wander(player, path, n, 40)
        lines.append({"game": entry.id, "said": said, "digests": [digest(view) for view in views]})
        said = plan(compiled(str(path)))
        views = [player.start(str(path)), *map(player.do, said)]
        assert views[-1].won
        lines.append({"game": entry.id, "said": said, "digests": [digest(view) for view in views]})
    lines.append(tour(player))
    FILE.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    record()
