"""Token log-probabilities: temperature, constraint, entropy, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.learner.step import LOGIT_BYTES, score_tokens
from crl_jax.losses.logprobs import chunked_logps, selected_logps
from crl_jax.records import TrainBatch

V = 6
ALLOWED = np.array([[-1, -1, -1], [0, 2, 5], [3, -1, -1]], np.int32)


def oracle(logits: np.ndarray, token: int, temperature: float, options: list[int]) -> tuple[float, float]:
    """(log-prob, entropy) by definition in float64."""
    weights = {o: np.exp(logits[o] / temperature) for o in options}
    z = sum(weights.values())
    return float(np.log(weights[token] / z)), float(-sum(w / z * np.log(w / z) for w in weights.values()))


def test_L38_temperature_acts_before_the_softmax() -> None:
    scores = selected_logps(jnp.array([[[2.0, 0.0]]]), jnp.array([[0]]), 0.5)
    assert float(scores.logps[0, 0]) == pytest.approx(-0.01815, abs=1e-5)


def test_full_and_constrained_tokens_match_the_definition() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (2, 3, V))
    ids, states = np.array([[4, 2, 3], [5, 1, 0]]), np.array([[0, 1, 2], [1, 0, 1]])
    scores = selected_logps(jnp.asarray(logits), jnp.asarray(ids), 0.7, jnp.asarray(ALLOWED), jnp.asarray(states))
    for b, n in np.ndindex(2, 3):
        options = list(range(V)) if states[b, n] == 0 else [o for o in ALLOWED[states[b, n]] if o >= 0]
        logp, entropy = oracle(logits[b, n], ids[b, n], 0.7, options)
        assert float(scores.logps[b, n]) == pytest.approx(logp, abs=1e-5)
        assert float(scores.entropy[b, n]) == pytest.approx(entropy, abs=1e-5)
    assert float(scores.logps[0, 2]) == 0.0  # a single legal token is certain


def test_constrained_gradient_touches_only_allowed_logits_and_is_finite() -> None:
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, V)), jnp.float32)
    ids, states = jnp.array([[2, 1]]), jnp.array([[1, 0]])

    def total(x: jax.Array) -> jax.Array:
        return selected_logps(x, ids, 0.5, jnp.asarray(ALLOWED), states).logps.sum()

    gradient = np.asarray(jax.grad(total)(logits))
    p = np.exp(np.asarray(logits[0, 0])[[0, 2, 5]] / 0.5)
    p /= p.sum()
    np.testing.assert_allclose(gradient[0, 0], [-p[0] / 0.5, 0, (1 - p[1]) / 0.5, 0, 0, -p[2] / 0.5], atol=1e-5)
    full = np.exp(np.asarray(logits[0, 1]) / 0.5)
    np.testing.assert_allclose(gradient[0, 1], (np.eye(V)[1] - full / full.sum()) / 0.5, atol=1e-5)


def test_a_token_its_state_does_not_allow_surfaces_as_nan() -> None:
    scores = selected_logps(jnp.zeros((1, 2, V)), jnp.array([[1, 0]]), 1.0, jnp.asarray(ALLOWED), jnp.array([[1, 1]]))
    assert np.array_equal(np.isnan(scores.logps), [[True, False]])


def test_large_logits_and_half_precision_stay_finite() -> None:
    logits = jnp.array([[[1e4, 0.0, -1e4]]], jnp.bfloat16)
    scores = selected_logps(logits, jnp.array([[2]]), 1.0)
    assert scores.logps.dtype == jnp.float32
    assert bool(jnp.isfinite(scores.logps).all())
    assert float(scores.entropy[0, 0]) == pytest.approx(0.0, abs=1e-3)


def test_bad_arguments_are_refused() -> None:
    logits, ids = jnp.zeros((1, 1, V)), jnp.zeros((1, 1), int)
    with pytest.raises(ValueError, match="greedy"):
        selected_logps(logits, ids, 0.0)
    with pytest.raises(ValueError, match="both"):
        selected_logps(logits, ids, 1.0, jnp.asarray(ALLOWED))


def head(hidden, table):
    return hidden @ table


def problem(rows: int = 3, n: int = 7, width: int = 5):
    rng = np.random.default_rng(2)
    hidden, table = (jnp.asarray(rng.normal(0, 0.7, s), jnp.float32) for s in ((rows, n, width), (width, V)))
    states = rng.integers(0, 3, (rows, n))
    ids = np.where(states == 0, rng.integers(0, V, (rows, n)), np.where(states == 1, 2, 3))
    return hidden, table, jnp.asarray(ids), jnp.asarray(states)


def weighted(hidden, table, ids, states, chunk):
    weights = jnp.arange(ids.size, dtype=jnp.float32).reshape(ids.shape) / ids.size
    tables = {"allowed": jnp.asarray(ALLOWED), "states": states}
    if chunk is None:
        scores = selected_logps(head(hidden, table), ids, 0.7, **tables)
    else:
        scores = chunked_logps(lambda h: head(h, table), hidden, ids, chunk=chunk, temperature=0.7, **tables)
    return jnp.sum(weights * scores.logps), scores


@pytest.mark.parametrize("chunk", [2, 3, 7])
def test_chunks_give_the_value_and_the_gradient_of_all_logits_at_once(chunk: int) -> None:
    hidden, table, ids, states = problem()
    (want, scores), slope = jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)(hidden, table, ids, states, None)
    (got, parts), part_slope = jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)(hidden, table, ids, states, chunk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ((got, parts), part_slope), ((want, scores), slope))


def sizes(jaxpr) -> set[int]:
    """Numbers of elements of every array made anywhere in a program, loops and calls included."""
    found = {int(np.prod(v.aval.shape)) for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "shape")}
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found |= sizes(inner)
    return found


def test_no_array_of_all_logits_exists_in_the_gradient() -> None:
    hidden, table, ids, states = problem(rows=4, n=32, width=2)

    def largest(chunk: int | None) -> int:
        def loss(hidden, table):
            return weighted(hidden, table, ids, states, chunk)[0]

        program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, table)
        return max(size for size in sizes(program.jaxpr) if size % V == 0)

    assert largest(None) == 4 * 32 * V  # the inspection sees them where they exist
    assert largest(4) == 4 * 4 * V


@pytest.mark.parametrize("logit_bytes", [LOGIT_BYTES, 4 * LOGIT_BYTES])
def test_the_steps_own_choice_of_chunk_bounds_the_logits(logit_bytes: int) -> None:
    """At SmolLM2's vocabulary 8 x 512 tokens would be 0.8 GB of logits; only shapes are computed here."""
    rows, n, vocabulary = 8, 512, 49152

    class Model:
        @staticmethod
        def hidden_states(config, params, tokens, positions, *, segments, prefixes, read, how):
            return params["table"][read % 7], None

        @staticmethod
        def unembed(config, params, hidden):
            return hidden @ params["table"].T

    shape = jax.ShapeDtypeStruct
    ints, floats = shape((rows, n), jnp.int32), shape((rows, n), jnp.float32)
    batch = TrainBatch(ints, ints, ints, shape((rows, n), jnp.bool_), floats, floats, ints)

    def loss(params, batch):
        return jnp.sum(score_tokens(Model(), None, params, batch, temperature=1.0, allowed=None, logit_bytes=logit_bytes).logps)

    program = jax.make_jaxpr(jax.grad(loss))({"table": shape((vocabulary, 4), jnp.float32)}, batch)
    assert max(sizes(program.jaxpr)) <= logit_bytes // 4
    assert max(sizes(program.jaxpr)) > logit_bytes // 8  # and it is not needlessly small


def test_a_chunk_of_nothing_is_refused() -> None:
    hidden, table, ids, _ = problem()
    with pytest.raises(ValueError, match="at least 1"):
        chunked_logps(lambda h: head(h, table), hidden, ids, chunk=0)
