"""Checksums of parameters: what they must not depend on, and what they must see."""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from crl_jax.models.params import flatten
from crl_jax.models.presets import TINY
from crl_jax.models.transformer import param_shapes
from crl_jax.models.transposed import transposed
from crl_jax.sharding import checksum
from crl_jax.sharding.checksum import ChecksumMismatch, compare_sums, join_sums, make_sums
from crl_jax.sharding.mesh import make_mesh
from crl_jax.sharding.reshard import serving_mesh
from crl_jax.sharding.rules import param_shardings

CONFIG = dataclasses.replace(TINY, n_layers=1)


def by_hand(values: np.ndarray) -> int:
    """The definition, in Python integers."""
    bits = values.view({4: np.uint32, 2: np.uint16}[values.itemsize]).ravel().tolist()
    total = 0
    for i, b in enumerate(bits):
        h = (b + i * 0x9E3779B1) % 2**32
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        total += h ^ (h >> 13)
    return total % 2**32


def sums_of(values, spec, mesh, dtype=None):
    where = {"leaf": NamedSharding(mesh, PartitionSpec(*spec))}
    return join_sums(np.asarray(make_sums(where, dtype)({"leaf": jax.device_put(values, where["leaf"])})), where)["leaf"]


@pytest.mark.parametrize(
    ("spec", "copies"),
    [((), 8), (("fsdp", "tensor"), 2), (("tensor", "fsdp"), 2), ((("data", "fsdp"), "tensor"), 1), ((None, "tensor"), 4)],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_copy_on_every_placement_has_the_sum_of_the_definition(spec, copies, dtype) -> None:
    values = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    found = sums_of(values, spec, make_mesh(2, 2, 2), dtype)
    assert found.tolist() == [by_hand(values.astype(dtype))] * copies


@pytest.mark.parametrize("shape", [(37, 8), (24, 8), (64,), (3, 40)])
def test_leaves_are_summed_in_blocks_and_remainders(shape, monkeypatch) -> None:
    monkeypatch.setattr(checksum, "_BLOCK", 40)
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    spec = (None, "tensor") if len(shape) == 2 else ()
    assert set(sums_of(values, spec, make_mesh(2, 2, 2)).tolist()) == {by_hand(values)}


def test_the_transposed_layout_has_the_sums_of_the_plain_one() -> None:
    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), param_shapes(CONFIG))
    where = param_shardings(CONFIG, mesh)
    alone = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), where)
    plain, turned = np.asarray(make_sums(where)(params)), np.asarray(make_sums(alone)(transposed(params)))
    np.testing.assert_array_equal(plain, turned)


def test_R15_one_bit_a_swap_and_a_transposition_change_the_sum() -> None:
    """Values with few bits set are the hard ones: their differences are large powers of two."""
    one = make_mesh(1, 1, 1, jax.devices()[:1])
    rng = np.random.default_rng(0)
    values = rng.choice(np.array([0, 0.5, 1, 2, -1, 4], np.float32), size=(16, 16))
    where = {"leaf": NamedSharding(one, PartitionSpec())}
    program = make_sums(where)

    def total(changed: np.ndarray) -> int:
        return int(np.asarray(program({"leaf": changed}))[0, 0])

    truth, seen = total(values), set[int]()
    changed = [values.T, values[::-1], values[:, ::-1], np.roll(values, 1, 0), np.roll(values, 1, 1), -values, values * 2]
    for _ in range(40):
        order = rng.permutation(values.size)
        changed.append(values.ravel()[order].reshape(values.shape))
    for _ in range(60):  # exactly two unequal elements change places
        a, b = rng.choice(values.size, 2, replace=False)
        flat = values.copy().ravel()
        flat[[a, b]] = flat[[b, a]]
        if flat[a] != flat[b]:
            changed.append(flat.reshape(values.shape))
    for bit in range(32):
        flipped = values.copy()
        flipped.view(np.uint32)[3, bit % 16] ^= np.uint32(1 << bit)
        changed.append(flipped)
    for other in changed:
        assert total(np.ascontiguousarray(other)) != truth
        seen.add(total(np.ascontiguousarray(other)))
    assert len(seen) == len(changed)


def test_a_difference_names_the_leaf_and_the_copy_and_the_checksum_does_not_depend_on_the_mesh() -> None:
    mesh = make_mesh(2, 2, 2)
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), param_shapes(CONFIG))
    sides = []
    for target in (mesh, serving_mesh(mesh, 2)):
        where = param_shardings(CONFIG, target)
        sides.append(join_sums(np.asarray(make_sums(where)(jax.device_put(values, where))), where))
    source, served = sides
    assert {len(sums) for sums in served.values()} == {4, 8}  # replicas; norms lie on every device
    same = compare_sums(source, served)
    assert same == compare_sums(served, source) == compare_sums(source, source)
    assert same == f"{zlib.crc32(np.array([by_hand(v) for _, v in sorted(flatten(values).items())], '<u4').tobytes()):08x}"
    served["layers.0.attn.q"][2] += np.uint32(1)
    with pytest.raises(ChecksumMismatch, match=r"layers\.0\.attn\.q \(the served copy 2 of 4\)\. They are not in use"):
        compare_sums(source, served)
