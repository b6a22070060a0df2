"""Count-aware weights (paper Eq. 7) by hand."""

import numpy as np
import pytest

from crl_jax.losses.reweight import count_weights

A = np.array


def test_weights_by_hand() -> None:
    counts, last = A([0, 1, 3, 8, 24]), A([-1, 0, 0, 0, 0])
    np.testing.assert_allclose(count_weights(counts, last, 10), [1.0, 0.7071, 0.5, 0.3333, 0.2], atol=1e-4)
    np.testing.assert_allclose(count_weights(counts, last, 10, alpha=0.0), np.ones(5))


def test_cooldown_silences_what_was_just_trained_but_never_the_untrained() -> None:
    counts, last = A([0, 2, 2, 2]), A([9, 9, 8, 7])
    np.testing.assert_allclose(count_weights(counts, last, 9, cooldown=2), [1.0, 0.0, 0.0, 3**-0.5], rtol=1e-6)
    assert count_weights(A([0]), A([-1]), 0)[0] == 1.0


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="after step"):
        count_weights(A([1]), A([5]), 4)
    with pytest.raises(ValueError, match="negative"):
        count_weights(A([-1]), A([0]), 4)
    with pytest.raises(ValueError, match="equal length"):
        count_weights(A([1]), A([0, 0]), 4)
