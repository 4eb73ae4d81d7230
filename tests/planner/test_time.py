"""Seconds of a step before it runs: what the papers measured, and laws that hold whatever the numbers are."""

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.published import errors, fit, table_1, table_5, v100_scaling
from mjax.batch_size import BatchSizes, at_batch
from mjax.config import Config, GPTConfig, MeshConfig, PrecisionConfig, TrainConfig, load_config
from mjax.errors import UsageError
from mjax.hardware import gpu_named
from mjax.model_config import as_kind
from mjax.parallel.schedules import build_schedule
from mjax.planner.calibration import MEGATRON_A100, MEGATRON_V100, MJAX_FROM_PAPERS
from mjax.planner.comms import ledger
from mjax.planner.rates import Rates
from mjax.planner.time import PARTS, _bubble, _ticks, predict_time
from tests.conftest import ROOT

# --- What was published -----------------------------------------------------------------------------------------------


def test_the_ten_rows_of_2104_04473_are_predicted_within_3_percent_on_average_and_6_at_worst():
    found = np.abs(errors(MEGATRON_A100, table_1()))
    assert len(found) == 10
    assert found.mean() < 0.03
    assert found.max() < 0.06
    assert found.max() < MEGATRON_A100.error


def test_a_row_left_out_of_the_fit_is_predicted_within_8_percent():
    runs, worst = table_1(), []
    for i in range(len(runs)):
        others = fit(MEGATRON_A100, runs[:i] + runs[i + 1 :], ("matmul", "half"))
        worst.append(abs(errors(others, runs[i : i + 1])[0]))
    assert max(worst) < 0.08
    assert max(worst) < MEGATRON_A100.error


def test_the_scaling_figures_of_1909_08053_are_predicted_within_12_percent():
    found = np.abs(errors(MEGATRON_V100, v100_scaling()))
    assert len(found) == 14
    assert found.max() < 0.12
    assert found.max() < MEGATRON_V100.error


def test_the_rates_in_the_code_are_those_that_the_fit_gives():
    for calibration, runs, names in (
        (MEGATRON_A100, table_1(), ("matmul", "half")),
        (MEGATRON_V100, v100_scaling(), ("matmul", "launch")),
    ):
        start = replace(calibration, matmul=0.5)
        again = fit(start, runs, names)
        for name in names:
            assert getattr(again, name) == pytest.approx(getattr(calibration, name), rel=5e-3), name


def test_the_error_bar_of_mjax_holds_on_runs_that_no_rate_was_fitted_to():
    # The same GPU and another program: sequence parallelism, selective recomputation, a year later.
    assert np.abs(errors(MJAX_FROM_PAPERS, table_5())).max() < MJAX_FROM_PAPERS.error
    # Another GPU and another program: weak scaling on V100s.
    weak = [run for run in v100_scaling() if run.source.endswith("figure 5")]
    carried_over = np.abs(errors(MJAX_FROM_PAPERS, weak))
    assert MJAX_FROM_PAPERS.error < carried_over.max() < MJAX_FROM_PAPERS.error_elsewhere


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


H100 = gpu_named("h100")


def test_the_parts_add_up_to_the_step_and_the_mfu_is_model_flops_over_the_peak():
    found = predict_time(_config(mesh={"pipe": 2, "model": 2}), H100)
    assert sum(found.parts.values()) == found.total
    assert all(found.parts[name] > 0 for name in PARTS)
    assert found.mfu == pytest.approx(found.model_tflops / 989.4)
    assert 0.05 < found.mfu < 0.8


def test_nothing_is_faster_than_the_peak():
    config = _config(model={"hidden": 16384, "heads": 128, "sequence": 2048})
    rates = replace(MJAX_FROM_PAPERS, matmul=1.0, half=1e-9, attention=1.0, launch=0.0, collective=0.0)
    assert 0.5 < predict_time(config, H100, rates).mfu < 1.0


def test_flash_attention_takes_its_flops_over_its_rate_five_products_backward_for_two_forward():
    config = _config(model={"sequence": 4096}, mesh={"data": 1})
    b, s, h = config.train.global_batch, config.model.sequence, config.model.hidden
    forward = config.model.layers * b * 4 * s * s * h / 2  # the masked half is left out
    rates = replace(MJAX_FROM_PAPERS, launch=0.0)
    rate = 989.4e12 * rates.attention
    assert predict_time(config, H100, rates).parts["attention"] == pytest.approx(3.5 * forward / rate)
    again = replace(config, train=replace(config.train, recompute="selective"))
    assert predict_time(again, H100, rates).parts["attention"] == pytest.approx(4.5 * forward / rate)
    both_sides = replace(config, model=as_kind(config.model, "bert"))
    assert predict_time(both_sides, H100, rates).parts["attention"] == pytest.approx(7 * forward / rate)


