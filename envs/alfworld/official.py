"""The engine ``official``: TextWorld's PDDL environment over Fast Downward, with ALFWorld's names.

Owns: loading it without its side effects, and the memos that make a step three times and a start four times faster.
Promises: what it says and lists is what ``textworld.envs.PddlEnv`` says and lists; ``sys.argv`` and ``sys.stdout`` are as they were.
Does not: run in several threads at once (loading and playing are serialised by one lock in this process: its parsers are shared).

Game files carry expressions that TextWorld evaluates: load only games that you trust.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from envs.alfworld.engine import View, read_game
from envs.alfworld.sentences import names_of

_LOCK = threading.RLock()
_TRANSLATIONS = 8  # games whose translation is kept: the episodes of a group play the same one, and loading alone asks for it twice


class OfficialEngine:
    """See ``engine.Engine``."""

    name = "official"

    def __init__(self) -> None:
        with _alone():
            textworld = _textworld()
            self._env: Any = textworld.envs.PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))
        self._path = ""

    def start(self, path: str) -> View:
        """Begin the game in the file at ``path``."""
        with _alone():
            if path != self._path:
                self._path = ""
                self._env.load(read_game(path))
                names = names_of(info.id for info in self._env._entity_infos.values())
                for info in self._env._entity_infos.values():
                    info.name = names[info.id]
                self._path = path
            return _view(self._env.reset())

    def do(self, command: str) -> View:
        """Say ``command``."""
        with _alone():
            return _view(self._env.step(command)[0])

    def close(self) -> None:
        """Free the planner's library: every environment has its own copy of it."""
        env, self._env = self._env, None
        if env is not None:
            with _alone():
                importlib.import_module("fast_downward").close_lib(env.downward_lib)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One thread at a time, with our translator; the original overwrites the command line and standard output."""
    fast_downward: Any = importlib.import_module("fast_downward")
    with _LOCK:
        argv, stdout, original = sys.argv, sys.stdout, fast_downward.pddl2sas
        fast_downward.pddl2sas = _translate
        try:
            yield
        finally:
            sys.argv, sys.stdout, fast_downward.pddl2sas = argv, stdout, original


def _translate(domain: str, problem: str, *, verbose: bool = False, optimize: bool = False) -> tuple[Any, str]:
    """As ``fast_downward.pddl2sas``. The optimized translation is for the planner alone, which nobody asks here: it stays empty."""
    return (None, "") if optimize else _translated(domain, problem)


@functools.lru_cache(maxsize=_TRANSLATIONS)
def _translated(domain: str, problem: str) -> tuple[Any, str]:
    return importlib.import_module("fast_downward.interface").pddl2sas(domain, problem)


def _view(state: Any) -> View:
    return View(state.feedback, tuple(state["admissible_commands"]), bool(state["won"]))


@functools.cache
def _textworld() -> Any:
    """TextWorld, with its parsers' results kept: two thirds of a step are the same short texts parsed again."""
    textworld: Any = importlib.import_module("textworld")
    textgen: Any = importlib.import_module("textworld.envs.pddl.textgen")
    rules: Any = importlib.import_module("textworld.logic").Rule
    parse, trees = textgen._parse_and_convert, {}

    def parse_once(text: str, rule_name: str | None = None, **options: Any) -> Any:
        key = (text, rule_name)
        if key not in trees:
            trees[key] = parse(text, rule_name=rule_name, **options)
        return copy.deepcopy(trees[key])  # a derivation writes into its tree

    textgen._parse_and_convert = parse_once
    rules.parse_conjunctive_query = functools.cache(rules.parse_conjunctive_query)

    def derive(self: Any, context: Any = None) -> list[Any]:
        """As the original, which from Python 3.13 on no longer sees its variables."""
        names = dict((context or self.context)["variables"])
        return [textgen.TerminalSymbol(eval(self.expression, {"__builtins__": {}}, names))]

    textgen.EvalSymbol.derive = derive
    return textworld
