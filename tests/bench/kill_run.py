"""30 random SIGKILLs: of training processes, of a bank's server, of environment workers; the last line is one JSON object.

Usage:  python tests/bench/kill_run.py [--main 14] [--bank 8] [--env 8] [--seed 0] [--out docs/results/kill_run.json] [--folder KEPT]

The moments are drawn from the seed: while a process starts, in the middle of a step, and while a checkpoint is being written.

- *main*: synchronous runs with a bank of their own are killed and resumed until they end. Each must equal one that was left alone, to the
  last bit: the weights, optimisers and records of every checkpoint, the tables of the bank, every row of exact metrics.
- *bank*: the server of a run's bank is killed and started again. The run must end with code 0 and have counted its retries; every call that
  was answered must be in the bank's file, once; the file must hold no fault that ``verify`` knows; every episode that was taken must be
  distilled, once, or wait.
- *env*: a worker, or the guard over it, is killed. The run must end with code 0, have counted every worker that was replaced, and have
  every step once.

After every end no process may be left. The value is the number of faults; ``log`` has every kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "system"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from smoke_runs import DEADLINE_S, children_of_session, command, start  # pyright: ignore[reportMissingImports]
from test_resume import TABLES, arrays, records  # pyright: ignore[reportMissingImports]

from crl_jax.experience.store import Store
from crl_jax.experience.verify import verify
from crl_jax.telemetry.exact import exact
from crl_jax.telemetry.result import Result, emit

Log = list[dict[str, Any]]

STEPS, LONGER = 8, 16  # of a run that is killed and resumed; of one that loses its bank or its workers
SMALL = ("run.eval_episodes=1", "env.max_turns=2", "run.keep_last=100")  # short steps; all checkpoints are compared
ACKNOWLEDGED = """
import os, sys
from crl_jax.bank_service.edge import Edge
call, log = Edge.call, open({log!r}, "a", buffering=1)
async def noted(self, method, request, reply, **how):
    found = await call(self, method, request, reply, **how)
    if getattr(request, "request_id", "") and getattr(found, "full", True):  # a batch that is not full changes nothing
        print(method, request.request_id, len(getattr(request, "episodes", ())), file=log)
    return found
Edge.call = noted
from crl_jax.cli import main
sys.exit(main({arguments!r}))
"""
DURABLE = ("Submit", "Observe", "OnStep", "PopBatch", "RecordTrained", "Ask", "Write")  # answered from the disk; others from memory


class Watched:
    """A process that was started here, and what its files say."""

    def __init__(self, args: list[str], log: pathlib.Path, run: pathlib.Path | None = None) -> None:
        self.log, self.run, self.began = log, run, time.monotonic()
        self.process = start(args, log)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the finished steps; of a line that is being written nothing."""
        assert self.run is not None
        path, found = self.run / "metrics.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                found += [row] if "env_steps" in row else []
        return found

    def wait_for(self, condition: Callable[[], Any], every_s: float = 0.05, deadline_s: float = DEADLINE_S) -> bool:
        """Whether the condition came true before the process ended."""
        end = time.monotonic() + deadline_s
        while not condition():
            if self.ended:
                return False
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"{self.log}: nothing happened for {deadline_s:g} s")
            time.sleep(every_s)
        return True

    def sleep(self, seconds: float) -> bool:
        """Whether the process is still there afterwards."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return not self.ended

    def kill(self) -> float:
        """SIGKILL to this process alone; returns the seconds since its start."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        return round(time.monotonic() - self.began, 2)

    def left(self) -> list[str]:
        """What is wrong when it has ended: processes that it left."""
        return [f"{self.log.name}: process {pid} is left" for pid in children_of_session(self.process.pid, wait_s=15)]

    def finish(self) -> list[str]:
        """Wait for its own end. What is wrong with it."""
        code = self.process.wait(DEADLINE_S)
        wrong = [] if code == 0 else [f"{self.log.name}: exit code {code}: {self.log.read_text()[-600:]}"]
        return wrong + self.left()


# -------------------------------------------------------------------------------------------------------------------- training processes


