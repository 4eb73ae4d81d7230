"""Seconds of a step before it runs: what the papers measured, and laws that hold whatever the numbers are."""

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from io import BytesIO

import jax
import matplotlib.figure
import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks.published import as_mjax, errors, fit, fsdp_steps, table_1, table_5, v100_scaling, whole_rows
from benchmarks.scaling_figure import draw_scaling
from mjax.batch_size import BatchSizes, at_batch
from mjax.config import Config, GPTConfig, MeshConfig, PrecisionConfig, TrainConfig, load_config
from mjax.errors import UsageError
from mjax.hardware import gpu_named
from mjax.model_config import as_kind
from mjax.models.build import count_parameters
from mjax.parallel.schedules import build_schedule
from mjax.planner.bubble import bubble, ticks
from mjax.planner.calibration import A100, MEGATRON_A100, MEGATRON_V100, default_calibration
from mjax.planner.calibration import H100 as H100_RATES
from mjax.planner.comms import ledger
from mjax.planner.rates import Rates
from mjax.planner.roofline import LATENCY
from mjax.planner.section import good_to
from mjax.planner.software import MEGATRON_2021, MEGATRON_2022, MJAX, Overlap, mjax_overlap
from mjax.planner.step_time import PARTS
from mjax.planner.time import predict_time
from mjax.training.flops import hardware_flops
from tests.conftest import ROOT
from tests.products import one_in
from tests.small import small_config

H100 = gpu_named("h100")

# --- What was published -----------------------------------------------------------------------------------------------


def test_18_runs_on_a100s_are_predicted_within_2_percent_on_average_and_6_at_worst():
    found = np.abs(errors(MEGATRON_A100, table_1() + table_5()))
    assert len(found) == 18
    assert found.mean() <= 0.02
    assert found.max() <= MEGATRON_A100.error == 0.06


def test_the_program_of_2022_does_not_accumulate_gradients_apart_from_its_products():
    apart = replace(MEGATRON_2022, accumulate_bytes=MEGATRON_2021.accumulate_bytes)
    runs = [replace(run, software=replace(run.software, accumulate_bytes=apart.accumulate_bytes)) for run in table_5()]
    assert np.abs(errors(MEGATRON_A100, runs)).max() > 0.08


def test_a_row_left_out_of_the_fit_is_predicted_within_7_percent():
    runs = table_1() + table_5()
    for i in range(0, len(runs), 3):
        others = fit(MEGATRON_A100, runs[:i] + runs[i + 1 :], ("matmul", "inner"))
        assert abs(errors(others, runs[i : i + 1])[0]) < 0.07, runs[i].name


def test_the_scaling_figures_of_1909_08053_are_predicted_within_12_percent():
    found = np.abs(errors(MEGATRON_V100, v100_scaling()))
    assert len(found) == 14
    assert found.max() < MEGATRON_V100.error == 0.12


def test_the_rates_in_the_code_are_those_that_the_fit_gives():
    for calibration, runs, names in (
        (MEGATRON_A100, table_1() + table_5(), ("matmul", "inner")),
        (MEGATRON_V100, v100_scaling(), ("matmul", "launch")),
    ):
        start = replace(calibration, matmul=0.5)
        again = fit(start, runs, names)
        for name in names:
            assert getattr(again, name) == pytest.approx(getattr(calibration, name), rel=5e-3), name


@pytest.mark.ci
@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 2)], ids=str)
def test_the_error_bars_hold_on_every_published_run_of_the_lengths_that_they_are_for(monkeypatch, version):
    """What mjax would take, compiled by either jax, against what other programs took: no rate was fitted to it, but
    those of the A100 to Megatron-LM's own program."""
    monkeypatch.setattr(jax, "__version_info__", version)
    compared = {"a100": table_1() + table_5(), "h100": (), "v100-dgx2h": weak_scaling()}
    for run in fsdp_steps():
        if run.config.model.sequence <= 2048:
            compared[run.gpu] += (run,)
    assert {name: len(runs) for name, runs in compared.items()} == {"a100": 43, "h100": 29, "v100-dgx2h": 8}
    for name, runs in compared.items():
        bar = {predict_time(run.config, run.hardware).error for run in runs if run.config.mesh.devices > 4}
        assert bar == {{"a100": A100.error, "h100": H100_RATES.error}.get(name, A100.error_elsewhere)}
        assert np.abs(as_mjax(runs)).max() < bar.pop(), name


