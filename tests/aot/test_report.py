"""Verdicts and the report object, from programs compiled for the CPU (the same path, another backend) and from made-up numbers."""

import json
import pathlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from crl_jax.aot.compile import Memory, Verdict, compile_program, describe, exhausted_bytes, memory_of, to_details
from crl_jax.aot.cost import Cost
from crl_jax.aot.recipe import Program, placed
from crl_jax.aot.report import Together, bytes_per_chip, choose, conclusion, main, summarise, together
from crl_jax.aot.roofline import roofline
from crl_jax.aot.topology import AotError, Chip, Topology
from crl_jax.config import Config, ConfigError

CHIP = Chip("toy", 2, hbm_bytes=1000, flops_s=1e3, hbm_bytes_s=1e2, ici_bytes_s=1e1, dcn_bytes_s=1.0)
TOPOLOGY = Topology(CHIP, (2, 2))


def program(name: str = "step", role: str = "actor", lower: Any = None, keeps: dict[str, Any] | None = None) -> Program:
    return Program(name, role, "2 x 3", 4, 800.0, lower, keeps or {})


def verdict(memory: Memory, **more: Any) -> Verdict:
    times = roofline(CHIP, flops=400, hbm_bytes=10, ici_bytes=1)
    return Verdict(program(**more), CHIP, memory, 1.0, Cost(400, 10, 0, {"all-gather": 1.0}), times)


def refuse(message: str, module: str = "") -> Any:
    """A traced program whose compilation is refused; ``module`` is what the compiler leaves when it is asked to dump."""

    def compile(compiler_options: dict[str, Any] | None = None) -> Any:
        if compiler_options and module:
            (pathlib.Path(compiler_options["xla_dump_to"]) / "module_1.oom_intermediate_module.txt").write_text(module)
        raise jax.errors.JaxRuntimeError(message)

    return lambda: types.SimpleNamespace(compile=compile)


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


REPORT = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm.

Total hbm usage >= 21.00G:
    reserved        530.00M
    program          20.50G

  Largest program allocations in hbm:

  1. Size: 2.00G
     Operator: op_name="jit(step)/dot" source_file="a.py" source_line=1
     Shape: f32[32,4096,4096]{1,2,0:T(8,128)}
     Unpadded size: 2.00G
     Allocation type: HLO temp
     ==========================

  2. Size: 2.00G
     Operator: op_name="jit(step)/dot" source_file="a.py" source_line=1
     Shape: f32[32,4096,4096]{1,2,0:T(8,128)}
     Allocation type: HLO temp
     ==========================

  3. Size: 512.0K
     Shape: bf16[512,512]{1,0}
     Allocation type: global
     ==========================
"""


def test_a_kernel_that_hides_its_arithmetic_does_not_lift_the_bound_above_all_there_is() -> None:
    """Needed are 800 FLOPs on 4 chips, counted none: 200 per chip take 0.2 s at 1000 per second."""
    module = """HloModule m
ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  ROOT %k = f32[4] custom-call(%p), custom_call_target="tpu_custom_call", metadata={op_name="hidden"}
}
"""
    stats = types.SimpleNamespace(
        argument_size_in_bytes=16, output_size_in_bytes=16, alias_size_in_bytes=0, temp_size_in_bytes=0, generated_code_size_in_bytes=0
    )
    compiled = types.SimpleNamespace(as_text=lambda: module, memory_analysis=lambda: stats)
    lowered = types.SimpleNamespace(compile=lambda: compiled)
    found = compile_program(program(lower=lambda: lowered), CHIP)
    assert found.cost is not None
    assert found.times is not None
    assert (found.cost.flops, found.times.compute_s, found.mfu) == (0, 0.2, pytest.approx(0.2 / found.times.roofline_s))
    assert found.mfu <= 1


def test_a_program_that_does_not_fit_is_named_with_its_largest_buffers() -> None:
    found = compile_program(program(lower=refuse(REPORT)), CHIP)
    assert found.memory.total == int(20.5 * 2**30)
    assert [(b.size, b.shape, b.source) for b in found.asked_for] == [
        (2 * 2**30, "f32[32,4096,4096]", "jit(step)/dot"),
        (512 * 2**10, "bf16[512,512]", "global"),
    ]
    words = conclusion("recipe", TOPOLOGY, [verdict(Memory(1), name="decode"), found], [], partial=False)
    assert words.splitlines()[0] == "1 of 2 programs fit toy:2x2"
    assert "actor.step does not fit: 20.50 of 0.00 GiB per chip; largest buffers: f32[32,4096,4096] 2.00 GiB (jit(step)/dot)" in words
    assert words.endswith("recipe: does not fit")
    assert to_details(found)["largest_buffers"][0]["shape"] == "f32[32,4096,4096]"
    assert conclusion("recipe", TOPOLOGY, [verdict(Memory(1))], [], partial=True).endswith("recipe: fits as far as asked")
    full = [Together("actor", {"train state": 999}, 2, "step", 1000)]
    assert "actor does not fit" in conclusion("recipe", TOPOLOGY, [verdict(Memory(1))], full, partial=False)


def test_a_refusal_without_a_list_is_compiled_again_for_its_largest_buffers() -> None:
    module = """HloModule m
ENTRY %main (p: f32[8,4]) -> f32[8,64] {
  %p = f32[8,4] parameter(0), metadata={op_name="weights"}
  ROOT %wide = f32[8,64] broadcast(%p), metadata={op_name="jit(step)/wide"}
}
"""
    found = compile_program(program(lower=refuse("RESOURCE_EXHAUSTED: HLO temporaries (63.90G) exceeds", module)), CHIP)
    assert [(b.size, b.source) for b in found.asked_for] == [(8 * 64 * 4, "jit(step)/wide"), (8 * 4 * 4, "argument weights")]


def test_vector_memory_is_not_taken_for_the_chips_memory() -> None:
    with pytest.raises(AotError, match=r"actor\.step.*vmem"):
        compile_program(program(lower=refuse("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20M of 16M.")), CHIP)


def test_only_takes_roles_programs_or_both_and_refuses_a_word_that_names_none() -> None:
    programs = [program(), program("decode"), program(role="extractor"), program("embed", "bank")]

    def chosen(*words: str) -> list[str]:
        return [f"{p.role}.{p.name}" for p in choose(programs, words)]

    assert chosen() == ["actor.step", "actor.decode", "extractor.step", "bank.embed"]
    assert chosen("step", "bank") == ["actor.step", "extractor.step", "bank.embed"]
    assert chosen("actor.decode") == ["actor.decode"]
    with pytest.raises(ValueError, match=r"--only typo names no program of this recipe: use actor\.step, actor\.decode"):
        choose(programs, ["actor.step", "typo"])


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


def test_a_folder_is_no_result_file_and_that_is_said_before_anything_is_compiled(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="is a folder: name a file in it"):
        main(Config(), tmp_path / "recipe.yaml", "v5e:1x1", only=[], json_path=tmp_path)
