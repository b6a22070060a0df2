"""Scripted players of the household games.

Owns: four policies
    random    any command that may be given
    expert    knows the whole game and does what ``plan`` says; finds out what was really done when somebody else played a turn
    follow    reads the observation and the lesson: fetches the thing from where the lesson says, uses the tool and the place it names, and
              searches the room for whatever the lesson does not say or says wrongly
    explore   the same without a lesson
and the lessons of an extractor that saw the game won.
Promises: deterministic given the seed and what it reads; all but the expert know nothing but what they read.
Does not: read goals that people wrote (those of the generator and of the original templates only).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from envs.alfworld import games
from envs.alfworld.native import Compiled, compiled
from envs.alfworld.plan import Expert, wanted
from envs.alfworld.rules import Operator, State, pairs
from envs.alfworld.search import Lesson, Searcher
from envs.api import EnvTask
from envs.players import Player

KINDS = ("random", "explore", "expert", "follow")

_TREAT = {"isclean": ("clean", "sinkbasin"), "ishot": ("heat", "microwave"), "iscool": ("cool", "fridge")}


def make_player(kind: str, task: EnvTask, *, seed: int, options: Mapping[str, Any], lesson: str = "") -> Player:
    """A player for one episode. Raises ValueError for an unknown kind, and for a lesson that says nothing; KeyError for an unknown game."""
    if kind == "random":
        draw = random.Random(seed).random
        return _spoken(lambda text, actions: actions[int(draw() * len(actions))], options)
    if kind == "expert":
        return _spoken(_Knowing(compiled(str(games.path_of(task.id)))).act, options)
    if kind == "explore":
        return _spoken(Searcher(task.goal).act, options)
    if kind == "follow":
        return _spoken(Searcher(task.goal, Lesson.read(lesson)).act, options)
    raise ValueError(f"no player {kind!r}: use one of {', '.join(KINDS)}")


def lesson(task: EnvTask, seed: int, *, right: bool = True) -> str:
    """Where the things of this game are and where they go; not ``right``: the same about receptacles that do not have them."""
    game = compiled(str(games.path_of(task.id)))
    state, want = game.world.start(), wanted(game)
    kinds = pairs([*game.world.facts["objecttype"], *game.world.facts["receptacletype"]])
    lies = pairs(state.facts["inreceptacle"])
    found = [o for o in lies if kinds.get(o) == want.target and kinds[lies[o]] != want.place][: want.count]
    homes = {lies[o] for o in lies if kinds.get(o) == want.target}
    others = sorted(r for r in (r for r, _ in game.world.facts["receptacleatlocation"]) if r not in homes and kinds[r] != want.place)
    where = [game.names[lies[o]] if right or not others else game.names[others[(seed + i) % len(others)]] for i, o in enumerate(found)]
    thing, them = want.target.removesuffix("type"), "it" if want.count == 1 else "them"
    said = f"the {thing} is in {' and '.join(where)}"
    if want.lamp:
        lamp = next(o for o in lies if kinds.get(o) == want.lamp)
        at = lies[lamp] if right or not others else others[(seed + 1) % len(others)]
        return f"{said}; take it, then use {game.names[lamp]} at {game.names[at]}"
    place = game.names[next(r for r in sorted(kinds) if kinds[r] == want.place)]
    if not want.treatment:
        return f"{said}; move {them} to {place}"
    verb, tool = _TREAT[want.treatment]
    return f"{said}; {verb} it in {game.names[next(r for r in sorted(kinds) if kinds[r] == f'{tool}type')]}, then move it to {place}"


def _spoken(act: Callable[[str, tuple[str, ...]], str], options: Mapping[str, Any]) -> Player:
    """In the grammar of the options."""
    if options.get("grammar", "tagged") == "tagged":
        return lambda text, actions: f"<action>{act(text, actions)}</action>"
    return act


class _Knowing:
    """Plays along on a state of its own. When what it reads is not what its last command leads to, it looks for the command that does."""

    def __init__(self, game: Compiled) -> None:
        self._game, self._expert, self._state = game, Expert(game), game.world.start()
        self._meant: Operator | None = None

    def act(self, text: str, actions: tuple[str, ...]) -> str:
        """The next command. Raises ValueError when more than one turn was played without it."""
        if self._meant is not None:
            self._state = self._after(text, actions)
        if self._game.world.reached(self._state):
            return "look"
        self._meant = self._expert.next(self._state)
        return self._game.command(self._meant, self._state)

    def _after(self, text: str, actions: tuple[str, ...]) -> State:
        assert self._meant is not None
        listed = self._game.commands(self._state)
        for operator in [self._meant, None, *listed.values()]:
            state = self._state.copy()
            if operator is not None:
                state.apply(operator)
                name, names = operator[0], self._game.names
                said = self._game.sentences.feedback(name, state, names, self._game.bound(operator)).strip()
            else:
                said = ""  # nothing happened, or no command: the text is an old one
            if tuple(self._game.commands(state)) == actions and (text.startswith(said) or said in text):
                return state
        raise ValueError(f"the expert cannot tell what led to {text[:80]!r}: it must read every observation of its episode")
