"""The pool of device batches: batching, growth, deadlines and failures with a batch in plain Python; then a real game and both pools."""

import asyncio
import threading
import time

import pytest

from crl_jax.rollout.device_pool import DevicePool
from crl_jax.rollout.pools import Pools, is_batched
from envs.api import EnvError, EnvUnavailable, Observation, Step


class ToyBatch:
    """Counts turns per slot. Replies "hang", "crash" (everybody's) and "stumble" (its holder's) do what they say."""

    made: list["ToyBatch"] = []  # noqa: RUF012

    def __init__(self, env, slots, **options):
        if env == "toy/missing":
            raise EnvUnavailable("pip install 'toy'")
        if env == "toy/broken":
            raise ValueError("no such level")
        self.slots, self.options, self.turns = slots, options, {}
        self.grown, self.sizes, self.threads = [slots], [], set()
        ToyBatch.made.append(self)

    def grow(self, slots):
        self.slots = slots
        self.grown.append(slots)

    def advance(self, resets, steps):
        self.sizes.append(len(resets) + len(steps))
        self.threads.add(threading.current_thread().name)
        if "hang" in steps.values():
            time.sleep(1.0)
        if "crash" in steps.values():
            raise FloatingPointError("the device is on fire")
        answers = {}
        for slot, (seed, task) in resets.items():
            self.turns[slot] = [seed]
            answers[slot] = KeyError(task) if task else Observation(f"start {seed}", ("go",))
        for slot, text in steps.items():
            self.turns[slot].append(text)
            told = Step(" ".join(map(str, self.turns[slot])), 0.0, False, False, False, True, {})
            answers[slot] = IndexError("stumbled") if text == "stumble" else told
        return answers


def with_pool(scenario, make=ToyBatch, **options):
    """Run ``await scenario(pool)`` under a deadline."""

    async def run():
        ToyBatch.made = []
        async with asyncio.timeout(60):
            pool = DevicePool(make, **options)
            try:
                return await scenario(pool)
            finally:
                await pool.close()

    return asyncio.run(run())


async def leased(pool, count):
    leases = await asyncio.gather(*(pool.lease("toy/a") for _ in range(count)))
    await asyncio.gather(*(lease.reset(seed) for seed, lease in enumerate(leases)))
    return leases


def test_an_episode_has_a_deadline_of_its_own_that_spares_the_others():
    async def scenario(pool):
        late, other = await pool.lease("toy/a"), await pool.lease("toy/a")
        await late.reset(1)
        await asyncio.sleep(0.3)
        await other.reset(2)
        await asyncio.sleep(0.3)
        with pytest.raises(EnvError, match=r"deadline of 0\.5 s .raise env\.episode_timeout_s"):
            await late.step("go")
        with pytest.raises(RuntimeError, match="released"):
            await late.step("go")
        assert (await other.step("in time")).observation == "2 in time"
        assert (pool.stats().overdue, pool.stats().restarts) == (1, 0)

    with_pool(scenario, episode_timeout_s=0.5)


def test_what_waits_goes_together_and_slots_grow_in_powers_of_two():
    async def scenario(pool):
        leases = await leased(pool, 64)
        batch = ToyBatch.made[0]
        assert batch.grown == [64], "asked for together, made at once"
        before = pool.stats().messages
        steps = await asyncio.gather(*(lease.step("x") for lease in leases))
        assert pool.stats().messages - before == 1
        assert [step.observation for step in steps] == [f"{seed} x" for seed in range(64)]
        await asyncio.gather(*(pool.lease("toy/a") for _ in range(10)))
        assert batch.grown == [64, 128]
        assert (await leases[7].step("y")).observation == "7 x y", "growth keeps what is under way"
        stats = pool.stats()
        assert (stats.made, stats.resets, stats.steps, stats.errors, stats.restarts) == (74, 64, 65, 0, 0)
        assert batch.threads == {"env-device"}

    with_pool(scenario)


def test_the_next_dispatch_takes_all_that_came_meanwhile_and_the_loop_goes_on():
    async def scenario(pool):
        leases = await leased(pool, 9)
        slow = asyncio.ensure_future(leases[0].step("hang"))
        await asyncio.sleep(0.05)
        late = [asyncio.ensure_future(lease.step("x")) for lease in leases[1:]]
        started, ticks = time.monotonic(), 0
        while not slow.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 20, f"the loop stood still for {time.monotonic() - started:.1f} s"
        await asyncio.gather(*late)
        assert ToyBatch.made[0].sizes[-2:] == [1, 8]

    with_pool(scenario)


def test_released_slots_are_used_again_only_after_a_reset_and_the_limit_is_told():
    async def scenario(pool):
        first, *_ = await leased(pool, 4)
        with pytest.raises(EnvError, match="all 4 slots"):
            await pool.lease("toy/a")
        await first.release()
        await first.release()
        with pytest.raises(RuntimeError, match="released"):
            await first.step("mine?")
        again = await pool.lease("toy/a")
        with pytest.raises(RuntimeError, match="before reset"):
            await again.step("peek")
        assert (await again.reset(9)).text == "start 9"
        assert (pool.stats().made, pool.stats().reused) == (4, 1)

    with_pool(scenario, start_slots=2, max_slots=4)


