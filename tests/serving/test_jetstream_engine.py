"""The engine behind JetStream's interface: its own calls, our additions, and JetStream's Driver on top of it."""

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

pytest.importorskip("jetstream")

from crl_jax.records import SamplingParams
from crl_jax.serving.engine import Row
from crl_jax.serving.jetstream_engine import JetStreamEngine, engine_api
from crl_jax.serving.jetstream_import import import_jetstream

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
import drive_jetstream as drive  # noqa: E402

PROMPT = np.random.default_rng(0).integers(3, 40, 11)


@functools.cache
def engine() -> JetStreamEngine:
    return JetStreamEngine(drive.CONFIG, max_slots=8, max_length=drive.LENGTH, row_buckets=(2,), chunk_buckets=(4, 16), max_steps=4)


@functools.cache
def weights():
    return drive.weights()


def padded(ids):
    return np.pad(np.asarray(ids, np.int32), (0, 16 - len(ids)))


@functools.cache
def extended(prompt: tuple[int, ...], n: int) -> tuple[list[int], list[float]]:
    """n greedy tokens by extend and generate, the sampler's way."""
    state = engine().init_decode_state()
    state = engine().extend(weights(), state, [Row(3, 0, prompt[:-1], prompt[-1], n, SamplingParams(n, temperature=0.0))])
    ids: list[int] = []
    logps: list[float] = []
    while len(ids) < n:
        state, more = engine().generate(weights(), state, [3], 4)
        ids, logps = ids + more.fetch()[0].ids, logps + more.fetch()[0].logps
    return ids, logps


def test_it_is_a_jetstream_engine_and_was_imported_without_tensorflow():
    assert isinstance(engine(), engine_api.Engine)
    assert (engine().max_concurrent_decodes, engine().samples_per_slot, engine().max_prefill_length) == (8, 1, 32)
    code = "import sys, crl_jax.serving.jetstream_engine; print('tensorflow' in sys.modules, 'seqio' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_an_absent_jetstream_is_named_with_the_line_that_installs_it():
    with pytest.raises(ImportError, match=r"pip install -e \.\[jetstream\]"):
        import_jetstream("jetstream.no_such_module")


def test_prefill_insert_generate_equal_extend_and_results_have_jetstreams_layout():
    expected, logps = extended(tuple(PROMPT.tolist()), 6)
    prefix = engine().prefill(params=weights(), padded_tokens=padded(PROMPT), true_length=len(PROMPT))
    state = engine().insert(prefix, engine().init_decode_state(), slot=5)
    jax.tree.map(lambda x: x.delete(), prefix)  # as JetStream's Driver does after insert
    for i in range(6):
        state, result = engine().generate(weights(), state)
        emitted = result.fetch()
        assert emitted[5].ids == [expected[i]]
        assert emitted[5].logps[0] == pytest.approx(logps[i], abs=1e-5)
        assert emitted[0].ids == []
        slot = result.convert_to_numpy().get_result_at_slot(5)
        assert (slot.tokens.tolist(), slot.valid.tolist(), slot.lengths.tolist()) == ([[expected[i]]], [[1]], [i + 1])


def test_prefill_continues_an_existing_prefix_and_leaves_it_intact():
    whole = engine().prefill(params=weights(), padded_tokens=padded(PROMPT), true_length=len(PROMPT))
    head = engine().prefill(params=weights(), padded_tokens=padded(PROMPT[:4]), true_length=4)
    for _ in range(2):
        both = engine().prefill(params=weights(), existing_prefix=head, padded_tokens=padded(PROMPT[4:]), true_length=len(PROMPT) - 4)
        assert int(both.slots.length[0]) == int(whole.slots.length[0]) == len(PROMPT) - 1
        np.testing.assert_allclose(both.cache.k[1][0], whole.cache.k[1][0], atol=1e-5)


def test_V06_prefill_leaves_room_for_one_token():
    ids = np.ones(drive.LENGTH, np.int32)
    with pytest.raises(ValueError, match="leave room"):
        engine().prefill(params=weights(), padded_tokens=ids, true_length=drive.LENGTH)
    prefix = engine().prefill(params=weights(), padded_tokens=ids, true_length=drive.LENGTH - 1)
    assert int(prefix.slots.budget[0]) == 1


def test_V12_engines_share_nothing_mutable():
    other = JetStreamEngine(drive.CONFIG, max_slots=2, max_length=16)
    other.row_buckets = (99,)
    assert engine().row_buckets == (2, 8)


@pytest.mark.system
def test_jetstreams_own_driver_and_orchestrator_give_the_same_text(tmp_path):
    prompts = ["Zebra", "HOME", "a", "LANTERN", "bcd", "W^_R"]
    tokenizer = drive.CharTokenizer()
    expected = []
    for prompt in prompts:
        ids, length = tokenizer.encode(prompt, is_bos=True, max_prefill_length=16, jax_padding=False)
        tokens = extended(tuple(ids[:length].tolist()), 6)[0]
        end = next((i for i, t in enumerate(tokens) if t in tokenizer.stop_tokens), len(tokens))
        expected.append(tokenizer.decode(tokens[:end]))
    command = [sys.executable, str(HERE / "drive_jetstream.py"), json.dumps(prompts), "6", str(tmp_path / "texts.json")]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    for _ in range(3):  # the Driver has a race at the end of its last request in which it kills its process
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
        if run.returncode != -signal.SIGKILL or (tmp_path / "texts.json").exists():
            break
    assert run.returncode in (0, -signal.SIGKILL), run.stdout[-2000:] + run.stderr[-2000:]
    assert json.loads((tmp_path / "texts.json").read_text()) == expected
