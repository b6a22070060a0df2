"""The same tokens from parameters and cache that are split over two devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from crl_jax.models import transformer
from crl_jax.records import SamplingParams
from crl_jax.serving.engine import Row, SlotEngine, host_row

CONFIG = transformer.ModelConfig("tiny", 40, 16, 2, 4, 2, 8, 32, tie_embeddings=False)


def tokens(params, mesh, layout=None) -> tuple[list[int], list[float], SlotEngine, object]:
    sizes = {"row_buckets": (), "chunk_buckets": (16,), "max_steps": 4}
    engine = SlotEngine(CONFIG, max_slots=2, max_length=32, mesh=mesh, cache_layout=layout, **sizes)
    rows = [Row(i, 0, list(range(3 + i, 11)), 11, 8, SamplingParams(8, temperature=float(i), seed=5)) for i in range(2)]
    state = engine.extend(params, engine.init_decode_state(), rows)
    state, first = engine.generate(params, state, [0, 1], 4)
    state, last = engine.generate(params, state, [0, 1], 4)
    parts = [r.fetch() for r in (first, last)]
    return [p[i].ids for i in range(2) for p in parts], [p[i].logps for i in range(2) for p in parts], engine, state


def split(path, leaf, mesh):
    """Output columns of q, k, v, gate, up over `tensor`; the rest replicated."""
    column = any(str(getattr(p, "key", p)) in ("q", "k", "v", "gate", "up") for p in path) and leaf.ndim == 2
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(None, "tensor") if column else PartitionSpec()))


@pytest.mark.parametrize(("layout", "heads"), [("whole", (None, "tensor")), ("tokens", (None, None, "tensor"))])
def test_two_devices_give_the_tokens_of_one(layout, heads):
    params = transformer.init(CONFIG, jax.random.key(0))
    params["head"]["kernel"] = params["head"]["kernel"] * 60
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharded = jax.tree_util.tree_map_with_path(lambda path, leaf: split(path, leaf, mesh), params)
    ids, logps, _, _ = tokens(params, None)
    ids2, logps2, engine, state = tokens(sharded, mesh, layout)
    assert ids == ids2
    np.testing.assert_allclose(np.concatenate(logps), np.concatenate(logps2), atol=1e-4)
    spec = NamedSharding(mesh, PartitionSpec(*heads))
    assert all(x.sharding.is_equivalent_to(spec, x.ndim) for x in jax.tree.leaves(state.cache))
    assert engine.max_slots == 2


def test_a_mesh_that_does_not_divide_the_heads_is_refused():
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="n_kv_heads=2"):
        SlotEngine(CONFIG, max_slots=2, max_length=32, mesh=mesh)


def test_slots_that_do_not_divide_over_the_replicas_are_refused():
    mesh = jax.make_mesh((4, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="max_slots=6 does not divide over 4 replicas: use a multiple of 4"):
        SlotEngine(CONFIG, max_slots=6, max_length=32, mesh=mesh, split_rows=True)


def test_a_row_that_moves_to_the_host_and_back_is_the_same_on_split_rows():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    params = jax.device_put(transformer.init(CONFIG, jax.random.key(0)), NamedSharding(mesh, PartitionSpec()))
    engine = SlotEngine(CONFIG, max_slots=4, max_length=32, chunk_buckets=(16,), mesh=mesh, split_rows=True)
    rows = [Row(i, 0, list(range(3 + i, 11)), 11, 8, SamplingParams(8)) for i in range(4)]
    state = engine.extend(params, engine.init_decode_state(), rows)
    before = jax.tree.map(np.asarray, state.cache)
    row = host_row(engine.save(state, 1, 16))
    state = engine.load(state, 2, row)  # from the first replica to the second
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.cache), strict=True):
        assert new.sharding.spec[0] == ("data",) or new.sharding.spec[0] == "data"
        np.testing.assert_array_equal(new[2, :, :7, :7], old[1, :, :7, :7])
        np.testing.assert_array_equal(np.asarray(new)[[0, 1, 3]], old[[0, 1, 3]])
