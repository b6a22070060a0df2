"""The environment pool: real worker processes, failing in every way we know."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from crl_jax.rollout.pool import EnvPool
from envs.api import EnvError, EnvUnavailable

FAULTY = "faulty_env:make"


def with_pool(scenario, **options):
    """Run ``await scenario(pool)`` under a deadline."""

    async def run():
        async with asyncio.timeout(60):
            async with EnvPool(**{"make": FAULTY, **options}) as pool:
                return await scenario(pool)

    return asyncio.run(run())


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.02)


def test_A14_concurrent_leases_share_nothing():
    async def scenario(pool):
        shared = {"tag": "x", "boxed": [0]}
        leases = [await pool.lease("toy", shared) for _ in range(8)]
        shared["boxed"].append(1)  # a caller's later change reaches nobody

        async def episode(i):
            first = await leases[i].reset(i)
            texts = [(await leases[i].step(f"{i}-{turn}")).observation for turn in range(5)]
            return first.text, texts[-1]

        return await asyncio.gather(*(episode(i) for i in range(8)))

    expected = [(f"x[0]:{i}", f"{i}:" + ",".join(f"{i}-{turn}" for turn in range(5))) for i in range(8)]
    assert with_pool(scenario) == expected


def test_N02_exception_fails_its_lease_only_and_discards_the_instance():
    async def scenario(pool):
        bad, good = await pool.lease("toy"), await pool.lease("toy")
        await asyncio.gather(bad.reset(1), good.reset(2))
        results = await asyncio.gather(bad.step("index"), good.step("fine"), return_exceptions=True)
        assert isinstance(results[0], EnvError)
        assert "IndexError" in str(results[0])
        assert results[1].observation == "2:fine"
        with pytest.raises(RuntimeError, match="failed before"):
            await bad.step("again")
        await bad.release()
        await good.release()
        third, fourth = await pool.lease("toy"), await pool.lease("toy")
        await asyncio.gather(third.reset(3), fourth.reset(4))
        stats = pool.stats()
        assert (stats.made, stats.reused, stats.errors, stats.restarts) == (3, 1, 1, 0)

    with_pool(scenario)


def test_released_instance_is_reused_only_after_reset():
    async def scenario(pool):
        lease = await pool.lease("toy")
        await lease.reset(1)
        await lease.release()
        await lease.release()
        again = await pool.lease("toy")
        with pytest.raises(RuntimeError, match="before reset"):
            await again.step("peek")
        assert (await again.reset(5)).text.endswith(":5")
        assert (await again.step("go")).observation == "5:go"
        with pytest.raises(RuntimeError, match="released"):
            await lease.step("mine?")
        assert pool.stats().reused == 1

    with_pool(scenario)


def test_cache_of_free_instances_is_bounded():
    async def scenario(pool):
        leases = [await pool.lease("toy", {"tag": str(i)}) for i in range(4)]
        for lease in leases:
            await lease.release()
        for i in (3, 2, 0):  # 0 was released first, so it had to go
            await pool.lease("toy", {"tag": str(i)})
        assert (pool.stats().reused, pool.stats().made) == (2, 5)

    with_pool(scenario, max_free=2)


def test_deadline_kills_the_worker_and_the_pool_goes_on():
    async def scenario(pool):
        hung, other = await pool.lease("toy"), await pool.lease("toy")
        await asyncio.gather(hung.reset(1), other.reset(2))
        started = time.monotonic()
        results = await asyncio.gather(other.step("a"), hung.step("hang 60"), other.step("b"), return_exceptions=True)
        assert time.monotonic() - started < 5
        assert isinstance(results[1], EnvError)
        assert "deadline of 0.5 s" in str(results[1])
        with pytest.raises(EnvError):
            await other.step("c")
        await hung.release()
        fresh = await pool.lease("toy")
        assert (await fresh.reset(7)).text.endswith(":7")
        stats = pool.stats()
        assert stats.restarts == 1
        assert stats.lost >= 1
        assert stats.made == 2 + 1

    with_pool(scenario, call_timeout_s=0.5)


def test_many_slow_calls_in_one_batch_are_no_deadline():
    async def scenario(pool):
        leases = [await pool.lease("toy") for _ in range(8)]
        await asyncio.gather(*(lease.reset(0) for lease in leases))
        await asyncio.gather(*(lease.step("hang 0.1") for lease in leases))  # 0.8 s together, 0.1 s each
        assert pool.stats().restarts == 0

    with_pool(scenario, call_timeout_s=0.5)


def test_crash_of_a_worker_spares_the_other_worker():
    async def scenario(pool):
        doomed, safe = await pool.lease("toy"), await pool.lease("toy")
        await asyncio.gather(doomed.reset(1), safe.reset(2))
        pids = [(await lease.step("pid")).observation for lease in (doomed, safe)]
        assert pids[0].split(":")[1] != pids[1].split(":")[1]
        with pytest.raises(EnvError, match="gone"):
            await doomed.step("crash")
        assert (await safe.step("ok")).observation.endswith("ok")
        replacement = await pool.lease("toy")
        assert (await replacement.reset(3)).text.endswith(":3")
        assert pool.stats().restarts == 1

    with_pool(scenario, workers=2)


def test_requests_that_arrive_together_travel_together():
    async def scenario(pool):
        leases = await asyncio.gather(*(pool.lease("toy") for _ in range(64)))
        await asyncio.gather(*(lease.reset(0) for lease in leases))
        before = pool.stats().messages
        await asyncio.gather(*(lease.step("x") for lease in leases))
        assert pool.stats().messages - before <= 3
        assert pool.stats().steps == 64

    with_pool(scenario)


def test_an_instance_that_cannot_be_closed_is_counted_and_harms_nobody():
    async def scenario(pool):
        stuck = await pool.lease("unclosable")
        await stuck.release()  # one instance is kept, so the next release closes this one
        await (await pool.lease("toy")).release()
        await (await pool.lease("toy")).reset(0)
        assert (pool.stats().close_errors, pool.stats().errors) == (1, 0)

    with_pool(scenario, max_free=1)


def test_what_is_slow_to_load_is_loaded_before_the_first_call():
    async def scenario(pool):
        return (await pool.lease("toy"), pool.stats().restarts)[1]

    assert with_pool(scenario, make="slow_env:make", call_timeout_s=0.5) == 0
    with pytest.raises(EnvError, match="did not start in time"):
        with_pool(scenario, make="slow_env:make", start_timeout_s=0.5)


def test_the_games_are_loaded_before_the_first_call():
    pytest.importorskip("nle")

    async def scenario(pool):
        return pathlib.Path(f"/proc/{pool._workers[0].pid}/maps").read_text()

    assert "_pynethack" in with_pool(scenario, make="envs.registry:make")


def test_making_errors_reach_the_caller():
    async def scenario(pool):
        with pytest.raises(EnvUnavailable, match="pip install"):
            await pool.lease("unavailable")
        with pytest.raises(EnvError, match="no such level"):
            await pool.lease("broken")
        await (await pool.lease("toy")).reset(0)

    with_pool(scenario)


def test_worker_that_cannot_start_is_an_error():
    with pytest.raises(EnvError, match="worker is gone"):
        with_pool(None, make="no_such_module:make")


def test_worker_does_not_import_jax():
    async def scenario(pool):
        lease = await pool.lease("toy")
        await lease.reset(0)
        return (await lease.step("jax")).observation

    assert with_pool(scenario) == "0:False"
    assert with_pool(scenario_dungeon_modules, make="envs.registry:make")


async def scenario_dungeon_modules(pool):
    pytest.importorskip("nle")
    lease = await pool.lease("dungeon/amber_cellar")
    await lease.reset(0)
    maps = pathlib.Path(f"/proc/{pool._workers[0].pid}/maps").read_text()
    return "_pynethack" in maps and "jaxlib" not in maps


def test_N03_episode_in_a_worker_equals_the_one_in_this_process():
    pytest.importorskip("nle")
    from envs import registry

    moves = ["north", "southwest", "east", "fly", "northwest", "west"]

    async def scenario(pool):
        lease = await pool.lease("dungeon/ruby_hall", {"hazards": "both"})
        return [(await lease.reset(11)).text, *[(await lease.step(move)).observation for move in moves]]

    env = registry.make("dungeon/ruby_hall", hazards="both")
    here = [env.reset(11).text, *[env.step(move).observation for move in moves]]
    env.close()
    assert with_pool(scenario, make="envs.registry:make") == here


def test_cancelled_lease_and_close_twice():
    async def scenario():
        pool = EnvPool(make=FAULTY)
        async with pool:
            lease = await pool.lease("toy")
            await lease.reset(0)
            slow = asyncio.ensure_future(lease.step("hang 0.3"))
            waiting = asyncio.ensure_future(pool.lease("toy"))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await slow
            pid, scratch = pool._workers[0].pid, pool._workers[0]._scratch
            hung = asyncio.ensure_future(lease.step("hang 60"))
            await asyncio.sleep(0.05)
            started = time.monotonic()
            await pool.close()
            await pool.close()
            assert time.monotonic() - started < 5
            with pytest.raises(EnvError, match="closed"):
                await hung
            with pytest.raises(EnvError, match="not open"):
                await pool.lease("toy")
        assert not alive(pid)
        assert not os.path.exists(scratch)

    asyncio.run(scenario())


@pytest.mark.parametrize("last_word", ["fine", "hang 60"])
def test_no_orphans_after_the_parent_is_killed(last_word, tmp_path):
    """The program is read from stdin, so this also shows that workers do not need an importable main module."""
    program = textwrap.dedent(f"""
        import asyncio
        from crl_jax.rollout.pool import EnvPool

        async def main():
            async with EnvPool(workers=2, make={FAULTY!r}) as pool:
                leases = [await pool.lease("toy") for _ in range(2)]
                for lease in leases:
                    await lease.reset(0)
                    print((await lease.step("pid")).observation.split(":")[1], flush=True)
                await asyncio.gather(*(lease.step({last_word!r}) for lease in leases))
                await asyncio.sleep(60)

        asyncio.run(main())
    """)
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[2])])
    parent = subprocess.Popen(
        [sys.executable, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
    )
    parent.stdin.write(program)
    parent.stdin.close()
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(alive(pid) for pid in workers)
    time.sleep(0.1)  # let the last call reach the workers
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not any(alive(pid) for pid in workers))
    parent.stdout.close()
    wait_until(lambda: not list(tmp_path.iterdir()))  # the workers' guards remove them


def test_what_a_failing_environment_says_is_bounded():
    async def scenario(pool):
        lease = await pool.lease("toy")
        await lease.reset(0)
        with pytest.raises(EnvError) as failure:
            await lease.step("shout " + "x" * 1_000_000)
        assert len(str(failure.value)) < 3_000
        assert "characters left out" in str(failure.value)

    with_pool(scenario)
