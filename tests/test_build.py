"""Building a run: what only helps must not stop it."""

import pathlib

import jax
import pytest

from crl_jax import build


def test_a_compile_cache_that_cannot_be_written_is_a_warning(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    before = jax.config.jax_compilation_cache_dir
    with pytest.warns(RuntimeWarning, match=r"not kept, every run compiles: run\.compile_cache=.*Not a directory"):
        build.keep_compiled_programs(str(tmp_path / "file" / "xla"))
    assert jax.config.jax_compilation_cache_dir == before
