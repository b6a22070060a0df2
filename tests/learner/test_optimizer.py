"""Schedule, clipping, decay and the dtypes of the optimiser state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crl_jax.learner.optimizer import make_optimizer, make_schedule


def test_C06_schedule_is_as_long_as_the_run() -> None:
    schedule = make_schedule("cosine", 1e-3, steps=500, warmup_steps=50)
    rates = np.array([float(schedule(n)) for n in range(0, 501, 10)])
    assert rates.argmax() == 5  # step 50
    assert rates[5] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(0.0, abs=1e-9)
    assert float(schedule(275)) == pytest.approx(0.5e-3, rel=1e-5)  # half-way through the cosine
    linear = make_schedule("linear", 1.0, steps=10)
    assert [float(linear(n)) for n in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert float(make_schedule("constant", 2.0, steps=10, warmup_steps=4)(9)) == 2.0
    with pytest.raises(ValueError, match="below the run"):
        make_schedule("cosine", 1.0, steps=5, warmup_steps=5)


def test_first_update_is_adam_of_the_clipped_gradient() -> None:
    params = {"w": jnp.ones((1, 2)), "b": jnp.ones(2)}
    grads = {"w": jnp.array([[30.0, 0.0]]), "b": jnp.array([0.0, 40.0])}  # norm 50
    optimizer = make_optimizer(0.1, eps=0.3, weight_decay=0.5, clip_norm=1.0)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # Adam's first step is g / (|g| + eps) with g clipped to (.6, .8); only the matrix decays
    np.testing.assert_allclose(updates["w"], [[-0.1 * (0.6 / 0.9 + 0.5), -0.05]], rtol=1e-5)
    np.testing.assert_allclose(updates["b"], [0.0, -0.1 * 0.8 / 1.1], rtol=1e-5)


def test_clip_norm_zero_is_off() -> None:
    optimizer = make_optimizer(0.1, eps=1.0, clip_norm=0.0)
    params = {"w": jnp.zeros((1, 1))}
    updates, _ = optimizer.update({"w": jnp.full((1, 1), 9.0)}, optimizer.init(params), params)
    assert float(updates["w"][0, 0]) == pytest.approx(-0.1 * 9.0 / 10.0, rel=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_K07_state_dtypes_survive_three_updates(dtype) -> None:
    params = {"w": jnp.ones((2, 2), dtype)}
    optimizer = make_optimizer(make_schedule("cosine", 0.1, steps=10, warmup_steps=2))
    state = optimizer.init(params)
    dtypes = jax.tree.map(lambda x: x.dtype, state)
    for _ in range(3):
        updates, state = optimizer.update({"w": jnp.ones((2, 2), jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
        assert jax.tree.map(lambda x: x.dtype, state) == dtypes
    assert params["w"].dtype == dtype
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