@pytest.mark.parametrize(
    "slower",
    [
        {"train": {"recompute": "full"}},
        {"train": {"micro_batch": 1}},
        {"mesh": {"data": 1, "model": 2}},
        {"mesh": {"zero": 3}},
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
    rates = Rates(H100, MJAX_FROM_PAPERS, "bf16")
    size = 1e12  # so large that latencies do not count
    inside, outside, beside = (rates.gather(8, stride, size) for stride in (1, 2, 8))
    node, network = 450e9 * MJAX_FROM_PAPERS.node, 400e9 * MJAX_FROM_PAPERS.network
    assert inside == pytest.approx(7 / 8 * size / node, rel=1e-3)
    assert outside == pytest.approx(7 / 8 * size / (network / 2), rel=1e-3)
    assert beside == pytest.approx(7 / 8 * size / (network / 8), rel=1e-3)
    assert rates.sum(8, 8, size) == pytest.approx(2 * beside, rel=1e-6)
    assert rates.gather(1, 1, size) == rates.sum(1, 1, size) == 0.0


# A network on which a second is a byte: what is predicted of collectives are the bytes that a device sends.
BYTE_A_SECOND = replace(H100, gpus_per_node=10**6, node_bandwidth=1.0, node_latency=0.0)
OPEN = replace(
    MJAX_FROM_PAPERS,
    node=1.0,
    collective=0.0,
    software=replace(MJAX_FROM_PAPERS.software, hides_backward_sums=False),
)


def _sent(config):
    """Bytes that a device sends, by the first axis of the collectives of the traced step, on the stage that sends
    most."""
    sent = Counter()
    for record in ledger(config).records:
        sent[record.axes[0]] += record.sent
    return {axis: found.max() for axis, found in sent.items()}


@pytest.mark.parametrize(
    ("mesh", "train"),
    [
        ({}, {"recompute": "full", "micro_batch": 2}),
        ({"sequence_parallel": True}, {"recompute": "selective"}),
        ({"sequence_parallel": True}, {"recompute": "full"}),
        ({"zero": 1}, {"recompute": "none"}),
        ({"zero": 3}, {"recompute": "full", "micro_batch": 2}),
        ({"pipe": 4, "data": 2, "model": 1}, {}),
        ({"pipe": 2, "data": 1, "model": 4, "chunks": 2, "sequence_parallel": True}, {}),
    ],
    ids=str,
)
def test_the_bytes_on_the_wire_are_those_of_the_traced_step(mesh, train):
    config = load_config("gpt_8b")
    config = replace(
        config,
        model=replace(config.model, attention="xla", layers=8),
        mesh=replace(config.mesh, **{"data": 8, **mesh}),
        train=replace(config.train, **{"global_batch": 64, "micro_batch": 8, "recompute": "none", **train}),
    )
    sent = _sent(config)
    parts = predict_time(config, BYTE_A_SECOND, OPEN).parts
    if config.mesh.pipe == 1:
        assert parts["model"] == pytest.approx(sent["model"], rel=1e-3)
        # The gradients of biases and LayerNorms, which with sequence parallelism cross `model` too, are left out there.
        assert parts["data"] == pytest.approx(sent["data"], rel=4e-3 if config.mesh.sequence_parallel else 1e-4)
        return
    # Under a pipeline the bubble holds messages and the waiting for other stages' collectives over `model`.
    idle = predict_time(config, BYTE_A_SECOND, replace(OPEN, software=replace(OPEN.software, sends_every_tick=False)))
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
        assert _ticks(config.mesh, micro_batches) == build_schedule(name, stages, micro_batches, chunks).ticks
        found = work + _bubble(config.mesh, micro_batches, f, b, w)
        if name == "zb-h1":  # exact where the three take the same time, else at most so much
            schedule = build_schedule(name, stages, micro_batches, chunks)
            alike = 3 * micro_batches * chunks + _bubble(config.mesh, micro_batches, 1, 1, 1)
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
    assert (inside.error, inside.caveats) == (MJAX_FROM_PAPERS.error, ())
    outside = predict_time(large, H100)
    assert outside.error == MJAX_FROM_PAPERS.error_elsewhere
    assert outside.caveats == ("calibrated on a100, not on h100",)
    small = predict_time(_config(mesh={"data": 1}), gpu_named("a100"))
    assert small.caveats == (
        "calibrated on models of 1.7 to 1008 billion parameters",
        "calibrated on 32 to 3072 GPUs",
    )


def test_every_rate_of_a_calibration_counts():
    config = _config(mesh={"data": 16, "model": 2})
    before = predict_time(config, H100).total
    for name, value in (
        ("matmul", 0.5),
        ("half", 300.0),
        ("attention", 0.3),
        ("memory", 0.5),
        ("launch", 5e-5),
        ("node", 0.3),
        ("network", 0.3),
        ("collective", 1e-3),
    ):
        rates = dataclasses.replace(MJAX_FROM_PAPERS, **{name: value})
        assert predict_time(config, H100, rates).total > 1.001 * before, name


def test_predicting_touches_no_device():
    code = (
        "from mjax.config import load_config; from mjax.hardware import gpu_named; "
        "from mjax.planner.memory import predict_memory; from mjax.planner.time import predict_time; "
        "config = load_config('bert_336m'); predict_memory(config); predict_time(config, gpu_named('h100'))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}  # JAX would take a GPU, or fail without one
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
