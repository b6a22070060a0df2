"""Whatever is done to a bank, in whatever order: replay, compare-and-set, lineage, counters, and an index that equals the exact one."""

import numpy as np
from experience_toys import HashEmbedder
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from crl_jax.experience import bank_json
from crl_jax.experience.bank import Author, Guided
from crl_jax.experience.eviction import Eviction
from crl_jax.experience.index import ExactIndex
from crl_jax.experience.scann_index import ScannIndex
from crl_jax.experience.store import Store
from crl_jax.experience.verify import verify
from crl_jax.experience.writer import WritePolicy, Writer
from crl_jax.records import BankOp, Generation, GenerationKind, OpKind

WORDS = ["red", "door", "key", "lava", "north", "rope"]
SPACES = st.sampled_from(["room", "maze"])
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)
WRITES = st.tuples(st.sampled_from(list(OpKind)), TEXTS, st.lists(st.integers(0, 30), max_size=3))
POLICIES = st.builds(
    WritePolicy,
    capacity=st.sampled_from([3, 1000]),
    eviction=st.sampled_from(list(Eviction)),
    protect_rare=st.sampled_from([0.0, 0.5]),
    dedup_cosine=st.sampled_from([0.999, 2.0]),
    keep_better=st.booleans(),
)


class Bank(RuleBasedStateMachine):
    @initialize(policy=POLICIES)
    def open(self, policy):
        self.store = Store.open(":memory:")
        embedder = HashEmbedder()
        self.writer = Writer(self.store, embedder, lambda: ScannIndex(embedder.dim, tail_min=2), policy)
        self.ids, self.generations, self.step = [], 0, 0
        self.past = {0: bank_json.to_json(self.writer.state)}

    def author(self, outcome):
        self.generations += 1
        name = f"g{self.generations:08d}"
        made = Generation(name, GenerationKind.DISTIL, (1,), (2,), (-0.5,), (3,), self.step)
        return Author(name, 3, self.step, (f"e{self.step}",), outcome), made

    @rule(writes=st.lists(WRITES, min_size=1, max_size=3), namespace=SPACES, outcome=st.sampled_from([True, False, None]))
    def write(self, writes, namespace, outcome):
        author, made = self.author(outcome)
        ops = [BankOp(kind, text, tuple(self.ids[p % len(self.ids)] for p in picks) if self.ids else ()) for kind, text, picks in writes]
        before = self.writer.state
        done = self.writer.write(ops, namespace=namespace, author=author, generations=[made])
        self.ids += [entry.id for entry in done.written]
        other = "maze" if namespace == "room" else "room"
        assert self.writer.state.space(other) == before.space(other), "X10: a write stays in its namespace"
        for entry in done.written:
            assert (entry.generation_id, entry.outcome, entry.namespace) == (author.generation_id, outcome, namespace)
        if len(ops) == 1 and ops[0].kind is OpKind.MERGE and any(t not in before.space(namespace) for t in ops[0].targets):
            assert done.written == (), "compare-and-set"
            assert self.writer.state.space(namespace) == before.space(namespace)

    @rule(picks=st.lists(st.integers(0, 30), min_size=2, max_size=3), namespace=SPACES)
    def merge(self, picks, namespace):
        if self.ids:
            self.write([(OpKind.MERGE, "red door key", picks)], namespace, None)

    @rule(picks=st.lists(st.integers(0, 30), max_size=3), success=st.booleans(), namespace=SPACES, decay=st.sampled_from([1.0, 0.95]))
    def observe(self, picks, success, namespace, decay):
        self.step += 1
        ids = [self.ids[p % len(self.ids)] for p in picks] if self.ids else []
        self.writer.observe([Guided(i, success, f"e{self.step}", namespace) for i in (*ids, "")], step=self.step, decay=decay)

    @rule(namespace=SPACES)
    def deduplicate(self, namespace):
        before = self.writer.state
        gone = self.writer.deduplicate(namespace)
        assert len(before) - len(self.writer.state) == gone
        shown = lambda state: sum(u.shown for u in state.usage.values())  # noqa: E731
        assert shown(self.writer.state) == shown(before), "no reader is forgotten"

    @rule(data=st.data())
    def rewind(self, data):
        revision = data.draw(st.sampled_from(sorted(self.past)))
        self.writer.rewind(revision)
        assert bank_json.to_json(self.writer.state) == self.past[revision]
        self.past = {r: text for r, text in self.past.items() if r <= revision}
        self.ids = [i for i in self.ids if self.store.experience(i) is not None]

    @invariant()
    def history_and_tables_agree(self):
        if not hasattr(self, "store"):
            return
        state = self.writer.state
        self.past[state.revision] = bank_json.to_json(state)
        assert verify(self.store).faults == ()
        assert bank_json.to_json(self.store.load()) == self.past[state.revision]
        for space in state.spaces.values():
            for entry in space.values():
                parents = [self.store.experience(parent) for parent in entry.parents]
                assert all(parent is not None and parent.namespace == entry.namespace for parent in parents)
                assert not any(parent.id in space for parent in parents), "what was replaced is gone"
        counted = [g for i in ("", *self.ids) for g in self.store.guided(i)]
        assert sum(t.episodes for t in state.transfer.values()) == len({id(g) for g in counted})
        assert set(state.usage) <= {i for space in state.spaces.values() for i in space}

    @invariant()
    def the_index_equals_the_exact_one(self):
        if not hasattr(self, "store"):
            return
        for namespace, space in self.writer.state.spaces.items():
            vectors = self.writer.vectors(list(space))
            exact = ExactIndex(HashEmbedder.dim)
            exact.add(list(vectors), np.stack(list(vectors.values())), namespace=namespace)
            queries = HashEmbedder().embed(["red door", "lava rope"])
            expected = exact.search(queries, 50, namespace=namespace)
            found = self.writer.index.search(queries, 50, namespace=namespace)
            for one, other in zip(expected, found, strict=True):
                assert {c.id for c in one} == {c.id for c in other}
                np.testing.assert_allclose([c.similarity for c in one], [c.similarity for c in other], atol=1e-5)

    def teardown(self):
        if hasattr(self, "store"):
            self.writer.index.close()
            self.store.close()


Bank.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestBank = Bank.TestCase