def weak_scaling():
    return tuple(run for run in v100_scaling() if run.source.endswith("figure 5"))


def test_beyond_the_lengths_of_the_published_runs_there_is_no_error_bar():
    longer = [run for run in fsdp_steps() if run.config.model.sequence > 2048]
    assert len(longer) == 59
    for run in longer:
        rates = default_calibration(run.hardware)
        assert rates.error_of(run.config, count_parameters(run.config.model), run.hardware)[0] is None, run.name
    (far,) = [run for run in longer if run.name == "1b, 65,536 positions, 8 GPUs" and run.gpu == "h100"]
    assert abs(as_mjax([far])[0]) > H100_RATES.error  # which is why
    for run in (longer[0], far):
        step = predict_time(run.config, run.hardware)
        length = f"{run.config.model.sequence:,}"
        assert step.caveats[0] == f"no error bar at {length} positions: it was found on runs of 512 to 2,048"
        assert (step.error, step.between(step.total), good_to(step.error)) == (None, None, "no error bar")


def test_the_picture_of_scaling_shows_every_published_run_beside_its_prediction(monkeypatch):
    drawn = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    file = BytesIO()
    draw_scaling(file)
    speed, scaling, everything = drawn[0].axes
    lines = {line.get_label(): line.get_ydata() for line in speed.lines}
    assert lines["published"] == pytest.approx([137, 138, 142, 135, 138, 140, 148, 155, 163, 163])
    assert np.abs(np.array(lines["predicted"]) / lines["published"] - 1).max() < 0.06
    published = [line.get_ydata() for line in scaling.lines if line.get_label().endswith("published")]
    assert np.round(published).tolist() == [[100, 95, 82, 77], [96, 83, 79, 74]]
    assert sum(len(line.get_xdata()) for line in everything.lines if line.get_label()[0] != "_") == 32
    assert len(table_1()) == len(lines["published"])
    file.seek(0)
    assert imread(file).std() > 0.05


# --- The compiled program ---------------------------------------------------------------------------------------------

# Micro-batch, recomputation, layers without a loop, mesh, and ms of the compiled step on the roofline.
ROOFLINE = (
    ("gpt_1b", 8, "none", "on", {}, 132.0),
    ("gpt_1b", 16, "none", "on", {}, 241.7),
    ("gpt_2b", 8, "none", "on", {}, 251.8),
    ("gpt_1b", 8, "selective", "on", {}, 139.7),
    ("gpt_1b", 8, "full", "on", {}, 159.9),
    ("gpt_8b", 8, "none", "on", {"model": 8, "sequence_parallel": True}, 164.7),
    ("gpt_8b", 8, "selective", "on", {"model": 8, "sequence_parallel": True}, 166.3),
    ("gpt_8b", 8, "full", "on", {"model": 8, "sequence_parallel": True}, 203.7),
    ("gpt_8b", 8, "none", "on", {"model": 8, "sequence_parallel": False}, 200.1),
    ("gpt_8b", 8, "selective", "on", {"model": 8, "sequence_parallel": False}, 202.5),
    ("gpt_8b", 8, "selective", "two streams", {"model": 8, "sequence_parallel": True}, 141.8),
    ("gpt_1b", 8, "none", "off", {}, 169.7),
    ("gpt_1b", 8, "selective", "off", {}, 163.2),
    ("gpt_1b", 8, "full", "off", {}, 168.5),
    ("gpt_8b", 8, "selective", "off", {"model": 8, "sequence_parallel": True}, 172.9),
    ("gpt_1b", 8, "offload", "off", {}, 184.7),
    ("gpt_8b", 8, "offload", "off", {"model": 8, "sequence_parallel": True}, 217.9),
)
# The same in float8; a name may have a number of layers.
SPLIT = {"model": 8, "sequence_parallel": True}
FLOAT8_ROOFLINE = (
    ("gpt_1b", 16, "none", "on", {}, 217.7),
    ("gpt_1b, 10", 8, "none", "on", {}, 36.1),
    ("gpt_1b, 10", 8, "selective", "on", {}, 39.7),
    ("gpt_1b, 10", 8, "full", "on", {}, 42.8),
    ("gpt_2b, 10", 8, "none", "on", {}, 49.3),
    ("llama3_8b, 4", 1, "none", "on", {}, 134.8),
    ("gpt_8b, 12", 8, "none", "on", SPLIT, 26.5),
    ("gpt_8b, 12", 8, "selective", "on", SPLIT, 27.9),
    ("gpt_8b, 12", 8, "full", "on", SPLIT, 32.4),
    ("gpt_8b, 12", 8, "none", "on", {"model": 8, "sequence_parallel": False}, 36.4),
    ("gpt_1b", 8, "none", "off", {}, 152.6),
    ("gpt_8b", 8, "selective", "off", SPLIT, 160.3),
)


