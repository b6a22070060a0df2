"""A family for the tests of ``crl envs``: walk along a line. Its players are ``toy_players``."""

from envs.api import EnvSpec, EnvTask, EnvUnavailable
from envs.api import Observation as Seen
from envs.turns import Played, TurnBased

BUILT = []


class Line(TurnBased[str]):
    """Two steps to the right; the task says which word the text holds."""

    family = "dungeon"  # for its notices

    def begin(self, seed, task):
        if task not in ("red <b>", "blue"):
            raise KeyError(f"no task {task!r}")
        self.at, self.word = 0, task
        return Seen(self._show(), ("left", "right"))

    def read(self, said):
        return said if said in ("left", "right") else None

    def play(self, action):
        self.at += 1 if action == "right" else -1
        won = self.at == 2
        return Played(self._show(), float(won), won, won, actions=("left", "right", "stay")[: 2 + (self.at == 1)])

    def free(self):
        pass

    def _show(self):
        return f"{self.word} & {self.at}"


def names():
    return ("line",)


def tasks(split):
    ids = {"train": ("red <b>",), "heldout": ("blue",)}[split]
    return tuple(EnvTask("toy/line", id, f"walk to {id}", "walk") for id in ids)


def spec(name, **options):
    if set(options) - {"max_turns"}:
        raise TypeError(f"unknown option {next(iter(options))!r}: use one of max_turns")
    return EnvSpec("toy/line", "toy", "walk", "toy", ("left", "right", "stay"), options.get("max_turns", 5), "Walk to the right.")


def make(name, **options):
    return Line(style="compact", grammar="bare", max_turns=spec(name, **options).max_turns, data_source="generated")


def prepare():
    pass


def build():
    BUILT.append(True)
    return "2 tasks in a folder"


class Missing:
    """The module of a family whose package is missing."""

    @staticmethod
    def names():
        return ("far",)

    @staticmethod
    def spec(name, **options):
        return EnvSpec("absent/far", "absent", "be there", "absent", ("go",), 5, "Go.")

    @staticmethod
    def prepare():
        raise EnvUnavailable("absent: pip install 'crl-jax[absent]'")

    make = tasks = staticmethod(lambda *_, **__: Missing.prepare())


class Players:
    """The module of the family's players."""

    KINDS = ("random", "expert", "follow")

    @staticmethod
    def make_player(kind, task, *, seed, options, lesson=""):
        word = {"random": "left", "expert": "right", "follow": lesson.rpartition(" ")[2]}[kind]
        replies = iter(["<script>alert(1)</script>", *[word] * 99])
        return lambda text, actions: next(replies)

    @staticmethod
    def lesson(task, seed, *, right=True):
        return f"go {'right' if right else 'left'}"
