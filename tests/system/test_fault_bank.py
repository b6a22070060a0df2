"""A run whose bank is on a server that is killed and started again, or hangs: it goes on and counts its retries, or stops at its deadline
with an error that names the server. (``tests/bench/kill_run.py`` does the same to whole runs, and looks at what the bank's file holds.)"""

import pathlib
import signal
import sys
import threading
import time

import pytest
from toy_runs import ROOT, Faults, nothing_left, run, toys

sys.path.insert(0, str(ROOT / "tests" / "bank_service"))  # its toys

from service_toys import start_process

from crl_jax.bank_service.edge import BankUnavailable

pytestmark = pytest.mark.system


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    """The faults of a run, its server's process, and the settings with which it uses it."""
    faults = Faults()
    toys(monkeypatch, faults)
    path = tmp_path / "bank.sqlite"
    with nothing_left():
        server = [*start_process(path, 0), path]
        yield faults, server, ("run.method=static", f"bank.server.url=grpc://127.0.0.1:{server[1]}", "ask.enabled=false")
        server[0].kill()
        server[0].wait(10)


def at_call(number: int, faults: Faults, do) -> None:
    """``do()`` when the actor is asked for its ``number``-th completion."""

    async def fault() -> None:
        if faults.calls["actor.sample"] == number:
            do()

    faults.at["actor.sample"] = fault


def test_a_run_goes_on_with_a_bank_that_was_killed_and_started_again(served, tmp_path):
    faults, server, settings = served

    again = threading.Thread(target=lambda: server.__setitem__(0, start_process(server[2], server[1])[0]))

    def kill() -> None:
        server[0].kill()
        server[0].wait(10)
        again.start()  # beside the run, which meets a server that is away

    at_call(60, faults, kill)
    found = run(tmp_path, *settings)
    again.join(30)
    assert sorted(found) == list(range(1, 9))
    assert found[8]["bank/client_retries"] > 0
    assert found[8].get("bank/client_unavailable", 0) == 0


def test_a_bank_that_hangs_stops_the_run_at_the_deadline_and_is_named(served, tmp_path):
    faults, server, settings = served
    at_call(60, faults, lambda: server[0].send_signal(signal.SIGSTOP))
    began = time.monotonic()
    with pytest.raises((BankUnavailable, TimeoutError), match=rf"at 127\.0\.0\.1:{server[1]}: "):
        run(tmp_path, *settings, "bank.server.timeout_s=2")
    assert time.monotonic() - began < 20