# Beside the layers, with a number of micro-batches.
ZERO_ROOFLINE = (
    ("gpt_1b", 8, "none", "on", {"data": 8, "zero": 1}, 1, 123.7),
    ("gpt_1b", 8, "selective", "on", {"data": 64, "zero": 1}, 1, 132.9),
    ("llama3_8b", 1, "selective", "on", {"data": 8, "zero": 3}, 1, 790.5),
    ("llama3_8b", 1, "selective", "off", {"data": 8, "zero": 3}, 1, 857.6),
    ("llama3_8b", 1, "selective", "off", {"data": 64, "zero": 3}, 1, 865.6),
    ("llama2_7b", 1, "selective", "on", {"data": 8, "zero": 3}, 2, 650.7),
    ("qwen3_8b", 1, "selective", "on", {"data": 8, "zero": 3}, 2, 831.1),
)


def _as_roofline(monkeypatch, name, micro_batch, recompute, unroll, mesh, compute="bf16", micro_batches=1):
    """Milliseconds with the rates of the roofline."""
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))  # which compiled them
    name, _, layers = name.partition(", ")
    config = load_config(name)
    how = {"streams": 2, "unroll": "on"} if unroll == "two streams" else {"unroll": unroll}
    config = replace(
        config,
        model=replace(config.model.without_dropout(), layers=int(layers or config.model.layers)),
        mesh=replace(config.mesh, **{"data": 1, "model": 1, **mesh}),
        precision=replace(config.precision, compute=compute),
        train=replace(
            config.train,
            global_batch=micro_batches * micro_batch * mesh.get("data", 1),
            micro_batch=micro_batch,
            recompute=recompute,
            **how,
        ),
    )
    rates = replace(H100_RATES, collective=LATENCY)  # it has no latency per rank
    return 1e3 * predict_time(config, replace(H100, node_latency=0.0), rates).total


@pytest.mark.parametrize(("name", "micro_batch", "recompute", "unroll", "mesh", "compiled"), ROOFLINE, ids=str)
def test_with_the_rates_of_the_roofline_it_gives_the_time_of_the_compiled_program(
    monkeypatch, name, micro_batch, recompute, unroll, mesh, compiled
):
    found = _as_roofline(monkeypatch, name, micro_batch, recompute, unroll, mesh)
    assert found == pytest.approx(compiled, rel=0.04 if unroll == "on" and recompute != "full" else 0.08)


@pytest.mark.parametrize(
    ("name", "micro_batch", "recompute", "unroll", "mesh", "compiled"), one_in(3, FLOAT8_ROOFLINE), ids=str
)
def test_with_the_rates_of_the_roofline_it_gives_the_time_of_the_program_compiled_in_float8(
    monkeypatch, name, micro_batch, recompute, unroll, mesh, compiled
):
    found = _as_roofline(monkeypatch, name, micro_batch, recompute, unroll, mesh, "fp8")
    assert found == pytest.approx(compiled, rel=0.06 if unroll == "on" else 0.09)


@pytest.mark.parametrize(("name", "micro_batch", "recompute", "unroll", "mesh", "times", "compiled"), ZERO_ROOFLINE)
def test_with_the_rates_of_the_roofline_it_gives_the_time_of_a_step_that_hides_what_zero_sends(
    monkeypatch, name, micro_batch, recompute, unroll, mesh, times, compiled
):
    found = _as_roofline(monkeypatch, name, micro_batch, recompute, unroll, mesh, micro_batches=times)
    assert found == pytest.approx(compiled, rel=0.1 if name == "qwen3_8b" else 0.04)


