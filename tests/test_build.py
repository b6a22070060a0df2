"""Building a run: what only helps must not stop it."""

import contextlib
import pathlib
import types
import warnings
from collections import Counter

import jax
import pytest

from crl_jax import build
from crl_jax.rollout.shell import Shell
from crl_jax.run_closing import at_end, close_bank


def test_a_compile_cache_that_cannot_be_written_is_a_warning(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    before = jax.config.jax_compilation_cache_dir
    with pytest.warns(RuntimeWarning, match=r"not kept, every run compiles: run\.compile_cache=.*Not a directory"):
        build.keep_compiled_programs(str(tmp_path / "file" / "xla"))
    assert jax.config.jax_compilation_cache_dir == before


@pytest.mark.parametrize("lost", [0, 5])
def test_A16_a_run_that_ends_names_the_episodes_it_did_not_distil(lost: int) -> None:
    async def aclose(deadline_s: float) -> int:
        assert deadline_s == 5.0
        return lost

    with Shell() as shell, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        close_bank(shell, types.SimpleNamespace(aclose=aclose, counts=Counter()), 5.0)  # pyright: ignore[reportArgumentType]
    assert [str(one.message) for one in said if one.category is RuntimeWarning] == (
        [f"the run ended before {lost} of its episodes were distilled: they teach nothing"] if lost else []
    )


@pytest.mark.parametrize("failed", [False, True])
def test_A13_what_goes_wrong_at_the_end_does_not_hide_what_ended_the_run(failed: bool) -> None:
    ended: list[str] = []

    def end() -> None:
        ended.append("bank")
        raise TimeoutError("stuck")

    def run() -> None:
        with contextlib.ExitStack() as stack:
            at_end(stack, "the pool", lambda: ended.append("pool"))
            at_end(stack, "the bank", end)
            if failed:
                raise ValueError("a broken step")

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(ValueError if failed else TimeoutError):
            run()
    assert ended == ["bank", "pool"]
    assert ["the bank did not end in order either (TimeoutError: stuck)" in str(one.message) for one in said] == [True] * failed
