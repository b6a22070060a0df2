"""Shared test set-up: eight virtual CPU devices and a compile cache that persists between runs, set before JAX starts its backend."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax  # the flags above must be set first
import pytest

CACHE = pathlib.Path(__file__).resolve().parent.parent / ".cache" / "jax-tests"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def compiled_in_haste():
    """For tests that count or only run programs: they are compiled without most optimisations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
