"""A sound little environment and many that break one promise each, by name; a source for ``envs.check``."""

import os
import subprocess
import sys
import tempfile
import threading
import time

from envs.api import EnvSpec, EnvTask, EnvUnavailable, Observation, Step

MOVES = ("left", "right")
TASKS = {"train": ("a", "b"), "heldout": ("c",)}
kept = []  # by those that leak


class Sound:
    """Walk to a place that seed and task fix. "left" and "right" are actions."""

    name = "sound"
    spec_more, step_more, info_more = {}, {}, {}
    tasks = TASKS

    def __init__(self, max_turns=8):
        self.max_turns, self.at, self.turn, self.closed = max_turns, 0, -1, False

    def seed_of(self, seed, task):
        return seed * 7 + ord(task or "a")

    def text(self):
        return f"you are {self.goal - self.at} away"

    def reset(self, seed, task=""):
        if self.closed:
            raise RuntimeError("closed")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed {seed}")
        if task not in ("a", "b", "c"):
            raise KeyError(task)
        self.goal, self.at, self.turn, self.invalid, self.task = self.seed_of(seed, task) % 5 + 1, 0, 0, 0, task
        return Observation(self.text(), MOVES)

    def valid(self, reply):
        return reply in MOVES

    def do_invalid(self, reply):
        return f"not an action; {self.text()}"

    def truncated(self):
        return self.turn >= self.max_turns

    def step(self, reply):
        if self.turn < 0:
            raise RuntimeError("no episode")
        self.turn += 1
        valid, won, text = self.valid(reply), False, ""
        if valid:
            self.at += 1 if reply == "right" else -1
            won = self.at == self.goal
        else:
            self.invalid += 1
            text = self.do_invalid(reply)
        late = not won and self.truncated()
        info = {"turn": self.turn, "invalid": self.invalid, "effective": valid, "data_source": "generated", "task": self.task}
        if won or late:
            self.turn = -1
        step = {"reward": float(won), "terminated": won, "truncated": late, "success": won, "valid": valid, "actions": MOVES}
        return Step(text or self.text(), info=info | self.info_more, **(step | self.step_more))

    def close(self):
        self.closed, self.turn = True, -1


BROKEN = {}


def broken(rule, said):
    """Register a class under its name: the rule that must find it, and words of the message."""

    def add(kind):
        BROKEN[kind.__name__] = (kind, rule, said)
        return kind

    return add


def variant(name, rule, said, **attributes):
    """A class that differs from the sound one in these attributes."""
    return broken(rule, said)(type(name, (Sound,), attributes))


variant("NoGoal", "spec", "goal is empty", spec_more={"goal": " "})
variant("OtherTurns", "spec", "max_turns is 9", spec_more={"max_turns": 9})
variant("OtherActions", "spec", "offers actions that it does not list", spec_more={"actions": ("up",)})
variant("OtherExample", "spec", "no valid first reply", spec_more={"system_prompt": "as in <action>fly</action>"})
variant("OtherName", "spec", "called 'other'", spec_more={"name": "other"})
variant("Leaky", "tasks", "in both splits", tasks={"train": ("a", "b"), "heldout": ("b",)})
variant("TwiceListed", "tasks", "listed twice", tasks={"train": ("a", "a"), "heldout": ()})
variant("NoTasks", "tasks", "no task", tasks={"train": (), "heldout": ()})
variant("NotFinite", "step", "no finite number", step_more={"reward": float("nan")})
variant("BothFlags", "step", "terminated and truncated", step_more={"terminated": True, "truncated": True})
variant("EarlySuccess", "step", "success, but the episode goes on", step_more={"success": True})
variant("NoSource", "step", "data_source", info_more={"data_source": None})
variant("WrongTurn", "step", "info['turn'] is 7", info_more={"turn": 7})
variant("Unsendable", "pickle", "pickling", info_more={"lock": threading.Lock()})
variant("AllTheSame", "reproduce", "same episode", seed_of=lambda self, seed, task: 2)
variant("TooShort", "truncation", "too early", truncated=lambda self: self.turn >= self.max_turns - 1)
variant("TooLong", "truncation", "goes on", truncated=lambda self: self.turn > self.max_turns)
variant("Silent", "reply", "not the one before with a notice", do_invalid=lambda self, reply: self.text())
variant("Echo", "text", "lone surrogates", do_invalid=lambda self, reply: f"{reply}? {self.text()}")
variant("Lenient", "reply", "counts as a valid action", valid=lambda self, reply: reply in MOVES or "north" in reply)
variant("Unset", "lifecycle", "step after close", close=lambda self: None)


