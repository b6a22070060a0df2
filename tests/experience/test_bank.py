"""The pure core: what each operation does to the entries."""

import pytest

from crl_jax.experience import bank
from crl_jax.experience.bank import Author, BankState, Guided
from crl_jax.experience.eviction import Eviction, plan_eviction
from crl_jax.records import BankOp, OpKind, Usage

AUTHOR = Author("g1", 3, 5, ("e1",))


def run(state, kind, text="", targets=(), namespace="room", **more):
    return bank.apply(state, BankOp(kind, text, tuple(targets)), namespace=namespace, author=AUTHOR, **more)


def filled(*texts, namespace="room", state=None):
    state = state or BankState()
    for text in texts:
        state = run(state, OpKind.ADD, text, namespace=namespace).state
    return state


def texts(state, namespace="room"):
    return [entry.text for entry in state.space(namespace).values()]


def test_add_writes_a_named_entry():
    done = run(BankState(), OpKind.ADD, "look first", op_index=2)
    assert done.state.revision == 1
    assert done.written == done.state.find("x00000001-2")
    assert (done.written.generation_id, done.written.author_version, done.written.step, done.written.episode_ids) == ("g1", 3, 5, ("e1",))
    assert BankState() == BankState(revision=0)


def test_update_replaces_its_targets_by_one_entry():
    state = filled("a", "b", "c")
    ids = list(state.space("room"))
    done = run(state, OpKind.UPDATE, "ab", [ids[0], ids[1], ids[0]])
    assert texts(done.state) == ["c", "ab"]
    assert done.written.parents == done.retired == (ids[0], ids[1])
    assert texts(state) == ["a", "b", "c"], "the old state is untouched"


def test_update_with_lost_targets_is_counted_and_becomes_an_add():
    state = filled("a")
    some = run(state, OpKind.UPDATE, "new", ["x00000001-0", "gone"])
    assert texts(some.state) == ["new"]
    assert [p.code for p in some.problems] == ["unknown_target"]
    none = run(state, OpKind.UPDATE, "new", ["gone"])
    assert texts(none.state) == ["a", "new"]
    assert [p.code for p in none.problems] == ["unknown_target", "update_became_add"]


def test_merge_is_a_compare_and_set():
    state = filled("a", "b")
    ids = list(state.space("room"))
    refused = run(state, OpKind.MERGE, "ab", [*ids, "gone"])
    assert refused.state is state
    assert refused.problems[-1].code == "merge_refused"
    assert run(state, OpKind.MERGE, "ab", []).state is state
    done = run(state, OpKind.MERGE, "ab", ids)
    assert (texts(done.state), done.retired) == (["ab"], tuple(ids))


@pytest.mark.parametrize("kind", [OpKind.ADD, OpKind.UPDATE, OpKind.MERGE])
def test_nothing_vanishes_for_an_empty_text(kind):
    state = filled("a")
    done = run(state, kind, " \n", list(state.space("room")))
    assert done.state is state
    assert done.problems[-1].code == "empty_text"


def test_noop_and_retire():
    state = filled("a", "b")
    assert run(state, OpKind.NOOP, "x", ["x00000001-0"]).state is state
    done = run(state, OpKind.RETIRE, "", ["x00000001-0", "gone"])
    assert (texts(done.state), done.written, done.state.revision) == (["b"], None, 3)
    assert run(state, OpKind.RETIRE, "", ["gone"]).state is state


@pytest.mark.parametrize("kind", [OpKind.UPDATE, OpKind.MERGE, OpKind.RETIRE])
def test_X10_writes_are_scoped(kind):
    state = filled("same", namespace="b", state=filled("same", namespace="a"))
    in_b = list(state.space("b"))
    done = run(state, kind, "new", in_b, namespace="a")
    assert done.state.space("b") == state.space("b")
    assert done.problems[0].code == "unknown_target"
    changed = run(state, OpKind.UPDATE, "new", list(state.space("a")), namespace="a").state
    assert (texts(changed, "a"), texts(changed, "b")) == (["new"], ["same"])


def test_usage_is_counted_for_live_entries_and_starts_anew_unless_inherited():
    state = filled("a", "b")
    state = bank.observe(state, [Guided("x00000001-0", True), Guided("x00000001-0", False), Guided("gone", True)], step=9)
    assert dict(state.usage) == {"x00000001-0": Usage(2, 1, 9, 2.0, 1.0)}
    assert state.revision == 3
    assert bank.observe(state, [Guided("gone", True)], step=9) is state
    assert dict(run(state, OpKind.UPDATE, "new", ["x00000001-0"]).state.usage) == {}
    heir = run(state, OpKind.UPDATE, "new", ["x00000001-0", "x00000002-0"], inherit_usage=True)
    assert dict(heir.state.usage) == {heir.written.id: Usage(2, 1, 9, 2.0, 1.0)}


