"""What the actor is asked about an experience before an episode, and how its verdict is read (actor-critic gate, paper appendix B.1).

Owns: the prompt (texts in a data file), the grammar of a verdict. Promises: reading model output never raises; what is not exactly a
verdict is no decision; an entry's text stands between delimiters that it cannot close. Does not: sample, or decide what follows from a
verdict (``rollout.gate``).
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import cast

from crl_jax.experience.extractor import as_data, fill
from crl_jax.experience.prompt_file import load_texts
from crl_jax.experience.protocols import Message
from crl_jax.experience.strict import UNREADABLE, Rejected, answer_text, lesson_text, reason, strict_json
from crl_jax.records import Decision, Usage, Verdict

DEFAULT_GATE_PROMPTS = pathlib.Path(__file__).with_name("gate_prompts.json")


@dataclasses.dataclass(frozen=True)
class GatePrompts:
    """Prompt texts with ``$name`` slots: ``task`` (the actor's own system prompt and the goal), ``lesson``, ``shown`` and ``succeeded``
    (episodes that read the entry so far), ``success`` (its estimated success, in percent)."""

    system: str
    user: str

    @staticmethod
    def load(path: pathlib.Path = DEFAULT_GATE_PROMPTS) -> GatePrompts:
        """Read the texts from a JSON file of this class's fields. Raises ValueError naming missing or unknown fields or what is no text."""
        return load_texts(GatePrompts, path)


def gate_messages(prompts: GatePrompts, *, task: str, lesson: str, usage: Usage, success: float) -> list[Message]:
    """The request for a verdict. ``success``: posterior mean of the success of episodes that read the entry, 0 to 1."""
    slots = {
        "task": as_data(task),
        "lesson": as_data(lesson),
        "shown": usage.shown,
        "succeeded": usage.succeeded,
        "success": f"{100 * success:.0f}",
    }
    return [Message("system", fill(prompts.system, slots)), Message("user", fill(prompts.user, slots))]


def parse_verdict(response: str, experience_id: str, *, max_chars: int = 2000) -> tuple[Verdict, str]:
    """The verdict on an entry and, where there is none (``Decision.NONE``), the reason. Never raises on model output.

    A verdict is one JSON object, ``{"verdict": "accept"}``, ``{"verdict": "reject"}`` or ``{"verdict": "refine", "experience": TEXT}``,
    and nothing else: no other fields, no text around it, no duplicate keys, no NaN, a text of 1 to ``max_chars`` characters.
    """
    try:
        row = strict_json(answer_text(response))
        if not isinstance(row, dict):
            raise Rejected(f"a verdict is an object, not {type(row).__name__}")
        fields = cast(dict[str, object], row)
        name = fields.get("verdict")
        if name not in ("accept", "refine", "reject"):
            raise Rejected(f"unknown verdict {str(name)[:40]!r}")
        wanted = {"verdict", "experience"} if name == "refine" else {"verdict"}
        if set(fields) != wanted:
            raise Rejected(f"{name} has the fields {sorted(wanted)}, not {sorted(fields)}"[:200])
        text = lesson_text(fields["experience"], max_chars) if name == "refine" else ""
        return Verdict(experience_id, Decision(name), text), ""
    except UNREADABLE as error:
        return Verdict(experience_id, Decision.NONE), reason(error)