# --- Laws -------------------------------------------------------------------------------------------------------------


def _config(**changes):
    config = Config(
        model=GPTConfig(layers=16, hidden=2048, heads=16, hidden_dropout=0.0, attention_dropout=0.0),
        mesh=MeshConfig(data=2),
        train=TrainConfig(global_batch=64, micro_batch=4),
    )
    for part, values in changes.items():
        config = replace(config, **{part: replace(getattr(config, part), **values)})
    return config


def test_the_parts_add_up_to_the_step_and_the_mfu_is_model_flops_over_the_peak():
    found = predict_time(_config(mesh={"pipe": 2, "model": 2}), H100)
    assert sum(found.parts.values()) == found.total
    assert all((found.parts[name] > 0) == (name not in ("context", "expert", "host")) for name in PARTS)
    assert found.mfu == pytest.approx(found.model_tflops / 989.4)
    assert 0.05 < found.mfu < 0.8


def test_a_copy_to_host_memory_hides_behind_its_layer_and_the_copy_back_does_not():
    model = {"sequence": 8192, "layers": 8}
    full, offload = (
        _config(model=model, train={"recompute": recompute, "unroll": "off"}) for recompute in ("full", "offload")
    )
    layers, micro_batches, stream = 8, 8, 2 * 4 * 8192 * 2048
    found, before = predict_time(offload, H100), predict_time(full, H100)
    once = micro_batches * layers * stream / 64e9
    assert found.parts["host"] == pytest.approx(once)
    assert before.parts["host"] == 0
    for part in set(PARTS) - {"host", "elementwise"}:
        assert found.parts[part] == before.parts[part]
    assert found.parts["elementwise"] < before.parts["elementwise"]  # no stack to fill and to copy
    assert hardware_flops(offload) == hardware_flops(full)
    forward = (found.total - found.parts["host"]) / micro_batches / layers  # at least that of a layer
    slow = replace(H100, host_bandwidth=stream / (2 * forward))
    assert (
        once * 64e9 / slow.host_bandwidth
        < predict_time(offload, slow).parts["host"]
        < (2 * once * 64e9 / slow.host_bandwidth)
    )
    assert (found.error, before.error) == (None, before.error)
    assert "nobody has timed the copies to host memory, which count at 64 GB/s one way here" in found.caveats


def test_nothing_is_faster_than_the_peak():
    config = _config(model={"hidden": 16384, "heads": 128, "sequence": 2048})
    perfect = ((128, 1024, 1.0, 1.0),)
    rates = replace(H100_RATES, matmul=1.0, inner=1e-9, attention=perfect, launch=0.0, collective=0.0)
    assert 0.5 < predict_time(config, H100, rates).mfu < 1.0


def test_flash_attention_takes_its_flops_over_its_rate_five_products_backward_for_two_forward():
    config = _config(model={"sequence": 4096}, mesh={"data": 1})
    b, s, h = config.train.global_batch, config.model.sequence, config.model.hidden
    forward = config.model.layers * b * 4 * s * s * h / 2 / 989.4e12  # the masked half is left out
    rates = replace(H100_RATES, launch=0.0, attention=((128, 1024, 0.3, 0.2), (128, 4096, 0.5, 0.4)))
    both = forward / 0.5 + 2.5 * forward / 0.4
    assert predict_time(config, H100, rates).parts["attention"] == pytest.approx(both)
    again = replace(config, train=replace(config.train, recompute="selective"))
    assert predict_time(again, H100, rates).parts["attention"] == pytest.approx(both + forward / 0.5)
    both_sides = replace(config, model=as_kind(config.model, "bert"))
    assert predict_time(both_sides, H100, rates).parts["attention"] == pytest.approx(2 * both)


def test_attention_takes_the_rate_of_its_head_size_and_of_the_lengths_around_its_own():
    rows = ((64, 1024, 0.3, 0.2), (128, 1024, 0.4, 0.3), (128, 4096, 0.6, 0.5))
    rates = Rates(H100, replace(H100_RATES, attention=rows), "bf16")
    assert rates.flash_rate(64, 8192) == pytest.approx(0.3 * 989.4e12)  # no other length of 64 was measured
    assert rates.flash_rate(128, 2048, backward=True) == pytest.approx(0.4 * 989.4e12)  # half way, in powers of two
    assert rates.flash_rate(96, 1024) == pytest.approx(0.75 * 0.4 * 989.4e12)  # as 128, of which a quarter is wasted
    assert rates.flash_rate(256, 4096) == pytest.approx(0.6 * 989.4e12)


