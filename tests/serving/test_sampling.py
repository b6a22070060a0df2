"""Sampling of one token per row, against small oracles in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.serving.constraint import ActionTrie
from crl_jax.serving.sampling import RowParams, allowed_mask, sample, truncate

V = 12


def rows(n, temperature=1.0, top_p=1.0, top_k=0, seed=0, counter=0, state=0, min_p=0.0, forbidden=((-1, -1),)) -> RowParams:
    def column(value, kind):
        return jnp.broadcast_to(jnp.asarray(value, kind), (n,))

    real, whole = functools.partial(column, kind=jnp.float32), functools.partial(column, kind=jnp.int32)
    banned = jnp.broadcast_to(jnp.asarray(forbidden, jnp.int32), (n, 2))
    return RowParams(real(temperature), real(top_p), real(min_p), whole(top_k), whole(seed), whole(counter), whole(state), banned)


draw = jax.jit(sample)
LOGITS = jax.random.normal(jax.random.key(3), (8, V)) * 2


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def test_greedy_takes_the_lowest_id_among_equals_and_reports_temperature_one():
    logits = jnp.zeros((8, V)).at[:, 4].set(2.0).at[:, 7].set(2.0)
    ids, logps, _ = draw(logits, rows(8, temperature=0.0))
    assert ids.tolist() == [4] * 8
    np.testing.assert_allclose(logps, log_softmax(logits)[:, 4], atol=1e-6)


@pytest.mark.parametrize(("p", "kept"), [(0.75, 2), (0.5, 1), (1.0, 4), (1e-9, 1), (0.76, 3)])
def test_S02_top_p_keeps_the_smallest_set_whose_mass_reaches_p(p, kept):
    logits = jnp.log(jnp.array([[0.125, 0.5, 0.125, 0.25]]))
    out = truncate(logits, rows(1, top_p=p))
    assert int(jnp.isfinite(out).sum()) == kept
    assert bool(jnp.isfinite(out[0, 1]))


def test_top_k_then_top_p_over_the_renormalised_rest():
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    out = truncate(logits, rows(1, top_k=2, top_p=0.5))  # .4/.7 = .571 >= .5
    assert np.isfinite(out[0]).tolist() == [True, False, False, False]
    assert np.isfinite(truncate(logits, rows(1, top_k=3))[0]).tolist() == [True, True, True, False]


def test_S05_parameters_travel_with_the_row_whatever_the_layout():
    temperature = np.array([0, 1, 0, 0, 1, 0, 1, 0], np.float32)
    best = np.asarray(LOGITS).argmax(-1)
    for order in (np.arange(8), np.arange(8)[::-1], np.roll(np.arange(8), 3)):
        ids, *_ = draw(LOGITS[order], rows(8, temperature=temperature[order], seed=np.arange(8)[order]))
        greedy = temperature[order] == 0
        assert (np.asarray(ids)[greedy] == best[order][greedy]).all()
    ids, *_ = draw(LOGITS, rows(8, temperature=-1.0))  # never divide by a padding value: it would prefer the least likely
    assert (np.asarray(ids) == best).all()


def test_S06_a_row_does_not_depend_on_its_neighbours():
    alone, logp, _ = draw(jnp.broadcast_to(LOGITS[2], (8, V)), rows(8, seed=7, counter=5))
    mixed = rows(8, seed=[0, 1, 7, 3, 4, 5, 6, 8], counter=5, temperature=[0, 2, 1, 1, 0.5, 1, 1, 1], top_k=[0, 3, 0, 0, 1, 0, 0, 0])
    ids, logps, _ = draw(LOGITS, mixed)
    assert int(ids[2]) == int(alone[0])
    assert float(logps[2]) == pytest.approx(float(logp[0]), abs=1e-6)


def test_S08_seeds_and_counters_give_different_draws_and_reproduce():
    flat = jnp.zeros((8, V))
    first, *_ = draw(flat, rows(8, seed=np.arange(8)))
    again, *_ = draw(flat, rows(8, seed=np.arange(8)))
    other, *_ = draw(flat, rows(8, seed=np.arange(8), counter=1))
    assert first.tolist() == again.tolist()
    assert len(set(first.tolist())) >= 2
    assert first.tolist() != other.tolist()


def test_frequencies_follow_the_softmax_at_the_temperature():
    n, temperature = 4096, 0.7
    ids, logps, _ = draw(jnp.broadcast_to(LOGITS[0], (n, V)), rows(n, temperature=temperature, seed=np.arange(n)))
    expected = log_softmax(np.asarray(LOGITS[0]) / temperature)
    np.testing.assert_allclose(np.bincount(np.asarray(ids), minlength=V) / n, np.exp(expected), atol=0.03)
    np.testing.assert_allclose(logps, expected[np.asarray(ids)], atol=1e-5)


def test_constrained_rows_sample_and_score_over_the_allowed_ids_only():
    trie = ActionTrie.build([(3, 1), (5, 1), (6, 1)])
    states = np.array([1, 0] * 4)
    ids, logps, _ = jax.jit(sample)(LOGITS, rows(8, seed=np.arange(8), state=states), jnp.asarray(trie.allowed))
    assert set(np.asarray(ids)[states == 1].tolist()) <= {3, 5, 6}
    small = log_softmax(np.asarray(LOGITS)[:, [3, 5, 6]])
    for i in range(8):
        expected = small[i][[3, 5, 6].index(int(ids[i]))] if states[i] else log_softmax(LOGITS[i])[int(ids[i])]
        assert float(logps[i]) == pytest.approx(expected, abs=1e-5)
    assert allowed_mask(jnp.array([0, 1]), jnp.asarray(trie.allowed), V).sum(1).tolist() == [V, 3]


def test_truncated_rows_report_the_untruncated_log_prob():
    ids, logps, _ = draw(LOGITS, rows(8, top_k=1, seed=np.arange(8)))
    assert ids.tolist() == np.asarray(LOGITS).argmax(-1).tolist()
    np.testing.assert_allclose(logps, log_softmax(LOGITS).max(-1), atol=1e-5)


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.25, 4), (0.26, 3), (0.6, 2), (1.0, 1)])
def test_min_p_keeps_what_is_likely_beside_the_likeliest(min_p, kept):
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    assert int(jnp.isfinite(truncate(logits, rows(1, min_p=min_p))).sum()) == kept


def test_min_p_comes_before_top_p():
    logits = jnp.log(jnp.array([[0.5, 0.2, 0.1, 0.1, 0.1]]))
    out = truncate(logits, rows(1, min_p=0.3, top_p=0.72))  # of .5 and .2, .5 / .7 = .714 is not enough
    assert np.isfinite(out[0]).tolist() == [True, True, False, False, False]


def test_forbidden_ids_are_never_drawn_and_change_the_sampling_log_prob_only():
    best = np.asarray(LOGITS).argmax(-1)
    banned = [[int(i), -1] for i in best]
    ids, logps, sampling = draw(LOGITS, rows(8, temperature=[0, 1] * 4, seed=np.arange(8), forbidden=banned))
    second = np.argsort(-np.asarray(LOGITS), -1)[:, 1]
    assert ids[::2].tolist() == second[::2].tolist()
    assert not (np.asarray(ids) == best).any()
    full = log_softmax(LOGITS)
    np.testing.assert_allclose(logps, full[np.arange(8), ids], atol=1e-5)
    left = 1 - np.exp(full[np.arange(8), best])
    expected = np.where(np.arange(8) % 2, np.asarray(logps) - np.log(left), 0.0)
    np.testing.assert_allclose(sampling, expected, atol=1e-5)


def test_the_sampling_log_prob_is_that_of_the_truncated_distribution():
    plain = draw(LOGITS, rows(8, seed=np.arange(8)))
    np.testing.assert_allclose(plain[1], plain[2], atol=1e-6)
    ids, logps, sampling = draw(LOGITS, rows(8, seed=np.arange(8), top_k=3, temperature=0.5))
    scaled = np.asarray(LOGITS, np.float64) / 0.5
    for i in range(8):
        top = np.sort(scaled[i])[-3:]
        assert scaled[i, int(ids[i])] >= top[0]
        assert float(sampling[i]) == pytest.approx(scaled[i, int(ids[i])] - np.log(np.exp(top).sum()), abs=1e-5)
        assert float(logps[i]) == pytest.approx(log_softmax(scaled)[i, int(ids[i])], abs=1e-5)
