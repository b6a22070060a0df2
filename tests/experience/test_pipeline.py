"""The bounded queue of distillations: what is pending is counted from the moment it is handed over."""

import asyncio

import pytest

from crl_jax.experience.pipeline import OrderedPipeline


def started(work, settle, **sizes):
    pipeline = OrderedPipeline(work, settle, **sizes)
    tasks = []

    def spawn(coroutine):
        tasks.append(asyncio.get_running_loop().create_task(coroutine))
        return tasks[-1]

    pipeline.start(spawn)
    return pipeline, tasks


async def at_once(item):
    return item


def test_an_item_settled_before_its_put_returns_does_not_unbalance_the_count():
    async def story():
        settled, low = [], []

        async def settle(item):
            settled.append(item)
            low.append(pipeline.pending)

        pipeline, _ = started(at_once, settle, queue_size=1, concurrency=4)
        for n in range(50):
            assert await pipeline.put(n, timeout_s=10)
        await asyncio.wait_for(pipeline.idle(), 10)
        assert settled == list(range(50))
        assert min(low) >= 1, "while an item is settled it is pending"
        assert pipeline.pending == 0
        pipeline.stop()

    asyncio.run(story())


@pytest.mark.parametrize("ending", ["timeout", "cancelled"])
def test_an_item_that_was_not_taken_is_not_pending(ending):
    async def story():
        forever = asyncio.Event()

        async def stuck(item):
            await forever.wait()

        pipeline, _ = started(stuck, at_once, queue_size=1, concurrency=1)
        taken = 0
        while await pipeline.put(taken, timeout_s=0.01):
            taken += 1
        assert pipeline.pending == taken
        late = asyncio.ensure_future(pipeline.put("late", timeout_s=0.01 if ending == "timeout" else 10))
        await asyncio.sleep(0)
        if ending == "cancelled":
            late.cancel()
        (outcome,) = await asyncio.gather(late, return_exceptions=True)
        assert outcome is False or isinstance(outcome, asyncio.CancelledError)
        assert pipeline.stop() == taken

    asyncio.run(story())


def test_what_is_ready_is_prepared_together_and_settled_one_by_one_in_order():
    async def story():
        seen = []

        async def work(n):
            await asyncio.sleep(0.02 if n == 3 else 0)
            return n

        async def prepare(items):
            await asyncio.sleep(0.005)
            seen.append(list(items))

        async def settle(item):
            seen.append(item)

        pipeline, _ = started(work, settle, queue_size=20, concurrency=10, prepare=prepare, together=4)
        for n in range(9):
            assert await pipeline.put(n, timeout_s=10)
        await asyncio.wait_for(pipeline.idle(), 10)
        assert [n for n in seen if isinstance(n, int)] == list(range(9))
        batches = [n for n in seen if isinstance(n, list)]
        assert [n for batch in batches for n in batch] == list(range(9))
        assert max(map(len, batches)) <= 4 < 9 / len(batches) * 4

    asyncio.run(story())


def test_an_exception_comes_after_what_was_before_it_is_settled():
    async def story():
        settled = []

        async def work(n):
            if n == 2:
                raise ValueError("two")
            return n

        async def settle(n):
            settled.append(n)

        pipeline, tasks = started(work, settle, queue_size=20, concurrency=10)
        for n in range(5):
            assert await pipeline.put(n, timeout_s=10)
        with pytest.raises(ValueError, match="two"):
            await asyncio.wait_for(tasks[1], 10)
        assert settled == [0, 1]

    asyncio.run(story())
