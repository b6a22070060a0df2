"""The threads of the bank: order, cancellation, and that a hung call cannot hold the process."""

import asyncio
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import CancelledError

import pytest

from crl_jax.experience.thread import DaemonThread, WriterThread

HUNG = """
import asyncio, threading
from test_manager import build, episode
from experience_toys import HashEmbedder

class Hung(HashEmbedder):
    def embed(self, texts):
        threading.Event().wait()

async def main():
    manager = build(embedder=Hung(), io_timeout_s=0.2)
    await manager.start()
    await manager.submit(episode())
    for wait in (manager.drain(20), manager.retrieve("room", "q"), manager.aclose(1.0)):
        try:
            await wait
        except TimeoutError as error:
            print(error)

asyncio.run(main())
"""


def test_A13_a_hung_embedder_is_named_and_the_process_ends():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HUNG)],
        cwd=pathlib.Path(__file__).parent,
        env={"PYTHONPATH": str(pathlib.Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "write on the bank's thread took longer than 0.2 s" in done.stdout


def test_calls_run_in_order_and_hand_over_results_and_errors():
    thread, seen = DaemonThread("t"), []
    futures = [thread.submit(lambda n=n: seen.append(n) or n * n) for n in range(20)]
    assert [f.result(20) for f in futures] == [n * n for n in range(20)]
    assert seen == list(range(20))
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result(20)
    assert thread.submit(len, "abc").result(20) == 3
    thread.shutdown()


def test_shutdown_finishes_the_call_under_way_and_drops_the_rest():
    thread, started, gate = DaemonThread("t"), threading.Event(), threading.Event()
    first = thread.submit(lambda: (started.set(), gate.wait(20))[1])
    waiting = thread.submit(len, "abc")
    assert started.wait(20)
    thread.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        thread.submit(len, "")
    gate.set()
    assert first.result(20) is True
    with pytest.raises(CancelledError):
        waiting.result(20)


def test_several_threads_share_one_queue():
    pool, gate = DaemonThread("t", threads=3), threading.Barrier(3)
    futures = [pool.submit(gate.wait, 20) for _ in range(3)]  # passes only if three calls run at once
    assert sorted(f.result(20) for f in futures) == [0, 1, 2]
    pool.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives threads a priority of their own")
def test_a_thread_of_low_priority_leaves_the_others_theirs():
    low, mine = DaemonThread("t", low_priority=True), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert low.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(20) == 19
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine
    low.shutdown()


def test_a_cancellation_that_comes_with_the_result_is_not_lost():
    """Else a loop that is told to end goes on with the next item, and closing waits for it."""

    async def story():
        thread, done = WriterThread(10.0), threading.Event()

        async def loop_of_calls():
            while True:
                await thread.run(done.wait)

        task = asyncio.create_task(loop_of_calls())
        await asyncio.sleep(0.05)
        done.set()
        time.sleep(0.05)  # the result is there, but this loop has not heard of it
        await asyncio.sleep(0)
        task.cancel()
        finished, _ = await asyncio.wait([task], timeout=1.0)
        thread.close()
        assert finished

    asyncio.run(story())
