"""The reader of a GPU's trace, on a trace made by hand: no GPU is at hand where these tests run.

Its planes, lines and statistics follow XLA's profiler for CUDA. The lines `Stream #…` of the plane `/device:GPU:N` hold
kernels, each with the instruction that launched it. Other lines repeat them. The host's threads follow.
"""
# ruff: noqa: E501 (HLO has long lines)

from types import SimpleNamespace

import pytest

from mjax.profiling.trace import Breakdown, read_trace

PROGRAM = """HloModule jit_train_step, is_scheduled=true, entry_computation_layout={(bf16[8]{0})->bf16[8]{0}}

ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {
  %x = bf16[8,8]{1,0} parameter(0)
  %fusion.1 = bf16[8,8]{1,0} fusion(%x, %x), kind=kCustom, calls=%product, metadata={op_name="jit(train_step)/transpose(jvp(layer))/dot_general"}
  %all-reduce-start.1 = bf16[8,8]{1,0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%sum, metadata={op_name="jit(train_step)/transpose(jvp(layer))/psum_invariant"}
  %fmha.1 = (bf16[8]{0}, u8[0]{0}) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(train_step)/jvp(layer)/attention/custom_call"}
  %slice_fusion = bf16[1,8]{1,0} fusion(%x, %x), kind=kLoop, calls=%slice_of_stack, metadata={op_name="jit(train_step)/jvp(layer)/dynamic_slice"}
  ROOT %adam_fusion = f32[8]{0} fusion(%x), kind=kLoop, calls=%adam, metadata={op_name="jit(train_step)/optimizer/sqrt"}
}
"""


def of_step(instruction, module="jit_train_step"):
    return {"hlo_op": instruction, "hlo_module": module}


def host(first=100, last=200, *others):
    return {"python": [("profiled steps", first, last, {}), ("train", first, first + 1, {"step_num": "7"}), *others]}


THREADS = host()
COMPUTE = [
    ("nvjet_tst_128x256", 90, 140, of_step("fusion.1")),  # began before the window: counts from 100
    ("cudnn_generated_fort_native_sdpa", 160, 170, of_step("fmha.1")),
    ("loop_slice_fusion", 170, 175, of_step("slice_fusion")),
    ("loop_adam_fusion", 175, 185, of_step("adam_fusion")),
    ("input_reduce", 185, 187, of_step("reduce.9", "jit__eval_step")),
]
BESIDE = [
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 130, 160, of_step("all-reduce-start.1")),
    ("MemcpyD2D", 150, 152, {"memcpy_details": "kind:d2d"}),
    ("MemcpyH2D", 165, 167, {"memcpy_details": "kind:h2d"}),
]
LINES = {
    "Stream #13(Compute)": COMPUTE,
    "Stream #14(NCCL)": BESIDE,
    "XLA Modules": [("jit_train_step", 90, 187, {})],
    "XLA Ops": COMPUTE,
}


def plane(name, lines):
    """Make a plane of jax.profiler.ProfileData; `lines`: by name, of (event, begin, end, statistics), times in µs."""

    def event(name, begin, end, stats):
        begin, end = begin * 1e3, end * 1e3
        return SimpleNamespace(name=name, start_ns=begin, end_ns=end, duration_ns=end - begin, stats=stats.items())

    lines = [SimpleNamespace(name=name, events=[event(*row) for row in rows]) for name, rows in lines.items()]
    return SimpleNamespace(name=name, lines=lines)


def trace_of(*gpus, threads=THREADS):
    planes = [plane(f"/device:GPU:{number}", lines) for number, lines in enumerate(gpus)]
    planes += [plane("/host:CPU", threads)] if threads else []
    return read_trace(SimpleNamespace(planes=planes), PROGRAM)


def by_kind(step):
    return {name: (milliseconds, hidden) for name, milliseconds, hidden, _ in step.rows(lambda key: key[0])}


def test_step_is_shared_by_computing_copying_and_communicating():
    step = Breakdown(*trace_of(LINES), steps=1)
    assert by_kind(step) == {
        "matmuls": (pytest.approx(0.040), pytest.approx(0)),
        "attention": (pytest.approx(0.010), pytest.approx(0)),
        "optimizer": (pytest.approx(0.010), pytest.approx(0)),
        "other programs": (pytest.approx(0.002), pytest.approx(0)),
        "copies and fills": (pytest.approx(0.007), pytest.approx(0.002)),  # the copy from the host is hidden
        "collectives (exposed)": (pytest.approx(0.018), pytest.approx(0.012)),
    }
    assert (step.devices, step.milliseconds) == (1, pytest.approx(0.100))
    parts = {name: milliseconds for name, milliseconds, *_ in step.rows(lambda key: key[1])}
    assert parts["layer backward"] == pytest.approx(0.058)
    assert parts["layer forward"] == pytest.approx(0.015)
    lines = [line.split() for line in step.lines()]
    assert ["idle", "0.01", "13.0%", "0.00", "0"] in lines
    assert ["layer", "backward:", "dot_general", "(fusion)", "0.04", "40.0%", "0.00", "1"] in lines


def test_breakdown_is_mean_of_gpus_and_steps():
    other = {"Stream #13(Compute)": [("nvjet_tst_128x256", 100, 200, of_step("fusion.1"))]}
    step = Breakdown(*trace_of(LINES, other), steps=2)
    assert (step.devices, step.milliseconds) == (2, pytest.approx(0.050))
    assert by_kind(step)["matmuls"][0] == pytest.approx((0.040 + 0.100) / 2 / 2)


def test_time_between_steps_is_not_counted():
    aside = ("between steps", 140, 160, {})
    step = Breakdown(*trace_of(LINES, threads=host(100, 200, aside)), steps=1)
    assert step.milliseconds == pytest.approx(0.080)
    assert by_kind(step)["collectives (exposed)"][0] == pytest.approx(0)


def test_kernel_without_instruction_is_known_by_name():
    names = {
        "ncclDevKernel_AllGather_RING_LL": "collectives (exposed)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
        "void sm90_xmma_gemm_bf16<long name>(int)": "matmuls",
        "MemcpyD2D": "copies and fills",
        "wrapped_slice": "copies and fills",
        "loop_add_fusion": "other kernels",
    }
    rows = [(name, 100 + i, 101 + i, {}) for i, name in enumerate(names)]
    _, kernels = trace_of({"Stream #7(Compute)": rows})
    assert [kernel.kind for kernel in kernels] == list(names.values())


def test_incomplete_trace_is_refused():
    with pytest.raises(ValueError, match=r"no kernels; its planes are /host:CPU"):
        trace_of()
    with pytest.raises(ValueError, match="no event 'profiled steps'"):
        trace_of(LINES, threads=None)
