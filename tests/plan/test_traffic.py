"""Traffic that is counted from optimized HLO."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_ragrl.plan.hlo import parse, shape_bytes
from jax_ragrl.plan.traffic import loop_traffic, program_traffic

MODULE = """\
HloModule jit_f, is_scheduled=true

%slice_of_weights (param_0: bf16[8,64,32], param_1: s32[]) -> bf16[64,32] {
  %param_0 = bf16[8,64,32]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %dynamic-slice.1 = bf16[1,64,32]{2,1,0} dynamic-slice(%param_0, %param_1, %zero, %zero)
  ROOT %bitcast.1 = bf16[64,32]{1,0} bitcast(%dynamic-slice.1)
}

%write_in_place (param_0.1: f32[16,128], param_1.1: f32[16,1], param_2: s32[]) -> f32[16,128] {
  %param_0.1 = f32[16,128]{1,0} parameter(0)
  %param_1.1 = f32[16,1]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %dus = f32[16,128]{1,0} dynamic-update-slice(%param_0.1, %param_1.1, %zero.1, %param_2)
}

%layer (arg: (s32[], bf16[8,64,32], bf16[64,32])) -> (s32[], bf16[8,64,32], bf16[64,32]) {
  %arg = (s32[], bf16[8,64,32]{2,1,0}, bf16[64,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %w = bf16[8,64,32]{2,1,0} get-tuple-element(%arg), index=1
  %fusion.1 = bf16[64,32]{1,0} fusion(%w, %i), kind=kLoop, calls=%slice_of_weights
  %all-reduce.1 = bf16[64,32]{1,0} all-reduce(%fusion.1), replica_groups={{0,1}}, to_apply=%add
  ROOT %tuple.1 = (s32[], bf16[8,64,32]{2,1,0}, bf16[64,32]{1,0}) tuple(%i, %w, %all-reduce.1)
}

%token (arg.1: (f32[16,128], f32[16,1], s32[])) -> (f32[16,128], f32[16,1], s32[]) {
  %arg.1 = (f32[16,128]{1,0}, f32[16,1]{1,0}, s32[]) parameter(0)
  %cache = f32[16,128]{1,0} get-tuple-element(%arg.1), index=0
  %new = f32[16,1]{1,0} get-tuple-element(%arg.1), index=1
  %t = s32[] get-tuple-element(%arg.1), index=2
  %fusion.2 = f32[16,128]{1,0} fusion(%cache, %new, %t), kind=kLoop, calls=%write_in_place
  ROOT %tuple.2 = (f32[16,128]{1,0}, f32[16,1]{1,0}, s32[]) tuple(%fusion.2, %new, %t)
}

ENTRY %main (p: (s32[], bf16[8,64,32], bf16[64,32]), q: (f32[16,128], f32[16,1], s32[])) -> s32[] {
  %p = (s32[], bf16[8,64,32]{2,1,0}, bf16[64,32]{1,0}) parameter(0)
  %q = (f32[16,128]{1,0}, f32[16,1]{1,0}, s32[]) parameter(1)
  %while.1 = (s32[], bf16[8,64,32]{2,1,0}, bf16[64,32]{1,0}) while(%p), condition=%c, body=%layer, \
backend_config={"known_trip_count":{"n":"8"}}
  %while.2 = (f32[16,128]{1,0}, f32[16,1]{1,0}, s32[]) while(%q), condition=%c, body=%token
  ROOT %out = s32[] get-tuple-element(%while.1), index=0
}
"""
SLICE = 64 * 32 * 2  # bytes of the weights of one layer


def collectives(text: str) -> dict[str, Any]:
    """The count and the bytes of each kind."""
    return program_traffic(text).facts()["collectives"]


def test_a_loop_and_its_collectives_count_as_often_as_it_runs_and_it_reads_its_slices_alone():
    traffic = program_traffic(MODULE)
    layer = 2 * SLICE + 4 + 2 * SLICE  # slice and index read, slice written; the sum both
    token = 16 * 4 + 16 * 4 + 4  # the new column read and written, and its place
    assert traffic.hbm_bytes == 8 * layer + token
    assert traffic.kernels == 8 * 2 + 1
    assert traffic.unknown_loops == 1
    assert collectives(MODULE) == {"all-reduce": {"count": 8, "bytes": 8 * SLICE}}


@pytest.mark.parametrize(("direction", "known"), [("LT", True), ("GT", False)])
def test_a_loop_without_a_count_runs_up_to_the_constant_of_its_condition(direction, known):
    """As the compiler for TPUs writes a scan."""
    condition = (
        "%c1 (x: (s32[])) -> pred[] {\n  %x = (s32[]) parameter(0)\n"
        "  %n = s32[] get-tuple-element(%x), index=0\n  %eight = s32[]{:T(128)} constant(8)\n"
        f"  ROOT %lt = pred[] compare(%n, %eight), direction={direction}\n}}\n\nENTRY"
    )
    text = MODULE.replace("ENTRY", condition).replace("%c, body=%layer", "%c1, body=%layer")
    text = text.replace(', backend_config={"known_trip_count":{"n":"8"}}', "")
    assert "known_trip_count" not in text
    traffic = program_traffic(text)
    assert traffic.unknown_loops == (1 if known else 2)
    assert (traffic.hbm_bytes == program_traffic(MODULE).hbm_bytes) == known


@pytest.mark.parametrize(
    ("target", "workspace"), [("__cublas$lt$matmul", 0), ("tpu_custom_call", 33554432)]
)
def test_the_scratch_memory_of_a_gpu_library_is_not_counted(target, workspace):
    """A product on a GPU returns 32 MiB that cuBLAS may use."""
    call = f'custom-call(%fusion.1), custom_call_target="{target}"'
    text = MODULE.replace("bf16[64,32]{1,0} all-reduce(%fusion.1)", f"bf16[64,32]{{1,0}} {call}")
    both = text.replace(
        "%all-reduce.1 = bf16[64,32]{1,0}", "%all-reduce.1 = (bf16[64,32]{1,0}, s8[33554432]{0})"
    )
    assert both != text != MODULE
    more = program_traffic(both).hbm_bytes - program_traffic(text).hbm_bytes
    assert more == 8 * workspace


def test_the_loop_of_tokens_is_the_one_of_unknown_length():
    step = loop_traffic(MODULE)
    assert step is not None and step.hbm_bytes == 2 * 16 * 4 + 4 and step.kernels == 1
    assert loop_traffic(MODULE.replace("while(%q)", "custom-call(%q)")) is None


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[2,3]{1,0}", 24),
        ("(s32[], bf16[4]{0}, /*index=2*/pred[8]{0})", 4 + 8 + 8),
        ("bf16[8,128]{1,0:T(8,128)(2,1)}", 2048),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 0),  # in VMEM
        ("f8e4m3fn[10]{0}", 10),
        ("s4[10]{0}", 5),
        ("token[]", 0),
    ],
)
def test_a_shape_takes_the_bytes_of_its_arrays_in_device_memory(shape, size):
    assert shape_bytes(shape) == size


def test_an_async_collective_counts_once_without_the_operands_in_its_shape():
    text = MODULE.replace("all-reduce(%fusion.1)", "all-reduce-start(%fusion.1)").replace(
        "tuple(%i, %w, %all-reduce.1)", "tuple(%i, %w, %done)"
    )
    done = "  %done = bf16[64,32]{1,0} all-reduce-done(%all-reduce.1)\n"
    text = text.replace("  ROOT %tuple.1", f"{done}  ROOT %tuple.1")
    assert program_traffic(text).collectives == {"all-reduce": 8}
    start = "(bf16[64,32]{1,0}, bf16[128,32]{1,0}) all-gather-start(%fusion.1)"
    text = MODULE.replace("bf16[64,32]{1,0} all-reduce(%fusion.1)", start)
    assert collectives(text) == {"all-gather": {"count": 8, "bytes": 8 * 2 * SLICE}}


def test_an_asynchronous_slice_reads_the_slice_alone():
    """The shape begins with the whole operand; the copy lies in VMEM, so that it is not written."""
    start = "((bf16[64,32]{1,0}), bf16[8,32]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%fusion.1)"
    text = MODULE.replace("bf16[64,32]{1,0} all-reduce(%fusion.1)", start)
    less = program_traffic(MODULE).hbm_bytes - program_traffic(text).hbm_bytes
    assert less == 8 * (2 * SLICE - 8 * 32 * 2)


def test_an_array_that_an_inner_fusion_renames_is_read():
    """XLA wraps the renamed weights of a product on a TPU in a separate fusion."""
    rename = (
        "%rename (x: bf16[8,64,32]) -> bf16[8,64,32] {\n"
        "  %x = bf16[8,64,32]{2,1,0} parameter(0)\n"
        "  ROOT %b = bf16[8,64,32]{2,1,0} bitcast(%x)\n}\n\n"
    )
    inner = "  %renamed = bf16[8,64,32]{2,1,0} fusion(%param_0), kind=kLoop, calls=%rename\n"
    text = MODULE.replace("dynamic-slice(%param_0,", "dynamic-slice(%renamed,")
    text = text.replace("  %dynamic-slice.1 =", f"{inner}  %dynamic-slice.1 =")
    text = text.replace("%slice_of_weights (", f"{rename}%slice_of_weights (", 1)
    assert program_traffic(text).hbm_bytes == program_traffic(MODULE).hbm_bytes


def test_a_collective_counts_its_arrays_on_the_chip():
    text = MODULE.replace("%slice_of_weights", "%all-reduce-scatter.3")
    text = text.replace("1,0}", "1,0:S(1)}")
    facts = collectives(text)
    assert facts["reduce-scatter"]["bytes"] == 8 * (8 * SLICE + 4)  # the operands
    assert facts["all-reduce"]["bytes"] == 8 * SLICE


def test_the_parts_of_a_collective_on_a_tpu_count_once():
    """On a TPU it has a fusion that begins it, fusions that also compute, and one that ends it."""

    def body(name: str, target: str) -> str:
        last = f'  ROOT %c = bf16[128,32]{{1,0}} custom-call(%g), custom_call_target="{target}"\n'
        return (
            f"%{name} (p: bf16[64,32]) -> bf16[128,32] {{\n"
            "  %p = bf16[64,32]{1,0:S(1)} parameter(0)\n"
            f"  %g = bf16[128,32]{{1,0}} all-gather(%p), dimensions={{0}}\n{last}}}\n\n"
        )

    bodies = (
        body("first", "AsyncCollectiveStart")
        + body("async_collective_fusion.7", "Product")
        + body("last", "AsyncCollectiveDone")
    )
    calls = "".join(
        f"  %part.{i} = bf16[128,32]{{1,0}} fusion(%fusion.1), kind=kCustom, calls=%{name}\n"
        for i, name in enumerate(("first", "async_collective_fusion.7", "last"))
    )
    text = MODULE.replace("%layer (", f"{bodies}%layer (", 1)
    text = text.replace("  ROOT %tuple.1", f"{calls}  ROOT %tuple.1")
    assert collectives(text)["all-gather"] == {"count": 8, "bytes": 8 * 2 * SLICE}


def test_a_compiled_scan_reads_its_weights_once():
    layers, width = 6, 64

    def apply(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    x, weights = jnp.zeros((8, width)), jnp.zeros((layers, width, width))
    text = jax.jit(apply).lower(x, weights).compile().as_text()
    traffic = program_traffic(text)
    weight_bytes = 4 * layers * width**2
    assert parse(text).entry and traffic.unknown_loops == 0
    # A slice may be copied before its product: read, written, read.
    assert weight_bytes <= traffic.hbm_bytes < 4 * weight_bytes
