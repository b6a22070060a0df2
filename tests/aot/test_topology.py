"""Names of slices, the table of chips, and what is said when there is no compiler."""

import dataclasses
import sys

import jax
import pytest

from crl_jax.aot import topology
from crl_jax.aot.topology import CHIPS, GIB, AotError, describe_devices, parse_topology, replica_mesh, topology_mesh
from crl_jax.sharding.mesh import make_mesh


@pytest.mark.parametrize(
    ("name", "chip", "shape", "slices", "chips"),
    [("v5p:4x4x4", "v5p", (4, 4, 4), 1, 64), ("v5e:4x4", "v5e", (4, 4), 1, 16), ("2*v5e:8x16", "v5e", (8, 16), 2, 256)],
)
def test_names_are_read_and_written_back(name: str, chip: str, shape: tuple[int, ...], slices: int, chips: int) -> None:
    topology = parse_topology(name)
    assert (topology.chip.name, topology.shape, topology.slices, topology.chips) == (chip, shape, slices, chips)
    assert topology.name == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v5p", "write CHIP:SHAPE"),
        ("v5p:4x4", "v5p slices have 3 dimensions"),
        ("v5e:4x4x4", "v5e slices have 2 dimensions"),
        ("v9:4x4", r"unknown chip `v9`, use one of \['v5e', 'v5p', 'v6e'\]"),
        ("0*v5e:4x4", "1 or more"),
        ("v5e:0x4", "1 or more"),
    ],
)
def test_a_bad_name_is_answered_with_a_good_one(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_topology(name)


def test_the_chip_table_holds_the_published_numbers() -> None:
    v5p, v5e = CHIPS["v5p"], CHIPS["v5e"]
    assert (v5p.flops_s, v5p.hbm_bytes_s) == (459e12, 2765e9)
    assert (v5e.flops_s, v5e.hbm_bytes_s) == (197e12, 819e9)
    assert 15 * GIB < v5e.hbm_bytes < 16 * GIB
    assert 90 * GIB < v5p.hbm_bytes < 96 * GIB
    for chip in CHIPS.values():
        assert chip.flops_s > chip.hbm_bytes_s > chip.ici_bytes_s > chip.dcn_bytes_s > 0


def test_without_libtpu_the_error_has_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(AotError, match=r"pip install -e '\.\[aot\]'"):
        describe_devices(parse_topology("v5e:4x4"))


def test_a_mesh_must_use_the_whole_slice_and_split_data_over_slices() -> None:
    with pytest.raises(ValueError, match="v5e:4x4 has 16"):
        topology_mesh([], parse_topology("v5e:4x4"), 1, 4, 2)
    with pytest.raises(ValueError, match="multiple of the 2 slices"):
        topology_mesh([], parse_topology("2*v5e:4x4"), 1, 8, 4)


@dataclasses.dataclass(frozen=True)
class Device:
    """What ``mesh_utils`` asks of a device of a 4x4 slice."""

    id: int
    slice_index: int
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"

    @property
    def coords(self) -> tuple[int, int, int]:
        return (self.id % 4, self.id // 4, 0)


def test_a_mesh_may_split_the_sides_of_each_of_two_slices() -> None:
    """Sides of 4 as fsdp=8 and tensor=2; the slices are the outer axis."""
    devices = [Device(i, sliced) for sliced in range(2) for i in range(16)]
    mesh = topology_mesh(devices, parse_topology("2*v5e:4x4"), 2, 8, 2)
    assert mesh.devices.shape == (2, 8, 2)
    assert [{d.slice_index for d in part.flat} for part in mesh.devices] == [{0}, {1}]


@pytest.mark.parametrize(("slice_name", "own"), [("v5p:2x2x2", None), ("v5e:2x4", "v5e:2x2"), ("v6e:2x4", "v6e:2x2")])
def test_a_replica_in_a_two_dimensional_slice_is_a_slice_of_its_own(monkeypatch, slice_name: str, own: str | None) -> None:
    asked = []

    def devices(wanted: topology.Topology) -> list[object]:
        asked.append(wanted.name)
        return list(jax.devices()[4:])

    monkeypatch.setattr(topology, "describe_devices", devices)
    mesh = make_mesh(1, 2, 4)
    replica = replica_mesh(mesh, parse_topology(slice_name))
    assert dict(replica.shape) == {"data": 1, "fsdp": 1, "tensor": 4}
    assert asked == ([] if own is None else [own])
    assert list(replica.devices.flat) == (list(mesh.devices[0, 0]) if own is None else jax.devices()[4:])
