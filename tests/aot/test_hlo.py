"""Scheduled GPU HLO is read: short programs in the words of XLA 0.10.2, whose collectives one can count by hand."""
# ruff: noqa: E501 (HLO has long lines)

import pytest

from benchmarks.aot.hlo import HloError, counted, read_collectives
from benchmarks.aot.schedule import Beside, read_launches, read_overlaps

MESH = {"pipe": 2, "data": 2, "model": 2}

# A loop of 5 layers on the ranks of `model`: one sum overlaps a matmul, one overlaps nothing. Then a gather of two
# weights at once over `data`, a message along `pipe`, and a sum over groups of one.
PROGRAM = """HloModule jit__train_step, is_scheduled=true, entry_computation_layout={(bf16[64,32]{1,0})->bf16[64,32]{1,0}}

%product_computation (p0: bf16[64,32], p1: bf16[32,32]) -> bf16[64,32] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[32,32]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (arg: (s32[], bf16[64,32], /*index=2*/bf16[32,32])) -> (s32[], bf16[64,32], bf16[32,32]) {
  %arg = (s32[], bf16[64,32]{1,0}, /*index=2*/bf16[32,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = bf16[64,32]{1,0} get-tuple-element(%arg), index=1
  %w = bf16[32,32]{1,0} get-tuple-element(%arg), index=2
  %all-reduce-start.1 = bf16[64,32]{1,0} all-reduce-start(%x), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, to_apply=%sum, metadata={op_name="jit(step)/while/body/psum"}, backend_config={"operation_queue_id":"0"}
  %product = bf16[64,32]{1,0} fusion(%x, %w), kind=kCustom, calls=%product_computation, backend_config={"operation_queue_id":"0","fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %small = bf16[64,32]{1,0} fusion(%x), kind=kLoop, calls=%add_computation
  %all-reduce-done.1 = bf16[64,32]{1,0} all-reduce-done(%all-reduce-start.1)
  %all-reduce-start.2 = bf16[64,32]{1,0} all-reduce-start(%product), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%sum
  %all-reduce-done.2 = bf16[64,32]{1,0} all-reduce-done(%all-reduce-start.2)
  ROOT %tuple = (s32[], bf16[64,32]{1,0}, bf16[32,32]{1,0}) tuple(%i, %all-reduce-done.2, %w)
}

%add_computation (p: bf16[64,32]) -> bf16[64,32] {
  %p = bf16[64,32]{1,0} parameter(0)
  ROOT %add = bf16[64,32]{1,0} add(%p, %p)
}

%condition (c: (s32[], bf16[64,32], bf16[32,32])) -> pred[] {
  %c = (s32[], bf16[64,32]{1,0}, bf16[32,32]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (param: bf16[64,32], weight: bf16[32,32], bias: f32[16]) -> bf16[64,32] {
  %param = bf16[64,32]{1,0} parameter(0)
  %weight = bf16[32,32]{1,0} parameter(1)
  %bias = f32[16]{0} parameter(2)
  %start = (s32[], bf16[64,32]{1,0}, bf16[32,32]{1,0}) tuple(%param, %param, %weight)
  %while.1 = (s32[], bf16[64,32]{1,0}, bf16[32,32]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}
  %all-gather-start.1 = ((bf16[32,32]{1,0}, bf16[64,32]{1,0}), (bf16[64,32]{1,0}, bf16[128,32]{1,0})) all-gather-start(%weight, %param), channel_id=1, replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}, use_global_device_ids=true
  %attention = (bf16[8,4,16,2]{3,1,2,0}, u8[0]{0}) custom-call(%param, %param, %param), custom_call_target="__cudnn$fmhaSoftmax", api_version=API_VERSION_STATUS_RETURNING
  %collective-permute-start = (bf16[64,32]{1,0}, bf16[64,32]{1,0}) collective-permute-start(%param), channel_id=2, source_target_pairs={{0,4},{1,5},{2,6},{3,7},{4,0},{5,1},{6,2},{7,3}}
  %all-gather-done.1 = (bf16[64,32]{1,0}, bf16[128,32]{1,0}) all-gather-done(%all-gather-start.1)
  %tail = bf16[64,32]{1,0} fusion(%param), kind=kInput, calls=%add_computation
  %collective-permute-done = bf16[64,32]{1,0} collective-permute-done(%collective-permute-start)
  %alone = f32[16]{0} all-reduce(%bias), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%sum
  ROOT %result = bf16[64,32]{1,0} copy(%collective-permute-done)
}
"""

ACTIVATION = 64 * 32 * 2


def found(text=PROGRAM, mesh=MESH):
    """The collectives of a program, those over `model` first."""
    order = ("model", "data", "pipe")
    return sorted(read_overlaps(text, mesh), key=lambda c: order.index(c.axes[-1]))


