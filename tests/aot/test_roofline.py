"""The modelled time of a compiled program: kernels whose bytes, FLOPs and waits one can count by hand."""

import pytest

from benchmarks.aot.roofline import COLLECTIVES, LATENCY, PRODUCTS, roofline
from mjax.cluster.hardware import gpu_named
from mjax.planner.time import H100 as RATES
from tests.aot.test_hlo import PROGRAM

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
