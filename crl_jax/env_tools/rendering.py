"""``crl envs render``: one episode of a scripted player, for people to read.

Owns: playing it, the text form, and the page: one HTML file that needs nothing else, readable in light and dark. Promises: whatever an
environment or a player says is shown as text, never taken as HTML. Does not: draw games; the transcript is what a model sees.
"""

from __future__ import annotations

import dataclasses
import html
import pathlib
import string
from collections.abc import Sequence
from typing import Any

from crl_jax.env_tools.page import PAGE
from crl_jax.env_tools.pick import WrongWords, explained, options_of, task_of
from envs import registry
from envs.api import EnvSpec, EnvTask, Observation, Step
from envs.players import Player, players_of

_ORDER = ("expert", "explore", "random")  # the first of these that a family has plays unless another is named


@dataclasses.dataclass(frozen=True)
class Shown:
    """An episode and what is told about it."""

    spec: EnvSpec
    task: EnvTask
    seed: int
    player: str
    lesson: str
    options: dict[str, Any]
    first: Observation
    turns: tuple[tuple[str, Step], ...]  # reply, what came of it

    @property
    def outcome(self) -> str:
        """The end in words."""
        last = self.turns[-1][1]
        how = "success" if last.success else "no success"
        return f"{how} after {len(self.turns)} of {self.spec.max_turns} turns" + (", the turns ran out" if last.truncated else "")

    @property
    def reward(self) -> float:
        """Summed."""
        return sum(step.reward for _, step in self.turns)

    @property
    def about(self) -> list[tuple[str, str]]:
        """Facts, by name."""
        source = str(self.turns[-1][1].info.get("data_source", ""))
        facts = [("task", self.task.id), ("kind", self.task.kind), ("seed", str(self.seed)), ("player", self.player)]
        facts += [("lesson", self.lesson), ("options", " ".join(f"{key}={value}" for key, value in self.options.items())), ("data", source)]
        return [(name, value) for name, value in facts if value]


def render_env(
    name: str,
    options: Sequence[str],
    seed: int,
    task: str | None,
    *,
    player: str = "",
    lesson: str = "",
    path: pathlib.Path | None = None,
) -> int:
    """Play one episode and show it; 0. Raises WrongWords, ``EnvUnavailable``, OSError."""
    shown = play(name, options_of(options), seed, task_of(name, task, seed), kind=player, lesson=lesson)
    if path is None:
        print(as_text(shown))
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_page(shown), encoding="utf-8", errors="replace")
    print(f"{path}: {shown.outcome}")
    return 0


def play(name: str, options: dict[str, Any], seed: int, task: EnvTask, *, kind: str = "", lesson: str = "") -> Shown:
    """The episode of a scripted player. Raises WrongWords, ``EnvUnavailable``."""
    with explained():
        spec = registry.spec(name, **options)
        players = players_of(spec.family)
        kinds = players.KINDS
    kind = kind or next((one for one in _ORDER if one in kinds), kinds[0])
    if kind not in kinds:
        raise WrongWords(f"{spec.family} has no player {kind!r}: use one of {', '.join(kinds)}")
    with explained():
        if kind == "follow":
            lesson = lesson or players.lesson(task, seed)
        act = players.make_player(kind, task, seed=seed, options=options, lesson=lesson)
        env = registry.make(name, **options)
    try:
        with explained():
            first = env.reset(seed, task.id)
        turns: list[tuple[str, Step]] = []
        text, actions = first.text, first.actions
        while not turns or not turns[-1][1].done:
            text, actions = _turn(env, act, text, actions, turns)
    finally:
        env.close()
    return Shown(spec, task, seed, kind, lesson, options, first, tuple(turns))


def _turn(env: Any, act: Player, text: str, actions: tuple[str, ...], turns: list[tuple[str, Step]]) -> tuple[str, tuple[str, ...]]:
    reply = act(text, actions)
    step = env.step(reply)
    turns.append((reply, step))
    return step.observation, step.actions


def as_text(shown: Shown) -> str:
    """For the terminal."""
    lines = [f"{shown.spec.name}: {shown.task.goal}", ", ".join(f"{name} {value}" for name, value in shown.about), "", shown.first.text]
    for number, (reply, step) in enumerate(shown.turns, 1):
        lines += ["", f"{number}> {reply}{'' if step.valid else '   [not a valid action]'}", step.observation]
    lines += ["", f"{shown.outcome}, reward {shown.reward:g}"]
    return "\n".join(lines).encode("utf-8", "replace").decode()


def as_page(shown: Shown) -> str:
    """A whole HTML document."""
    turns = "\n".join(_turn_html(number, reply, step) for number, (reply, step) in enumerate(shown.turns, 1))
    facts = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in shown.about)
    return string.Template(PAGE).substitute(
        title=html.escape(shown.spec.name),
        goal=html.escape(shown.task.goal),
        facts=facts,
        outcome=html.escape(shown.outcome),
        mark="won" if shown.turns[-1][1].success else "lost",
        reward=f"{shown.reward:g}",
        prompt=html.escape(shown.spec.system_prompt),
        first=html.escape(shown.first.text),
        turns=turns,
    )


def _turn_html(number: int, reply: str, step: Step) -> str:
    notes = [] if step.valid else ["not a valid action"]
    notes += [] if step.info.get("effective") or not step.valid else ["changed nothing"]
    notes += [f"reward {step.reward:g}"] if step.reward else []
    said = html.escape(reply) or "<i>(nothing)</i>"
    told = "".join(f'<span class="note">{html.escape(note)}</span>' for note in notes)
    return (
        f'<li><div class="reply{"" if step.valid else " invalid"}"><span class="number">{number}</span><pre>{said}</pre>{told}</div>'
        f'<pre class="seen">{html.escape(step.observation)}</pre></li>'
    )
