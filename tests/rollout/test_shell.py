"""The background event loop: errors surface, waits end, close leaves nothing."""

import asyncio
import gc
import time

import pytest

from crl_jax.rollout.shell import Shell, ShellClosed


async def _fail():
    raise ValueError("x")


async def _sleep(seconds):
    await asyncio.sleep(seconds)
    return seconds


def test_A08_error_of_a_background_task_reaches_the_owner():
    with Shell() as shell:
        failed = shell.start(_fail())
        while not failed.done():
            time.sleep(0.001)
        with pytest.raises(ValueError, match="x"):
            shell.start(_sleep(0))


def test_wait_has_a_deadline_and_says_what_was_late():
    with Shell() as shell, pytest.raises(TimeoutError, match="rollout did not finish within 0 s"):
        shell.call(_sleep(30), 0.05, "rollout")


def test_A11_task_survives_garbage_collection():
    with Shell() as shell:
        future = shell.start(_sleep(0.05))
        for _ in range(100):
            gc.collect(0)
        assert shell.wait(future, 5, "sleep") == 0.05


def test_A13_close_is_bounded_and_final():
    shell = Shell()
    shell.start(_sleep(60))
    start = time.monotonic()
    shell.close()
    shell.close()
    assert time.monotonic() - start < 5
    with pytest.raises(ShellClosed):
        shell.start(_sleep(0))