@pytest.mark.parametrize(
    "slower",
    [
        {"train": {"recompute": "full"}},
        {"train": {"micro_batch": 1}},
        {"mesh": {"data": 1, "model": 2}},
        {"model": {"attention": "xla"}},
        {"model": {"attention_dropout": 0.1}},
        {"model": {"sequence": 2048}},
        {"precision": {"compute": "fp32"}},
    ],
    ids=str,
)
def test_what_costs_more_takes_longer(slower):
    assert predict_time(_config(**slower), H100).total > 1.02 * predict_time(_config(), H100).total


@pytest.mark.parametrize(
    "faster",
    [
        {"mesh": {"pipe": 4, "chunks": 2}},
        {"mesh": {"pipe": 4, "model": 8, "sequence_parallel": True}, "train": {"recompute": "full"}},
        {"mesh": {"pipe": 4, "zero": 1}},
    ],
    ids=str,
)
def test_what_saves_time_in_a_pipeline_does(faster):
    plain = {part: dict(values) for part, values in faster.items()}
    for name in ("chunks", "sequence_parallel", "zero"):
        plain["mesh"].pop(name, None)
    assert predict_time(_config(**faster), H100).total < predict_time(_config(**plain), H100).total


def test_a_ring_that_leaves_the_server_shares_its_network_cards_with_the_rings_beside_it():
    rates = Rates(H100, H100_RATES, "bf16")
    size = 1e12  # so large that latencies do not count
    inside, outside, beside = (rates.gather(8, stride, size) for stride in (1, 2, 8))
    node, network = 450e9 * H100_RATES.node, 400e9 * H100_RATES.network
    assert inside == pytest.approx(7 / 8 * size / node, rel=1e-3)
    assert outside == pytest.approx(7 / 8 * size / (network / 2), rel=1e-3)
    assert beside == pytest.approx(7 / 8 * size / (network / 8), rel=1e-3)
    assert rates.sum(8, 8, size) == pytest.approx(2 * beside, rel=1e-6)
    assert rates.gather(1, 1, size) == rates.sum(1, 1, size) == 0.0


def test_a_ring_without_bytes_takes_a_message_for_each_rank():
    """NVIDIA/nccl, src/graph/tuning.cc: base + (steps - steps between servers) × NVLink + steps between × network."""
    rates, base = Rates(H100, H100_RATES, "bf16"), H100_RATES.collective
    assert rates.gather(8, 1, 0.0) == pytest.approx(base + 7 * 3.4e-6)
    assert rates.sum(8, 1, 0.0) == pytest.approx(base + 14 * 3.4e-6)
    assert rates.gather(64, 1, 0.0) == pytest.approx(base + 56 * 3.4e-6 + 7 * 14e-6)
    assert rates.gather(64, 8, 0.0) == pytest.approx(base + 63 * 14e-6)
    assert rates.gather(64, 2, 0.0) == pytest.approx(base + 48 * 3.4e-6 + 15 * 14e-6)


# A network on which a second is a byte: what is predicted of collectives are the bytes that a device sends.
BYTE_A_SECOND = replace(H100, gpus_per_node=10**6, node_bandwidth=1.0, node_latency=0.0)
OPEN = replace(H100_RATES, node=1.0, collective=0.0)
NOTHING_HIDDEN = replace(MJAX, overlap=Overlap(backward=0.0))


def _sent(config):
    """Bytes that a device sends, by the first axis of the collectives of the traced step, on the stage that sends
    most."""
    sent = Counter()
    for record in ledger(config).records:
        sent[record.axes[0]] += record.sent
    return {axis: found.max() for axis, found in sent.items()}


