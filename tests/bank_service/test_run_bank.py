"""A run's bank in this process and on a server: the same story, the same results."""

import asyncio
import dataclasses

import pytest
from service_toys import add, episode, manager_on, remote, run, serving

from crl_jax.bank_service.client import connect
from crl_jax.bank_service.edge import BankUnavailable
from crl_jax.config.load import parse_text
from crl_jax.config.parse import ConfigError
from crl_jax.config.schema import BankServerConfig
from crl_jax.experience.reward import RewardRule
from crl_jax.experience.store import Store
from crl_jax.job import Job
from crl_jax.records import Completion, Condition, Decision, Finish, Provenance, TokenLog, Turn, Verdict
from crl_jax.rollout.bank import ManagedBank
from crl_jax.run_bank import LocalBank, SharedBank


async def training(bank):
    """What a run does with its bank, and what it sees."""
    seen = []
    rollouts = ManagedBank(bank)
    await bank.on_step(0)
    for n in range(3):
        assert await bank.submit(episode(f"e{n}", observation=f"door {n} is locked"))
    seen.append(await bank.drain(10))
    await bank.on_step(1)
    lessons = await rollouts.retrieve([("room", "door 1"), ("room", "door 2"), ("other", "door")])
    seen.append(lessons)
    answer = await rollouts.ask(episode().task, "which door?", "e9", 0)
    seen.append(answer)
    shown = [i for found in lessons for i, _ in found]
    await bank.observe([episode("r0", shown=shown, asks=[answer.generation_id]), episode("r1", shown=shown[:1], success=False)])
    batch = await bank.pop_batch()
    seen.append(batch)
    await bank.record_trained([batch[0].generation.id], step=1)
    seen.append([entry.text for entry in await bank.find([*shown, "x00000099-0"])])
    seen.append([entry.text for entry in await bank.newest(2)])
    saved = await bank.checkpoint()
    seen.append(saved)
    await bank.restore(saved)
    stats = await bank.stats()
    return [*seen, stats["entries"], stats["revision"], stats["searches"], stats["submitted"]]


def test_a_shared_bank_gives_what_a_local_one_gives():
    async def local():
        manager = manager_on(Store.open(":memory:"))
        await manager.start()
        found = await training(LocalBank(manager))
        await manager.aclose()
        return found

    async def shared():
        async with serving() as (url, _, _), remote(url) as bank:
            return await training(SharedBank(bank, read_only=False))

    here, there = run(local()), run(shared())
    assert here == there
    assert len(here[1][0]) == 1
    assert len(here[3]) == 2


def played(name, *, group, condition, logps, success, shown=(), verdicts=()):
    """An episode with a log: a context token, the sampled ones, and a question to the bank, which counts for no entropy."""
    ask = Completion((1,), (-9.0,), (0,), (0,), Finish.STOP)
    said = Completion((1,) * len(logps), tuple(logps), (0,) * len(logps), (0,) * len(logps), Finish.STOP)
    log = TokenLog.empty().append_context([5], Provenance.PROMPT).append_completion(said).append_completion(ask)
    turns = (Turn("seen", "said", (1, 1 + len(logps))), Turn("", "?", (1 + len(logps), 2 + len(logps)), tool=True))
    more = {"group_id": group, "condition": condition, "log": log, "turns": turns, "verdicts": verdicts}
    return dataclasses.replace(episode(name, success=success, shown=shown), **more)


