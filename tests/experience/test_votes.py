"""Votes in the extractor's grammar: an option, off by default."""

import pytest
from experience_toys import episode
from manager_toys import add, build, run, teach

from crl_jax.experience.extractor import DEFAULT_PROMPTS, ExtractorPrompts, ParsedOp, parse, resolve
from crl_jax.records import BankOp, OpKind, Usage

VOTES = '[{"op":"upvote","targets":[2,1]},{"op":"downvote","targets":[3,9]}]'


def test_votes_are_read_only_where_they_are_allowed():
    assert "unknown operation 'upvote'" in parse(VOTES).error
    parsed = parse(VOTES, allow_votes=True)
    up, down = parsed.ops
    assert (up, down) == (ParsedOp(OpKind.UPVOTE, "", (2, 1)), ParsedOp(OpKind.DOWNVOTE, "", (3, 9)))
    assert not parsed.is_noop
    shown = ["x1", "x2", "x3"]
    assert resolve(up, shown) == (BankOp(OpKind.UPVOTE, "", ("x2", "x1")), 0)
    assert resolve(down, shown) == (BankOp(OpKind.DOWNVOTE, "", ("x3",)), 1)
    assert resolve(down, []) == (BankOp(OpKind.NOOP), 2)
    assert resolve(up, shown, merging=True) == (None, 0), "a merge pass neither adds nor votes"


@pytest.mark.parametrize(
    "response",
    [
        '{"op":"upvote"}',
        '{"op":"upvote","targets":[]}',
        '{"op":"upvote","targets":[0]}',
        '{"op":"downvote","targets":[true]}',
        '{"op":"downvote","targets":[1.0]}',
        '{"op":"downvote","targets":1}',
        '{"op":"upvote","targets":[1],"experience":"text"}',
        '{"op":"upvote","targets":[1],"targets":[2]}',
        '[{"op":"upvote","targets":[1]},{"op":"return"}]',
        '{"op":"merge","targets":[1],"experience":"text"}',
        '{"op":"retire","targets":[1]}',
    ],
)
def test_E04_votes_of_another_shape_are_rejected_whole(response):
    assert parse(response, allow_votes=True).error


def test_only_the_prompt_variant_offers_votes():
    files = {path.name: path.read_text(encoding="utf-8") for path in DEFAULT_PROMPTS.parent.glob("extractor_prompts*.json")}
    assert [name for name, text in files.items() if "vote" in text] == ["extractor_prompts_votes.json"]
    assert "upvote" in ExtractorPrompts.load(DEFAULT_PROMPTS.with_name("extractor_prompts_votes.json")).distil_system


@pytest.mark.parametrize("votes", [False, True])
def test_the_manager_takes_votes_only_with_the_option(votes):
    def reply(prompt):
        return '[{"op":"upvote","targets":[1]}]' if "1. first" in prompt else add("first")

    async def story():
        async with build(reply, votes=votes) as manager:
            await teach(manager, "an episode")
            (first,) = manager.state.space("room")
            assert await manager.submit(episode("v", shown=[first]))
            assert await manager.drain(20) == 0
            assert manager.stats().get("parse_failures", 0) == (0 if votes else 1)
            assert list(manager.state.space("room")) == [first]
            assert manager.state.usage.get(first, Usage()).votes == int(votes)

    run(story())
