"""No dead-lock by construction: while the extractor learns, and while new weights are brought to its sampler, searches, questions,
distillations and merges are answered, by the weights of before; new ones take over when they are there.

One run with real engines for all tests; what holds it up is put into its learner and its publisher by hand."""

import concurrent.futures
import contextlib
import threading
import time

import pytest
from toy_runs import Faults, ToyPool, config_of, toys

from crl_jax import build
from crl_jax.experience.bank import Author
from crl_jax.experience.buffer import Sample
from crl_jax.extractor_learner import ExtractorLearner
from crl_jax.records import BankOp, Condition, Episode, OpKind, Status, Sum, Task, TokenLog, Turn

pytestmark = pytest.mark.system

ANSWER_S = 60.0  # a first answer compiles
SPACE = "dungeon"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A started run: real engines and bank, and its extractor's learner beside it."""
    patch = pytest.MonkeyPatch()
    real = build.Role, build.open_sampler
    toys(patch, Faults(), pool=ToyPool)
    patch.setattr(build, "Role", real[0])
    patch.setattr(build, "open_sampler", real[1])
    few = ("extractor.slots=4", "extractor.sampling.max_new_tokens=4", "actor.slots=4", "bank.merge_every=0", "ask.timeout_s=50")
    with build.open_run(config_of(tmp_path_factory.mktemp("run"), *few), resume=False) as run, ExtractorLearner(run) as learner:
        _serve_all(run, "warm up")
        yield run, learner
    patch.undo()


def episode(name):
    turn = Turn(f"you see {name}", "go", (0, 1))
    task = Task("dungeon/amber_cellar", 1, "find the stairs", SPACE)
    return Episode(name, name, Condition.FREE, task, TokenLog.empty(), (turn,), "the end", Status.TERMINATED, True, 1.0)


def _serve_all(run, name):
    """One of each, all at once; the entries by which they are served come from a write by hand."""
    bank, manager = run.manager, run.manager.manager

    async def all_of_them():
        ops = [BankOp(OpKind.ADD, f"{name} lesson {n}") for n in range(3)]
        await manager._thread.run(manager._writer.write, ops, namespace=SPACE, author=Author("", 0, 0))
        found = await bank.retrieve(SPACE, name)
        answer = await bank.ask(SPACE, name, episode_id=f"{name}/{time.monotonic()}", number=0)
        await bank.submit(episode(f"{name}/{time.monotonic()}"))
        left = await bank.drain(ANSWER_S)
        before = manager.counts["generations_merge"]
        await manager.merge(SPACE)
        return found, answer, left, manager.counts["generations_merge"] - before

    found, answer, left, merges = run.shell.call(all_of_them(), ANSWER_S, f"serving during {name}")
    assert found
    assert answer is not None
    assert answer.generation_id or manager.counts["ask_fallbacks"]
    assert left == 0
    assert merges > 0
    assert manager.counts["sample_timeouts"] == 0


def versions(run):
    """Of the newest generation of the bank."""
    newest = run.manager.manager._store.read(lambda db: db.execute("SELECT id FROM generations ORDER BY id DESC LIMIT 1").fetchone())[0]
    return set(run.manager.manager._store.generation(newest).versions)


@contextlib.contextmanager
def held(monkeypatch, target, name, then):
    """``target.name`` waits inside the block, and does ``then`` afterwards."""
    reached, gate = threading.Event(), threading.Event()

    def wait(*arguments):
        reached.set()
        assert gate.wait(120)
        return then(*arguments)

    monkeypatch.setattr(target, name, wait)
    try:
        yield reached
    finally:
        gate.set()


def _evidence(run, monkeypatch):
    """One batch is ready, whatever the bank's buffer holds."""
    batches = [[Sample(run.manager.manager._store.generation("g00000001"), 1.0, 1, 0, -1)]]
    monkeypatch.setattr(run, "pop_evidence", lambda step: batches.pop() if batches else None)
    monkeypatch.setattr(run, "record_training", lambda *_: None)


def test_everything_is_served_while_the_extractor_learns(opened, monkeypatch):
    run, learner = opened
    _evidence(run, monkeypatch)
    version = run.extractor.version
    with held(monkeypatch, run.extractor, "update", lambda samples: {"loss": Sum(1.0, 1.0)}) as reached:
        learner.step(0)
        assert reached.wait(30)
        _serve_all(run, "learning")
        learner.step(1)  # the actor's learner does not wait either
        assert run.extractor.version == version
        assert versions(run) == {version}
    learner.settle()
    assert run.extractor.version == version + 1
    _serve_all(run, "learned")
    assert versions(run) == {version + 1}


def test_everything_is_served_while_new_weights_are_brought(opened, monkeypatch):
    run, _ = opened
    version, publisher = run.extractor.version, run.extractor.publisher
    with (
        concurrent.futures.ThreadPoolExecutor(1) as thread,
        held(monkeypatch, publisher, "publish", publisher.publish) as reached,
    ):
        publishing = thread.submit(run.extractor.publish)
        try:
            assert reached.wait(30)
            _serve_all(run, "publishing")
            assert versions(run) == {version}
        finally:
            monkeypatch.undo()
    publishing.result(60)
    _serve_all(run, "published")
    assert versions(run) == {version + 1}


@pytest.mark.parametrize("drain_s", [0.0, 30.0], ids=["in the middle of requests", "drained"])
def test_everything_is_served_between_and_during_swaps(drain_s, opened, monkeypatch):
    run, _ = opened
    monkeypatch.setattr(run.extractor.sampler, "_drain_timeout_s", drain_s)
    over = threading.Event()

    def swap():
        swaps = 0
        while not over.is_set():
            run.extractor.publish()
            swaps += 1
            over.wait(0.005)
        return swaps

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        swapping = thread.submit(swap)
        try:
            for n in range(3):
                _serve_all(run, f"swap {n}")
        finally:
            over.set()
        assert swapping.result(60) > 1
