"""Counting on a module small enough to count by hand."""

import pytest

from crl_jax.aot.cost import count, group_size
from crl_jax.aot.hlo import parse_module, parse_shapes, walk

# Five turns of a loop: slice one layer out of a stack, gather it over 4 chips, multiply, reduce over 2 chips, store in a stack.
MODULE = """HloModule jit_f, is_scheduled=true, num_partitions=8

%slice (p0: bf16[5,64,32], p1: s32[]) -> bf16[1,64,32] {
  %p0 = bf16[5,64,32]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %ds = bf16[1,64,32]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,64,32}
}

%store (q0: f32[5,16,128], q1: f32[1,16,128], q2: s32[]) -> f32[5,16,128] {
  %q0 = f32[5,16,128]{2,1,0:T(8,128)} parameter(0)
  %q1 = f32[1,16,128]{2,1,0:T(8,128)} parameter(1)
  %q2 = s32[]{:T(128)} parameter(2)
  %nil = s32[]{:T(128)} constant(0)
  ROOT %dus = f32[5,16,128]{2,1,0:T(8,128)} dynamic-update-slice(%q0, %q1, %q2, %nil, %nil)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], bf16[5,64,32], f32[5,16,128], bf16[16,64])) -> (s32[], bf16[5,64,32], f32[5,16,128], bf16[16,64]) {
  %state = (s32[]{:T(128)}, bf16[5,64,32]{2,1,0}, f32[5,16,128]{2,1,0}, bf16[16,64]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %w = bf16[5,64,32]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %acc = f32[5,16,128]{2,1,0:T(8,128)} get-tuple-element(%state), index=2
  %x = bf16[16,64]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%state), index=3
  %layer = bf16[1,64,32]{2,1,0:T(8,128)(2,1)} fusion(%w, %i), kind=kLoop, calls=%slice
  %flat = bf16[64,32]{1,0:T(8,128)(2,1)} bitcast(%layer)
  %whole = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%flat), channel_id=1, replica_groups=[2,4]<=[8], dimensions={1}
  %y = f32[16,128]{1,0:T(8,128)S(1)} dot(%x, %whole), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="f/dot"}
  %z = f32[16,128]{1,0:T(8,128)S(1)} all-reduce(%y), channel_id=2, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  %z1 = f32[1,16,128]{2,1,0:T(8,128)S(1)} bitcast(%z)
  %new = f32[5,16,128]{2,1,0:T(8,128)} fusion(%acc, %z1, %i), kind=kLoop, calls=%store
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  ROOT %out = (s32[], bf16[5,64,32], f32[5,16,128], bf16[16,64]) tuple(%next, %w, %new, %x)
}

%condition (state.1: (s32[], bf16[5,64,32], f32[5,16,128], bf16[16,64])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %state.1 = (s32[]{:T(128)}, bf16[5,64,32]{2,1,0}, f32[5,16,128]{2,1,0}, bf16[16,64]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

ENTRY %main (w0: bf16[5,64,32], x0: bf16[16,64]) -> f32[5,16,128] {
  %w0 = bf16[5,64,32]{2,1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="w"}
  %x0 = bf16[16,64]{1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="x"}
  %start = s32[]{:T(128)} constant(0)
  %start.1 = s32[]{:T(128)} copy(%start)
  %near = (bf16[16,64]{1,0:T(8,128)(2,1)S(1)}, bf16[16,64]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x0)
  %near.1 = bf16[16,64]{1,0:T(8,128)(2,1)S(1)} copy-done(%near)
  %acc0 = f32[5,16,128]{2,1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %init = (s32[], bf16[5,64,32], f32[5,16,128], bf16[16,64]) tuple(%start.1, %w0, %acc0, %near.1)
  %loop = (s32[]{:T(128)}, bf16[5,64,32]{2,1,0}, f32[5,16,128]{2,1,0}, bf16[16,64]{1,0:S(1)}) while(%init), condition=%condition, body=%body
  ROOT %result = f32[5,16,128]{2,1,0:T(8,128)} get-tuple-element(%loop), index=2
}
"""


def test_a_loop_counts_with_its_trips() -> None:
    visits = {visit.name: visit.times for visit in walk(parse_module(MODULE)).visits}
    assert visits == {"main": 1, "body": 5}


def test_flops_collectives_and_traffic_of_the_loop_by_hand() -> None:
    cost = count(parse_module(MODULE), devices=8)
    assert cost.flops == 5 * 2 * 16 * 128 * 64
    shard, reduced = 64 * 32 * 2, 16 * 128 * 4
    assert cost.collectives == {"all-gather": 5 * 3 * shard, "all-reduce": 5 * 2 * reduced * 1 / 2}
    assert cost.ici_bytes == 5 * (3 * shard + reduced)
    assert cost.sent_by == {("all-gather", "whole"): 5 * 3 * shard, ("all-reduce", "z"): 5 * reduced}
    # per turn: the slice is read and written, read again by the gather; the stored row is written; all else stays in vector memory
    scalars = 5 * (4 + 4 + 3 * 4)  # the counter: read by both fusions and by the addition with its two inputs
    assert cost.hbm_bytes - 5 * (3 * shard + reduced) == pytest.approx(16 * 64 * 2, abs=scalars + 10)
    assert not cost.unknown_loops


