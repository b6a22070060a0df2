"""Several processes of one run on one bank: each has its own client, all of them the run's name."""

import asyncio

import pytest
from service_toys import add, episode, remote, run, serving

from crl_jax.bank_service.limits import Refused
from crl_jax.bank_service.run_steps import RunSteps
from crl_jax.experience.merging import MergePolicy


def test_processes_of_one_run_submit_and_observe_their_own_episodes():
    """Two of the actor and two of the extractor: nobody is turned away, and every word counts once."""

    async def story():
        async with serving() as (url, manager, _):
            clients = [remote(url, run="r", seed=n) for n in range(4)]
            lessons = (await clients[0].write("room", add("one", "two"))).written
            for n, bank in enumerate(clients):
                assert await bank.submit(episode(f"s0/g{n}/0", observation=f"door {n}"))
            assert [await bank.drain(10) for bank in clients] == [0] * 4
            observed = (bank.observe([episode(f"s0/g{n}/0", shown=lessons[:1])]) for n, bank in enumerate(clients))
            await asyncio.gather(*observed)
            assert manager.state.usage[lessons[0]].shown == 4
            submitted = [e.episode_ids for e in manager.state.space("room").values() if e.episode_ids]
            assert sorted(submitted) == [(f"r/s0/g{n}/0",) for n in range(4)]
            for bank in clients:
                await bank.aclose()

    run(story())


def test_a_step_begins_once_however_many_processes_tell_of_it():
    async def story():
        async with serving(merge=MergePolicy(every_steps=5)) as (url, manager, _), remote(url, run="r") as one, remote(url, run="r") as two:
            began, begin = [], manager.on_step
            manager.on_step = lambda step: began.append(step) or begin(step)
            await asyncio.gather(one.on_step(5), two.on_step(5))
            await one.on_step(6)
            await two.on_step(5)  # a late word
            await two.on_step(6)
            assert began == [5, 6]
            assert (manager.step, manager.counts["steps_repeated"]) == (6, 3)
            saved = await one.checkpoint()
            await one.on_step(7)
            await one.restore(saved)
            await asyncio.gather(one.on_step(7), two.on_step(7))
            assert began == [5, 6, 7, 7]

    run(story())


def test_every_process_sees_how_far_its_run_is_also_after_a_restart(tmp_path):
    async def story():
        path = tmp_path / "bank.sqlite"
        async with serving(path) as (url, manager, _), remote(url, run="a") as one, remote(url, run="b") as other, remote(url) as any_run:
            assert (await one.stats())["step"] == 0
            await one.on_step(200)
            await other.on_step(3)  # a run of its own: not a late word of the first
            assert manager.step == 3
            assert [(await bank.stats())["step"] for bank in (one, other, any_run)] == [200, 3, 3]
            for step in (9, 9, 4):
                await any_run.on_step(step)  # clients without a run are not known to each other
            assert manager.step == 4
        async with serving(path) as (url, _, _), remote(url, run="a") as again, remote(url, run="new") as new:
            assert (await again.stats())["step"] == 200
            assert (await new.stats())["step"] == 0
            await again.restart(rewind=False)
            assert (await again.stats())["step"] == 0

    run(story())


def test_an_asynchronous_run_that_goes_back_may_submit_again_what_still_waits():
    """T: it plays episodes of the same names; the bank kept the first ones, for it does not go back with the run."""

    async def story():
        async with serving(delay=lambda prompt: 0.3) as (url, manager, _), remote(url, run="r") as bank:
            saved = await bank.checkpoint()
            assert await bank.submit(episode("s1/g0/0", observation="first"))
            await bank.restore(saved, rewind=False)
            assert await bank.submit(episode("s1/g0/0", observation="again"), episode("s1/g1/0", observation="other"))
            assert await bank.drain(10) == 0
            assert sorted(e.text for e in manager.state.space("room").values()) == ["first", "other"]
            assert (manager.counts["submitted_again"], manager.stats()["inbox"]) == (1, 0)

    run(story())


def test_K_an_inbox_from_which_nothing_leaves_refuses_at_once_after_one_wait():
    """The extractor is away: a step of 64 episodes must not wait 64 times."""

    async def story():
        async with serving(delay=lambda prompt: 1.0, queue_size=2, distil_concurrency=1) as (_, manager, _):
            await manager.submit_once("k", [episode("a"), episode("b")], timeout_s=0.2)
            now = asyncio.get_running_loop().time
            started = now()
            for n in range(20):
                with pytest.raises(Refused, match="2 episodes wait for distillation, 2 at most"):
                    await manager.submit_once(f"k{n}", [episode(f"c{n}")], timeout_s=0.2)
            assert 0.15 < now() - started < 1

    run(story())


def test_the_steps_of_many_runs_are_kept_for_the_newest_of_them():
    steps = RunSteps()
    for n in range(1200):
        steps.begin(f"r{n}", n)
    assert [steps.newest(run) for run in ("r0", "r199", "r200", "r1199")] == [0, 0, 200, 1199]
    assert RunSteps.of_json(steps.to_json()).newest("r1199") == 1199
    assert steps.is_new("r1199", 1200)
    assert not steps.is_new("r1199", 1199)
