"""Which games there are, and their files.

Owns: the list of generated games (``games.jsonl``), and the original data set where ``ALFWORLD_DATA`` names its folder.
Promises: generated and original games lie in the same layout and are played by the same code; a missing or empty folder is an
``EnvUnavailable`` that says what is missing; a game's id never leads out of its folder.
Does not: play.

The original data: ``json_2.1.1/{train,valid_seen,valid_unseen}/<task>/<trial>/game.tw-pddl``. Held out is ``valid_unseen`` (134 games).
Training is every solvable game of ``train``, or those that a list names: the file in ``ALFWORLD_TRAIN_IDS``, else ``train_ids.txt`` in the
data folder. The paper trains on 1,466 games that its authors list; any text with ``<task>/<trial>`` in its lines will do.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from envs import cache
from envs.alfworld import generate, wheel
from envs.api import EnvUnavailable, Split

DATA, TRAIN_IDS = "ALFWORLD_DATA", "ALFWORLD_TRAIN_IDS"

_LAYOUT = "json_2.1.1"
_FILE = "game.tw-pddl"
_FOLDERS: dict[Split, str] = {"train": "train", "heldout": "valid_unseen"}
_ID = re.compile(r"[\w.-]*[\w-]+-\d+/trial_\w+", re.ASCII)
_NOT_PLAYED = ("movable", "Sliced")  # as the original loader
_SOLVABLE = re.compile(r'"solvable"\s*:\s*true')
_TASK = re.compile(r"Your task is to: (.*?)\.?\\*\"")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A game: its id, type, goal in words, and split."""

    id: str
    kind: str
    goal: str
    split: Split
    scene: int = 0
    seed: int = 0


def entries(split: Split) -> tuple[Entry, ...]:
    """The games of a split, in a fixed order. Raises ``EnvUnavailable``."""
    root = data_folder()
    if root is None:
        return tuple(entry for entry in listed() if entry.split == split)
    return _original(root, split, os.environ.get(TRAIN_IDS, "") if split == "train" else "")


def path_of(game: str) -> Path:
    """The file of a game; a generated one is made now, unless it is there. Raises KeyError for an unknown id, ``EnvUnavailable``."""
    if not _ID.fullmatch(game):
        raise KeyError(f"no ALFWorld game {game!r}: see envs.registry.tasks('alfworld')")
    root = data_folder()
    if root is not None:
        for folder in ("train", "valid_seen", "valid_unseen"):
            path = root / _LAYOUT / folder / game / _FILE
            if path.is_file():
                return path
        raise KeyError(f"no ALFWorld game {game!r} in {root} ({DATA}): see envs.registry.tasks('alfworld')")
    entry = _by_id().get(game)
    if entry is None:
        raise KeyError(f"no ALFWorld game {game!r}: see envs.registry.tasks('alfworld')")
    made = f"games-{generate.FORMAT}-{wheel.VERSION}"
    folder = cache.folder("alfworld") / made / _LAYOUT / _FOLDERS[entry.split] / entry.id
    return cache.made_once(folder, lambda half: make(half, entry)) / _FILE


def make(folder: Path, entry: Entry) -> None:
    """Generate a listed game into ``folder``. Raises ``EnvUnavailable``, and RuntimeError when it is not the game that the list means."""
    from envs.alfworld.native import Compiled
    from envs.alfworld.plan import plan

    game = generate.design(entry.kind, entry.scene, entry.seed)
    if game is None or (game.id, game.goal) != (entry.id, entry.goal):
        raise RuntimeError(f"{entry.id}: the generator made another game; is alfworld=={wheel.VERSION} installed? ({wheel.INSTALL})")
    generate.write(folder, game, plan(Compiled(json.loads(generate.contents(game)[_FILE]))))


def is_generated(game: str) -> bool:
    """Whether a game comes from our generator."""
    return "/trial_gen_" in game


@functools.cache
def listed() -> tuple[Entry, ...]:
    """The generated games."""
    lines = Path(__file__).with_name("games.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Entry(**json.loads(line)) for line in lines)


@functools.cache
def _by_id() -> dict[str, Entry]:
    return {entry.id: entry for entry in listed()}


def data_folder() -> Path | None:
    """The folder of the original data, where one is named. Raises ``EnvUnavailable`` when it does not hold them."""
    named = os.environ.get(DATA)
    if not named:
        return None
    root = cache.path_of(named, DATA)
    missing = [f"{_LAYOUT}/{folder}" for folder in _FOLDERS.values() if not (root / _LAYOUT / folder).is_dir()]
    if missing:
        raise EnvUnavailable(
            f"{DATA}={named} lacks {' and '.join(missing)}: run alfworld-download into it, or unset {DATA} to play generated games"
        )
    return root


@functools.lru_cache(maxsize=8)
def _original(root: Path, split: Split, ids_file: str) -> tuple[Entry, ...]:
    folder = root / _LAYOUT / _FOLDERS[split]
    found = {entry.id: entry for entry in _read(folder, split)}
    if not found:
        raise EnvUnavailable(
            f"{folder} holds no solvable <task>/<trial>/{_FILE}: run alfworld-download into {root}, or unset {DATA} to play generated games"
        )
    chosen = _train_ids(root, ids_file) if split == "train" else None
    if chosen is None:
        return tuple(found.values())
    lost = [game for game in chosen if game not in found]
    if lost:
        raise EnvUnavailable(f"{len(lost)} of {len(chosen)} listed training games are not in {folder} or not solvable, e.g. {lost[0]}")
    return tuple(found[game] for game in chosen)


def _read(folder: Path, split: Split) -> Iterator[Entry]:
    """Solvable games of the six types, in the order of their ids. The files are searched, not parsed: there are thousands."""
    for path in sorted(folder.glob(f"*/*/{_FILE}")):
        game = "/".join(path.parts[-3:-1])
        kind = game.split("-")[0]
        if kind not in generate.KINDS or any(word in game for word in _NOT_PLAYED) or not _ID.fullmatch(game):
            continue
        text = _text(path)
        task = _TASK.search(text)
        if _SOLVABLE.search(text) and task:
            yield Entry(game, kind, task[1], split)


def _train_ids(root: Path, ids_file: str) -> tuple[str, ...] | None:
    """The listed training games in their order, or None without a list. Raises ``EnvUnavailable``."""
    path = cache.path_of(ids_file, TRAIN_IDS) if ids_file else root / "train_ids.txt"
    if not path.is_file():
        if ids_file:
            raise EnvUnavailable(f"{TRAIN_IDS}={ids_file} is no file: give a text file with one <task>/<trial> per line")
        return None
    found = dict.fromkeys(_ID.findall(_text(path)))
    if not found:
        raise EnvUnavailable(f"{path} names no game: give a text file with one <task>/<trial> per line")
    return tuple(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as damage:
        raise EnvUnavailable(f"{path} cannot be read ({damage}): download it again, or unset {DATA} to play generated games") from damage
