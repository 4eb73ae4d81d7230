"""The modelled time of a compiled program: kernels whose bytes, FLOPs and waits one can count by hand."""

import pytest

from mjax.hardware import gpu_named
from mjax.planner.calibration import H100 as RATES
from mjax.planner.hlo import FROM_HOST, TO_HOST, read_program
from mjax.planner.roofline import COLLECTIVES, COPIES, FILLS, HOST_COPIES, LATENCY, PRODUCTS, roofline
from tests.planner.test_hlo import PROGRAM

H100 = gpu_named("h100")
BANDWIDTH = RATES.memory * H100.memory_bandwidth
HEAD = "HloModule jit_step, is_scheduled=true\n\n"


def program(*lines, inside=""):
    return (
        HEAD + inside + "\nENTRY %main (p: f32[8]) -> f32[8] {\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"
    )


def cublas(name, shape, left, right):
    config = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    return (
        f'%{name} = ({shape}, s8[4]{{0}}) custom-call(%{left}, %{right}), custom_call_target="__cublas$gemm", {config}'
    )


def test_host_copies_overlap_products():
    layer, link = 2 * 1024**2, H100.host_bandwidth
    shapes = "(bf16[40,1024,1024]{2,1,0:S(5)}, bf16[1,1024,1024]{2,1,0}, s32[])", "bf16[40,1024,1024]{2,1,0:S(5)}"
    back = "((bf16[40,1024,1024]{2,1,0:S(5)}, s32[]), bf16[1,1024,1024]{2,1,0}, u32[])"
    text = program(
        "%x = bf16[8192,8192]{1,0} parameter(0)",
        "%w = bf16[8192,8192]{1,0} parameter(1)",
        "%one = bf16[1,1024,1024]{2,1,0} parameter(2)",
        "%i = s32[] parameter(3)",
        '%stack = bf16[40,1024,1024]{2,1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"',
        f"%out = ({shapes[0]}, {shapes[1]}, u32[]) fusion-start(%stack, %one, %i), kind=kCustom, calls=%written",
        cublas("y", "bf16[8192,8192]{1,0}", "x", "w"),
        f"%there = {shapes[1]} fusion-done(%out)",
        f"%in = {back} fusion-start(%there, %i), kind=kCustom, calls=%sliced",
        "%here = bf16[1,1024,1024]{2,1,0} fusion-done(%in)",
        "%again = (bf16[1,1024,1024]{2,1,0:S(5)}, bf16[1,1024,1024]{2,1,0}, u32[]) copy-start(%here)",
        "%gone = bf16[1,1024,1024]{2,1,0:S(5)} copy-done(%again)",
        inside=INSIDE,
    )
    found = roofline(text, H100)
    row = found.rows[HOST_COPIES]
    assert (row.kernels, row.bytes) == (3, 3 * layer)
    assert layer / link < found.rows[PRODUCTS].seconds  # so the first is hidden
    assert row.seconds == pytest.approx(2 * layer / link)
    assert found.seconds == pytest.approx(row.seconds + found.rows[PRODUCTS].seconds)
    assert found.rows[PRODUCTS].flops == 2 * 8192**3
    launches = read_program(text, {"data": 1}).launches
    assert (launches[TO_HOST], launches[FROM_HOST]) == (2, 1)


INSIDE = """%sliced (stack: bf16[40,1024,1024], i: s32[]) -> f32[1,1024,1024] {
  %stack = bf16[40,1024,1024]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %layer = bf16[1,1024,1024]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,1024,1024}
  ROOT %wide = f32[1,1024,1024]{2,1,0} convert(%layer), metadata={op_name="jit(step)/jvp(layer)/convert_element_type"}
}

%written (stack: bf16[40,1024,1024], one: bf16[1,1024,1024], i: s32[]) -> bf16[40,1024,1024] {
  %stack = bf16[40,1024,1024]{2,1,0} parameter(0)
  %one = bf16[1,1024,1024]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = bf16[40,1024,1024]{2,1,0} dynamic-update-slice(%stack, %one, %i, %zero, %zero), metadata={op_name="jit(step)/jvp(layer)/while/body/dynamic_update_slice"}
}

%zeros () -> bf16[40,1024,1024] {
  %nothing = bf16[] constant(0)
  ROOT %fill = bf16[40,1024,1024]{2,1,0} broadcast(%nothing), dimensions={}
}
"""  # noqa: E501


