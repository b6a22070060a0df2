"""Replies and the action they name."""

import pytest

from envs.parse import parse_action

ACTIONS = ("left", "right", "up")


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("<think><action>left</action></think><action>right</action>", "right"),
        ("<action>up</think>", None),
        ("<think>I could go <action>left</action>", None),  # never closed: all of it is reasoning
        ("<action>left</action></think> so <action>up</action>", "up"),  # the chat template opened the reasoning
        ("<action>left</action> or <action>right</action>", "right"),  # several: the last counts
        ("<action>left</action><action>fly</action>", None),  # the last one, not the last known one
        ("<ACTION> Left </ACTION>", "left"),
        ("<think>a</think><think>b</think>\n<action>up</action>\n", "up"),
        ("left", None),
        ("", None),
    ],
)
def test_N14_tagged_action_is_the_last_well_formed_one_outside_reasoning(reply, action):
    assert parse_action(reply, ACTIONS, "tagged") == action


@pytest.mark.parametrize(("reply", "action"), [(" LEFT\n", "left"), ("go left", None), ("", None), ("<action>left</action>", None)])
def test_bare_action_is_the_whole_reply(reply, action):
    assert parse_action(reply, ACTIONS, "bare") == action


def test_unknown_grammar_is_an_error():
    with pytest.raises(ValueError, match="bare"):
        parse_action("left", ACTIONS, "loose")  # pyright: ignore[reportArgumentType]


def test_thousands_of_unclosed_tags_are_read_in_time_that_grows_with_their_number():
    """A pattern that looks for the closing tag from every opening one would take minutes here."""
    assert parse_action("<think>" * 100_000 + "</think><action>up</action>", ACTIONS, "tagged") == "up"
    assert parse_action("<think></think>" * 50_000 + "<action>" * 50_000, ACTIONS, "tagged") is None
