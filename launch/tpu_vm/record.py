"""What a pod is asked to be.

Owns: ``Wanted`` and the file it is remembered in. Promises: every field has passed its rule (``cloud/names.py``), also when it comes from
the file; what ``create`` was told, the other commands need not be told again. Does not: know what exists.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from launch.cloud.errors import Refused
from launch.cloud.names import all_checked, checked


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A pod: its name, where it may be, what it is made of and how it is paid for."""

    name: str
    zones: tuple[str, ...] = ()
    project: str | None = None
    accelerator_type: str | None = None
    runtime_version: str | None = None
    kind: str = "on-demand"  # or spot, reserved
    reservation: str | None = None  # a reservation by name; with kind "reserved" and none, any that fits
    labels: tuple[str, ...] = ()
    service_account: str | None = None
    network: str | None = None
    internal_ip: bool = False

    def __post_init__(self) -> None:
        checked("name", self.name)
        all_checked("zone", self.zones)
        all_checked("label", self.labels)
        rules = {"project": self.project, "accelerator type": self.accelerator_type, "runtime version": self.runtime_version}
        rules |= {"reservation": self.reservation, "service account": self.service_account, "network": self.network}
        for kind, value in rules.items():
            if value is not None:
                checked(kind, value)
        if self.kind not in ("on-demand", "spot", "reserved"):
            raise Refused(f"kind {self.kind!r} is not accepted: on-demand, spot or reserved")
        if self.reservation and self.kind != "reserved":
            raise Refused(f"a reservation is named, but the pod would be {self.kind}: give --reserved with --reservation")

    def complete(self) -> Wanted:
        """Itself, when it says enough to create a pod. Raises Refused with the options that are missing."""
        needed = {"--zone": self.zones, "--accelerator-type": self.accelerator_type, "--runtime-version": self.runtime_version}
        missing = [option for option, value in needed.items() if not value]
        if missing:
            raise Refused(f"pod {self.name} was not created from here, so say what it is: {', '.join(missing)}")
        return self


def merged(name: str, given: dict[str, Any], folder: pathlib.Path) -> Wanted:
    """What was remembered of the pod, with what is ``given`` now in its place."""
    checked("name", name)
    file = folder / f"{name}.json"
    said = {key: value for key, value in given.items() if value is not None}
    try:
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if said.get("kind", "reserved") != "reserved":
            known.pop("reservation", None)
        fields = {**known, **said, "name": name}
        for key in ("zones", "labels"):
            fields[key] = tuple(fields.get(key) or ())
        return Wanted(**fields)
    except (ValueError, TypeError, AttributeError):
        raise Refused(f"{file} is damaged: delete it and say again what the pod is") from None


def remember(wanted: Wanted, folder: pathlib.Path) -> None:
    """Keep ``wanted`` for the next command."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{wanted.name}.json").write_text(json.dumps(dataclasses.asdict(wanted), indent=1) + "\n", encoding="utf-8")
