"""The train step against an independent reference, and what must not change it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_model
from toy_model import BUCKETS, VOCAB, samples

from crl_jax.learner import objective
from crl_jax.learner.batching import to_batch
from crl_jax.learner.optimizer import make_optimizer, make_schedule
from crl_jax.learner.state import TrainingDiverged, init_state, require_progress, to_host
from crl_jax.learner.step import make_train_step, score_tokens
from crl_jax.models import transformer
from crl_jax.models.config import ModelConfig
from crl_jax.models.forward import Execution
from crl_jax.records import Completion, Finish, Provenance, TokenLog, TrainBatch, TrainSample

LR, EPS, CLIP, T = 0.01, 1e-3, 0.5, 0.7
OPTIMIZER = make_optimizer(LR, eps=EPS, clip_norm=CLIP)
ALLOWED = np.array([[-1, -1, -1], [0, 1, 2], [3, 4, -1]], np.int32)


def make(objective_=None, **kw):
    kw = {"temperature": T, "allowed": None, "model": toy_model} | kw
    return make_train_step(None, OPTIMIZER, objective_ or objective.actor(), **kw)


@pytest.fixture(scope="module")
def steps() -> dict:
    """Compiled once for the whole file, by number of micro-batches."""
    return {m: make(microbatches=m) for m in (1, 2, 4)}


def fresh(seed: int = 0):
    return init_state(toy_model.init(seed), OPTIMIZER)


def batch(seed: int = 0) -> TrainBatch:
    return to_batch(samples(7, seed), **BUCKETS)


def close(a, b, atol: float = 1e-6) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=atol, rtol=1e-4), a, b)


def reference_loss(params: dict, rows: list, kind: str) -> jax.Array:
    """Eq. 5 / Eq. 3 over a flat list of the trained tokens, each with its unpadded prefix; no masks, no batches."""
    tokens = [(row, t) for row in rows for t in np.flatnonzero(row.log.loss_mask)]
    last = np.eye(VOCAB)[[row.log.ids[t - 1] for row, t in tokens]]
    history = np.stack([np.bincount(row.log.ids[:t], minlength=VOCAB) / t for row, t in tokens])
    h = jnp.tanh(jnp.concatenate([last @ params["embed"], history @ params["embed"]], -1) @ params["mix"]) * params["scale"]
    everything = jax.nn.log_softmax(h @ params["embed"].T / T)
    logp = everything[np.arange(len(tokens)), np.array([row.log.ids[t] for row, t in tokens])]
    ratio = jnp.exp(logp - np.array([row.log.logps[t] for row, t in tokens]))
    a = np.array([row.advantage for row, _ in tokens])
    if kind == "actor":
        share = np.array([1 / (len(rows) * row.log.loss_mask.sum()) for row, _ in tokens])  # 1/rows * 1/tokens of the row
        return -jnp.sum(share * jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a))
    return -jnp.mean(jax.lax.stop_gradient(jnp.clip(ratio, 0.9, 1.1)) * a * logp)


@pytest.mark.parametrize("kind", ["actor", "extractor"])
def test_update_equals_the_reference(kind: str, steps: dict) -> None:
    step = steps[1] if kind == "actor" else make(objective.extractor())
    loss, grads = jax.jit(jax.value_and_grad(lambda p: reference_loss(p, samples(4), kind)))(toy_model.init())
    grads = jax.tree.map(np.asarray, grads)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    clipped = {k: g * min(1.0, CLIP / norm) for k, g in grads.items()}
    expected = {k: np.asarray(toy_model.init()[k]) - LR * g / (np.abs(g) + EPS) for k, g in clipped.items()}  # Adam's first step

    state, sums = step(fresh(), to_batch(samples(4), **BUCKETS))
    close(state.params, expected)
    assert sums["loss"].mean() == pytest.approx(float(loss), abs=1e-6)
    assert sums["grad_norm"].mean() == pytest.approx(norm, rel=1e-5)
    assert (int(state.step), int(state.skipped)) == (1, 0)


def test_L11_M04_microbatches_do_not_change_the_step(steps: dict) -> None:
    results = [steps[m](fresh(), batch()) for m in (1, 2, 4)]
    for state, sums in results[1:]:
        close(state, results[0][0])
        close(sums, results[0][1], atol=1e-5)


def test_L37_a_second_iteration_passes_over_the_whole_batch(steps: dict) -> None:
    def twice(m: int):
        return steps[m](steps[m](fresh(), batch())[0], batch())[0]

    close(twice(2), twice(1))


def test_chunks_of_logits_change_nothing_but_memory(steps: dict) -> None:
    close(make(logit_chunk=4)(fresh(), batch()), steps[1](fresh(), batch()))  # 6 slots: the second chunk is padded


def test_L14_L32_padding_changes_nothing(steps: dict) -> None:
    wide = to_batch(samples(7), row_buckets=(12,), length_buckets=(20,), token_buckets=(9,))
    close(steps[1](fresh(), wide), steps[1](fresh(), batch()))


def test_L14_two_sequences_padded_to_8_and_to_16_give_one_loss_and_one_update() -> None:
    """Padded in tokens, in trained slots and in rows: the constant normaliser is not a padded shape."""
    step = make(objective.actor(aggregation="seq_mean_token_sum_norm", normaliser=5.0))
    rng = np.random.default_rng(3)
    two = [toy_model.sample(rng, 2, 1, 1.0), toy_model.sample(rng, 2, 2, -0.5)]  # 6 and 7 tokens
    narrow = step(fresh(), to_batch(two, row_buckets=(2,), length_buckets=(8,), token_buckets=(3,)))
    wide = step(fresh(), to_batch(two, row_buckets=(4,), length_buckets=(16,), token_buckets=(8,)))
    close(wide, narrow)
    assert wide[1]["loss"].mean() != 0


def test_L16_one_trained_token_keeps_its_advantage_and_none_gives_zero(steps: dict) -> None:
    """There is no whitening, so a single token keeps its advantage of 0.5; of a sequence without any nothing is seen."""
    log = toy_model.sample(np.random.default_rng(0), 3, 1, 0.5).log
    prompt = TokenLog.empty().append_context(log.ids[:3].tolist(), Provenance.PROMPT)
    one, nothing = prompt.append_completion(Completion((4,), (-2.0,), (0,), (0,), Finish.STOP)), prompt
    alone = to_batch([TrainSample(one, 0.5)], **BUCKETS)
    assert alone.advantages[alone.mask].tolist() == [0.5]
    state, sums = steps[1](fresh(), alone)
    assert (sums["advantage_abs"].mean(), int(sums["advantage_abs"].count), int(state.skipped)) == (0.5, 1, 0)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((state, sums)))
    beside, beside_sums = steps[1](fresh(), to_batch([TrainSample(one, 0.5), TrainSample(nothing, 0.5)], **BUCKETS))
    close((beside, beside_sums), (state, sums))
    state, sums = steps[1](fresh(), to_batch([TrainSample(nothing, 0.5)], **BUCKETS))
    assert (float(sums["loss"].total), int(sums["loss"].count), int(state.skipped)) == (0.0, 0, 1)


def test_sums_by_hand(steps: dict) -> None:
    b = batch()
    scores = score_tokens(toy_model, None, toy_model.init(), b, temperature=T, allowed=None)
    mask, logps = np.asarray(b.mask), np.asarray(scores.logps)
    log_ratio = (logps - b.behaviour_logps)[mask]
    ratio, adv = np.exp(log_ratio), np.asarray(b.advantages)[mask]
    _, sums = steps[1](fresh(), b)
    tokens = int(mask.sum())
    assert int(sums["tokens"].total) == int(sums["ratio"].count) == tokens
    assert sums["ratio"].mean() == pytest.approx(ratio.mean(), rel=1e-5)
    assert sums["kl_behaviour"].mean() == pytest.approx((ratio - 1 - log_ratio).mean(), rel=1e-5)
    assert sums["logp_gap"].mean() == pytest.approx(np.abs(log_ratio).mean(), rel=1e-5)
    assert sums["logp_gap_max"].mean() == pytest.approx(np.abs(log_ratio).max(), rel=1e-5)
    assert sums["ess"].mean() == pytest.approx(ratio.sum() ** 2 / (ratio**2).sum() / tokens, rel=1e-5)
    assert sums["clip_fraction"].mean() == pytest.approx(np.mean(((ratio > 1.2) & (adv > 0)) | ((ratio < 0.8) & (adv < 0))))
    assert sums["advantage_abs"].mean() == pytest.approx(np.abs(adv).mean(), rel=1e-5)
    assert sums["entropy"].mean() == pytest.approx(np.asarray(scores.entropy)[mask].mean(), rel=1e-5)
    assert sums["refused"].mean() == 0.0


class NextIdPeaks:
    """Logits after token i peak (10) on token i + 1."""

    @staticmethod
    def hidden_states(config, params, tokens, positions, *, segments, prefixes, read, how):
        return jnp.take_along_axis(10.0 * jax.nn.one_hot(tokens + 1, 3), read[..., None], axis=1), None

    @staticmethod
    def unembed(config, params, hidden):
        return hidden


def test_L21_a_token_is_scored_from_the_logits_before_it() -> None:
    b = TrainBatch(*(np.zeros((1, 2), np.int32),) * 7)._replace(tokens=np.array([[0, 1, 2]]), token_index=np.array([[1, 2]]))
    scores = score_tokens(NextIdPeaks(), None, None, b, temperature=1.0, allowed=None)
    np.testing.assert_allclose(scores.logps, [[-9.08e-5] * 2], rtol=1e-2)


def test_constrained_tokens_use_their_own_softmax() -> None:
    b = batch()
    b = b._replace(tokens=b.tokens % 3, states=np.where(b.mask, 1, 0))
    params = toy_model.init()
    scores = score_tokens(toy_model, None, params, b, temperature=T, allowed=jnp.asarray(ALLOWED))
    first = [int(t) for t in b.tokens[0, : b.token_index[0, 0] + 1]]
    hidden, _ = toy_model.hidden_states(None, params, jnp.array([first[:-1]]), jnp.arange(len(first) - 1)[None])
    logits = np.asarray(toy_model.unembed(None, params, hidden))[0, -1, :3] / T
    assert float(scores.logps[0, 0]) == pytest.approx(logits[first[-1]] - np.log(np.exp(logits).sum()), abs=1e-5)
    _, sums = make(allowed=ALLOWED)(fresh(), b)
    assert np.isfinite(sums["loss"].mean())


def test_M05_L02_a_non_finite_step_changes_nothing_and_the_next_one_is_applied(steps: dict) -> None:
    once, _ = steps[1](fresh(), batch())
    before = to_host(once)
    bad = batch()
    bad.advantages[2, 0] = np.nan
    refused, sums = steps[1](once, bad)
    close((refused.params, refused.opt_state), (before.params, before.opt_state), atol=0.0)
    assert (int(refused.step), int(refused.skipped), int(refused.skipped_in_row)) == (1, 1, 1)
    assert (float(sums["refused"].total), float(sums["loss"].total), int(sums["loss"].count)) == (1.0, 0.0, 0)
    for name in ("logp_gap", "logp_gap_max", "ess"):
        assert (float(sums[name].total), int(sums[name].count)) == (0.0, 0), name

    applied, _ = steps[1](refused, batch(1))
    expected, _ = steps[1](steps[1](fresh(), batch())[0], batch(1))
    close((applied.params, applied.opt_state), (expected.params, expected.opt_state), atol=0.0)
    assert (int(applied.step), int(applied.skipped), int(applied.skipped_in_row)) == (2, 1, 0)


def test_M05_a_refused_step_advances_neither_adam_nor_its_schedule() -> None:
    """Counts of Adam and of the schedule after good, bad, good: 1, 1, 2; the second good step has the rate of the second update."""
    optimizer = make_optimizer(make_schedule("linear", 0.1, steps=4), eps=EPS, clip_norm=0.0)
    how = {"temperature": T, "allowed": None, "model": toy_model, "microbatches": 2}
    step = make_train_step(None, optimizer, objective.actor(), **how)
    state, bad = init_state(toy_model.init(), optimizer), batch()
    bad.behaviour_logps[3, 0] = np.nan
    seen = []
    for data in (batch(), bad, batch(1)):
        state, sums = step(state, data)
        counts = [int(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim == 0]
        seen.append((counts, int(state.step), int(state.skipped), float(sums["refused"].total)))
    assert seen == [([1, 1], 1, 0, 0.0), ([1, 1], 1, 1, 1.0), ([2, 2], 2, 1, 0.0)]
    without = init_state(toy_model.init(), optimizer)
    for data in (batch(), batch(1)):
        without, _ = step(without, data)
    close((state.params, state.opt_state), (without.params, without.opt_state), atol=0.0)


def test_L02_nan_in_a_masked_slot_is_harmless(steps: dict) -> None:
    odd = batch()
    for column in (odd.advantages, odd.behaviour_logps):
        column[~odd.mask] = np.nan
    close(steps[1](fresh(), odd), steps[1](fresh(), batch()), atol=0.0)


def test_a_batch_without_trained_tokens_is_refused(steps: dict) -> None:
    empty = batch()._replace(mask=np.zeros_like(batch().mask))
    state, _ = steps[1](fresh(), empty)
    assert (int(state.step), int(state.skipped)) == (0, 1)
    close(state.params, toy_model.init(), atol=0.0)


def test_M05_refusals_in_a_row_stop_the_run(steps: dict) -> None:
    state, bad = fresh(), batch()
    bad.behaviour_logps[0, 0] = np.inf
    bad.advantages[0, 0] = np.nan
    for _ in range(2):
        state, _ = steps[1](state, bad)
        require_progress(state, limit=3)
    state, _ = steps[1](state, bad)
    with pytest.raises(TrainingDiverged, match="3 updates in a row"):
        require_progress(state, limit=3)


def test_P04_the_old_state_is_deleted_and_a_host_copy_keeps_its_values(steps: dict) -> None:
    state, _ = steps[1](fresh(), batch())
    saved = to_host(state)
    expected = {k: v.copy() for k, v in saved.params.items()}
    newer, _ = steps[1](state, batch(1))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state.params["mix"])
    close(saved.params, expected, atol=0.0)
    assert np.abs(np.asarray(newer.params["mix"]) - saved.params["mix"]).max() > 0


def test_K07_one_program_and_stable_dtypes_over_three_updates() -> None:
    step, state = make(microbatches=2), init_state(toy_model.init(dtype=jnp.bfloat16), OPTIMIZER)
    dtypes = jax.tree.map(lambda x: x.dtype, state)
    for seed in range(3):
        state, _ = step(state, batch(seed))
        assert jax.tree.map(lambda x: x.dtype, state) == dtypes
    assert step._cache_size() == 1  # type: ignore[attr-defined]
    assert int(state.step) == 3


def test_the_transformer_overfits_four_sequences() -> None:
    config = ModelConfig(name="t", vocab_size=VOCAB, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32)
    optimizer = make_optimizer(0.03)
    step = make_train_step(config, optimizer, objective.supervised(), temperature=1.0, allowed=None)
    state, four = init_state(transformer.init(config, jax.random.key(0)), optimizer), to_batch(samples(4, 3), **BUCKETS)
    losses = []
    for _ in range(120):
        state, sums = step(state, four)
        losses.append(sums["loss"].mean())
    assert losses[0] == pytest.approx(np.log(VOCAB), rel=0.1)  # a uniform guess, undisturbed by the padded rows
    assert losses[-1] < 0.05
    assert int(state.skipped) == 0


def test_float32_masters_keep_moves_that_bfloat16_would_lose() -> None:
    """Norm scales start at 1, where neighbours in bfloat16 are 2^-8 below and 2^-7 above; three updates of 1e-4 add up all the same."""
    config = ModelConfig(name="t", vocab_size=VOCAB, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32)
    optimizer = make_optimizer(1e-4)
    how = Execution(dtype=jnp.bfloat16)
    step = make_train_step(config, optimizer, objective.supervised(), temperature=1.0, allowed=None, how=how)
    state, four = init_state(transformer.init(config, jax.random.key(0)), optimizer), to_batch(samples(4, 3), **BUCKETS)
    scales = []
    for _ in range(3):
        state, _ = step(state, four)
        assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.ndim} == {jnp.dtype(jnp.float32)}
        scales.append(np.asarray(state.params["final_norm"]["scale"]))
    assert np.all(scales[2].astype(jnp.bfloat16) == 1), "a bfloat16 master would still be at 1"
    moved = [np.abs(scale - 1) for scale in scales]
    assert moved[0].min() > 0.9e-4, "Adam's first step is the whole rate"
    assert np.median(moved[2] / moved[0]) > 2.5, "and the later ones add to it"


@pytest.mark.parametrize("kind", ["supervised", "actor"])
def test_M05_an_absurd_learning_rate_ends_training_and_keeps_the_weights_finite(kind: str) -> None:
    config = ModelConfig(name="t", vocab_size=VOCAB, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32)
    optimizer = make_optimizer(1e9)
    step = make_train_step(config, optimizer, getattr(objective, kind)(), temperature=1.0, allowed=None)
    state, four = init_state(transformer.init(config, jax.random.key(0)), optimizer), to_batch(samples(4, 3), **BUCKETS)
    refused = 0.0
    for _ in range(8):
        state, sums = step(state, four)
        refused += float(sums["refused"].total)
    assert int(state.skipped_in_row) == int(state.skipped) == refused >= 5
    with pytest.raises(TrainingDiverged, match="updates in a row were refused after step"):
        require_progress(state, limit=5)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))


def test_bad_arguments_are_refused(steps: dict) -> None:
    with pytest.raises(ValueError, match="do not divide 6 rows"):
        steps[4](fresh(), to_batch(samples(6), **BUCKETS | {"row_buckets": (6,)}))
    with pytest.raises(ValueError, match="neither"):
        make(mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)))
    with pytest.raises(ValueError, match="eps_high"):
        objective.extractor(eps_high=-0.5)
    with pytest.raises(ValueError, match="normaliser"):
        objective.actor(aggregation="seq_mean_token_sum_norm")
