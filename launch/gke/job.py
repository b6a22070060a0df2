"""The command ``launch/gke/job.sh``.

Owns: its words and exit codes (0 done, 1 failed outside, 2 refused). Promises: names are checked before anything runs; ``--dry-run`` prints
every command with what it reads and runs none; creating twice and deleting twice are no errors. Does not: restart a run: JobSet does, by
the rules in ``jobset.yaml``.

xpk (https://github.com/AI-Hypercomputer/xpk) makes the cluster with its slices, JobSet and Kueue. Its workloads run one command on all
slices, ours one per role, so the JobSet is our own and goes in by kubectl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from launch.cloud.commands import Commands
from launch.cloud.cost import cost_line, slice_of
from launch.cloud.errors import LaunchError, Refused
from launch.cloud.names import checked
from launch.gke.render import Job, bank, jobset

ASK_S, CLUSTER_S = 180.0, 7200.0
ROLES = ("actor", "extractor")


def main(argv: Sequence[str] | None = None, *, out: Callable[[str], None] = print) -> int:
    """Runs one command and returns its exit code."""
    args = parser().parse_args(argv)
    try:
        getattr(_Run(args, Commands(dry_run=args.dry_run, out=out)), args.command.replace("-", "_"))()
    except LaunchError as error:
        print(f"job: {error}", file=sys.stderr)
        return error.exit_code
    return 0


class _Run:
    """One method per command."""

    def __init__(self, args: argparse.Namespace, commands: Commands):
        self._args, self._commands = args, commands

    def cluster(self) -> None:
        """A cluster with one slice per role."""
        a = self._args
        checked("accelerator type", a.accelerator_type)
        kind = "spot" if a.spot else "reserved" if a.reservation else "on-demand"
        flag = "--spot" if a.spot else f"--reservation={checked('reservation', a.reservation)}" if a.reservation else "--on-demand"
        self._commands.say(cost_line(slice_of(a.accelerator_type), kind=kind, price=a.price, count=len(ROLES)))
        words = [
            f"--cluster={checked('name', a.cluster)}",
            f"--tpu-type={a.accelerator_type}",
            f"--num-slices={len(ROLES)}",
            flag,
            *self._place(),
        ]
        self._commands.run(["xpk", "cluster", "create", *words], timeout_s=CLUSTER_S)

    def delete_cluster(self) -> None:
        """The cluster and everything on it."""
        words = [f"--cluster={checked('name', self._args.cluster)}", *self._place(), "--quiet"]
        done = self._commands.run(["xpk", "cluster", "delete", *words], timeout_s=CLUSTER_S, check=False)
        if done.code != 0 and not done.not_found:
            raise LaunchError(f"cluster {self._args.cluster} was not deleted and costs money while it exists: {done.last_words}")

    def create(self) -> None:
        """The bank, then the JobSet."""
        a, job = self._args, self._job()
        kind = "spot" if job.spot else "on-demand"
        self._commands.say(cost_line(job.slice, kind=kind, price=a.price, count=len(ROLES)))
        if not job.volume:
            self._commands.say("warning: without --volume the runs lie in the pods: a restart begins again at step 0")
        secret = self._kubectl("get", "secret", job.token, "--ignore-not-found", "--output=name")
        if not self._commands.run(secret, timeout_s=ASK_S, quiet=True).out.strip():
            if not a.token_file:
                raise Refused(f"the cluster has no secret {job.token} yet: give --token-file, a file whose first line is the bank's token")
            words = ("create", "secret", "generic", job.token, f"--from-file=token={a.token_file}")
            self._commands.run(self._kubectl(*words), timeout_s=ASK_S)
        for text in (bank(job), jobset(job)):
            self._commands.run(self._kubectl("apply", "--filename=-"), timeout_s=ASK_S, stdin=text)

    def render(self) -> None:
        """What `create` would apply."""
        job = self._job()
        self._commands.out(f"{bank(job)}---\n{jobset(job)}")

    def status(self) -> None:
        """JobSet, pods and bank."""
        name = self._name()
        for words in (("jobset", name), ("pods", f"--selector=app.kubernetes.io/instance={name}"), ("statefulset", f"{name}-bank")):
            done = self._commands.run(self._kubectl("get", *words, "--ignore-not-found"), timeout_s=ASK_S, quiet=True)
            self._commands.out(done.out.rstrip("\n") or f"# no {words[0]}")

    def logs(self) -> None:
        """The end of one host's log, or of the bank's."""
        a, name = self._args, self._name()
        if a.role == "bank":
            words = [f"statefulset/{name}-bank"]
        else:
            chosen = {"jobset.sigs.k8s.io/jobset-name": name, "jobset.sigs.k8s.io/replicatedjob-name": a.role}
            chosen["batch.kubernetes.io/job-completion-index"] = str(a.worker)
            words = [f"--selector={','.join(f'{key}={value}' for key, value in chosen.items())}", "--container=trainer"]
        done = self._commands.run(self._kubectl("logs", *words, f"--tail={a.lines}"), timeout_s=ASK_S, quiet=True)
        self._commands.out(done.out.rstrip("\n"))

    def stop(self) -> None:
        """The JobSet; the trainers get SIGTERM and save. The bank stays."""
        self._commands.run(self._kubectl("delete", "jobset", self._name(), "--ignore-not-found"), timeout_s=600)

    def delete(self) -> None:
        """JobSet and bank. The bank's disk and its token stay, unless ``--purge``."""
        name = self._name()
        self.stop()
        for words in (("statefulset", f"{name}-bank"), ("service", f"{name}-bank")):
            self._commands.run(self._kubectl("delete", *words, "--ignore-not-found"), timeout_s=600)
        if self._args.purge:
            for words in (("pvc", f"bank-{name}-bank-0"), ("secret", f"{name}-bank-token")):
                self._commands.run(self._kubectl("delete", *words, "--ignore-not-found"), timeout_s=600)

    def _job(self) -> Job:
        a = self._args
        groups = {
            key: tuple(getattr(a, key) or ()) for key in ("settings", "actor_settings", "extractor_settings", "bank_settings", "labels")
        }
        single = ("name", "image", "recipe", "accelerator_type", "topology", "volume", "bank_disk", "spot", "max_failures", "stall_s")
        return Job(queue=a.queue or None, **groups, **{key: getattr(a, key) for key in single})

    def _name(self) -> str:
        return checked("name", self._args.name)

    def _place(self) -> list[str]:
        a = self._args
        return [f"--zone={checked('zone', a.zone)}", *([f"--project={checked('project', a.project)}"] if a.project else [])]

    def _kubectl(self, *words: str) -> list[str]:
        a = self._args
        context = [f"--context={checked('context', a.context)}"] if a.context else []
        return ["kubectl", *context, f"--namespace={checked('object name', a.namespace)}", *words]


def parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    top = argparse.ArgumentParser(prog="job.sh", description="A run on GKE: one TPU slice per role, the bank on CPU nodes.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    cluster = _command(commands, "cluster", "make a cluster with one slice per role, by xpk", on_cluster=False)
    cluster.add_argument("--accelerator-type", required=True, help="e.g. v5litepod-16")
    kind = cluster.add_mutually_exclusive_group()
    kind.add_argument("--spot", action="store_true")
    kind.add_argument("--reservation")
    cluster.add_argument("--price", type=float, help="USD per chip and hour, for the cost line")
    delete_cluster = _command(commands, "delete-cluster", "give the cluster back, with everything on it", on_cluster=False)
    for command in (cluster, delete_cluster):
        command.add_argument("--cluster", required=True)
        command.add_argument("--zone", required=True)
        command.add_argument("--project")
    for name, text in (("create", "start the bank and the run; what exists is kept"), ("render", "print the objects that create applies")):
        _job_words(_command(commands, name, text))
    _command(commands, "status", "JobSet, pods and bank")
    logs = _command(commands, "logs", "the end of a log")
    logs.add_argument("--role", choices=(*ROLES, "bank"), default="actor")
    logs.add_argument("--worker", type=int, default=0)
    logs.add_argument("--lines", type=int, default=100)
    _command(commands, "stop", "end the run; it saves first; the bank stays")
    delete = _command(commands, "delete", "end the run and the bank; the bank's disk stays")
    delete.add_argument("--purge", action="store_true", help="the bank's disk and token too")
    return top


def _command(commands: Any, name: str, text: str, *, on_cluster: bool = True) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("--dry-run", action="store_true", help="print every command and run none")
    if on_cluster:
        command.add_argument("--name", required=True, help="of the run")
        command.add_argument("--namespace", default="default")
        command.add_argument("--context", help="kubectl's; default: the current one")
    return command


def _job_words(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", help="e.g. configs/paper_7b_v5e.yaml, as in the image")
    command.add_argument("settings", nargs="*", metavar="section.key=value", help="for both roles and the bank")
    for role in (*ROLES, "bank"):
        command.add_argument(
            f"--{role}", dest=f"{role}_settings", action="append", metavar="KEY=VALUE", help=f"a setting for the {role} only"
        )
    command.add_argument("--image", required=True, help="made from the Dockerfile with VARIANT=tpu")
    command.add_argument("--accelerator-type", required=True, help="of each role's slice, e.g. v5litepod-16")
    command.add_argument("--topology", required=True, help="of it, e.g. 4x4")
    command.add_argument("--spot", action="store_true", help="on spot nodes only")
    command.add_argument("--label", dest="labels", action="append", metavar="KEY=VALUE")
    command.add_argument("--queue", default="multislice-queue", help="Kueue's LocalQueue; the default is the one xpk makes; '' = none")
    command.add_argument("--volume", help="a claim that all hosts can write (ReadWriteMany), for the runs")
    command.add_argument("--bank-disk", default="20Gi")
    command.add_argument("--token-file", help="its first line becomes the bank's token, at the first create")
    command.add_argument("--max-failures", type=int, default=3, help="restarts after failures; preemptions do not count")
    command.add_argument("--stall-s", type=float, default=1800.0, help="silence after a step that means it hangs; 0 = never")
    command.add_argument("--price", type=float, help="USD per chip and hour, for the cost line")


if __name__ == "__main__":
    sys.exit(main())
