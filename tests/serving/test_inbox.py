"""Hand-over between callers and the engine thread: order, gathering, closing, idling."""

import asyncio
import threading
import time

import pytest

from crl_jax.serving.inbox import IDLE_WAIT_S, Inbox, Promise, resolve


def test_messages_keep_their_order_and_are_taken_once():
    inbox, seen = Inbox(), []
    for i in range(5):
        inbox.put(lambda i=i: seen.append(i))
    for message in inbox.take():
        message()
    assert seen == [0, 1, 2, 3, 4]
    assert inbox.take() == []


def test_a_burst_is_gathered_and_a_complete_one_is_not_waited_for():
    inbox = Inbox()

    def burst():
        for _ in range(4):
            inbox.put(lambda: None, request=True)

    thread = threading.Thread(target=burst)
    thread.start()
    start = time.monotonic()
    inbox.wait(20.0, 5, lambda: 4)  # returns as soon as the fourth is there, not after 20 s
    assert time.monotonic() - start < 10
    thread.join()
    assert len(inbox.take()) == 4


def test_A12_an_idle_wait_blocks_and_a_closed_inbox_does_not():
    inbox = Inbox()
    start = time.monotonic()
    inbox.wait(0.001, 5, lambda: 1)
    assert time.monotonic() - start > 0.9 * IDLE_WAIT_S
    inbox.close(RuntimeError("gone"))
    inbox.wait(0.001, 5, lambda: 1)
    inbox.put(lambda: None, late_ok=True)
    with pytest.raises(RuntimeError, match="gone"):
        inbox.put(lambda: None)


def test_results_for_a_closed_event_loop_are_counted_not_raised():
    loop = asyncio.new_event_loop()
    promise = Promise(loop, loop.create_future())
    loop.close()
    done = [(promise, 1)]
    assert resolve(done) == 1
    assert done == []
