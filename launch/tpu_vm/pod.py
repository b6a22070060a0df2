"""The command ``launch/tpu_vm/pod.sh``.

Owns: its words and exit codes (0 done, 1 failed outside, 2 refused, 75 stopped and can be resumed, else the trainer's own). Promises: names
are checked before anything runs; ``--dry-run`` changes nothing here or elsewhere. Does not: contain logic.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from launch.cloud.commands import Commands
from launch.cloud.cost import cost_line, slice_of
from launch.cloud.errors import LaunchError, Refused
from launch.cloud.names import all_checked, checked
from launch.tpu_vm.hosts import ROOT, Hosts, Training
from launch.tpu_vm.queued import QueuedPod, Time
from launch.tpu_vm.record import merged, remember
from launch.tpu_vm.supervise import Limits, Supervisor

RECORDS = ROOT / "runs" / ".pods"
REAL_TIME = Time(time.monotonic, time.sleep)


def main(
    argv: Sequence[str] | None = None,
    *,
    clock: Time = REAL_TIME,
    out: Callable[[str], None] = print,
    records: pathlib.Path = RECORDS,
) -> int:
    """Runs one command and returns its exit code."""
    args = parser().parse_args(argv)
    try:
        return _Pod(args, clock, out, records).do()
    except LaunchError as error:
        print(f"pod: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("pod: interrupted here; what runs on the pod goes on: `run` watches it again, `stop` ends it", file=sys.stderr)
        return 130


class _Pod:
    def __init__(self, args: argparse.Namespace, clock: Time, out: Callable[[str], None], records: pathlib.Path):
        self._args, self._clock, self._records = args, clock, records
        given = {key: getattr(args, key, None) for key in _FIELDS}
        self._wanted = merged(args.name, given, records)
        self._commands = Commands(dry_run=args.dry_run, out=out)
        self._pod = QueuedPod(self._wanted, self._commands, clock, poll_s=args.poll_s)

    def do(self) -> int:
        return int(getattr(self, f"_{self._args.command.replace('-', '_')}")() or 0)

    def _create(self) -> None:
        wanted = self._wanted.complete()
        self._commands.say(cost_line(slice_of(str(wanted.accelerator_type)), kind=wanted.kind, price=self._args.price))
        if not self._args.dry_run:
            remember(wanted, self._records)
        self._pod.create(wait_s=self._args.wait_s)

    def _sync(self) -> None:
        self._hosts().sync()

    def _run(self) -> int:
        a = self._args
        training = Training(
            recipe=checked("recipe", a.recipe),
            settings=all_checked("setting", a.settings),
            role=a.role,
            bucket=checked("bucket", a.bucket) if a.bucket else None,
            runs=checked("folder", a.runs),
            stall_s=a.stall_s,
            grace_s=a.grace_s,
        )
        wanted = self._wanted.complete()
        self._commands.say(cost_line(slice_of(str(wanted.accelerator_type)), kind=wanted.kind, price=a.price))
        if not a.dry_run:
            remember(wanted, self._records)
        if wanted.kind == "spot" and not a.bucket and not a.runs.startswith("/"):
            lost = "a pod that is taken away takes its disks with it"
            self._commands.say(f"warning: {lost}: without --bucket, or --runs on a mounted folder, a restart begins at step 0")
        limits = Limits(
            max_failures=a.max_failures,
            max_preemptions=a.max_preemptions,
            create_s=a.wait_s,
            siblings_s=a.siblings_s,
            silent_s=a.silent_s,
            poll_s=a.poll_s,
        )
        code = Supervisor(self._pod, training, self._commands, self._clock, limits).run(resume=a.resume, sync=a.sync)
        if code == 0 and a.delete_when_done:
            self._delete()
        else:
            self._commands.say(f"the pod still exists and costs money: pod.sh delete --name {wanted.name}")
        return code

    def _status(self) -> int:
        found = self._pod.find(pretend="ACTIVE")
        if found is None:
            self._commands.say(f"{self._wanted.name}: no such pod in {', '.join(self._zones())}")
            return 1
        self._commands.say(f"{self._wanted.name}: {found[1]} in {found[0]}")
        if found[1] == "ACTIVE":
            for i, host in sorted(Hosts(self._pod, self._commands, self._clock, found[0]).states().items()):
                self._commands.say(f"host {i}: {host.state}{'' if host.code is None else f' {host.code}'}")
        return 0

    def _logs(self) -> None:
        self._commands.out(self._hosts().log(self._args.worker, lines=self._args.lines).rstrip("\n"))

    def _stop(self) -> None:
        self._hosts().stop(grace_s=self._args.grace_s)

    def _delete(self) -> None:
        for zone in self._zones():
            self._pod.delete(zone, wait_s=self._args.wait_s)

    def _zones(self) -> tuple[str, ...]:
        if not self._wanted.zones:
            raise Refused(f"pod {self._wanted.name} was not created from here: say where it is with --zone")
        return self._wanted.zones

    def _hosts(self) -> Hosts:
        self._zones()
        found = self._pod.find(pretend="ACTIVE")
        if found is None or found[1] != "ACTIVE":
            raise LaunchError(f"{self._wanted.name} is not ACTIVE ({'no such pod' if found is None else found[1]}): `create` it first")
        return Hosts(self._pod, self._commands, self._clock, found[0])


_FIELDS = (
    *("zones", "project", "accelerator_type", "runtime_version", "kind", "reservation"),
    *("labels", "service_account", "network", "internal_ip"),
)


def parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    top = argparse.ArgumentParser(prog="pod.sh", description="Cloud TPU VM pods by queued resources.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    create = _command(commands, "create", "ask for the pod and wait until it is ACTIVE; one that exists is kept")
    _machine(create)
    _command(commands, "sync", "bring this tree to every host and set its environment up")
    run = _command(commands, "run", "start the training on every host and stay with it over preemptions and failures")
    _machine(run)
    _training(run)
    _command(commands, "status", "the pod's state and every host's")
    logs = _command(commands, "logs", "the end of a host's log")
    logs.add_argument("--worker", type=int, default=0)
    logs.add_argument("--lines", type=int, default=100)
    stop = _command(commands, "stop", "end the training; the pod stays")
    stop.add_argument("--grace-s", type=float, default=300.0, help="from SIGTERM to SIGKILL")
    delete = _command(commands, "delete", "give the pod back, with everything on it")
    delete.add_argument("--wait-s", type=float, default=1800.0, help="the longest wait for its end")
    return top


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("--name", required=True, help="of the pod")
    command.add_argument("--zone", dest="zones", action="append", help="where; repeat it for several, tried in order")
    command.add_argument("--project", help="default: gcloud's own")
    command.add_argument("--internal-ip", action="store_const", const=True, help="hosts without external addresses; reach them from inside")
    command.add_argument("--dry-run", action="store_true", help="print every command and run none")
    command.add_argument("--poll-s", type=float, default=30.0, help="from one look to the next")
    return command


def _machine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--accelerator-type", help="e.g. v5litepod-16")
    command.add_argument("--runtime-version", help="e.g. v2-alpha-tpuv5-lite")
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--spot", dest="kind", action="store_const", const="spot", help="cheaper, and may be taken away")
    kind.add_argument("--on-demand", dest="kind", action="store_const", const="on-demand", help="(default)")
    kind.add_argument("--reserved", dest="kind", action="store_const", const="reserved", help="from a reservation that fits")
    command.add_argument("--reservation", help="with --reserved: this one")
    command.add_argument("--label", dest="labels", action="append", metavar="KEY=VALUE")
    command.add_argument("--service-account")
    command.add_argument("--network")
    command.add_argument("--price", type=float, help="USD per chip and hour, for the cost line")
    command.add_argument("--wait-s", type=float, default=3600.0, help="the longest wait for ACTIVE in one zone")


def _training(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", help="e.g. configs/paper_7b_v5e.yaml")
    command.add_argument("settings", nargs="*", metavar="section.key=value")
    command.add_argument("--role", choices=("actor", "extractor"), help="train this one here, the other elsewhere")
    command.add_argument("--resume", action="store_true", help="continue from the newest checkpoint already at the first start")
    command.add_argument("--sync", action="store_true", help="bring the code to a pod that exists, too")
    command.add_argument("--delete-when-done", action="store_true", help="give the pod back when the run is done, not when it failed")
    command.add_argument("--bucket", help="gs://BUCKET/FOLDER: logs go there, and the runs, which a new pod fetches")
    command.add_argument("--runs", default="runs", help="the folder of runs on a host (run.dir)")
    command.add_argument("--max-failures", type=int, default=3, help="failures after which it starts again; preemptions do not count")
    command.add_argument("--max-preemptions", type=int, default=100)
    command.add_argument("--stall-s", type=float, default=1800.0, help="silence after a step that means it hangs; 0 = never")
    command.add_argument("--grace-s", type=float, default=300.0, help="from SIGTERM to SIGKILL")
    command.add_argument("--siblings-s", type=float, default=120.0, help="from one host's bad end to the others'")
    command.add_argument("--silent-s", type=float, default=900.0, help="how long hosts may not answer while the pod is ACTIVE")


if __name__ == "__main__":
    sys.exit(main())
