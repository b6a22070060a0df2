"""What an episode is worth, by hand: direct, relative, critic (Eq. 8), entropy bonus."""

import dataclasses
import math

import pytest
from experience_toys import episode

from crl_jax.experience.reward import RewardRule, credits_of, entropy_form, token_entropy
from crl_jax.records import Completion, Condition, Decision, Experience, Finish, Status, TokenLog, Turn, Verdict

BANK = {i: Experience(i, "room", "text", f"g-{i}", 0, 0, 0) for i in ("x1", "x2", "x3")}
BANK["x1b"] = Experience("x1b", "room", "text", "g-x1", 1, 0, 0)  # a second lesson of the generation that wrote x1


def member(name, condition=Condition.GUIDED, group="A", **changes):
    made = episode(name, **{k: v for k, v in changes.items() if k in ("success", "shown", "asks", "status")})
    rest = {k: v for k, v in changes.items() if k in ("verdicts", "reward", "log", "turns")}
    return dataclasses.replace(made, condition=condition, group_id=group, **rest)


def guided(name, **changes):
    return member(name, **{"shown": ("x1",), **changes})


def free(name, **changes):
    return member(name, Condition.FREE, **changes)


def rewards(episodes, **rule):
    credits, counts = credits_of(episodes, BANK.get, RewardRule(**rule))
    return {(c.episode_id, c.generation_id): pytest.approx(c.reward) for c in credits}, dict(counts)


def said(*logps, tool=()):
    """The log and turns of an episode that sampled one token per turn; ``tool``: which of the turns were questions."""
    log, turns = TokenLog.empty(), []
    for n, logp in enumerate(logps):
        log = log.append_completion(Completion((1,), (logp,), (0,), (0,), Finish.STOP))
        turns.append(Turn("obs", "go", (n, n + 1), tool=n in tool))
    return {"log": log, "turns": tuple(turns)}


def test_a_partial_reward_of_the_environment_never_leaks_in():
    found, _ = rewards(
        [guided("a", success=False, reward=0.3), guided("b", success=True, reward=-7.0), guided("c", success=False, reward=9.0)]
    )
    assert found == {("a", "g-x1"): -1.0, ("b", "g-x1"): 1.0, ("c", "g-x1"): -1.0}


def test_relative_reward_is_the_success_minus_the_mean_of_the_free_half_of_the_own_group():
    batch = [
        free("f1", success=True),
        free("f2", success=False),
        free("f3", success=False),
        free("lost", success=False, status=Status.ENV_ERROR),
        guided("won", success=True),
        guided("missed", success=False),
        free("other", group="B", success=True),
        guided("b", group="B", success=True),
        guided("alone", group="C", success=False),
    ]
    found, counts = rewards(batch, base="relative")
    # group A: free mean (1 - 1 - 1) / 3 = -1/3;  group B: 1;  group C has no free half: direct
    assert found == {("won", "g-x1"): 4 / 3, ("missed", "g-x1"): -2 / 3, ("b", "g-x1"): 0.0, ("alone", "g-x1"): -1.0}
    assert counts == {"reward_without_free_half": 1}
    assert rewards(batch)[0][("won", "g-x1")] == 1.0, "direct is the default"


def verdict(experience_id, decision):
    return Verdict(experience_id, decision, "other words" if decision is Decision.REFINE else "")


@pytest.mark.parametrize(
    ("decision", "success", "reward"),
    [(Decision.ACCEPT, True, 2.0), (Decision.ACCEPT, False, 0.0), (Decision.REFINE, True, 1.5), (Decision.REFINE, False, -0.5)],
)
def test_critic_adds_its_score_to_the_outcome(decision, success, reward):
    one = guided("a", success=success, verdicts=(verdict("x1", decision),))
    assert rewards([one], critic=True)[0] == {("a", "g-x1"): reward}
    assert rewards([one])[0] == {("a", "g-x1"): 1.0 if success else -1.0}, "without the option the verdict is worth nothing"