def test_every_option_of_the_reward_gives_the_same_credit_on_a_shared_bank():
    rule = RewardRule("relative", True, "log", 0.5)

    def batch(lesson, other):
        for group, logps in (("g1", (-0.1, -0.7)), ("g2", (-1.5, -0.25, -3.0))):
            free, guided = tuple(2 * p for p in logps), logps
            yield played(f"{group}/0", group=group, condition=Condition.FREE, logps=free, success=False)
            verdicts = (Verdict(lesson, Decision.REFINE, "in other words"), Verdict(other, Decision.REJECT))
            more = {"shown": (lesson,), "verdicts": verdicts, "success": True}
            yield played(f"{group}/1", group=group, condition=Condition.GUIDED, logps=guided, **more)

    async def story(bank, manager):
        await bank.submit(episode("e1", observation="a red door"))
        await bank.submit(episode("e2", observation="a blue key"))
        assert await bank.drain(10) == 0
        lesson, other = manager.state.space("room")
        await bank.retrieve("room", "a red door")
        await bank.observe(list(batch(lesson, other)))
        assert manager._reader._reserved.count(lesson) == 0
        return [(s.generation.id, s.reward, s.evidence) for s in await bank.pop_batch()]

    async def local():
        manager = manager_on(Store.open(":memory:"), reward=rule)
        await manager.start()
        found = await story(LocalBank(manager), manager)
        await manager.aclose()
        return found

    async def shared():
        async with serving(reward=rule) as (url, manager, _), remote(url) as bank:
            return await story(SharedBank(bank, read_only=False), manager)

    here, there = run(local()), run(shared())
    assert here == there
    assert here[0][1] > 2.5  # +1 against -1 of the free half, 0.5 for a refined entry, and a part for the lower entropy
    assert here[1][1:] == (0.0, 2)


def test_the_gate_asks_for_the_counters_of_entries_in_one_call():
    async def story():
        async with serving() as (url, manager, server), remote(url) as bank:
            ids = (await bank.write("room", add("one", "two"))).written
            await bank.observe([episode("r", shown=ids[:1])])
            calls = server.counts["calls"]
            found = await asyncio.gather(*(SharedBank(bank, read_only=False).usage(i) for i in (*ids, "gone")))
            assert [u.shown for u in found] == [1, 0, 0]
            assert server.counts["calls"] == calls + 1
            assert [(await LocalBank(manager).usage(i)).shown for i in (*ids, "gone")] == [1, 0, 0]

    run(story())


def test_a_run_that_is_looked_at_leaves_a_shared_bank_alone():
    async def story():
        async with serving() as (url, manager, _), remote(url) as bank:
            await bank.write("room", add("one"))
            saved = await bank.checkpoint()
            await bank.write("room", add("two"))
            looked = SharedBank(bank, read_only=True)
            await looked.restore(saved)
            await looked.restart()
            assert len(manager.state) == 2

    run(story())


def test_the_bank_of_a_configuration_answers_before_the_run_begins(tmp_path):
    async def story():
        async with serving(token="t") as (url, _, _):
            bank = await connect(BankServerConfig(url=url, timeout_s=5), token="t", run="mine")
            await bank.aclose()
        with pytest.raises(BankUnavailable, match="is the bank's server up"):
            await connect(BankServerConfig(url="grpc://127.0.0.1:9", attempts=1))
        with pytest.raises(ConfigError, match="write grpc://HOST:PORT"):
            await connect(BankServerConfig(url="http://x"))

    run(story())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bank.server.url=http://h:1", "write grpc://HOST:PORT"),
        ("bank.server.tls_root=x.pem", "write bank.server.url=grpcs://h:1"),
        ("bank.server.attempts=0", "attempts must be 1 or more"),
    ],
)
def test_a_server_that_cannot_be_is_refused_with_the_configuration(override, message):
    with pytest.raises(ConfigError, match=message):
        parse_text("env: {family: dungeon}\nbank: {server: {url: 'grpc://h:1'}}\n", [override])
    parse_text("env: {family: dungeon}\nrun: {method: static}\nbank: {server: {url: 'grpc://h:1'}}\n", [])


def test_a_run_that_trains_the_extractor_itself_must_bring_it_to_the_servers_a_shared_bank_asks():
    shared = "env: {family: dungeon}\nbank: {server: {url: 'grpc://h:1'}}\n"
    with pytest.raises(ConfigError, match="so the extractor trained here must be served to it"):
        Job().check(parse_text(shared, []))
    servers = ["extractor.server.url='http://h:2,http://h:3'"]
    with pytest.raises(ConfigError, match=r"`extractor\.server\.weights_folder`: the server must get this run's weights"):
        Job().check(parse_text(shared, servers))
    Job().check(parse_text(shared, [*servers, "extractor.server.weights_folder=w"]))
    Job("actor").check(parse_text(shared, []))
