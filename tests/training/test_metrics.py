"""Records and displays of a run: FLOPs, MFU, metrics.jsonl, the curve, the line."""

import contextlib
import importlib
import json
import math
import re
import sys
import threading
import time
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from mjax.config import BERTConfig, Config, load_config, save_config
from mjax.config.marks import Metric
from mjax.config.run import LogConfig
from mjax.errors import UsageError
from mjax.pictures import runs
from mjax.pictures.figures import add_perplexity
from mjax.pictures.runs import Curve, draw_experts, draw_loss, smooth, smoothing_window
from mjax.planner.layer import hardware_flops, model_flops, peak_tflops
from mjax.run import metrics
from mjax.run.metrics import MetricsLog, Record, check_trackers


def record(step, **changes):
    numbers = {"learning_rate": 1e-3, "loss_scale": 1.0, "seconds": 0.5, "tokens_per_second": 200.0, "tflops": 0.1}
    values = {"loss": 9.0 - step / 10, "grad_norm": 1.0, "skipped": False, "tokens": step * 100, "mfu": None}
    return Record(step=step, **{**numbers, **values, **changes})


def log_of(folder, said=None, step=0, **options):
    say = print if said is None else said.append
    return contextlib.closing(MetricsLog(folder, step, LogConfig(**{"tensorboard": False, **options}), say))


# --- FLOPs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count", "recompute", "factor", "per_head"),
    [
        ("gpt_345m", model_flops, "none", 72, 12),
        ("gpt_8b", model_flops, "full", 72, 12),
        ("gpt_145b", hardware_flops, "full", 96, 16),  # equation 3 of 2104.04473
    ],
)
def test_flops_are_those_of_the_papers(name, count, recompute, factor, per_head):
    config = load_config(name)
    config = replace(config, train=replace(config.train, recompute=recompute))
    model, batch = config.model, config.train.global_batch
    h, s, v, layers = model.hidden, model.sequence, model.padded_vocabulary, model.layers
    paper = factor * batch * layers * s * h**2 * (1 + s / (6 * h) + v / (per_head * h * layers))
    assert count(config) == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "seconds", "mfu"),
    [
        ("gpt_22b_sp", 1.10, 41.5),
        ("gpt_175b_sp", 13.75, 51.4),
        ("gpt_530b_sp", 37.83, 56.0),
        ("gpt_1t_sp", 71.49, 56.3),
    ],
)
def test_mfu_is_that_of_2205_05198(name, seconds, mfu):
    config = load_config(name)
    found = 100 * model_flops(config) / seconds / config.mesh.devices / 312e12
    assert found == pytest.approx(mfu, abs=0.3)  # the seconds have three digits


def test_flops_count_what_is_repeated():
    config = load_config("gpt_8b")
    model, batch = config.model, config.train.global_batch

    def of(count, causal=False, **train):
        return count(replace(config, train=replace(config.train, **{"recompute": "none", **train})), causal)

    whole = of(model_flops)
    assert of(hardware_flops) == of(model_flops, loss_chunks=4) == whole
    core = batch * model.layers * 4 * model.sequence**2 * model.hidden
    assert of(hardware_flops, recompute="selective") - whole == pytest.approx(core)
    # A causal model needs half of its attention: three times half a core less.
    assert whole - of(model_flops, causal=True) == pytest.approx(1.5 * core)
    logits = 2 * batch * model.sequence * model.hidden * model.padded_vocabulary
    assert of(hardware_flops, loss_chunks=4) - whole == pytest.approx(logits)
    bert = load_config("bert_336m")  # attention to both sides has no half to leave out
    assert model_flops(bert, causal=True) == model_flops(bert)


def test_peak_is_known_or_none():
    assert peak_tflops("NVIDIA H200", "fp32") == 494.7  # TF32, which XLA uses for float32 products
    assert peak_tflops("NVIDIA H200", "fp8") == 989.4  # of bf16, in which attention and head multiply
    assert peak_tflops("NVIDIA H300", "bf16") is None


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