def test_a_loop_of_unknown_length_is_named_and_uses_the_given_trips() -> None:
    text = MODULE.replace("constant(5)", "parameter(1)")
    cost = count(parse_module(text), devices=8, unknown_trips=3)
    assert cost.unknown_loops == ["loop"]
    assert cost.flops == 3 * 2 * 16 * 128 * 64


@pytest.mark.parametrize(
    ("step", "turns"),
    [
        ("%one = s32[] constant(2)\n  %next = s32[] add(%i, %one)", 3),  # 0, 2, 4
        ("%one = s32[] constant(1)\n  %half = s32[] add(%i, %one)\n  %next = s32[] add(%one, %half)", 3),
        ("%one = s32[] constant(5)\n  %half = s32[] copy(%i)\n  %next = s32[] add(%half, %one)", 1),
        ("%one = s32[] constant(1)\n  %next = s32[] fusion(%i), kind=kLoop, calls=%plus2", 3),
    ],
)
def test_a_loop_that_counts_in_larger_steps_turns_less_often(step: str, turns: int) -> None:
    inside = "%r = s32[] parameter(0)\n  %two = s32[] constant(2)\n  ROOT %r2 = s32[] add(%r, %two)"
    plus2 = f"%plus2 (r: s32[]) -> s32[] {{\n  {inside}\n}}\n\n%body ("
    usual = "%one = s32[]{:T(128)} constant(1)\n  %next = s32[]{:T(128)} add(%i, %one)"
    text = MODULE.replace(usual, step).replace("%body (", plus2, 1)
    assert count(parse_module(text), devices=8).flops == turns * 2 * 16 * 128 * 64


def test_a_loop_whose_steps_cannot_be_read_is_of_unknown_length() -> None:
    cost = count(
        parse_module(MODULE.replace("%next = s32[]{:T(128)} add(", "%next = s32[]{:T(128)} multiply(")), devices=8, unknown_trips=3
    )
    assert (cost.unknown_loops, cost.flops) == (["loop"], 3 * 2 * 16 * 128 * 64)


def test_an_annotated_loop_is_believed() -> None:
    text = MODULE.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert count(parse_module(text), devices=8).flops == 7 * 2 * 16 * 128 * 64


def test_largest_buffers_are_distinct_and_only_in_hbm() -> None:
    buffers = count(parse_module(MODULE), devices=8).buffers
    assert (buffers[0].shape, buffers[0].size) == ("f32[5,16,128]", 5 * 16 * 128 * 4)
    assert "argument w" in {b.source for b in buffers}
    assert all(b.shape != "bf16[64,128]" for b in buffers), "the gathered layer is in vector memory"


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        # a matrix product as the TPU compiler writes it: [8, 4] x [4, 16]
        ("f32[8,16] convolution(%l, %r), dim_labels=bf_io->bf", 2 * 8 * 4 * 16),
        # the gradient of a batched product: the batch is a window that is summed over
        ("f32[4,16,1] convolution(%l3, %r3), window={size=6}, dim_labels=0fb_0io->bf0", 2 * 4 * 16 * 6 * 8),
        # a batched product: six windows, each of which meets one input, the others fall into dilation holes
        ("f32[6,5,16] convolution(%l4, %r4), window={size=6 stride=5 pad=0_0 lhs_dilate=6}, dim_labels=0bf_0io->0bf", 2 * 6 * 5 * 7 * 16),
    ],
)
def test_products_written_as_convolutions(line: str, flops: int) -> None:
    text = f"""HloModule m
ENTRY %main (l: f32[8,4]) -> f32[8,16] {{
  %l = f32[8,4] parameter(0)
  %r = f32[4,16] parameter(1)
  %l3 = f32[6,8,4] parameter(2)
  %r3 = f32[6,8,16] parameter(3)
  %l4 = f32[6,5,7] parameter(4)
  %r4 = f32[6,7,16] parameter(5)
  ROOT %c = {line}
}}
"""
    assert count(parse_module(text), devices=1).flops == flops


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=mesh['a'=2,'b'=4,'c'=8] {'b','c'}", 32),
        ("replica_groups={}", 16),
    ],
)
def test_group_sizes_in_every_notation(groups: str, size: int) -> None:
    assert group_size(f"channel_id=3, {groups}, use_global_device_ids=true", 16) == size