def test_collectives_are_read_with_axes_and_counts():
    """A loop multiplies, two gathers may be one call, and a group of one device sends nothing."""
    assert sum(c.calls for c in found() if c.operation == "all-gather") == 1
    assert [c.count for c in found()] == [5, 5, 1, 1, 1]
    sizes = {key: size for key, (_, size) in counted(read_collectives(PROGRAM, MESH)).items()}
    assert sizes == {
        (("model",), "all-reduce", "bfloat16"): 2 * 5 * ACTIVATION,
        (("data",), "all-gather", "bfloat16"): 32 * 32 * 2 + ACTIVATION,
        (("pipe",), "permute", "bfloat16"): ACTIVATION,
    }
    kinds = {"attention, cuDNN": 1, "fusion, reduction": 1, "matrix product, Triton": 5}
    assert kinds.items() <= {kind: counts["launches"] for kind, counts in read_launches(PROGRAM).items()}.items()


def test_overlap_is_between_start_and_done():
    with pytest.raises(HloError, match=r"nothing waits for all-reduce-start\.2"):
        found(PROGRAM.replace("all-reduce-done(%all-reduce-start.2)", "copy(%product)"))
    beside = {(c.operation, c.source): c.beside for c in found()}
    assert beside["all-reduce", "jit(step)/while/body/psum"] == Beside(products=1, kernels=1)
    assert beside["all-gather", ""] == Beside(products=1)  # attention
    assert [c.overlap for c in found()] == ["products", "nothing", "products", "products", "kernels"]


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,4,5},{2,3,6,7}}", ("pipe", "model")),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("data",)),
        ("[1,8]<=[8]", ("pipe", "data", "model")),
        ("{}", ("pipe", "data", "model")),
        ("mesh['pipe'=2,'data'=2,'model'=2] {'pipe', 'model'}", ("pipe", "model")),
    ],
)
def test_groups_in_every_form_are_axes(groups, axes):
    changed = [c for c in found(PROGRAM.replace("[4,2]<=[8]", groups)) if c.operation == "all-reduce" and not c.source]
    assert [c.axes for c in changed] == [axes]


BRANCH = """
%branch (b: bf16[64,32]) -> bf16[64,32] {
  %b = bf16[64,32]{1,0} parameter(0)
  %async = ((bf16[64,32]{1,0}), bf16[32,32]{1,0}) async-start(%b), calls=%wrapped
  %wait = bf16[32,32]{1,0} async-done(%async)
  ROOT %out = bf16[64,32]{1,0} copy(%b)
}

%wrapped (w: bf16[64,32]) -> bf16[32,32] {
  %in = bf16[64,32]{1,0} parameter(0)
  ROOT %scatter = bf16[32,32]{1,0} reduce-scatter(%in), channel_id=3, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}, to_apply=%sum
}

%other (b: bf16[64,32]) -> bf16[64,32] {
  ROOT %same = bf16[64,32]{1,0} parameter(0)
}

%looped (b: bf16[64,32]) -> bf16[64,32] {
  %b = bf16[64,32]{1,0} parameter(0)
  ROOT %again = bf16[64,32]{1,0} while(%b), condition=%condition, body=%branch, backend_config={"known_trip_count":{"n":"2"}}
}

"""
CHOICE = "  %choice = bf16[64,32]{1,0} conditional(%i, %x, %x), branch_computations={%other, %looped}\n  ROOT %tuple = "


def test_branch_counts_as_if_always_taken():
    """And a loop in it is as uncertain."""
    text = PROGRAM.replace("%body", BRANCH.lstrip() + "\n%body", 1).replace("  ROOT %tuple = ", CHOICE, 1)
    scatters = [c for c in found(text) if c.operation == "reduce-scatter"]
    assert [(c.bytes, c.count, c.conditional, c.beside) for c in scatters] == [(ACTIVATION, 5 * 2, True, Beside())]
    assert not any(c.conditional for c in found(text) if c.operation != "reduce-scatter")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("is_scheduled=true, ", "", "not scheduled"),
        ('"known_trip_count":{"n":"5"},', "", "the loop while.1 has an unknown length"),
        ("[4,2]<=[8]", "{{0,3},{1,2},{4,7},{5,6}}", "lie along no axes"),
        ("bf16[64,32]{1,0} all-reduce-start(%product)", "mx4[64,32]{1,0} all-reduce-start(%x2)", "dtype mx4"),
    ],
)
def test_unknown_programs_are_rejected(old, new, message):
    assert old in PROGRAM
    text = PROGRAM.replace(old, new).replace("  %w = ", "  %x2 = mx4[64,32]{1,0} bitcast(%x)\n  %w = ", 1)
    with pytest.raises(HloError, match=message):
        read_collectives(text, MESH)
