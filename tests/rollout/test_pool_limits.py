"""What the pool does about environments that wait, hang, grow, crash again and again, or leave processes behind."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from test_pool import FAULTY, alive, wait_until, with_pool

from crl_jax.rollout.pool import EnvPool
from crl_jax.rollout.quarantine import FORGIVEN_AFTER, Quarantine, key_of
from envs.api import EnvError


def test_a_call_that_waits_holds_up_nobody_else():
    async def scenario(pool):
        slow, other, plain = await pool.lease("slow"), await pool.lease("slow"), await pool.lease("toy")
        await asyncio.gather(slow.reset(1), other.reset(2), plain.reset(3))
        started = time.monotonic()
        waits = [asyncio.ensure_future(lease.step("hang 1.0")) for lease in (slow, other)]
        answers = [(await plain.step(str(turn))).observation for turn in range(20)]
        assert time.monotonic() - started < 0.9
        assert answers[-1].endswith(",19")
        assert [step.observation for step in await asyncio.gather(*waits)] == ["1:hang 1.0", "2:hang 1.0"]
        assert time.monotonic() - started < 1.9, "they waited at the same time"
        assert (pool.stats().steps, pool.stats().restarts) == (22, 0)
        for lease in (slow, other, plain):
            await lease.release()
        again = await pool.lease("slow")
        assert (await again.reset(4)).text.endswith(":4")
        assert pool.stats().reused == 1

    with_pool(scenario, call_timeout_s=5.0)


def test_N12_a_start_that_never_ends_is_an_error_of_its_own_and_leaves_no_process(tmp_path):
    async def scenario(pool):
        stuck, plain = await pool.lease("slow"), await pool.lease("toy")
        await plain.reset(1)
        with pytest.raises(EnvError, match="deadline of 1 s"):
            await stuck.reset(0, str(tmp_path / "pid"))
        pid = int((tmp_path / "pid").read_text())
        assert (await plain.step("on")).observation == "1:on", "the worker ends with its last lease"
        fresh = await pool.lease("slow")
        await fresh.reset(5)
        await plain.release()
        await asyncio.to_thread(wait_until, lambda: not alive(pid))
        stats = pool.stats()
        assert (stats.restarts, stats.drained, stats.lost, stats.errors) == (1, 1, 1, 0)

    with_pool(scenario, call_timeout_s=1.0)


def test_N13_a_verifier_that_never_gives_way_ends_in_time_in_any_thread(tmp_path):
    async def scenario(pool):
        verifier = await pool.lease("slow")
        await verifier.reset(0)
        pid = int((await verifier.step("pid")).observation.partition(":")[2])
        started = time.monotonic()
        with pytest.raises(EnvError, match="deadline of 1 s"):
            await verifier.step("power")
        assert time.monotonic() - started < 3
        fresh = await pool.lease("slow")
        await fresh.reset(1)
        await asyncio.to_thread(wait_until, lambda: not os.path.exists(f"/proc/{pid}"))

    with_pool(scenario, call_timeout_s=1.0)


def test_an_episode_has_a_deadline_of_its_own():
    async def scenario(pool):
        long, short = await pool.lease("toy"), await pool.lease("toy")
        await long.reset(1)
        await asyncio.sleep(0.3)
        await short.reset(2)
        with pytest.raises(EnvError, match=r"deadline of 0\.5 s .raise env\.episode_timeout_s"):
            await long.step("hang 0.4")
        await short.step("still in time")
        with pytest.raises(RuntimeError, match="released"):
            await long.reset(1)
        await long.release()
        assert (pool.stats().overdue, pool.stats().restarts) == (1, 0)
        again = await pool.lease("toy")
        await again.reset(3)
        assert pool.stats().reused == 1, "the environment was not at fault"

    with_pool(scenario, episode_timeout_s=0.5)


def test_an_environment_that_costs_workers_their_lives_is_not_tried_again():
    async def scenario(pool):
        for _ in range(2):
            bad, good = await pool.lease("toy", {"tag": "bad"}), await pool.lease("toy", {"tag": "good"})
            await asyncio.gather(bad.reset(0), good.reset(0))
            results = await asyncio.gather(good.step("a"), bad.step("crash"), good.step("b"), return_exceptions=True)
            assert "exited with code 3" in str(results[1])
        with pytest.raises(EnvError, match=r"toy with .*bad.* is in quarantine: its calls cost 2 workers .*code 3.*crl envs check toy"):
            await pool.lease("toy", {"tag": "bad"})
        await (await pool.lease("toy", {"tag": "good"})).reset(0)
        assert (pool.stats().quarantined, pool.stats().restarts) == (1, 2)

    with_pool(scenario, quarantine_after=2)


def test_a_mishap_now_and_then_is_forgiven_and_a_row_of_them_is_not():
    key, tally = key_of("toy", {}), Quarantine(after=3)
    for _ in range(5):  # far apart
        tally.blame([key], "killed")
        for _ in range(FORGIVEN_AFTER):
            assert not tally.refusal(key)
            tally.lent(key)
    for _ in range(3):
        assert not tally.refusal(key)
        tally.blame([key], "killed")
        tally.lent(key)
    assert "cost 3 workers" in tally.refusal(key)


def test_a_worker_whose_environments_keep_failing_is_replaced_when_its_leases_end():
    async def scenario(pool):
        healthy = await pool.lease("toy")
        await healthy.reset(0)
        pid = (await healthy.step("pid")).observation
        for _ in range(33):
            lease = await pool.lease("toy")
            await lease.reset(1)
            with pytest.raises(EnvError, match="IndexError"):
                await lease.step("index")
            await lease.release()
        assert (pool.stats().drained, pool.stats().errors) == (1, 33)
        fresh = await pool.lease("toy")
        await fresh.reset(0)
        assert (await fresh.step("pid")).observation != pid
        assert (await healthy.step("fine")).observation.endswith("fine")
        await healthy.release()

    with_pool(scenario)


def test_a_worker_above_its_memory_is_replaced_and_its_episode_ends_in_peace():
    async def scenario(pool):
        big = await pool.lease("toy")
        await big.reset(0)
        await big.step("grow 150")
        await asyncio.sleep(0.1)
        await big.step("on")
        assert (pool.stats().drained, pool.stats().lost) == (1, 0)
        await big.step("on")
        await big.release()
        await (await pool.lease("toy")).reset(0)
        assert 0 < pool.stats().memory_mib < 140

    with_pool(scenario, worker_memory_mib=150)
    with pytest.raises(EnvError, match="worker_memory_mib=2, but a worker needs"):
        with_pool(scenario, worker_memory_mib=2)


def test_an_environment_that_grows_without_end_takes_neither_the_machine_nor_its_neighbours():
    async def scenario(pool):
        big = await pool.lease("toy")
        await big.reset(0)
        with pytest.raises(EnvError, match="MemoryError"):
            await big.step("grow 4000")  # at once: refused by the system
        with pytest.raises(RuntimeError, match="failed before"):
            await big.step("on")
        endless = await pool.lease("toy")
        await endless.reset(0)
        with pytest.raises(EnvError, match=r"more than 1.5 times worker_memory_mib=150"):
            await endless.step("swell")  # little by little: seen by the worker
        await (await pool.lease("toy")).reset(0)
        assert pool.stats().restarts == 1

    with_pool(scenario, worker_memory_mib=150)


def test_what_cannot_be_sent_fails_its_lease_only():
    async def scenario(pool):
        bad, good = await pool.lease("toy"), await pool.lease("toy")
        await asyncio.gather(bad.reset(1), good.reset(2))
        results = await asyncio.gather(bad.step("unsendable"), good.step("fine"), return_exceptions=True)
        assert "cannot be sent" in str(results[0])
        assert results[1].observation == "2:fine"
        assert pool.stats().restarts == 0

    with_pool(scenario)


def test_workers_that_die_for_no_reason_are_given_up():
    async def scenario(pool):
        for _ in range(3):
            pool._workers[0]._process.terminate()
            dead = pool._workers[0]
            await asyncio.to_thread(wait_until, lambda dead=dead: dead.reason is not None)
        with pytest.raises(EnvError, match="did not start, 3 times one after the other"):
            await pool.lease("toy")

    with_pool(scenario)


@pytest.mark.parametrize("end", ["close", "deadline", "kill -9"])
def test_what_an_environment_started_ends_with_its_worker(end, tmp_path):
    if end == "kill -9":
        children = _children_of_a_program(tmp_path)
    else:

        async def scenario(pool):
            lease = await pool.lease("toy")
            await lease.reset(0)
            children.append(int((await lease.step("child")).observation.partition(":")[2]))
            assert alive(children[0])
            if end == "deadline":
                with pytest.raises(EnvError):
                    await lease.step("hang 60")
                await asyncio.to_thread(wait_until, lambda: not alive(children[0]))

        children = []
        with_pool(scenario, call_timeout_s=0.5 if end == "deadline" else 20.0)
    wait_until(lambda: not any(alive(pid) for pid in children))


def _children_of_a_program(folder):
    """Process ids of what the environments of a program started; it is killed before this returns."""
    program = textwrap.dedent(f"""
        import asyncio
        from crl_jax.rollout.pool import EnvPool

        async def main():
            async with EnvPool(workers=2, make={FAULTY!r}) as pool:
                leases = [await pool.lease("toy"), await pool.lease("slow")]
                for lease in leases:
                    await lease.reset(0)
                    print((await lease.step("child")).observation.split(":")[1], flush=True)
                await asyncio.gather(*(lease.step("hang 60") for lease in leases))

        asyncio.run(main())
    """)
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[2])])
    settings = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=settings)
    with parent:
        children = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(alive(pid) for pid in children)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not list(folder.iterdir()))
    return children


def test_a_pool_wants_sensible_numbers():
    with pytest.raises(ValueError, match="quarantine_after=0"):
        EnvPool(quarantine_after=0)