def test_N02_a_mistake_reaches_its_holder_only():
    async def scenario(pool):
        bad, good = await leased(pool, 2)
        results = await asyncio.gather(bad.step("stumble"), good.step("x"), return_exceptions=True)
        assert isinstance(results[0], EnvError)
        assert "IndexError: stumbled" in str(results[0])
        assert results[1].observation == "1 x"
        with pytest.raises(RuntimeError, match="failed before"):
            await bad.step("again")
        with pytest.raises(EnvError, match="KeyError"):
            await (await pool.lease("toy/a")).reset(0, "no such task")
        assert (pool.stats().errors, pool.stats().restarts) == (2, 0)

    with_pool(scenario)


@pytest.mark.parametrize(("reply", "reason"), [("crash", "on fire"), ("hang", "deadline of 0.3 s")])
def test_a_device_that_fails_or_hangs_costs_its_batch_and_the_pool_goes_on(reply, reason):
    async def scenario(pool):
        doomed, other = await leased(pool, 2)
        spared = await pool.lease("toy/b")
        await spared.reset(5)
        started = time.monotonic()
        results = await asyncio.gather(doomed.step(reply), other.step("x"), return_exceptions=True)
        assert time.monotonic() - started < 0.9
        assert all(isinstance(result, EnvError) and reason in str(result) for result in results)
        assert results[0] is not results[1]
        with pytest.raises(RuntimeError, match="failed before"):
            await other.step("x")
        await doomed.release()
        assert (await spared.step("x")).observation == "5 x"
        (fresh,) = await leased(pool, 1)
        assert (await fresh.step("x")).observation == "0 x"
        assert (pool.stats().restarts, pool.stats().lost) == (1, 2)

    with_pool(scenario, call_timeout_s=0.3)


def test_making_errors_reach_the_caller_and_options_make_batches_of_their_own():
    async def scenario(pool):
        with pytest.raises(EnvUnavailable, match="pip install 'toy'"):
            await pool.lease("toy/missing")
        with pytest.raises(EnvError, match="no such level"):
            await pool.lease("toy/broken")
        await pool.lease("toy/a", {"size": 1})
        await pool.lease("toy/a", {"size": 2})
        await pool.lease("toy/a", {"size": 1})
        assert [batch.options for batch in ToyBatch.made] == [{"size": 1}, {"size": 2}]

    with_pool(scenario)


def test_cancelled_callers_leave_nothing_behind_and_close_ends_all_calls():
    async def scenario(pool):
        leases = await leased(pool, 3)
        slow = asyncio.ensure_future(leases[0].step("hang"))
        await asyncio.sleep(0.05)
        given_up, hung = asyncio.ensure_future(leases[1].step("lost")), asyncio.ensure_future(leases[2].step("x"))
        gone = asyncio.ensure_future(pool.lease("toy/a"))
        await asyncio.sleep(0.05)
        given_up.cancel()
        gone.cancel()
        await slow
        await hung
        assert ToyBatch.made[0].turns[leases[1]._slot] == [1], "what nobody waits for is not played"
        assert len(pool._lanes["toy/a []"]._free) == 8 - 3
        last = asyncio.ensure_future(leases[0].step("hang"))
        await asyncio.sleep(0.05)
        await pool.close()
        await pool.close()
        with pytest.raises(EnvError, match="closed"):
            await last
        with pytest.raises(EnvError, match="closed"):
            await pool.lease("toy/a")

    with_pool(scenario)


def test_both_kinds_of_environments_behind_one_door_with_64_episodes(compiled_in_haste):
    """A batched game and one in worker processes; every batched episode equals the same game alone."""
    pytest.importorskip("gymnax")
    from envs import registry

    options = {"style": "compact", "grammar": "bare"}
    moves = ("left", "stay", "right", "right", "fly", "left", "stay", "left", "right", "right")

    async def episode(pools, seed):
        lease = await pools.lease("gymnax/catch", options)
        told = [(await lease.reset(seed)).text]
        while not (step := await lease.step(moves[(seed + len(told)) % 10])).done:
            told.append(step.observation)
        await lease.release()
        return told, step.success

    async def run():
        async with asyncio.timeout(120), Pools(workers=1) as pools:
            walker = await pools.lease("sokoban/boxes_2", options)
            found = await asyncio.gather(walker.reset(3), *(episode(pools, seed) for seed in range(64)))
            assert found[0].text == registry.make("sokoban/boxes_2", **options).reset(3).text
            with pytest.raises(EnvError, match="nothing/here"):
                await pools.lease("nothing/here")
            stats = pools.stats()
            assert (stats.made, stats.resets, stats.errors) == (65, 65, 1)
            assert stats.messages < 64 + 40
            return found[1:]

    assert is_batched("gymnax/catch")
    assert not is_batched("sokoban/boxes_2")
    episodes = asyncio.run(run())
    alone = registry.make("gymnax/catch", **options)
    for seed in (0, 17, 63):
        told = [alone.reset(seed).text]
        while not (step := alone.step(moves[(seed + len(told)) % 10])).done:
            told.append(step.observation)
        assert episodes[seed] == (told, step.success)