@pytest.mark.parametrize(
    ("mesh", "train"),
    one_in(
        3,
        [
            ({}, {"recompute": "full", "micro_batch": 2}),
            ({"sequence_parallel": True}, {"recompute": "selective"}),
            ({"sequence_parallel": True}, {"recompute": "full"}),
            ({"zero": 1}, {"recompute": "none"}),
            ({"zero": 3}, {"recompute": "full", "micro_batch": 2}),
            ({"sequence_parallel": True}, {"recompute": "selective", "compute": "fp8"}),
            ({"sequence_parallel": True}, {"recompute": "full", "compute": "fp8"}),
            ({"zero": 1}, {"compute": "fp8"}),
            ({"zero": 3}, {"recompute": "full", "micro_batch": 2, "compute": "fp8"}),
            ({"pipe": 4, "data": 2, "model": 1}, {}),
            ({"pipe": 2, "data": 1, "model": 4, "chunks": 2, "sequence_parallel": True}, {}),
        ],
    ),
    ids=str,
)
def test_the_bytes_on_the_wire_are_those_of_the_traced_step(mesh, train):
    config, compute = whole_rows(load_config("gpt_8b")), train.get("compute", "bf16")
    train = {name: value for name, value in train.items() if name != "compute"}
    config = replace(
        config,
        precision=replace(config.precision, compute=compute),
        model=replace(config.model, attention="xla", layers=8),
        mesh=replace(config.mesh, **{"data": 8, **mesh}),
        train=replace(config.train, **{"global_batch": 64, "micro_batch": 8, "recompute": "none", **train}),
    )
    sent = _sent(config)
    parts = predict_time(config, BYTE_A_SECOND, OPEN, NOTHING_HIDDEN).parts
    if config.mesh.pipe == 1:
        assert parts["model"] == pytest.approx(sent["model"], rel=1e-3)
        # The gradients of biases and LayerNorms, which with sequence parallelism cross `model` too, are left out there.
        left_out = 4e-3 if config.mesh.sequence_parallel else 1e-3 if compute == "fp8" else 1e-4  # and in fp8 gathers
        assert parts["data"] == pytest.approx(sent["data"], rel=left_out)
        return
    # Under a pipeline the bubble holds messages and the waiting for other stages' collectives over `model`.
    idle = predict_time(config, BYTE_A_SECOND, OPEN, replace(NOTHING_HIDDEN, sends_every_tick=False))
    message = parts["pipe"] / (2 * config.micro_batches * config.mesh.chunks)
    over_pipe = parts["pipe"] + parts["bubble"] - idle.parts["bubble"] + 2 * (config.mesh.pipe - 1) * message
    # The embedding's gradient and weights cross `pipe` too; the prediction has them with what crosses `data`.
    assert over_pipe + parts["data"] == pytest.approx(sent["pipe"] + sent.get("data", 0), rel=0.02)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 2, 1), (4, 8, 1), (8, 3, 1), (4, 8, 2), (2, 4, 3)])
