"""The engine ``native``: a household game in plain Python, without planner, compiler or locks.

Owns: playing one game file, and keeping the games read last.
Promises: the observations, the admissible commands and their order, and the moment of winning are those of the official engine
(tests/envs/alfworld hold both to the same transcripts).
Does not: choose games, or read what a model says.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from envs.alfworld.engine import NOTHING, GameFile, View, read_game
from envs.alfworld.pddl import read_domain, read_problem
from envs.alfworld.rules import Operator, State, World
from envs.alfworld.sentences import Sentences, names_of


class Compiled:
    """A game file, read. Shared by everyone who plays it; never changed after that, apart from a memo of commands."""

    def __init__(self, game: GameFile) -> None:
        self.problem = read_problem(game["pddl_problem"])
        self.world = World(read_domain(game["pddl_domain"]), self.problem)
        self.sentences = Sentences(game["grammar"])
        self.names: Mapping[str, str] = names_of({name for atoms in self.world.facts.values() for atom in atoms for name in atom})
        self._commands: dict[Operator, str] = {}
        self._fickle = {name for name, asked in self.sentences.asked.items() if asked & self.world.changing}
        self._named = {  # which arguments of an action its command names
            name: [i for i, variable in enumerate(schema.parameters) if variable[1:] in self.sentences.named[name]]
            for name, schema in self.world.schemas.items()
        }

    def bound(self, operator: Operator) -> dict[str, str]:
        """Parameters (without "?") to objects."""
        name, arguments = operator
        return dict(zip((variable[1:] for variable in self.world.schemas[name].parameters), arguments, strict=True))

    def command(self, operator: Operator, state: State) -> str:
        """What to say for ``operator``; made once, unless its template asks for something that changes."""
        name, arguments = operator
        key = (name, tuple([arguments[i] for i in self._named[name]]))
        command = self._commands.get(key)
        if command is None or name in self._fickle:
            command = self._commands[key] = self.sentences.command(name, state, self.names, self.bound(operator))
        return command

    def commands(self, state: State) -> dict[str, Operator]:
        """What may be said, sorted, and what it does."""
        return dict(sorted((self.command(operator, state), operator) for operator in self.world.operators(state)))


class NativeEngine:
    """See ``engine.Engine``."""

    name = "native"

    def __init__(self) -> None:
        self.game: Compiled | None = None
        self.state: State | None = None
        self._commands: dict[str, Operator] = {}

    def start(self, path: str) -> View:
        """Begin the game in the file at ``path``."""
        self.game = compiled(path)
        self.state = self.game.world.start()
        return self._view(self.game.sentences.intro(self.state, self.game.names))

    def do(self, command: str) -> View:
        """Say ``command``."""
        assert self.game is not None
        assert self.state is not None
        operator = self._commands.get(command.strip())
        if operator is None:
            return self._view(NOTHING)
        self.state.apply(operator)
        return self._view(self.game.sentences.feedback(operator[0], self.state, self.game.names, self.game.bound(operator)))

    def close(self) -> None:
        """Forget the game."""
        self.game = self.state = None
        self._commands = {}

    def _view(self, said: str) -> View:
        assert self.game is not None
        assert self.state is not None
        self._commands = self.game.commands(self.state)
        return View(said, tuple(self._commands), self.game.world.reached(self.state))


@functools.lru_cache(maxsize=64)  # about 0.7 MB each
def compiled(path: str) -> Compiled:
    """The game in a file. Raises OSError, ValueError."""
    return Compiled(read_game(path))