def main_kills(folder: pathlib.Path, count: int, rng: random.Random, log: Log) -> list[str]:
    """Kill and resume synchronous runs, one after the other, and compare each with one that was left alone."""
    settings = (f"run.steps={STEPS}", "extractor.max_age_steps=4", *SMALL)
    whole = folder / "whole"
    whole.mkdir()
    faults = Watched(command(whole, *settings), folder / "whole.txt").finish()
    number = 0
    while number < count and not faults:
        broken, mine = folder / f"broken{number}", list[dict[str, Any]]()
        broken.mkdir()
        args = command(broken, *settings)
        while True:
            again = ["--resume"] if (broken / "smoke" / "config.yaml").exists() or (broken / "smoke" / "metrics.jsonl").exists() else []
            watched = Watched([*args, *again], folder / f"main{number}.txt", broken / "smoke")
            during = rng.choice(("start", "step", "step", "checkpoint", "checkpoint"))
            killed = number < count and _until(during, watched, rng)
            if killed:
                number += 1
                at_s = watched.kill()
                mine.append(_entry("main", during, at_s, watched))
                faults += watched.left()
            else:
                faults += watched.finish()
            for entry in mine[: len(mine) - killed]:  # those before this process
                entry["resumed_at_step"] = _first_step(watched.log) if entry["resumed_at_step"] is None else entry["resumed_at_step"]
            if faults or not killed:
                break
        wrong = faults or differences(whole / "smoke", broken / "smoke")
        wrong += [f"went on at {e['resumed_at_step']}: {e}" for e in mine if e["resumed_at_step"] != e["newest_checkpoint"]]
        log += [{**entry, "result": "; ".join(wrong) or "equal bit for bit"} for entry in mine]
        faults += [fault for fault in wrong if fault not in faults]
    return faults


def _until(during: str, watched: Watched, rng: random.Random) -> bool:
    """Wait for a random moment of that kind; False when the process ended before."""
    if during == "start":
        return watched.sleep(rng.uniform(0.5, 8.0))
    if during == "step":
        first, more, then_s = len(watched.rows()), rng.randint(1, 2), rng.uniform(0.0, 1.5)
        return watched.wait_for(lambda: len(watched.rows()) >= first + more) and watched.sleep(then_s)
    seen = set(_half_written(watched))  # left by a kill before
    let_pass = rng.randint(0, 1)

    def writing() -> bool:
        nonlocal let_pass
        new = [name for name in _half_written(watched) if name not in seen]
        seen.update(new)
        let_pass -= len(new)
        return let_pass < 0

    return watched.wait_for(writing, every_s=0.002)


def _half_written(watched: Watched) -> list[str]:
    assert watched.run is not None
    return [f.name for f in (watched.run / "checkpoints").glob("step_*") if not (f / "manifest.json").exists()]


def _entry(what: str, during: str, at_s: float, watched: Watched) -> dict[str, Any]:
    found = {"killed": what, "during": during, "seconds_after_start": at_s, "steps_logged": len(watched.rows())}
    if what != "main":
        return found
    whole = [int(f.parent.name[5:]) for f in ((watched.run or pathlib.Path()) / "checkpoints").glob("step_*/manifest.json")]
    return {**found, "half_written": _half_written(watched), "newest_checkpoint": max(whole, default=0), "resumed_at_step": None}


def _first_step(log: pathlib.Path) -> int | None:
    """At which step a process went on; None when it was killed before it said so."""
    text = log.read_text()
    return int(text.split(", from step ")[1].split()[0]) if ", from step " in text else None