def test_the_bubble_is_that_of_the_schedule(stages, micro_batches, chunks):
    f, b, w = 1.0, 1.3, 0.7
    work = micro_batches * chunks * (f + b + w)
    for name in ("gpipe", "1f1b", "zb-h1"):
        config = Config(
            mesh=MeshConfig(pipe=stages, chunks=chunks, schedule=name),
            train=TrainConfig(global_batch=micro_batches, micro_batch=1),
        )
        if chunks > 1 and micro_batches % stages:
            continue
        assert ticks(config.mesh, micro_batches) == build_schedule(name, stages, micro_batches, chunks).ticks
        found = work + bubble(config.mesh, micro_batches, f, b, w)
        if name == "zb-h1":  # exact where the three take the same time, else at most so much
            schedule = build_schedule(name, stages, micro_batches, chunks)
            alike = 3 * micro_batches * chunks + bubble(config.mesh, micro_batches, 1, 1, 1)
            assert alike == schedule.makespan(1, 1, 1)
            assert schedule.makespan(f, b, w) <= found < 1.2 * schedule.makespan(f, b, w)
        else:
            assert found == pytest.approx(build_schedule(name, stages, micro_batches, chunks).makespan(f, b + w))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_mean_of_a_run_whose_batch_grows_is_that_of_the_steps_at_each_of_their_batches(schedule):
    grows = {"batch_rampup": (8, 8, 2_000), "global_batch": 64, "micro_batch": 2, "steps": 100}
    config = _config(mesh={"data": 2, "pipe": 4, "schedule": schedule}, train=grows)
    sizes = [BatchSizes.of(config).size(step) for step in range(100)]
    assert len(set(sizes)) == 8
    assert {size // 4 for size in sizes} > {2, 4, 16}  # fewer micro-batches than stages, and more
    each = {size: predict_time(at_batch(config, size), H100) for size in set(sizes)}
    found = predict_time(config, H100)
    assert found.mean == pytest.approx(sum(each[size].total for size in sizes) / 100, rel=1e-12)
    assert found.total == each[64].total > found.mean
    assert all(step.mean == step.total for step in each.values())


def test_a_gpu_without_the_compute_type_is_refused():
    with pytest.raises(UsageError, match=r"no bf16 peak is known for v100, .* use --precision.compute fp16 or fp32"):
        predict_time(_config(), gpu_named("v100"))
    assert predict_time(replace(_config(), precision=PrecisionConfig(compute="fp16")), gpu_named("v100")).total > 0


def test_a_prediction_outside_the_calibration_says_so_and_has_a_wider_error_bar():
    large = load_config("gpt_18b")
    large = replace(large, model=replace(large.model, attention_dropout=0.0))
    inside = predict_time(large, gpu_named("a100"))
    assert (inside.error, inside.caveats) == (A100.error, ())
    assert inside.between(1.0) == pytest.approx((1 / 1.35, 1 / 0.65))
    outside = predict_time(large, gpu_named("a100-pcie"))
    assert outside.error == A100.error_elsewhere
    assert outside.caveats == ("calibrated on a100, not on a100-pcie",)
    small = predict_time(_config(mesh={"data": 1}), H100)
    assert small.caveats == ("compared with runs on 8 to 64 GPUs",)
    tiny = predict_time(_config(mesh={"data": 1}, model={"layers": 1, "hidden": 256, "heads": 2}), gpu_named("h200"))
    assert tiny.caveats[:2] == (
        "calibrated on h100, not on h200",
        "compared with models of 0.75 to 65 billion parameters",
    )


def test_every_rate_of_a_calibration_counts():
    config = _config(mesh={"data": 16, "model": 2})
    before = predict_time(config, H100).total
    for name, value in (
        ("matmul", 0.5),
        ("inner", 400.0),
        ("attention", ((128, 1024, 0.2, 0.2),)),
        ("memory", 0.5),
        ("launch", 5e-5),
        ("node", 0.3),
        ("network", 0.3),
        ("collective", 1e-3),
    ):
        rates = dataclasses.replace(H100_RATES, **{name: value})
        assert predict_time(config, H100, rates).total > 1.001 * before, name


def test_what_a_step_hides_is_stated_in_one_place_and_shortens_it():
    config = _config(mesh={"model": 4, "sequence_parallel": True}, train={"recompute": "selective"})

    def exposed(**hidden):
        parts = predict_time(config, H100, software=replace(MJAX, overlap=Overlap(**hidden))).parts
        return parts["model"], parts["data"]

    nothing = exposed(backward=0.0)
    for name in ("backward", "repeated", "forward"):
        some = exposed(**{"backward": 0.0, name: 0.5})
        assert some[0] < nothing[0], name
        assert some[1] == nothing[1], name
    assert exposed(backward=0.0, gradients=True)[1] < nothing[1]


def test_each_version_of_jax_hides_what_its_compiled_program_hides():
    config = load_config("gpt_8b")
    plain = replace(config, mesh=replace(config.mesh, sequence_parallel=False))
    split = replace(config, mesh=replace(config.mesh, sequence_parallel=True))
    assert (mjax_overlap(plain, (0, 10, 2)).backward, mjax_overlap(plain, (0, 11, 2)).backward) == (1.0, 0.0)
    assert {mjax_overlap(split, version).backward for version in ((0, 10, 2), (0, 11, 2))} == {0.5}
    assert (mjax_overlap(split, (0, 10, 2)).copies, mjax_overlap(split, (0, 11, 2)).copies) == (False, True)
    assert [mjax_overlap(small_config(4, ranks), (0, 10, 2)).gradients for ranks in (1, 2)] == [True, False]


def test_predicting_touches_no_device():
    code = (
        "from mjax.config import load_config; from mjax.hardware import gpu_named; "
        "from mjax.planner.memory import predict_memory; from mjax.planner.time import predict_time; "
        "config = load_config('bert_336m'); predict_memory(config); predict_time(config, gpu_named('h100'))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}  # JAX would take a GPU, or fail without one
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