@pytest.mark.parametrize("success", [True, False])
def test_a_rejected_entry_gets_none_of_the_outcome(success):
    one = guided("a", success=success, shown=(), verdicts=(verdict("x1", Decision.REJECT),))
    assert rewards([one])[0] == {}
    assert rewards([one], critic=True)[0] == {("a", "g-x1"): 0.0}, "s_c = 0, and no outcome to add to it"
    unread = guided("a", success=success, shown=(), verdicts=(verdict("x1", Decision.NONE),))
    assert rewards([unread], critic=True)[0] == {}


def test_critic_with_several_entries_and_a_question():
    verdicts = tuple(
        verdict(i, d)
        for i, d in {
            "x1": Decision.ACCEPT,
            "x1b": Decision.REFINE,
            "x2": Decision.REJECT,
            "gone": Decision.ACCEPT,
            "x3": Decision.NONE,
        }.items()
    )
    one = guided("a", success=True, shown=("x1", "x1b", "gone"), asks=("g-ask",), verdicts=verdicts)
    found, _ = rewards([one], critic=True)
    assert found == {("a", "g-x1"): 1.75, ("a", "g-ask"): 1.0, ("a", "g-x2"): 0.0}, "(1 + 0.5) / 2 for the author of two"
    assert one.handed == ("x1", "x1b", "gone", "x2", "x3")


def test_an_author_both_shown_and_rejected_is_credited_once_by_what_was_shown():
    verdicts = (verdict("x1", Decision.REJECT), verdict("x1b", Decision.ACCEPT))
    assert rewards([guided("a", shown=("x1b",), verdicts=verdicts)], critic=True)[0] == {("a", "g-x1"): 2.0}


def test_environment_errors_credit_nobody_whatever_the_verdict():
    one = guided("a", status=Status.ENV_ERROR, verdicts=(verdict("x1", Decision.ACCEPT), verdict("x2", Decision.REJECT)))
    assert rewards([one], critic=True, base="relative", bonus="tanh") == ({}, {})


@pytest.mark.parametrize(
    ("form", "drop", "value"),
    [
        ("off", 0.5, 0.0),
        ("relative", 0.5, 0.25),
        ("relative", -3.0, -1.0),
        ("tanh", 0.5, 0.46211716),
        ("sigmoid", 0.5, 0.24491866),  # 2 / (1 + e^-0.5) - 1
        ("asymmetric", 0.5, 0.5),
        ("asymmetric", 1.5, 1.0),
        ("asymmetric", -0.5, -0.2),
        ("log", 0.5, 0.40546511),  # ln 1.5
        ("log", -0.5, -0.40546511),
        ("sigmoid", -2000.0, -1.0),
    ],
)
def test_forms_of_the_entropy_bonus_at_an_entropy_of_two(form, drop, value):
    assert entropy_form(form, drop, 2.0) == pytest.approx(value, abs=1e-7)
    assert entropy_form(form, 0.0, 2.0) == 0.0


def test_relative_form_without_any_entropy_to_lose():
    assert (entropy_form("relative", 0.0, 0.0), entropy_form("relative", -0.1, 0.0)) == (0.0, -1.0)


def test_entropy_bonus_by_hand():
    batch = [
        free("f1", success=True, **said(-1.0, -3.0)),
        free("f2", success=True, **said(-2.0)),  # free half: 6 nats over 3 tokens = 2
        guided("a", success=True, **said(-0.5, -9.0, -2.5, tool=(1,))),  # 3 nats over 2 moves = 1.5, the question left out
        guided("b", success=False, **said(-4.0)),
        guided("alone", group="C", success=True, **said(-1.0)),
        guided("silent", success=True),
    ]
    found, counts = rewards(batch, bonus="tanh", bonus_weight=0.5)
    assert found[("a", "g-x1")] == 1 + 0.5 * math.tanh(0.5)
    assert found[("b", "g-x1")] == -1 + 0.5 * math.tanh(-2.0)
    assert (found[("alone", "g-x1")], found[("silent", "g-x1")]) == (1.0, 1.0)
    assert counts == {"reward_without_entropy": 2}
    both, _ = rewards(batch, base="relative", bonus="asymmetric")
    assert both[("a", "g-x1")] == 0.0 + 0.5


def test_entropy_is_over_tokens_not_over_episodes():
    assert token_entropy([free("a", **said(-1.0, -1.0, -1.0)), free("b", **said(-5.0))]) == pytest.approx(2.0)
    assert token_entropy([]) is None