@broken("reproduce", "the same instance")
class Remembers(Sound):
    def reset(self, seed, task=""):
        self.before = getattr(self, "before", 0) + 1
        seen = super().reset(seed, task)
        return Observation(f"{seen.text} ({self.before})", seen.actions)


@broken("reply", "changes what the same actions do")
class Slips(Sound):
    def do_invalid(self, reply):
        text = super().do_invalid(reply)
        self.at += 1
        return text

    def text(self):
        return "you are on a white square" if self.at % 2 else "you are on a black square"


@broken("reply", "takes")
class Dawdles(Sound):
    def valid(self, reply):
        time.sleep(5.1 if len(reply) > 10**6 else 0)
        return super().valid(reply)


@broken("reply", "IndexError")
class Raises(Sound):
    def valid(self, reply):
        return reply[0] in "lr" and super().valid(reply)


@broken("lifecycle", "step after the end")
class GoesOn(Sound):
    def step(self, reply):
        step = super().step(reply)
        self.turn = max(self.turn, 0) or int(step.info["turn"])
        return step


@broken("lifecycle", "an unknown task")
class AnyTask(Sound):
    def reset(self, seed, task=""):
        return super().reset(seed, task if task in ("a", "b", "c") else "a")


@broken("lifecycle", "close during an episode, and again")
class ClosesOnce(Sound):
    def close(self):
        if self.closed:
            raise OSError("closed already")
        super().close()


@broken("episode", "seed 10")
class Fails(Sound):
    def seed_of(self, seed, task):
        return 1 // (seed % 5 or 1 - seed // 1000)


@broken("leak", "more open files")
class LeaksFiles(Sound):
    def __init__(self, max_turns=8):
        super().__init__(max_turns)
        kept.append(open(os.devnull))  # noqa: SIM115 - that is the fault


@broken("leak", "more threads")
class LeaksThreads(Sound):
    def __init__(self, max_turns=8):
        super().__init__(max_turns)
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


@broken("leak", "more temporary files")
class LeaksFolders(Sound):
    def __init__(self, max_turns=8):
        super().__init__(max_turns)
        tempfile.mkdtemp()


@broken("leak", "MiB more memory")
class LeaksMemory(Sound):
    def reset(self, seed, task=""):
        kept.append(bytearray(b"x") * (3 << 20))
        return super().reset(seed, task)


@broken("orphan", "processes are left")
class LeavesProcesses(Sound):
    def __init__(self, max_turns=8):
        super().__init__(max_turns)
        if not kept:
            kept.append(subprocess.Popen(["sleep", "1000"], start_new_session=True))


@broken("hang", "invalid and hostile replies: no answer within")
class Hangs(Sound):
    def valid(self, reply):
        time.sleep(1000 if not reply else 0)
        return super().valid(reply)


@broken("crash", "exit code 5")
class Crashes(Sound):
    def valid(self, reply):
        return os._exit(5) if "\0" in reply else super().valid(reply)


@broken("reproduce", "PYTHONHASHSEED")
class ReadsHashes(Sound):
    def seed_of(self, seed, task):
        return hash(f"{seed}{task}")


@broken("reproduce", "PYTHONHASHSEED")
class ReadsThePid(Sound):
    def text(self):
        return f"{super().text()} in {os.getpid()}"


def spec(name, **options):
    """As ``envs.registry.spec``."""
    kind = kind_of(name)
    given = {"goal": "get there", "actions": MOVES, "max_turns": kind(**options).max_turns, "name": name}
    return EnvSpec(**{"family": "toy", "namespace": "toy", "system_prompt": "Walk.", **given, **kind.spec_more})


def make(name, **options):
    """As ``envs.registry.make``."""
    if name == "toy/Missing":
        raise EnvUnavailable("toy: pip install nothing")
    return kind_of(name)(**options)


def tasks(what, split="train"):
    """As ``envs.registry.tasks``."""
    return tuple(EnvTask(what, id, f"get to {id}") for id in kind_of(what).tasks[split])


def kind_of(name):
    """The class of a name."""
    short = name.partition("/")[2]
    return {"Sound": Sound, "Missing": Sound}.get(short) or BROKEN[short][0]


if __name__ == "__main__":
    sys.exit("a source for envs.check")
