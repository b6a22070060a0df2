"""How large a slice is and what it costs.

Owns: chips and hosts of an accelerator type, and the cost line. Promises: no price is made up: it comes from the user, in
``accelerators.json`` or on the command line, or the line says that it is unknown. Does not: ask a price list.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from launch.cloud.errors import Refused

TABLE = pathlib.Path(__file__).with_name("accelerators.json")


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of a TPU pod: its chips and the hosts they hang on."""

    accelerator: str
    chips: int
    hosts: int
    gke: str | None
    prices: dict[str, float | None]

    @property
    def chips_per_host(self) -> int:
        """Chips that one host sees."""
        return self.chips // self.hosts


def slice_of(accelerator: str, *, table: pathlib.Path = TABLE) -> Slice:
    """The slice called ``accelerator``, e.g. v5litepod-16. Raises Refused for a family that is not in the table or half a chip."""
    family, _, number = accelerator.rpartition("-")
    families: dict[str, Any] = json.loads(table.read_text(encoding="utf-8"))["families"]
    if family not in families:
        raise Refused(
            f"accelerator type {accelerator!r}: family {family!r} is not in {table}, which has {', '.join(families)}: add it there"
        )
    row = families[family]
    chips, rest = divmod(int(number), row["cores_per_chip"])
    hosts = 1 if chips <= row["one_host_chips"] else chips // row["chips_per_host"]
    if rest or chips < 1 or (hosts > 1 and chips % row["chips_per_host"]):
        raise Refused(f"accelerator type {accelerator!r}: {number} is no whole number of hosts of family {family}")
    return Slice(accelerator, chips, hosts, row["gke"], row["usd_per_chip_hour"])


def cost_line(slice_: Slice, *, kind: str, price: float | None = None, count: int = 1) -> str:
    """What ``count`` slices of ``kind`` (on-demand, spot, reserved) cost; ``price`` in USD per chip and hour goes before the table's."""
    chips = slice_.chips * count
    what = f"cost: {f'{count} x ' if count > 1 else ''}{slice_.accelerator} = {chips} chips ({kind})"
    source = "--price" if price is not None else TABLE.name
    known = price if price is not None else slice_.prices.get(kind)
    if known is None:
        return f"{what}: price unknown; give --price USD_PER_CHIP_HOUR, or write it into launch/cloud/{TABLE.name}"
    hour = chips * known
    return f"{what} x {known:g} USD per chip-hour (from {source}) = {hour:,.2f} USD per hour, {24 * hour:,.2f} per day, until deleted"
