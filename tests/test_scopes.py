"""Names in a profiler trace: there while one is taken, next to nothing otherwise."""

import asyncio
import gzip
import pathlib
import subprocess
import sys
import threading
import timeit

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import CONFIG

from crl_jax.models import transformer
from crl_jax.scopes import long_scope, scope, step_scope
from crl_jax.serving import programs
from crl_jax.telemetry.capture import Capture


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The trace of a small piece of work, with all kinds of names."""
    folder = tmp_path_factory.mktemp("trace")
    capture = Capture(folder)

    async def wait(name: str) -> None:
        with long_scope(name):
            await asyncio.sleep(0.05)

    async def both() -> None:
        await asyncio.gather(wait("first"), wait("second"))

    assert capture.begin()
    assert not capture.begin(), "one at a time"
    with step_scope("train", 3), scope("decode", "actor"), scope("search"):
        jnp.ones(3).sum().block_until_ready()
    asyncio.run(both())
    for thread in [t for t in threading.enumerate() if t.name.startswith("trace-")]:
        thread.join(5)
    assert capture.end()
    assert not capture.end()
    (found,) = folder.glob("plugins/profile/*/*.xplane.pb")
    assert capture.newest == found.parent
    return found


def test_names_are_in_the_trace_and_what_waits_has_lines_of_its_own(trace: pathlib.Path) -> None:
    lines: dict[str, int] = {}
    length: dict[str, float] = {}
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for number, line in enumerate(plane.lines):
            for event in line.events:
                lines[event.name], length[event.name] = number, event.duration_ns
    assert {"train", "decode/actor", "search", "first", "second"} <= set(lines)
    assert len({lines["first"], lines["second"], lines["train"]}) == 3
    assert min(length["first"], length["second"]) > 40e6
    assert lines["decode/actor"] == lines["search"] == lines["train"]
    assert not [name for name in lines if name.startswith("$")], "Python's calls would fill the trace"


def test_the_memory_profile_lies_beside_the_trace(trace: pathlib.Path) -> None:
    profile = trace.with_name(trace.name.replace(".xplane.pb", ".memory.pprof"))
    assert len(gzip.decompress(profile.read_bytes())) > 100


def test_without_a_trace_a_name_costs_next_to_nothing() -> None:
    def named() -> None:
        with scope("decode", "actor"):
            pass

    def waiting() -> None:
        with long_scope("rollout"):
            pass

    for function in (named, waiting):
        assert min(timeit.repeat(function, number=1000, repeat=5)) / 1000 < 50e-6, "2 to 4 microseconds on a busy machine"


def test_a_process_without_jax_stays_without() -> None:
    code = (
        "import sys; from crl_jax.scopes import scope, long_scope, step_scope\n"
        "with scope('a'), long_scope('b'), step_scope('c', 1): pass\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_names_inside_compiled_programs_only_label() -> None:
    program = programs.Program(CONFIG, None, 2, 2)
    state = jax.eval_shape(lambda: programs.init_state(program, 4, 16))
    params = jax.eval_shape(lambda: transformer.init(CONFIG, jax.random.key(0)))
    packed = np.zeros((4, programs.row_columns(program) + 4), np.int32)
    index, steps = np.zeros(4, np.int32), np.int32(1)
    cases = {
        "prefill": (programs.extend, ("program", "dense"), (program, params, state, packed, True)),
        "decode": (
            programs.generate,
            ("program", "width", "dense"),
            (program, params, state, programs.Tables(), index, steps, 2, True),
        ),
    }
    for name, (labelled, static, arguments) in cases.items():
        bare = jax.jit(labelled.__wrapped__.__wrapped__, static_argnames=static, donate_argnames=("state",))
        one, two = labelled.lower(*arguments), bare.lower(*arguments)
        assert one.as_text() == two.as_text(), "the same program"
        assert f"{name}/" in one.as_text(debug_info=True)
        assert f"{name}/" not in two.as_text(debug_info=True)
