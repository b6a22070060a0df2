"""A small store with a history of every kind of change, for the tests of verification, recovery and compaction."""

import numpy as np

from crl_jax.experience import bank
from crl_jax.experience.bank import Author, BankState, Guided
from crl_jax.experience.store import Change, Observation, Store
from crl_jax.records import BankOp, Generation, GenerationKind, OpKind

DIM = 8


def generation(n: int) -> Generation:
    ids = tuple(range(n, n + 5))
    return Generation(f"g{n:08d}", GenerationKind.DISTIL, ids, ids, (-0.5,) * 5, (n,) * 5, n)


def write(store: Store, state: BankState, kind: OpKind, text: str = "", targets=(), *, n: int, namespace="room", success=True) -> BankState:
    """One operation of generation ``n``, whose record is stored with it."""
    author = Author(f"g{n:08d}", n, n, (f"e{n}",), success)
    op = BankOp(kind, text, tuple(targets))
    done = bank.apply(state, op, namespace=namespace, author=author)
    vectors = {done.written.id: np.random.default_rng(n).normal(size=DIM)} if done.written else {}
    change = Change(state.revision, op, namespace, author, 0, done)
    store.commit([change], vectors=vectors, fingerprint="f", generations=[generation(n)])
    return done.state


def look(store: Store, state: BankState, ids, *, step: int, success=True, reader="room") -> BankState:
    """One finished episode for each id (an empty one read nothing)."""
    guided = tuple(Guided(i, success, f"{step}-{n}", reader, float(success)) for n, i in enumerate(ids))
    after = bank.observe(state, guided, step=step, decay=0.99)
    store.commit([Observation(state.revision, guided, step, after, 0.99)])
    return after


def history(store: Store, rounds: int = 12) -> dict[int, BankState]:
    """Adds, updates, merges, votes, retirements and episodes; returns the state at every revision."""
    state, past, n = BankState(), {0: BankState()}, 0

    def note(after: BankState) -> BankState:
        past[after.revision] = after
        return after

    for k in range(rounds):
        n += 1
        state = note(write(store, state, OpKind.ADD, f"lesson {k} " + "words " * 20, n=n, success=k % 3 == 0))
        live = list(state.space("room"))
        state = note(look(store, state, [live[0], live[-1], ""], step=k, success=k % 2 == 0))
        if k % 4 == 3:
            n += 1
            state = note(write(store, state, OpKind.MERGE, f"merged {k}", live[:2], n=n))
        if k % 5 == 4:
            n += 1
            state = note(write(store, state, OpKind.UPVOTE, targets=live[-1:], n=n))
            state = note(write(store, state, OpKind.RETIRE, targets=list(state.space("room"))[:1], n=(n := n + 1)))
    return past
