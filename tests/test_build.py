"""Building a run: what only helps must not stop it."""

import pathlib
import types
import warnings

import jax
import pytest

from crl_jax import build
from crl_jax.rollout.shell import Shell


def test_a_compile_cache_that_cannot_be_written_is_a_warning(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    before = jax.config.jax_compilation_cache_dir
    with pytest.warns(RuntimeWarning, match=r"not kept, every run compiles: run\.compile_cache=.*Not a directory"):
        build.keep_compiled_programs(str(tmp_path / "file" / "xla"))
    assert jax.config.jax_compilation_cache_dir == before


@pytest.mark.parametrize("lost", [0, 5])
def test_A16_a_run_that_ends_names_the_episodes_it_did_not_distil(lost: int) -> None:
    async def aclose() -> int:
        return lost

    with Shell() as shell, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        build.close_bank(shell, types.SimpleNamespace(aclose=aclose))  # pyright: ignore[reportArgumentType]
    assert [str(one.message) for one in said if one.category is RuntimeWarning] == (
        [f"the run ended before {lost} of its episodes were distilled: they teach nothing"] if lost else []
    )
