"""Verdicts and the report object, from programs compiled for the CPU (the same path, another backend) and from made-up numbers."""

import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from crl_jax.aot.compile import Memory, Verdict, compile_program, describe, exhausted_bytes, memory_of, to_details
from crl_jax.aot.cost import Cost
from crl_jax.aot.recipe import Program, placed
from crl_jax.aot.report import Together, bytes_per_chip, summarise, together
from crl_jax.aot.roofline import roofline
from crl_jax.aot.topology import AotError, Chip, Topology

CHIP = Chip("toy", 2, hbm_bytes=1000, flops_s=1e3, hbm_bytes_s=1e2, ici_bytes_s=1e1, dcn_bytes_s=1.0)
TOPOLOGY = Topology(CHIP, (2, 2))


def program(name: str = "step", role: str = "actor", lower: Any = None, keeps: dict[str, Any] | None = None) -> Program:
    return Program(name, role, "2 x 3", 4, 800.0, lower, keeps or {})


def verdict(memory: Memory, **more: Any) -> Verdict:
    times = roofline(CHIP, flops=400, hbm_bytes=10, ici_bytes=1)
    return Verdict(program(**more), CHIP, memory, 1.0, Cost(400, 10, 0, {"all-gather": 1.0}), times)


def refuse(message: str) -> Any:
    def lower() -> Any:
        raise jax.errors.JaxRuntimeError(message)

    return lower


def test_a_program_is_compiled_and_counted() -> None:
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)

    def scanned(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ x.T @ x), None), x, None, length=7)[0]

    texts: list[str] = []
    roomy = Chip("roomy", 2, 10**9, 1e3, 1e2, 1e1, 1.0)
    found = compile_program(
        program(lower=lambda: jax.jit(scanned).lower(x)), roomy, clock=iter((1.0, 3.5)).__next__, keep_text=texts.append
    )
    assert found.fits
    assert found.compile_s == 2.5
    assert found.cost is not None
    assert found.cost.flops == 7 * 2 * (2 * 8 * 16 * 8)
    assert texts[0].startswith("HloModule")
    assert "fits" in describe(found)


def test_running_out_of_memory_is_a_verdict_and_anything_else_an_error() -> None:
    message = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (63.90G) exceeds available HBM."
    found = compile_program(program(lower=refuse(message)), CHIP)
    assert not found.fits
    assert found.memory.total == int(63.90 * 2**30)
    assert "DOES NOT FIT" in describe(found)
    assert to_details(found)["note"] == message
    assert exhausted_bytes("Used 1.5M of 1M hbm") == int(1.5 * 2**20)
    assert exhausted_bytes("no number") == 0
    with pytest.raises(AotError, match=r"actor\.step.*INTERNAL"):
        compile_program(program(lower=refuse("INTERNAL: no")), CHIP)


def test_donated_arguments_count_once() -> None:
    stats = types.SimpleNamespace(
        argument_size_in_bytes=100, output_size_in_bytes=90, alias_size_in_bytes=80, temp_size_in_bytes=30, generated_code_size_in_bytes=5
    )
    assert memory_of(stats) == Memory(145, 100, 10, 30, 5)


def test_what_shares_a_chip_is_added_up() -> None:
    """State 400 bytes, serving weights 100, cache 200; the step works in 250, decode in 50, the copy of the weights is already counted."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    split, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())

    def kept(size: int, sharding: NamedSharding) -> Any:
        return placed([jax.ShapeDtypeStruct((size,), jnp.int8)], sharding)

    state, weights, cache = kept(800, split), kept(100, whole), kept(400, split)
    assert [bytes_per_chip(t) for t in (state, weights, cache)] == [400, 100, 200]
    verdicts = [
        verdict(Memory(650, 400, 0, 250), keeps={"train state": state}),
        verdict(Memory(500, 400, 100), name="reshard"),
        verdict(Memory(350, 300, 0, 50), name="decode", keeps={"serving weights": weights, "decode state": cache}),
        verdict(Memory(10), name="embed", role="bank"),
    ]
    (group,) = together(verdicts)
    assert group == Together("actor", {"train state": 400, "serving weights": 100, "decode state": 200}, 250, "step", 1000)
    assert group.total == 950
    assert group.fits
    assert not Together("actor", group.kept, 301, "step", 1000).fits


def test_the_report_has_the_agreed_fields_and_fails_when_one_program_does() -> None:
    good, bad = verdict(Memory(900, 900)), verdict(Memory(1100, 1100), name="decode")
    row = json.loads(json.dumps(summarise("recipe", TOPOLOGY, [good], []).to_json()))
    assert {"name", "value", "unit", "goal", "pass", "commit", "command", "machine", "details"} == set(row)
    assert (row["name"], row["value"], row["pass"]) == ("aot_recipe_toy:2x2", 0.9, True)
    detail = row["details"]["programs"][0]
    assert detail["mfu_bound"] == 800 / (4 * 1e3 * 0.4)
    assert (detail["bound"], detail["roofline_s"], detail["arithmetic_intensity"]) == ("compute", 0.4, 40)
    assert detail["hbm"]["limit"] == 1000
    failed = summarise("recipe", TOPOLOGY, [good, bad], [])
    assert (failed.passed, failed.value) == (False, 1.1)
    full = [Together("actor", {"train state": 999}, 2, "step", 1000)]
    assert summarise("recipe", TOPOLOGY, [good], full).passed is False