def test_inherited_recent_counts_fade_to_the_newest_step():
    state = filled("a", "b")
    a, b = state.space("room")
    state = bank.observe(state, [Guided(a, True)] * 4, step=10, decay=0.5)
    state = bank.observe(state, [Guided(b, False)], step=12, decay=0.5)
    heir = run(state, OpKind.UPDATE, "new", [a, b], inherit_usage=True, decay=0.5)
    assert heir.state.usage[heir.written.id] == Usage(5, 4, 12, 2.0, 1.0), "by hand: 4 / 2 ** 2 + 1 and 4 / 2 ** 2"


def test_eviction_order():
    state = filled("a", "b", "c", "d")
    a, b, c, d = state.space("room")
    state = bank.observe(state, [Guided(a, True), Guided(b, False), Guided(c, True)], step=8)
    state = bank.observe(state, [Guided(a, True)], step=9)
    assert plan_eviction(state, "room", capacity=4, policy=Eviction.FIFO) == ()
    assert plan_eviction(state, "room", capacity=2, policy=Eviction.FIFO) == (a, b)
    assert plan_eviction(state, "room", capacity=2, policy=Eviction.LRU) == (b, c)
    assert plan_eviction(state, "room", capacity=3, policy=Eviction.UTILITY) == (b,)
    assert plan_eviction(state, "room", capacity=1, policy=Eviction.LRU) == (b, c, a), "the newest stays"
    assert d in state.space("room")


def test_a_large_namespace_is_emptied_by_a_hundredth_at_once():
    state = filled(*map(str, range(201)))
    gone = plan_eviction(state, "room", capacity=200, policy=Eviction.FIFO)
    assert gone == tuple(list(state.space("room"))[:3])


def test_rare_successes_are_evicted_last():
    state = BankState()
    for n in range(10):
        author = AUTHOR._replace(outcome=n == 2)
        state = bank.apply(state, BankOp(OpKind.ADD, str(n)), namespace="room", author=author).state
    ids = list(state.space("room"))
    plan = lambda capacity, share: plan_eviction(state, "room", capacity=capacity, policy=Eviction.FIFO, protect_rare=share)  # noqa: E731
    assert plan(6, 0.1) == (ids[0], ids[1], ids[3], ids[4])
    assert plan(6, 0.0) == plan(6, 0.05) == (*ids[:4],), "one in ten is not rare at a share of 0.05"
    assert plan(1, 0.1) == (ids[0], ids[1], *ids[3:9], ids[2]), "protected, not immortal"


def test_recent_counts_fade_with_steps_and_so_does_the_utility():
    state = bank.observe(filled("a"), [Guided("x00000001-0", True)], step=4, decay=0.5)
    state = bank.observe(state, [Guided("x00000001-0", False)], step=6, decay=0.5)
    usage = state.usage["x00000001-0"]
    assert usage == Usage(2, 1, 6, 1.25, 0.25)  # by hand: 0.5 ** 2 = a quarter of the first episode is left
    assert bank.utility(usage) == 1.25 / 3.25
    assert bank.utility(usage, decay=0.5, age=1) == 1.125 / 2.625
    assert bank.utility(Usage()) == 0.5


def test_votes_retire_what_falls_below_zero():
    state = filled("a", "b")
    a, b = state.space("room")
    up = run(state, OpKind.UPVOTE, targets=[a, a]).state
    assert (up.usage[a].votes, up.revision) == (1, 3)
    down = run(up, OpKind.DOWNVOTE, targets=[a, b])
    assert (list(down.state.space("room")), down.retired, down.state.revision) == ([a], (b,), 4)
    assert down.state.usage[a].votes == 0
    assert b not in down.state.usage
    nothing = run(state, OpKind.DOWNVOTE, targets=["gone"])
    assert nothing.state is state
    assert [p.code for p in nothing.problems] == ["unknown_target", "vote_without_target"]
    assert run(state, OpKind.UPVOTE, targets=[a], namespace="other").state is state, "X10: votes are scoped too"


def test_the_newest_entries_of_a_space():
    state = filled("a", "b", "c")
    assert [entry.text for entry in state.space("room").newest(2)] == ["c", "b"]
    assert [entry.text for entry in state.space("room").newest(9)] == ["c", "b", "a"]