def test_slices_count_the_bytes_they_touch():
    layer = 2 * 1024**2
    text = program(
        "%stack = bf16[40,1024,1024]{2,1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%one = bf16[1,1024,1024]{2,1,0} parameter(2)",
        "%a = f32[1,1024,1024]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%sliced",
        "%b = bf16[40,1024,1024]{2,1,0} fusion(%stack, %one, %i), kind=kLoop, calls=%written",
        "%c = bf16[40,1024,1024]{2,1,0} fusion(), kind=kLoop, calls=%zeros",
        inside=INSIDE,
    )
    found = roofline(text, H100)
    assert {kind: row.bytes for kind, row in found.rows.items()} == pytest.approx(
        {"layer forward": 3 * layer, COPIES: 2 * layer, FILLS: 40 * layer}, rel=1e-5
    )
    assert found.rows[FILLS].seconds == pytest.approx(40 * layer / BANDWIDTH + RATES.launch)
    assert found.copied_stacks == 1


def test_hidden_collectives_take_no_time():
    sums = "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%sum"
    lines = [
        "%x = bf16[8192,8192]{1,0} parameter(0)",
        "%w = bf16[8192,8192]{1,0} parameter(1)",
        f"%start = bf16[8192,8192]{{1,0}} all-reduce-start(%x), {sums}",
        cublas("y", "bf16[8192,8192]{1,0}", "x", "w"),
        "%done = bf16[8192,8192]{1,0} all-reduce-done(%start)",
    ]
    hidden, alone = roofline(program(*lines), H100, 8), roofline(program(*lines[:3], lines[4]), H100, 8)
    sent = 2 * 7 / 8 * 2 * 8192**2
    assert alone.collectives == pytest.approx(LATENCY + sent / (RATES.node * H100.node_bandwidth))
    assert alone.seconds == alone.rows[COLLECTIVES].seconds == alone.collectives
    assert hidden.rows[COLLECTIVES].seconds == 0.0
    assert hidden.seconds == hidden.rows[PRODUCTS].seconds > hidden.collectives
    across = program(*lines[:3], lines[4]).replace("{0,1,2,3,4,5,6,7}", "{0,8,16,24,32,40,48,56}")
    assert roofline(across, H100, 64).collectives > 5 * alone.collectives  # eight rings share the network cards


def test_rings_inside_and_between_servers_overlap():
    within = "{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}"
    between = "{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}"

    def both(first, second):
        lines = ["%x = bf16[8192,8192]{1,0} parameter(0)"]
        for name, groups in (("a", first), ("b", second)):
            sums = f"channel_id=1, replica_groups={{{groups}}}, use_global_device_ids=true, to_apply=%add"
            lines.append(f"%{name} = bf16[8192,8192]{{1,0}} all-reduce-start(%x), {sums}")
        lines += [f"%done_{name} = bf16[8192,8192]{{1,0}} all-reduce-done(%{name})" for name in "ab"]
        return roofline(program(*lines), H100, 16)

    apart, after = both(within, between), both(within, within)
    assert after.seconds == pytest.approx(after.collectives)
    assert apart.seconds < 0.95 * apart.collectives


def test_loop_runs_as_often_as_it_says():
    found = roofline("\n".join(line for line in PROGRAM.split("\n") if "__cudnn" not in line), H100, 8)
    assert found.rows[PRODUCTS].kernels == 5
    assert found.rows[COLLECTIVES].kernels == 5 * 2 + 2  # a group of one sends nothing