def test_metrics_are_valid_json_without_nan(tmp_path):
    with log_of(tmp_path) as log:
        log.write(record(1, loss=None, grad_norm=None, skipped=True, nonfinite="final_norm.bias first, 3 of 28"))
        log.write(record(2, val_loss=8.5))
        log.write(record(3, val_loss=math.inf))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second, third = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (first["loss"], "val_loss" in first, second["val_loss"], third["val_loss"]) == (None, False, 8.5, None)


@pytest.mark.parity
def test_tensorboard_reads_scalars_of_both_starts(tmp_path):
    """It checks lengths and checksums; a second start hides what the first wrote after its last checkpoint."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    huge = 2**40
    for start, steps in ((0, (1, 2, huge)), (1, (2, 3))):
        with log_of(tmp_path, step=start, tensorboard=True) as log:
            for step in steps:
                log.write(record(step, loss=1e60 if step == huge else step / 3 + start))
    found = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(found.Tags()["scalars"]) >= {"loss", "grad_norm", "learning_rate", "tokens_per_second"}
    losses = {event.step: event.value for event in found.Scalars("loss")}
    assert losses == {1: np.float32(1 / 3), 2: np.float32(2 / 3 + 1), 3: 2.0}
    (first, _) = sorted((tmp_path / "tensorboard").iterdir())
    alone = event_accumulator.EventAccumulator(str(first)).Reload()
    assert [(event.step, event.value) for event in alone.Scalars("loss")][2:] == [(huge, float("inf"))]
    assert time.time() - alone.Scalars("loss")[0].wall_time < 60


@pytest.mark.parametrize("count", [59, 60, 299, 1500])
def test_smoothed_curve_is_that_of_savitzky_and_golay(count):
    from scipy.signal import savgol_filter  # takes a second

    values = np.random.default_rng(count).normal(8, 1, count).tolist()
    half = {59: 0, 60: 1, 299: 4, 1500: 25}[count]
    expected = savgol_filter(values, 2 * half + 1, polyorder=1) if half else values
    np.testing.assert_allclose(smooth(values, smoothing_window(count)), expected, rtol=0, atol=1e-12)
    assert Curve(enumerate(values)).last == pytest.approx(expected[-1], abs=1e-12)


# --- Pictures ---------------------------------------------------------------------------------------------------------

BERT = {"mlm_loss": 8.0, "order_accuracy": 0.5, "val_loss": 6.5, "val_mlm_loss": 5.5, "val_unigram_entropy": 6.25}
EXPERTS = {"loss": 5.0, "expert_load": 1.5, "router_entropy": None}


def curves_in(records):
    names = {name for record in records for name in record if name != "step"}
    found = {name: [(r["step"], r[name]) for r in records if r.get(name) is not None] for name in names}
    return {name: Curve(values) for name, values in found.items() if values}


@pytest.mark.parametrize("changes", [[], [{"loss": 5.0}], [{"loss": None}, {"loss": 5.0}], [BERT, BERT], [EXPERTS]])
def test_pictures_are_drawn_from_any_beginning(tmp_path, changes):
    records = [{"step": step, "loss": 9.0} | more for step, more in enumerate(changes, start=1)]
    draw_loss(curves_in(records), tmp_path / "loss.png", r"\frac{a_$b_$ näme €", BERTConfig.metrics)
    if EXPERTS in changes:
        draw_experts(curves_in(records), 1, np.full((3, 8), 1 / 8), tmp_path / "experts.png", "$")
    pictures = list(tmp_path.iterdir())
    assert len(pictures) == 1 + (EXPERTS in changes)
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.parametrize(
    ("record", "shown", "panels"),
    [
        (BERT, BERTConfig.metrics, {"run: masked tokens": "alone, 6.250", "run: sentence order": "chance, 50%"}),
        (BERT, (), {"run": "training, last 9.000"}),
        ({"loss": 5.0}, BERTConfig.metrics, {"run": "training, last 5.000"}),
        ({"hits": 0.25}, (Metric("hits", "", axis="share", share=True),), {"run": "training, last 25.0%"}),
    ],
    ids=["BERT", "unknown model", "record of before", "model of one's own"],
)
def test_curves_are_those_the_model_names(tmp_path, monkeypatch, record, shown, panels):
    drawn = []
    monkeypatch.setattr(runs, "save", lambda figure, file: drawn.append(figure))
    draw_loss(curves_in([{"step": 1, "loss": 9.0} | record]), tmp_path / "loss.png", "run", shown)
    texts = {panel.get_title(): panel.get_legend_handles_labels()[1] for panel in drawn[0].axes}
    assert texts.keys() == panels.keys()
    assert all(any(text in label for label in texts[title]) for title, text in panels.items())


@pytest.mark.parametrize("limits", [(2.0, 9.0), (6.455, 6.533), (3.1, 3.9), (3.2, 3.2001), (-0.1, 0.2)], ids=str)
def test_perplexities_are_shown_in_any_range(limits):
    axes = Figure().add_subplot()
    axes.set_ylim(limits)
    add_perplexity(axes)
    (beside,) = axes.child_axes
    shown = [
        (place, label.get_text()) for place, label in zip(beside.get_yticks(), beside.get_yticklabels(), strict=True)
    ]
    assert 3 <= len(shown) <= 40
    assert len({label for _, label in shown}) == len(shown)
    assert all(limits[0] <= place <= limits[1] for place, _ in shown)


def test_perplexities_of_a_diverged_run_are_left_out():
    axes = Figure().add_subplot()
    axes.set_ylim(800, 3000)
    add_perplexity(axes)
    assert not len(axes.child_axes[0].get_yticks())


def test_picture_is_redrawn_when_ten_seconds_old(tmp_path, monkeypatch):
    clock, drawn = SimpleNamespace(), []
    with log_of(tmp_path) as log:
        monkeypatch.setattr(metrics, "time", clock)
        monkeypatch.setattr(metrics, "draw_loss", lambda *_: drawn.append(clock.monotonic()))
        for now in (100.0, 109.0, 111.0, 120.0, 121.5):
            clock.monotonic = lambda now=now: now
            log.draw(last=now == 120.0)
            log._executor.submit(int).result()  # after the picture, in the same thread
    assert drawn == [100.0, 111.0, 120.0]


# --- Runs of any length -----------------------------------------------------------------------------------------------


def noisy(count):
    return (np.random.default_rng(count).normal(5, 1, count) + 100 / np.arange(1, count + 1)).tolist()


@pytest.mark.parametrize("count", [1, runs.MAX_POINTS])
def test_curve_of_short_run_is_exact(count):
    values = noisy(count)
    bins = Curve(enumerate(values, start=1)).bins()
    assert (bins.steps.tolist(), bins.means.tolist()) == ([*range(1, count + 1)], values)


@pytest.mark.parametrize("first", [0, 1, 10**12])
def test_curve_of_long_run_has_bounded_bins(monkeypatch, first):
    monkeypatch.setattr(runs, "MAX_POINTS", 64)
    values = noisy(10_000)
    curve = Curve(enumerate(values, start=first))
    bins = curve.bins()
    assert 32 <= len(bins.steps) <= 64
    assert curve.width == 256
    for key, *reduced in [*zip(*bins, strict=True)][1:-1]:
        inside = values[key * 256 - first : (key + 1) * 256 - first]
        expected = [key * 256 + 127.5, np.mean(inside), min(inside), max(inside)]
        assert reduced == pytest.approx(expected)


def test_start_of_a_long_run_takes_little_memory(tmp_path):
    lines = (json.dumps(record(step, val_loss=9.0).as_dict()) + "\n" for step in range(1, 20_001))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    tracemalloc.start()
    with log_of(tmp_path, step=19_999) as log:
        _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5e6  # with a dict for each line it was 30 MB
    assert [len(log.curves[name].bins().steps) for name in ("loss", "val_loss")] == [2500, 2500]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 19_999


def test_pictures_are_drawn_while_training_continues(tmp_path, monkeypatch):
    begun, free, drawn = threading.Event(), threading.Event(), []

    def draw(curves, *_):
        drawn.append(curves["loss"].steps[-1])
        begun.set()
        free.wait(60)

    monkeypatch.setattr(metrics, "draw_loss", draw)
    monkeypatch.setattr(metrics, "REDRAW_INTERVAL", 0.0)
    with log_of(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(record(step))
            log.draw(last=False)
            begun.wait(60)
        free.set()
        log.draw()
        assert drawn == [1, 3]
        log.draw(last=False)
    assert drawn == [1, 3, 3]  # `close` has waited


# --- Weights & Biases, Trackio ----------------------------------------------------------------------------------------


def starts_of(package, folder, monkeypatch, steps):
    """Calls of a tracker by starts of a run in a folder, each from the step before the first one that it writes."""
    calls = []
    run = SimpleNamespace(
        define_metric=lambda name, **options: calls.append(("define", name, options)),
        log=lambda values, **options: calls.append(("log", values, options)),
        finish=lambda: calls.append(("finish",)),
    )
    fake = SimpleNamespace(init=lambda **options: calls.append(("init", options)) or run)
    monkeypatch.setitem(sys.modules, package, fake)
    folder.mkdir()
    address = "s3://user:password@bucket/corpus"
    save_config(Config(data=replace(Config().data, train_path=(address,))), folder / "config.json")
    for start in steps:
        with log_of(folder, step=start[0] - 1, **{package: "project"}) as log:
            for step in start:
                log.write(record(step))
    return calls


def test_wandb_gets_config_id_and_repeated_steps(tmp_path, monkeypatch):
    """The second start is continued from an older checkpoint: wandb drops a `step` below its last one."""
    calls = starts_of("wandb", tmp_path / "gpt_demo", monkeypatch, [[1, 2, 3], [2, 3]])
    first, second = (call[1] for call in calls if call[0] == "init")
    assert first == second, "it continues its own"
    assert first["config"]["train"]["global_batch"] == Config().train.global_batch
    assert first["config"]["data"]["train_path"] == ["s3://…@bucket/corpus"]
    assert (first["project"], first["name"], first["resume"]) == ("project", "gpt_demo", "allow")
    logged = [(call[1]["step"], call[2]) for call in calls if call[0] == "log"]
    assert logged == [(step, {}) for step in (1, 2, 3, 2, 3)]
    assert ("define", "*", {"step_metric": "step"}) in calls
    (tmp_path / "other").mkdir()
    [_, options], *_ = starts_of("wandb", tmp_path / "other/gpt_demo", monkeypatch, [[1]])
    assert options["id"] != first["id"], "another user's run of this name"
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    [_, options], *_ = starts_of("wandb", tmp_path / "chosen", monkeypatch, [[1]])
    assert options["id"] == "chosen"


def test_empty_module_is_not_a_tracker(tmp_path, monkeypatch):
    """W&B writes a folder of its name into the working directory, which Python imports as an empty module."""
    (tmp_path / "trackio").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(UsageError, match=r"needs the trackio package .* pip install trackio"):
        check_trackers(LogConfig(trackio="project"))


def test_trackio_continues_run_of_same_id(tmp_path, monkeypatch):
    """Trackio has no ids and no dir: the name tells runs apart; its steps may repeat."""
    imported, import_module = [], importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: imported.append(name) or import_module(name))
    calls = starts_of("trackio", tmp_path / "gpt_demo", monkeypatch, [[1, 2], [2]])
    first, second = (call[1] for call in calls if call[0] == "init")
    assert first == second
    assert first.keys() == {"project", "name", "resume", "config"}
    assert "matplotlib.figure" in imported, "Trackio drops values while another thread imports it for a picture"
    assert re.fullmatch("gpt_demo-[0-9a-f]{8}", first["name"])
    assert [call[2] for call in calls if call[0] == "log"] == [{"step": 1}, {"step": 2}, {"step": 2}]
    assert [call[0] for call in calls].count("finish") == 2
