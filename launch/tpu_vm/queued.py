"""A pod as a queued resource.

Owns: asking for it, waiting for it, looking at it, giving it back. Promises: asking twice leaves one pod, giving back twice is no error;
zones are tried in the order given, and a request that a zone could not fill is taken back before the next one is asked; every wait has a
deadline. Does not: run anything on the pod (``hosts``).

States: https://cloud.google.com/tpu/docs/queued-resources; what a deletion with --force does:
https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources/delete
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from launch.cloud.commands import Commands, Result
from launch.cloud.errors import LaunchError, Refused
from launch.tpu_vm.record import Wanted

LOST = frozenset({"SUSPENDING", "SUSPENDED", "FAILED"})  # it had, or would have had, machines, and will not have them again
LEAVING = frozenset({"DELETING"})
LOOK_S, ASK_S = 120.0, 600.0  # the longest wait for an answer to a look and to a request
MISSES = 5  # looks in a row that may fail before it is an error


@dataclasses.dataclass(frozen=True)
class Time:
    """The clock (s) and how to wait; tests bring their own."""

    now: Callable[[], float]
    sleep: Callable[[float], None]


class QueuedPod:
    """The queued resource of one pod."""

    def __init__(self, wanted: Wanted, commands: Commands, time: Time, *, poll_s: float = 30.0):
        self.wanted, self._commands, self._time, self._poll_s = wanted, commands, time, poll_s
        self._misses = 0
        self._type_seen: str | None = None  # the accelerator type in the last description

    def gcloud(self, *words: str, zone: str, alpha: bool = False) -> list[str]:
        """A ``gcloud compute tpus`` command for this pod's project."""
        project = [f"--project={self.wanted.project}"] if self.wanted.project else []
        return ["gcloud", *(["alpha"] if alpha else []), "compute", "tpus", *words, f"--zone={zone}", *project, "--quiet"]

    def state(self, zone: str, *, pretend: str = "") -> str | None:
        """The state of the request in ``zone``, None when there is none. Looks that fail are repeated a few times. Raises LaunchError."""
        argv = self.gcloud("queued-resources", "describe", self.wanted.name, "--format=json", zone=zone)
        while True:
            done = self._commands.run(argv, timeout_s=LOOK_S, check=False, quiet=True, pretend=json.dumps({"state": {"state": pretend}}))
            if done.not_found:
                self._misses = 0
                return None
            found, self._type_seen = _read(done)
            if found is not None:
                self._misses = 0
                return found or None
            self._misses += 1
            if self._misses >= MISSES:
                raise LaunchError(f"{MISSES} looks at {self.wanted.name} in {zone} failed; the last: {done.last_words}")
            self._time.sleep(self._poll_s)

    def find(self, *, pretend: str = "") -> tuple[str, str] | None:
        """The zone the pod is in and its state; None when no zone has it."""
        for zone in self.wanted.zones:
            state = self.state(zone, pretend=pretend)
            if state is not None:
                return zone, state
        return None

    def create(self, *, wait_s: float) -> str:
        """A pod that is ACTIVE, made if need be; returns its zone. ``wait_s``: the longest wait in one zone. Raises LaunchError when no
        zone gives one.
        """
        wanted, refusals = self.wanted.complete(), []
        found = self.find()
        if found is not None and found[1] not in LOST | LEAVING:
            if self._type_seen not in (None, wanted.accelerator_type):
                raise Refused(f"{wanted.name} exists in {found[0]} as {self._type_seen}, not {wanted.accelerator_type}: delete it first")
            self._commands.say(f"{wanted.name} exists in {found[0]} ({found[1]}): not asked for again")
            if self._becomes_active(found[0], wait_s):
                return found[0]
            refusals.append(f"{found[0]}: not ACTIVE after {wait_s:g} s")
        if found is not None:
            self.delete(found[0], wait_s=ASK_S)
        for zone in wanted.zones:
            done = self._commands.run(self._request(zone), timeout_s=ASK_S, check=False)
            if done.code != 0:
                refusals.append(f"{zone}: {done.last_words}")
            elif self._becomes_active(zone, wait_s):
                self._commands.say(f"{wanted.name} is ACTIVE in {zone}")
                return zone
            else:
                refusals.append(f"{zone}: not ACTIVE after {wait_s:g} s, or refused by the queue")
                self.delete(zone, wait_s=ASK_S)
        raise LaunchError(f"no zone gave {wanted.accelerator_type} ({wanted.kind}):\n" + "\n".join(refusals))

    def delete(self, zone: str, *, wait_s: float) -> None:
        """Give the pod back, with its machines; nothing when there is none. Raises LaunchError when it is still there after ``wait_s``."""
        state = self.state(zone, pretend="ACTIVE")
        if state is None:
            self._commands.say(f"{self.wanted.name} is not in {zone}: nothing to delete")
            return
        if state not in LEAVING:
            argv = self.gcloud("queued-resources", "delete", self.wanted.name, "--force", "--async", zone=zone)
            done = self._commands.run(argv, timeout_s=ASK_S, check=False)
            if done.code != 0 and not done.not_found:
                raise LaunchError(f"{self.wanted.name} in {zone} was not deleted and costs money while it exists: {done.last_words}")
        end = self._time.now() + wait_s
        while not self._commands.dry_run and self.state(zone) is not None:
            if self._time.now() > end:
                raise LaunchError(
                    f"{self.wanted.name} in {zone} still exists {wait_s:g} s after its deletion was asked for; look again with status"
                )
            self._time.sleep(self._poll_s)

    def addresses(self, zone: str, *, pretend: int) -> list[str]:
        """The internal addresses of the hosts, in the order of gcloud's worker numbers, read now. Raises LaunchError."""
        argv = self.gcloud("tpu-vm", "describe", self.wanted.name, "--format=json", zone=zone)
        shown = json.dumps({"networkEndpoints": [{"ipAddress": f"ADDRESS-OF-WORKER-{i}"} for i in range(pretend)]})
        found: dict[str, Any] = json.loads(self._commands.run(argv, timeout_s=LOOK_S, quiet=True, pretend=shown).out)
        addresses = [str(endpoint["ipAddress"]) for endpoint in found.get("networkEndpoints", []) if endpoint.get("ipAddress")]
        if not addresses:
            raise LaunchError(
                f"{self.wanted.name} in {zone} has no hosts with addresses (state {found.get('state')}): wait, or delete and create it"
            )
        return addresses

    def _becomes_active(self, zone: str, wait_s: float) -> bool:
        end = self._time.now() + wait_s
        shown = ""
        while True:
            state = self.state(zone, pretend="ACTIVE") or "not yet listed"
            if state == "ACTIVE":
                return True
            if state != shown:
                self._commands.say(f"{self.wanted.name} in {zone}: {state}")
                shown = state
            if state in LOST | LEAVING or self._time.now() > end:
                return False
            self._time.sleep(self._poll_s)

    def _request(self, zone: str) -> list[str]:
        w = self.wanted
        words = [f"--node-id={w.name}", f"--accelerator-type={w.accelerator_type}", f"--runtime-version={w.runtime_version}", "--async"]
        if w.kind == "spot":
            words.append("--spot")
        if w.kind == "reserved":
            words.append(f"--reservation={w.reservation}" if w.reservation else "--reserved")
        optional = {"--labels": ",".join(w.labels), "--service-account": w.service_account, "--network": w.network}
        words += [f"{option}={value}" for option, value in optional.items() if value]
        if w.internal_ip:
            words.append("--internal-ips")
        # A reservation by name is a flag of the alpha command only: https://cloud.google.com/tpu/docs/consume-reservation
        return self.gcloud("queued-resources", "create", w.name, *words, zone=zone, alpha=bool(w.reservation))


def _read(done: Result) -> tuple[str | None, str | None]:
    """The state and the accelerator type in a description; None for what cannot be read."""
    if done.code != 0:
        return None, None
    try:
        described = json.loads(done.out)
        state = str(described["state"]["state"])
    except (ValueError, KeyError, TypeError):
        return None, None
    try:
        return state, str(described["tpu"]["nodeSpec"][0]["node"]["acceleratorType"])
    except (KeyError, IndexError, TypeError):
        return state, None
