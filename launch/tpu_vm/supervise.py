"""A run from its start to its last end, over preemptions and failures.

    loop
      a pod that is ACTIVE: the one there is, or a new one with the code on it
      the trainer on every host: the one that runs, or a new start
      wait for its end
      done, stopped -> leave;  preempted -> again with --resume;  failed -> again with --resume, at most ``max_failures`` times

Owns: that loop. Promises: a preemption does not use up a failure's retry; both are bounded and counted in what is printed; a host that fell
silent is not waited for without end; a supervisor that is started again finds the run and goes on with it. Does not: know gcloud.
"""

from __future__ import annotations

import dataclasses

from launch.cloud.commands import Commands
from launch.cloud.errors import LaunchError
from launch.cloud.outcome import HostState, Verdict, failure_code, verdict, verdict_of_codes
from launch.tpu_vm.hosts import Hosts, Training
from launch.tpu_vm.queued import LEAVING, LOST, QueuedPod, Time

STOPPED_CODE = 75  # as a preempted trainer: it can be resumed


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a run may use up, and how long is waited for what (s)."""

    max_failures: int = 3
    max_preemptions: int = 100
    create_s: float = 3600.0
    siblings_s: float = 120.0  # from a bad end of one host to that of the others
    finish_s: float = 3600.0  # from a good end of one host to that of the others, which may still copy to a bucket
    silent_s: float = 900.0  # a pod that is ACTIVE and does not answer
    poll_s: float = 30.0


@dataclasses.dataclass(frozen=True)
class End:
    """How one attempt ended."""

    verdict: Verdict
    code: int
    why: str


class Supervisor:
    """Runs ``training`` on ``pod``."""

    def __init__(self, pod: QueuedPod, training: Training, commands: Commands, time: Time, limits: Limits):
        self._pod, self._training, self._commands, self._time, self._limits = pod, training, commands, time, limits

    def run(self, *, resume: bool, sync: bool) -> int:
        """Returns the exit code: 0 done, 75 stopped on request, else that of the last failure. Raises LaunchError."""
        failures = preemptions = 0
        while True:
            end = self._attempt(resume=resume, sync=sync)
            if end is None:
                return 0
            self._commands.say(f"{end.verdict.value}: {end.why}")
            if end.verdict in (Verdict.DONE, Verdict.STOPPED):
                return end.code
            if end.verdict is Verdict.PREEMPTED:
                preemptions += 1
                if preemptions > self._limits.max_preemptions:
                    raise LaunchError(f"preempted {preemptions} times: allow more with --max-preemptions, or choose another zone or kind")
            else:
                failures += 1
                if failures > self._limits.max_failures:
                    self._commands.say(f"failed {failures} times, {self._limits.max_failures} retries are used up: see `logs`")
                    return end.code
            self._commands.say(
                f"again, with --resume: preemption {preemptions}, failure retries left {self._limits.max_failures - failures}"
            )
            resume, sync = True, False

    def _attempt(self, *, resume: bool, sync: bool) -> End | None:
        """One start, or the one that runs already, and its end; None when dry."""
        found = self._pod.find(pretend="ACTIVE")
        if found is not None and found[1] in LEAVING:
            return End(Verdict.STOPPED, STOPPED_CODE, "the pod is being deleted")
        if found is None or found[1] != "ACTIVE":
            zone, sync = self._pod.create(wait_s=self._limits.create_s), True
        else:
            zone = found[0]
        hosts = Hosts(self._pod, self._commands, self._time, zone)
        try:
            if sync:
                hosts.sync()
            count = self._running(hosts) or hosts.start(self._training, resume=resume)
        except LaunchError as error:
            state = self._pod.state(zone)
            if state not in LOST:
                raise
            return End(Verdict.PREEMPTED, STOPPED_CODE, f"the pod is {state}; {error}")
        if self._commands.dry_run:
            self._commands.say(
                "then wait; after a preemption: create, sync and start again with --resume; after a failure: start again with --resume"
            )
            return None
        end = self._wait(hosts, zone, count)
        if end.verdict in (Verdict.PREEMPTED, Verdict.FAILED) and self._pod.state(zone) == "ACTIVE":
            hosts.stop(grace_s=self._training.grace_s)  # what still waits for those that ended
        return end

    def _running(self, hosts: Hosts) -> int:
        """How many hosts run the trainer already: all, or none; a part that was left behind is stopped."""
        states = {} if self._commands.dry_run else hosts.states()
        running = sum(host.state == "running" for host in states.values())
        if running and running < len(states):
            self._commands.say(f"{running} of {len(states)} hosts run what is left of an earlier start: stopping them")
            hosts.stop(grace_s=self._training.grace_s)
            return 0
        if running:
            self._commands.say(f"{running} hosts run the trainer already: watching")
        return running

    def _wait(self, hosts: Hosts, zone: str, count: int) -> End:
        silent_since: float | None = None
        ended_since: float | None = None
        while True:
            state = self._pod.state(zone)
            if state is None or state in LEAVING:
                return End(Verdict.STOPPED, STOPPED_CODE, "the pod was deleted")
            if state in LOST:
                return End(Verdict.PREEMPTED, STOPPED_CODE, f"the pod is {state}")
            states, now = hosts.states(), self._time.now()
            missing = count - len(states)
            found = Verdict.RUNNING if missing > 0 else verdict(states)
            if found is not Verdict.RUNNING:
                return _end(found, states)
            silent_since = None if missing <= 0 else now if silent_since is None else silent_since
            if silent_since is not None and now - silent_since > self._limits.silent_s:
                return End(Verdict.FAILED, 1, f"{missing} of {count} hosts did not answer for {self._limits.silent_s:g} s")
            ended = {i: host for i, host in states.items() if host.state != "running"}
            ended_since = None if not ended else now if ended_since is None else ended_since
            if ended_since is not None and (end := self._siblings(ended, now - ended_since, all_answer=missing <= 0)) is not None:
                return end
            self._time.sleep(self._limits.poll_s)

    def _siblings(self, ended: dict[int, HostState], since_s: float, *, all_answer: bool) -> End | None:
        """The verdict over those that ended while others run on. One host's end takes the others down, soon or in a collective that waits
        for it for ever. A host that does not answer may be one that was taken away: then a failure is not yet known to be one.
        """
        found = verdict_of_codes(host.code for host in ended.values())
        if found is Verdict.DONE:
            if since_s <= self._limits.finish_s:
                return None
            return End(Verdict.FAILED, 1, f"hosts {sorted(ended)} are done, the others still run after {self._limits.finish_s:g} s")
        if since_s <= self._limits.siblings_s or (found is Verdict.FAILED and not all_answer):
            return None
        return _end(found, ended)


def _end(found: Verdict, states: dict[int, HostState]) -> End:
    codes = ", ".join(f"host {i} {host.state}{'' if host.code is None else f' {host.code}'}" for i, host in sorted(states.items()))
    code = {Verdict.DONE: 0, Verdict.FAILED: failure_code(states)}.get(found, STOPPED_CODE)
    return End(found, code, codes)