def differences(whole: pathlib.Path, mended: pathlib.Path) -> list[str]:
    """In what two synchronous runs differ that must be equal."""
    found: list[str] = []
    for step in range(1, STEPS + 1):
        found += [f"arrays of step {step} differ"] * (arrays(whole, step) != arrays(mended, step))
        found += [f"records of step {step} differ"] * (records(whole, step) != records(mended, step))
    rows = [[exact(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (whole, mended)]
    found += ["rows of metrics differ"] * (rows[0] != rows[1])
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(contextlib.closing(sqlite3.connect(run / "bank.sqlite"))) for run in (whole, mended))
        for name, query in TABLES.items():
            found += [f"table {name} differs"] * (one.execute(query).fetchall() != two.execute(query).fetchall())
    return found


# -------------------------------------------------------------------------------------------------------------------- environment workers


def env_kills(folder: pathlib.Path, count: int, rng: random.Random, log: Log) -> list[str]:
    """Kill workers, or their guards, of asynchronous runs."""
    faults, number = list[str](), 0
    while number < count and not faults:
        run = folder / f"env{number}"
        run.mkdir()
        args = command(run, f"run.steps={LONGER}", "run.sync=false", "env.workers=2", "env.count=12", *SMALL, "env.max_turns=4")
        watched, mine = Watched(args, folder / f"env{number}.txt", run / "smoke"), list[dict[str, Any]]()
        watched.wait_for(watched.rows)
        while number < count and _both(watched) and watched.sleep(rng.uniform(0.2, 1.5)):
            pair = rng.choice(_workers(watched) or [(0, 0)])
            which = rng.choice((0, 1))
            if not pair[which]:
                continue
            with contextlib.suppress(ProcessLookupError):  # it ended in this moment: not ours
                os.kill(pair[which], signal.SIGKILL)
                number += 1
                what = ("environment worker's guard", "environment worker")[which]
                mine.append(_entry(what, "run", round(time.monotonic() - watched.began, 2), watched))
        wrong = watched.finish()
        rows = watched.rows()
        wrong += ["a step is missing or there twice"] * ([row["step"] for row in rows] != list(range(1, LONGER + 1)))
        counted = rows[-1] if rows else {}
        wrong += [f"{len(mine)} kills, {counted.get('env/restarts')} replaced workers counted"] * (counted.get("env/restarts") != len(mine))
        errors = sum(row["rollout/env_errors"] for row in rows)
        done = f"the run ended; {counted.get('env/lost')} calls lost, {errors:.0f} episodes without reward, all counted"
        log += [{**entry, "result": "; ".join(wrong) or done} for entry in mine]
        faults += wrong
    return faults


def _both(watched: Watched) -> bool:
    """Wait until no worker is missing."""
    return watched.wait_for(lambda: len(_workers(watched)) == 2)


def _workers(watched: Watched) -> list[tuple[int, int]]:
    """(guard, worker) of every environment worker."""
    parents: dict[int, int] = {}
    for pid in children_of_session(watched.process.pid):
        with contextlib.suppress(OSError):
            if b"envs.worker" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                parents[pid] = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return [(parent, pid) for pid, parent in parents.items() if parent in parents]


# -------------------------------------------------------------------------------------------------------------------- the bank's server


def bank_kills(folder: pathlib.Path, count: int, rng: random.Random, log: Log) -> list[str]:
    """Kill the bank's server under asynchronous runs and start it again, beside one server of the extractor."""
    here, weights, acknowledged = folder / "bank", folder / "weights", folder / "acknowledged.txt"
    here.mkdir()
    weights.mkdir()
    ports = _free_port(), _free_port()
    url = f"extractor.server.url=http://127.0.0.1:{ports[0]}"
    settings = (
        *SMALL,
        "run.sync=false",
        f"run.steps={LONGER}",
        url,
        f"extractor.server.weights_folder={weights}",
        "extractor.max_length=320",
    )
    recipe = command(here, *settings)[4:]
    cli = [sys.executable, "-m", "crl_jax.cli"]
    alone = [word for word in recipe if not word.startswith("extractor.server.")]
    serve = [*cli, "serve", "extractor", *alone, "--port", str(ports[0]), "--weights-folder", str(weights)]
    bank = [*cli, "bank", "serve", *recipe, "--port", str(ports[1])]
    faults, number, runs, mine = list[str](), 0, 0, list[dict[str, Any]]()
    with _served(serve, folder / "extractor.txt"):
        server = _ready(bank, folder / "bank0.txt")
        while number < count:
            runs += 1
            arguments = ["train", *recipe, f"bank.server.url=grpc://127.0.0.1:{ports[1]}", f"run.name=run{runs}"]
            program = ACKNOWLEDGED.format(log=str(acknowledged), arguments=arguments)
            watched = Watched([sys.executable, "-c", program], folder / f"train{runs}.txt", here / f"run{runs}")
            killed = number
            while number < count and _after_calls(acknowledged, rng.randint(1, 15), watched) and watched.sleep(rng.uniform(0.0, 0.5)):
                entry = _entry("bank's server", "run", server.kill(), watched)
                faults += server.left()
                number += 1
                server = _ready(bank, folder / f"bank{number}.txt")
                mine.append({**entry, "away_s": round(time.monotonic() - server.began, 1)})
            wrong = watched.finish()
            rows = watched.rows()
            wrong += ["a step is missing or there twice"] * ([row["step"] for row in rows] != list(range(1, LONGER + 1)))
            retries = rows[-1].get("bank/client_retries", 0) if rows else 0
            wrong += ["kills, but no retry was counted"] * (number > killed and not retries)
            for entry in mine[killed:]:
                entry["result"] = "; ".join(wrong) or f"the run ended; {retries:.0f} retries counted"
            faults += wrong
        server.process.send_signal(signal.SIGTERM)
        faults += server.finish()
    faults += bank_faults(here / "smoke" / "bank.sqlite", acknowledged, mine)
    log += mine
    return faults


def _after_calls(acknowledged: pathlib.Path, more: int, watched: Watched) -> bool:
    """Wait for so many more answered calls; False when the run ended before."""

    def answered() -> int:
        return acknowledged.read_text().count("\n") if acknowledged.exists() else 0

    wanted = answered() + more
    return watched.wait_for(lambda: answered() >= wanted, every_s=0.01)


def bank_faults(path: pathlib.Path, acknowledged: pathlib.Path, mine: Log) -> list[str]:
    """What the file of the bank lacks, or has twice."""
    calls = [line.split() for line in acknowledged.read_text().splitlines()] if acknowledged.exists() else []
    with contextlib.closing(Store.open(path)) as store:
        faults = list(verify(store).faults)
        kept: set[str] = store.read(lambda db: {row[0] for row in db.execute("SELECT id FROM requests")})
        distilled: int = store.read(lambda db: db.execute("SELECT count(*) FROM generations WHERE kind='distil'").fetchone()[0])
        waiting = len(store.inbox())
    wanted = {f"{method}/{request}" for method, request, _ in calls if method in DURABLE}
    lost = sorted(wanted - kept)
    faults += [f"{len(lost)} acknowledged calls are not in the bank: {lost[:3]}"] * bool(lost)
    taken = sum(int(n) for method, _, n in calls if method == "Submit")
    faults += [f"{taken} episodes taken, {distilled} distilled and {waiting} waiting"] * (taken != distilled + waiting)
    if mine:
        mine[-1]["bank"] = f"{len(wanted)} acknowledged calls, {taken} episodes taken, {distilled} distilled, {waiting} waiting: all there"
    return faults


def _ready(args: list[str], log: pathlib.Path) -> Watched:
    """A server, once it says where it listens."""
    server = Watched(args, log)
    if not server.wait_for(lambda: " at " in log.read_text()):
        raise RuntimeError(f"{log.name}: {log.read_text()[-600:]}")
    return server


@contextlib.contextmanager
def _served(args: list[str], log: pathlib.Path) -> Iterator[None]:
    server = _ready(args, log)
    try:
        yield
    finally:
        server.process.terminate()
        server.process.wait(30)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


# -------------------------------------------------------------------------------------------------------------------- all of them


def main() -> int:
    """Kill, look, go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count, what in (("main", 14, "training processes"), ("bank", 8, "servers of a bank"), ("env", 8, "environment workers")):
        parser.add_argument(f"--{name}", type=int, default=count, help=f"how many {what} are killed (default {count})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, help="where the runs and logs lie, and stay; a temporary folder if not given")
    args = parser.parse_args()
    log, faults, seconds = Log(), list[str](), dict[str, float]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or pathlib.Path(scratch)
        for name, kills in (("bank", bank_kills), ("env", env_kills), ("main", main_kills)):
            (folder / name).mkdir(parents=True)
            began, count = time.monotonic(), getattr(args, name)
            if count:
                faults += [f"{name}: {fault}" for fault in kills(folder / name, count, random.Random(f"{args.seed}/{name}"), log)]
            seconds[name] = round(time.monotonic() - began, 1)
            print(f"{name}: {count} kills, {len(faults)} faults so far, {seconds[name]:.0f} s", flush=True)
    for number, entry in enumerate(log, start=1):
        entry["kill"] = number
        print(json.dumps(entry), flush=True)
    asked = args.main + args.bank + args.env
    faults += [f"{asked} kills were asked for, {len(log)} happened"] * (len(log) != asked)
    details = {"kills": len(log), "seed": args.seed, "seconds": seconds, "faults": faults[:20], "log": log}
    emit(Result("kill_run.faults", len(faults), "faults", "0", not faults, details=details), args.out)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