def test_a_collective_spread_over_fusions_counts_once_and_a_fused_reduce_scatter_is_one() -> None:
    text = """HloModule m
%start (p: bf16[8,4]) -> bf16[8,8] {
  %p = bf16[8,4] parameter(0)
  ROOT %g = bf16[8,8] all-gather(%p), channel_id=6, replica_groups=[1,2]<=[2], dimensions={1}
}
%done (p: bf16[8,4]) -> bf16[8,8] {
  %p = bf16[8,4] parameter(0)
  ROOT %g.1 = bf16[8,8] all-gather(%p), channel_id=6, replica_groups=[1,2]<=[2], dimensions={1}
}
%all-reduce-scatter.1 (p: f32[8,8]) -> f32[4,8] {
  %p = f32[8,8] parameter(0)
  %r = f32[8,8] all-reduce(%p), channel_id=7, replica_groups=[1,2]<=[2], to_apply=%start
  %c = s32[] constant(0)
  ROOT %s = f32[4,8] dynamic-slice(%r, %c, %c), dynamic_slice_sizes={4,8}
}
ENTRY %main (p: bf16[8,4]) -> f32[4,8] {
  %p = bf16[8,4] parameter(0)
  %q = f32[8,8] parameter(1)
  %f = bf16[8,8] fusion(%p), kind=kCustom, calls=%start
  %f.1 = bf16[8,8] fusion(%p), kind=kCustom, calls=%done
  %send = (f32[3,4], u32[], token[]) send(%q, %q), frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  ROOT %h = f32[4,8] fusion(%q), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    cost = count(parse_module(text), devices=2)
    assert cost.collectives == {"all-gather": 8 * 4 * 2, "reduce-scatter": 8 * 8 * 4 / 2}
    assert cost.dcn_bytes == 3 * 4 * 4


def test_pieces_of_a_collective_in_a_later_loop_belong_to_the_one_that_began_before_it() -> None:
    """The gather of the loop body begins outside: once, not once more per turn."""
    begun = "  %early = bf16[64,128] all-gather(%w0), channel_id=1, replica_groups=[2,4]<=[8], dimensions={1}\n  %start = s32[]"
    text = MODULE.replace("  %start = s32[]", begun, 1)
    assert count(parse_module(text), devices=8).collectives["all-gather"] == 3 * 5 * 64 * 32 * 2  # of the whole stack %w0, one time


def test_shapes_know_their_memory_space() -> None:
    a, b, c = parse_shapes("(f32[2,3]{1,0:T(8,128)S(1)}, /*index=1*/bf16[4]{0:T(256)}, pred[])")
    assert (a.size, a.space, b.size, b.space, c.size) == (24, 1, 8, 0, 1)


def test_attention_kernels_count_causal_pairs_and_instructions_may_span_lines() -> None:
    """Forward: 2 products x 2 FLOPs x half of 16 x 16 pairs x 8 wide x 4 heads; the attributes of Pallas kernels hold line breaks."""
    text = """HloModule m
ENTRY %main (q: bf16[4,16,8]) -> bf16[4,16,8] {
  %q = bf16[4,16,8] parameter(0)
  %k = bf16[2,16,8] parameter(1)
  %splash_mha_fwd_segmented.1 = bf16[4,16,8] custom-call(%q, %k), custom_call_target="tpu_custom_call", frontend_attributes={metadata={
"block": "512"
}}, metadata={op_name="splash"}
  %other.1 = bf16[4,16,8] custom-call(%q), custom_call_target="tpu_custom_call", metadata={op_name="mine"}
  %l = f32[8,4] parameter(2)
  %r = f32[4,16] parameter(3)
  ROOT %c = f32[8,16] dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    cost = count(parse_module(text), devices=1)
    assert cost.flops == 2 * 2 * 4 * 8 * 16 * 16 / 2 + 2 * 8 * 4 * 16
    assert cost.opaque_kernels == ["mine"]


def test_a_matrix_that_passes_a_fusion_of_bitcasts_is_read_whole_and_its_slice_as_a_slice() -> None:
    """XLA wraps layout changes in fusions inside fusions; the weights of a decode step come to their product in this way."""
    text = """HloModule jit_f, is_scheduled=true, num_partitions=1

%flat (r: bf16[8,64]) -> bf16[512] {
  %r = bf16[8,64]{1,0} parameter(0)
  ROOT %b = bf16[512]{0} bitcast(%r)
}

%outer (p: bf16[8,64]) -> bf16[512] {
  %p = bf16[8,64]{1,0} parameter(0)
  %f = bf16[512]{0} fusion(%p), kind=kLoop, calls=%flat
  ROOT %use = USE
}

ENTRY %main (w: bf16[8,64]) -> bf16[512] {
  %w = bf16[8,64]{1,0} parameter(0)
  ROOT %result = RESULT fusion(%w), kind=kLoop, calls=%outer
}
"""

    def traffic(use: str, result: str) -> float:
        return count(parse_module(text.replace("USE", use).replace("RESULT", result)), devices=1).hbm_bytes

    assert traffic("bf16[512]{0:S(1)} negate(%f)", "bf16[512]{0:S(1)}") == 8 * 64 * 2
    assert traffic("bf16[16]{0:S(1)} slice(%f), slice={[0:16]}", "bf16[16]{0:S(1)}") == 16 * 2
