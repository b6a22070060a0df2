"""The extractor's job on parts that only note what was asked of them: what it learns from, who speaks to the bank, when it ends."""

import concurrent.futures
import contextlib
import types

import pytest
from test_processes import Shared

from crl_jax import extractor_job
from crl_jax.config.load import parse_text
from crl_jax.experience.buffer import Sample
from crl_jax.extractor_job import ExtractorParts
from crl_jax.job import Job
from crl_jax.preemption import Preemption
from crl_jax.processes import Processes
from crl_jax.records import Generation, GenerationKind, Sum
from crl_jax.rollout.shell import Shell
from crl_jax.watchdog import Watchdog

STEPS = 6


def evidence(*names: str) -> list[Sample]:
    def one(i: int, name: str) -> Sample:
        made = Generation(name, GenerationKind.DISTIL, (1, 2, 3), (4, 5 + i), (-0.25, -1.0 / 3), (0, 0), step=1)
        return Sample(made, reward=1.0 - 2 * (i % 2), evidence=1, train_count=0, last_trained_step=-1)

    return [one(i, name) for i, name in enumerate(names)]


class Bank:
    """``finds`` are what the looks at it give: a batch, or the step the run is at."""

    def __init__(self, *finds: list[Sample] | int) -> None:
        self.finds, self.step, self.trained = list(finds), 0, []

    async def pop_batch(self) -> list[Sample] | None:
        found = self.finds.pop(0) if self.finds else None
        if isinstance(found, int):
            self.step, found = found, None
        return found

    async def stats(self) -> dict[str, float]:
        return {"step": self.step}

    async def record_trained(self, ids: list[str], *, step: int) -> None:
        self.trained.append((list(ids), step))


class Extractor:
    name, version = "extractor", 0

    def __init__(self) -> None:
        self.seen, self.sampler = [], types.SimpleNamespace(stats=dict)
        self.published = types.SimpleNamespace(metrics=dict)

    def update(self, samples) -> dict[str, Sum]:
        self.seen.append([(sample.log.ids[-1], round(sample.advantage, 6)) for sample in samples])
        return {"loss": Sum(1.0, 1)}

    def publish(self) -> None:
        self.version += 1


def learned(bank: Bank, processes: Processes | None = None, clock=lambda: 0.0, *, went_on: bool = False):
    """What the job did with ``bank``: its model and the rows of its metrics."""
    rows = []
    quiet = types.SimpleNamespace(check=lambda: None, stats=dict, counts=dict, before=lambda step: None)
    config = parse_text(f"env: {{family: dungeon}}\nrun: {{steps: {STEPS}, save_every: 0}}\n", [])
    with Shell() as shell, Preemption(grace_s=5) as stop, Watchdog(0.0) as watchdog, contextlib.ExitStack():
        parts = ExtractorParts(
            config=config, job=Job("extractor", processes or Processes.alone()), folder=None, shell=shell, manager=None,
            trackers=types.SimpleNamespace(log=lambda step, row: rows.append((step, row))), profiler=quiet, saver=quiet,
            clock=clock, extractor=Extractor(), bank=bank, front=quiet, went_on=went_on,
        )  # fmt: skip
        extractor_job._learn(parts, stop, watchdog, lambda text: None)
        return parts.extractor, rows


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extractor_job, "LOOK_S", 0.0)


def test_every_batch_is_learned_from_until_the_run_is_over() -> None:
    bank = Bank(1, evidence("a", "b"), 3, evidence("c", "d"), STEPS)
    extractor, rows = learned(bank)
    assert bank.trained == [(["a", "b"], 1), (["c", "d"], 3)]
    assert extractor.seen == [[(5, 1.0), (6, -1.0)]] * 2, "advantages over the whole batch"
    assert [step for step, _ in rows] == [1, 2]
    assert [row["extractor/version"] for _, row in rows] == [1, 2]


def test_a_batch_that_comes_with_the_end_is_still_learned_from() -> None:
    bank = Bank(1, STEPS - 1, evidence("a", "b"))
    bank.finds.append(STEPS)
    assert len(learned(bank)[0].seen) == 1


def test_processes_share_out_what_the_first_found_and_it_alone_tells_the_bank() -> None:
    shared, unasked = Shared(), Bank()
    banks = (Bank(1, evidence("a", "b", "c", "d"), STEPS), unasked)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = [pool.submit(learned, bank, Processes(i, 2, shared, deadline_s=20)) for i, bank in enumerate(banks)]
        (first, _), (second, _) = (future.result(60) for future in done)
    assert first.seen + second.seen == [[(5, 1.0), (6, -1.0)], [(7, 1.0), (8, -1.0)]]
    assert (first.version, second.version) == (1, 1)
    assert banks[0].trained == [(["a", "b", "c", "d"], 1)]
    assert unasked.trained == []


def test_evidence_arrives_at_the_others_as_it_was() -> None:
    sent = evidence("a", "b", "c")
    shared = Shared()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        given = (sent, [])
        done = [pool.submit(extractor_job._handed_round, Processes(i, 2, shared, deadline_s=20), given[i]) for i in range(2)]
        arrived = [future.result(60) for future in done]
    assert arrived[0] == arrived[1]
    assert [(s.generation.id, s.generation.response_ids, s.reward) for s in arrived[1]] == [
        (s.generation.id, s.generation.response_ids, s.reward) for s in sent
    ]


def test_the_end_of_an_earlier_run_is_not_this_ones_until_it_has_lasted() -> None:
    now = iter(range(0, 100_000, 100))
    bank = Bank(STEPS)
    learned(bank, clock=lambda: float(next(now)))
    assert next(now) > extractor_job.EARLIER_S
    begun_before = iter(range(0, 100_000, 100))
    learned(Bank(STEPS), clock=lambda: float(next(begun_before)), went_on=True)
    assert next(begun_before) < extractor_job.EARLIER_S
