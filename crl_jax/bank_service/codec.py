"""Records of crl_jax as messages of the bank's protocol, and back.

Owns: that mapping. Promises: what comes back equals what went, but for the token log of an episode, of which only the log-probs travel,
with `observed_to_proto`; a message that cannot be a record is refused with what would be one. Does not: check sizes (``limits``).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import typing
from typing import Any, TypeVar

import numpy as np
from google.protobuf import json_format

from crl_jax.bank_service import bank_pb2 as pb
from crl_jax.bank_service.limits import Refused, named
from crl_jax.experience.buffer import Sample, check_saved
from crl_jax.experience.carry import Carry
from crl_jax.experience.reader import Shown
from crl_jax.records import (
    BankOp,
    Condition,
    Decision,
    Episode,
    Experience,
    Generation,
    GenerationKind,
    OpKind,
    Provenance,
    Status,
    Task,
    TokenLog,
    Turn,
    Usage,
    Verdict,
)

Kind = TypeVar("Kind", bound=enum.Enum)
_LONGEST = 10**7  # tokens of an episode


def episode_to_proto(e: Episode) -> pb.Episode:
    """A finished episode as its distillation wants it: whole, but for the token log."""
    turns = [_turn(t, observation=t.observation, reply=t.reply) for t in e.turns]
    return _episode(e, turns=turns, final_observation=e.final_observation)


def observed_to_proto(e: Episode) -> pb.Episode:
    """A finished episode as usage and credit want it: no texts, but the log-probs of its moves."""
    return _episode(e, turns=[_turn(t, logps=() if t.tool else e.log.logps[slice(*t.span)].tolist()) for t in e.turns])


def _turn(t: Turn, **more: Any) -> pb.Turn:
    return pb.Turn(span_start=t.span[0], span_end=t.span[1], tool=t.tool, valid=t.valid, **more)


def _episode(e: Episode, **more: Any) -> pb.Episode:
    return pb.Episode(
        id=e.id,
        group_id=e.group_id,
        condition=e.condition.value,
        task=pb.Task(env=e.task.env, seed=e.task.seed, goal=e.task.goal, namespace=e.task.namespace, id=e.task.id),
        status=e.status.value,
        success=e.success,
        reward=e.reward,
        shown=e.shown,
        asks=e.asks,
        started_version=e.started_version,
        verdicts=[pb.Verdict(experience_id=v.experience_id, decision=v.decision.value, text=v.text) for v in e.verdicts],
        **more,
    )


def episode_from_proto(m: pb.Episode) -> Episode:
    """Raises Refused for a message without id or namespace, with an unknown condition or status, or a reward that is no number."""
    reward = m.reward if m.HasField("reward") else None
    if reward is not None and not math.isfinite(reward):
        raise Refused("INVALID_ARGUMENT", f"episode {m.id}: a reward of {reward} is no number: leave it out if nothing scored the episode")
    return Episode(
        id=named("the id of an episode", m.id),
        group_id=m.group_id,
        condition=_value(Condition, m.condition, "condition"),
        task=Task(m.task.env, m.task.seed, m.task.goal, named("task.namespace of an episode", m.task.namespace), m.task.id),
        log=_log(m),
        turns=tuple(Turn(t.observation, t.reply, (t.span_start, t.span_end), t.tool, t.valid) for t in m.turns),
        final_observation=m.final_observation,
        status=_value(Status, m.status, "status"),
        success=m.success,
        reward=reward,
        shown=tuple(m.shown),
        asks=tuple(m.asks),
        started_version=m.started_version,
        verdicts=tuple(Verdict(v.experience_id, _value(Decision, v.decision, "decision"), v.text) for v in m.verdicts),
    )


def _log(m: pb.Episode) -> TokenLog:
    """Log-probs where they were sampled; of the other columns only the provenance of these tokens is true. Empty without log-probs."""
    with_logps = [t for t in m.turns if t.logps]
    if not with_logps:
        return TokenLog.empty()
    end = max(t.span_end for t in with_logps)
    if end > _LONGEST or any(not 0 <= t.span_start <= t.span_end == t.span_start + len(t.logps) for t in with_logps):
        raise Refused("INVALID_ARGUMENT", f"episode {m.id}: a turn needs one log-prob for each token of its span, or none at all")
    provenance, logps = np.full(end, Provenance.OBSERVATION, np.int8), np.zeros(end, np.float32)
    for t in with_logps:
        provenance[t.span_start : t.span_end] = Provenance.ACTION
        logps[t.span_start : t.span_end] = t.logps
    return TokenLog(np.zeros(end, np.int32), provenance, logps, np.full(end, -1, np.int32), np.zeros(end, np.int32))


def episode_to_text(e: Episode) -> str:
    """As it lies in the inbox: JSON."""
    return json_format.MessageToJson(episode_to_proto(e), indent=None, preserving_proto_field_name=True)


def episode_from_text(text: str) -> Episode:
    """Of `episode_to_text`. Raises json_format.ParseError for anything else."""
    return episode_from_proto(json_format.Parse(text, pb.Episode(), ignore_unknown_fields=True))


def checkpoint_from_text(text: str) -> dict[str, Any]:
    """What Checkpoint answered. Raises Refused for anything else: a restore that fails halfway would leave the bank where nobody was."""
    try:
        saved: Any = json.loads(text)
        check_saved(saved["buffer"])
        Carry.from_json(saved.get("carry"))
        whole = all(type(saved[name]) is int and 0 <= saved[name] < 2**62 for name in ("revision", "step"))
    except (ValueError, TypeError, LookupError, RecursionError):
        whole, saved = False, {}
    if not whole:
        raise Refused("INVALID_ARGUMENT", "`saved` is not what Checkpoint answered: send that text as it was")
    return saved


def shown_to_proto(found: list[Shown]) -> pb.ShownList:
    """What one query is shown."""
    return pb.ShownList(shown=[pb.Shown(id=s.id, text=s.text, similarity=s.similarity) for s in found])


def shown_from_proto(m: pb.ShownList) -> list[Shown]:
    """What one query is shown."""
    return [Shown(s.id, s.text, s.similarity) for s in m.shown]


def op_to_proto(op: BankOp) -> pb.Op:
    """One operation."""
    return pb.Op(kind=op.kind.value, text=op.text, targets=op.targets)


def op_from_proto(m: pb.Op) -> BankOp:
    """Raises Refused for an unknown kind, and for the one that does nothing."""
    kind = _value(OpKind, m.kind, "kind", but=OpKind.NOOP)
    return BankOp(kind, m.text, tuple(m.targets))


def experience_to_proto(e: Experience) -> pb.Experience:
    """One lesson."""
    return pb.Experience(**dataclasses.asdict(e))


def experience_from_proto(m: pb.Experience) -> Experience:
    """One lesson."""
    found: dict[str, Any] = {f.name: getattr(m, f.name) for f in dataclasses.fields(Experience)}
    outcome = m.outcome if m.HasField("outcome") else None
    return Experience(**found | {"episode_ids": tuple(m.episode_ids), "parents": tuple(m.parents), "outcome": outcome})


def usage_to_proto(u: Usage) -> pb.Usage:
    """The counters of a lesson."""
    return pb.Usage(**dataclasses.asdict(u))


def usage_from_proto(m: pb.Usage) -> Usage:
    """The counters of a lesson."""
    return Usage(**{f.name: getattr(m, f.name) for f in dataclasses.fields(Usage)})


def generation_to_proto(g: Generation) -> pb.Generation:
    """One generation, whole."""
    columns: dict[str, Any] = dataclasses.asdict(g) | {"kind": g.kind.value}
    return pb.Generation(**columns)


def generation_from_proto(m: pb.Generation) -> Generation:
    """One generation, whole."""
    found: dict[str, Any] = {f.name: getattr(m, f.name) for f in dataclasses.fields(Generation)}
    found |= {name: tuple(found[name]) for name in ("prompt_ids", "response_ids", "logps", "versions")}
    found["kind"] = GenerationKind(m.kind)
    return Generation(**found)


def sample_values(sample: Sample) -> dict[str, float]:
    """The numbers of a popped generation by name."""
    return {name: float(value) for name, value in sample._asdict().items() if name != "generation"}


def sample_of(generation: Generation, values: dict[str, float]) -> Sample:
    """A popped generation of its numbers; a number that this version does not know is left out."""
    types = typing.get_type_hints(Sample)
    known: dict[str, Any] = {name: int(value) if types[name] is int else value for name, value in values.items() if name in types}
    return Sample(generation=generation, **known)


def _value(kind: type[Kind], text: str, what: str, but: Kind | None = None) -> Kind:
    known = [member.value for member in kind if member is not but]
    if text not in known:
        raise Refused("INVALID_ARGUMENT", f"{what} {text[:40]!r} is unknown: use one of {', '.join(known)}")
    return kind(text)
