"""Fixtures of the suites."""

import functools

import pytest
import tiny_model

from crl_jax.serving.engine import SlotEngine


@pytest.fixture(params=["slots", "jetstream"])
def make(request):
    """``make(slots=8)`` gives an engine: the plain one, and the same behind JetStream's interface."""
    kind = SlotEngine
    if request.param == "jetstream":
        pytest.importorskip("jetstream")
        from crl_jax.serving.jetstream_engine import JetStreamEngine as kind
    return functools.partial(tiny_model.engine, kind=kind)
