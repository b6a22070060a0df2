"""The extractor's update on generations that older weights sampled: the ratio comes from the stored log-probs, and the clip acts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_model
from toy_model import BUCKETS

from crl_jax.experience.buffer import Sample
from crl_jax.learner import objective
from crl_jax.learner.batching import to_batch
from crl_jax.learner.optimizer import make_optimizer
from crl_jax.learner.state import init_state
from crl_jax.learner.step import make_train_step
from crl_jax.records import Generation, GenerationKind
from crl_jax.rollout.assemble import extractor_samples

PROMPT, RESPONSE = (1, 2), (3, 4, 5)


@jax.jit
def logps_of(params) -> jax.Array:
    """Log-probs of RESPONSE after PROMPT, as a sampler with these weights would have stored them."""
    ids = jnp.array([*PROMPT, *RESPONSE])
    hidden, _ = toy_model.hidden_states(None, params, ids[None], jnp.arange(len(ids))[None])
    everything = jax.nn.log_softmax(toy_model.unembed(None, params, hidden)[0])
    return everything[jnp.arange(len(PROMPT) - 1, len(ids) - 1), ids[len(PROMPT) :]]


def test_the_ratio_of_a_generation_differs_from_one_once_the_weights_changed() -> None:
    behaviour = tuple(map(float, logps_of(toy_model.init())))
    optimizer = make_optimizer(0.05)
    step = make_train_step(None, optimizer, objective.extractor(), temperature=1.0, allowed=None, model=toy_model)
    state = init_state(toy_model.init(), optimizer)

    def evidence() -> list[Sample]:
        made = [
            Generation(f"g{n}", GenerationKind.DISTIL, PROMPT, RESPONSE[: 2 + n], behaviour[: 2 + n], (0,) * (2 + n), 0) for n in (0, 1)
        ]
        return [Sample(g, reward, 1, 0, -1) for g, reward in zip(made, (1.0, -1.0), strict=True)]

    batch = to_batch(extractor_samples(evidence(), step=0, alpha=0.5, cooldown_steps=2)[0], **BUCKETS)
    ratios, clipped = [], []
    for _ in range(3):
        now = np.array(logps_of(state.params))
        state, sums = step(state, batch)
        rho = np.exp(now - np.array(behaviour))
        expected = np.concatenate([rho[:2], rho])  # the tokens of both generations
        assert sums["ratio"].mean() == pytest.approx(expected.mean(), rel=1e-4)
        assert sums["clip_fraction"].mean() == pytest.approx(np.mean(np.abs(expected - 1) > 0.1))
        ratios.append(sums["ratio"].mean())
        clipped.append(sums["clip_fraction"].mean())
    assert ratios[0] == pytest.approx(1.0, abs=1e-5), "sampled with these weights"
    assert abs(ratios[1] - 1) > 1e-3
    assert clipped[0] == 0.0
    assert clipped[-1] > 0.0
