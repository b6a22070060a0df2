"""Kept answers: who makes one when callers are cancelled."""

import asyncio

import pytest

from crl_jax.serving.http.answers import Answer, Answers


def test_a_caller_that_is_cancelled_together_with_the_one_it_waits_for_does_not_take_over():
    made = []

    async def make():
        made.append(asyncio.current_task())
        await asyncio.sleep(60)
        return Answer(b"", {})

    async def main():
        answers = Answers(lambda: 0.0)
        first, second = (asyncio.create_task(answers.once("id", "digest", make)) for _ in range(2))
        await asyncio.sleep(0.01)
        answers._entries["id"].future.add_done_callback(lambda _: second.cancel())
        first.cancel()
        for task in (first, second):
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 5)
        return len(made)

    assert asyncio.run(main()) == 1
