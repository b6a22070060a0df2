"""From counted work to time: the roofline of one chip.

Owns: the arithmetic. Promises: pure functions of numbers. Does not: model latency, or overlap other than "all" (``roofline_s``: everything
at once, every link of the chip busy) and "none" (``serial_s``: one thing after the other, collectives on one axis of the torus); a measured
time lies between or above them.

Williams, Waterman, Patterson 2009 (doi:10.1145/1498765.1498785); MFU as in PaLM (arXiv:2204.02311, appendix B), with causal attention
counted once.
"""

from __future__ import annotations

import dataclasses

from crl_jax.aot.topology import Chip


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one execution if each resource worked alone at its peak, all per chip.

    ``ici_s``: over the links of all axes, as a group of chips that spans them can use; ``ici_axis_s``: over those of one axis.
    """

    compute_s: float
    hbm_s: float
    ici_s: float
    ici_axis_s: float
    dcn_s: float

    @property
    def roofline_s(self) -> float:
        """Lower bound with perfect overlap: the slowest resource."""
        return max(self.compute_s, self.hbm_s, self.ici_s, self.dcn_s)

    @property
    def serial_s(self) -> float:
        """The same work without any overlap."""
        return self.compute_s + self.hbm_s + self.ici_axis_s + self.dcn_s

    @property
    def bound(self) -> str:
        """The slowest resource: ``compute``, ``hbm``, ``ici`` or ``dcn``."""
        times = {"compute": self.compute_s, "hbm": self.hbm_s, "ici": self.ici_s, "dcn": self.dcn_s}
        return max(times, key=lambda name: times[name])


def roofline(chip: Chip, *, flops: float, hbm_bytes: float, ici_bytes: float, dcn_bytes: float = 0.0) -> Roofline:
    """Times of per-chip work on ``chip``."""
    axis_s = ici_bytes / chip.ici_bytes_s
    return Roofline(flops / chip.flops_s, hbm_bytes / chip.hbm_bytes_s, axis_s / chip.dimensions, axis_s, dcn_bytes / chip.dcn_bytes_s)


def intensity(flops: float, hbm_bytes: float) -> float:
    """Arithmetic intensity, FLOPs per byte of HBM traffic; 0 when nothing is moved."""
    return flops / hbm_bytes if hbm_bytes else 0.0


def mfu_bound(chip: Chip, *, model_flops: float, chips: int, seconds: float) -> float:
    """Model FLOPs utilisation if an execution took ``seconds``: needed arithmetic over what ``chips`` could do in that time."""
    return model_flops / (chips * chip.flops_s * seconds) if seconds else 0.0
