"""Stand-ins for gcloud, kubectl, xpk and git: small programs that write down how they were called and answer from a script."""

import ast
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # the launchers are not installed

from launch.tpu_vm import pod
from launch.tpu_vm.queued import Time

# Answers of the first rule whose words are all among the call's; one after the other, the last one again and again. Files hold Python
# literals, not JSON: a call then takes a third of the time.
FAKE = f"""#!{sys.executable} -IS
import fcntl, sys
here, name = sys.argv[0].rsplit("/", 1)
argv = [name, *sys.argv[1:]]
with open(here + "/lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    stdin = sys.stdin.read() if "--filename=-" in argv else ""
    with open(here + "/calls", "a") as calls:
        calls.write(repr((argv, stdin)) + "\\n")
    with open(here + "/script") as file:
        script = eval(file.read())
    text, code = "", 0
    for words, answers in script:
        if all(any(word in part for part in argv) for word in words):
            text, code = answers.pop(0) if len(answers) > 1 else answers[0]
            break
    with open(here + "/script", "w") as file:
        file.write(repr(script))
print(text, file=sys.stderr if code else sys.stdout)
sys.exit(code)
"""


class Clock:
    """Time that passes only when something waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 1e6, "waits without end"


@dataclasses.dataclass
class Cloud:
    """The stand-ins, in ``bin``."""

    bin: pathlib.Path
    records: pathlib.Path
    clock: Clock
    said: list[str]

    def script(self, *rules: tuple[str, list[Any]]) -> None:
        """What is answered: to calls with these words, these texts (or (text, exit code) or objects) in order."""
        answers = [(when.split(), [_answer(a) for a in given]) for when, given in rules]
        (self.bin / "script").write_text(repr(answers))

    def calls(self, words: str = "") -> list[list[str]]:
        """The calls so far that have all ``words``."""
        return [argv for argv, _ in self._calls() if all(any(w in part for part in argv) for w in words.split())]

    def applied(self) -> list[str]:
        """What kubectl was given on its standard input."""
        return [stdin for _, stdin in self._calls() if stdin]

    def pod(self, *words: str) -> int:
        """Runs the pod command in this process."""
        clock = Time(lambda: self.clock.now, self.clock.sleep)
        return pod.main(words, clock=clock, out=self.said.append, records=self.records)

    def _calls(self) -> list[Any]:
        file = self.bin / "calls"
        return [ast.literal_eval(line) for line in file.read_text().splitlines()] if file.exists() else []


def _answer(given: Any) -> tuple[str, int]:
    if isinstance(given, tuple):
        return given
    return given if isinstance(given, str) else json.dumps(given), 0


@pytest.fixture
def cloud(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """The stand-ins are all that can be called: a real gcloud is out of reach."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("gcloud", "kubectl", "xpk", "git"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)
    made = Cloud(folder, tmp_path / "records", Clock(), [])
    made.script()
    monkeypatch.setenv("PATH", str(folder))
    return made


@pytest.fixture
def states() -> Callable[..., list[Any]]:
    """Descriptions of a queued resource: one per state, None = there is none."""

    def described(*found: str | None) -> list[Any]:
        return [{"state": {"state": s}} if s else ("ERROR: NOT_FOUND: no such queued resource", 1) for s in found]

    return described
