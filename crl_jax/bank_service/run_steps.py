"""How far each run of a bank's clients has come.

Owns: the newest step of each run, and what names a run's episodes. Promises: a step begins once however many processes of the run tell of
it, and a late word of an older one begins none; a run that went back to a checkpoint, or is at step 0 again, begins anew. Does not: act on
steps.
"""

from __future__ import annotations

import json

_RUNS = 1000  # the runs that told of a step last; older ones are forgotten


def prefix_of(run: str) -> str:
    """What comes before the ids of the episodes of ``run``; nothing for a run without a name."""
    return f"{run}/" if run else ""


class RunSteps:
    """Mutable. A run without a name ("") may be any number of clients that do not know each other: all its steps are new."""

    def __init__(self, newest: dict[str, int] | None = None) -> None:
        self._newest = dict(newest or {})

    def newest(self, run: str) -> int:
        """The newest step of ``run``; 0 if it began none since it started or went back."""
        return self._newest.get(run, 0)

    def is_new(self, run: str, step: int) -> bool:
        """Whether ``run`` has not come to ``step`` yet. After a later one step 0 is the beginning of another run of that name."""
        return not run or run not in self._newest or step > self._newest[run] or 0 == step < self._newest[run]

    def begin(self, run: str, step: int) -> None:
        """``run`` is at ``step``."""
        if run:
            self._newest.pop(run, None)  # the newest entry is the last
            self._newest[run] = step
            while len(self._newest) > _RUNS:
                del self._newest[next(iter(self._newest))]

    def forget(self, run: str) -> None:
        """Whatever step ``run`` tells of next is new."""
        self._newest.pop(run, None)

    def to_json(self) -> str:
        """For `of_json`."""
        return json.dumps(self._newest)

    @staticmethod
    def of_json(text: str) -> RunSteps:
        """As they were."""
        return RunSteps(json.loads(text))
