"""What a run records and shows: FLOPs, MFU, metrics.jsonl, the curve, the line."""

import contextlib
import io
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import rich.progress
from rich.console import Console

from mjax.config import load_config
from mjax.training import metrics
from mjax.training.display import Display, duration, verdict
from mjax.training.flops import hardware_flops, model_flops, peak_tflops
from mjax.training.metrics import MetricsLog, Record, read_metrics
from mjax.training.pictures import draw_loss, smoothed


@pytest.mark.parametrize("name", ["gpt_345m", "gpt_1b", "gpt_8b"])
def test_model_flops_are_those_of_the_paper(name):
    config = load_config(name)
    model, batch = config.model, config.train.global_batch
    h, s, v, layers = model.hidden, model.sequence, model.padded_vocabulary, model.layers
    paper = 72 * batch * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert model_flops(config) == pytest.approx(paper, rel=1e-12)


def test_a_wider_mlp_costs_its_products():
    config = load_config("gpt_345m")
    wide = replace(config, model=replace(config.model, feed_forward=5 * config.model.hidden))
    tokens = config.train.global_batch * config.model.sequence
    extra = 3 * 2 * 2 * config.model.hidden**2 * config.model.layers * tokens
    assert model_flops(wide) - model_flops(config) == pytest.approx(extra)


def test_an_unknown_device_or_type_has_no_peak():
    assert peak_tflops("NVIDIA H200", "bf16") == 989.4
    assert peak_tflops("NVIDIA H200", "fp32") == 494.7  # TF32, which XLA uses for float32 products
    assert peak_tflops("NVIDIA H200", "fp8") == 989.4  # of bf16, in which attention and head multiply
    assert peak_tflops("NVIDIA H200", "fp64") is None
    assert peak_tflops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_tflops("cpu", "bf16") is None
    assert peak_tflops("NVIDIA H300", "bf16") is None


def _flops_of(name, recompute):
    config = load_config(name)
    return replace(config, train=replace(config.train, recompute=recompute))


def test_hardware_flops_of_full_recomputation_are_equation_3_of_2104_04473():
    config = _flops_of("gpt_145b", "full")
    model, batch = config.model, config.train.global_batch
    h, s, v, layers = model.hidden, model.sequence, model.padded_vocabulary, model.layers
    paper = 96 * batch * layers * s * h**2 * (1 + s / (6 * h) + v / (16 * h * layers))
    assert hardware_flops(config) == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "seconds", "mfu"),
    [
        ("gpt_22b_sp", 1.10, 41.5),
        ("gpt_175b_sp", 13.75, 51.4),
        ("gpt_530b_sp", 37.83, 56.0),
        ("gpt_1t_sp", 71.49, 56.3),
    ],
)
def test_model_flops_give_the_mfu_of_2205_05198_from_its_step_times(name, seconds, mfu):
    config = load_config(name)
    found = 100 * model_flops(config) / seconds / config.mesh.devices / 312e12
    assert found == pytest.approx(mfu, abs=0.3)  # the seconds have three digits


def test_recomputation_adds_a_forward_of_what_it_repeats():
    none, selective, full = (_flops_of("gpt_8b", how) for how in ("none", "selective", "full"))
    assert hardware_flops(none) == model_flops(none) == model_flops(full)
    model, batch = none.model, none.train.global_batch
    core = batch * model.layers * 4 * model.sequence**2 * model.hidden
    assert hardware_flops(selective) - model_flops(selective) == pytest.approx(core)
    # A causal model needs half of its attention: three times half a core less.
    assert model_flops(none) - model_flops(none, causal=True) == pytest.approx(1.5 * core)
    assert hardware_flops(selective, causal=True) - model_flops(selective, causal=True) == pytest.approx(core / 2)


def test_logits_that_are_computed_twice_are_flops_of_the_hardware_alone():
    whole, model = load_config("llama3_8b"), load_config("llama3_8b").model
    chunked = replace(whole, train=replace(whole.train, loss_chunks=4))
    assert model_flops(chunked) == model_flops(whole)
    logits = 2 * whole.train.global_batch * model.sequence * model.hidden * model.padded_vocabulary
    assert hardware_flops(chunked) - hardware_flops(whole) == pytest.approx(logits)


def test_attention_to_both_sides_has_no_half_to_leave_out():
    config = load_config("bert_336m")
    assert model_flops(config, causal=True) == model_flops(config)


def _record(step, **changes):
    values = {
        "step": step,
        "loss": 9.0 - step / 10,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "loss_scale": 1.0,
        "skipped": False,
        "tokens": step * 100,
        "seconds": 0.5,
        "tokens_per_second": 200.0,
        "tflops": 0.1,
        "mfu": None,
    }
    return Record(**{**values, **changes})


def test_lines_are_valid_json_even_when_a_loss_is_not_finite(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    log.write(_record(1, loss=None, grad_norm=None, skipped=True, nonfinite="final_norm.bias first, 3 of 28"))
    log.write(_record(2, val_loss=8.5))
    log.close()
    first, second = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert first["loss"] is None
    assert "val_loss" not in first
    assert second["val_loss"] == 8.5


def test_continuing_drops_the_future_and_a_line_cut_short(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    for step in range(1, 6):
        log.write(_record(step))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    log = MetricsLog(tmp_path, 3, tensorboard=False)
    log.write(_record(4, loss=1.0))
    log.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path / "metrics.jsonl")][2:] == [(3, 8.7), (4, 1.0)]


def test_tensorboard_gets_the_scalars(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=True)
    log.write(_record(1))
    log.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second"):
        assert name.encode() in content


@pytest.mark.parametrize("losses", [[], [5.0], [None, 5.0, 4.0]])
def test_the_curve_is_drawn_from_any_beginning(tmp_path, losses):
    records = [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)]
    draw_loss(records, tmp_path / "loss.png", "run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]


def test_the_picture_is_drawn_first_and_last_and_between_them_where_it_is_ten_seconds_old(tmp_path, monkeypatch):
    clock, drawn = SimpleNamespace(), []
    with contextlib.closing(MetricsLog(tmp_path, 0, tensorboard=False)) as log:
        monkeypatch.setattr(metrics, "time", clock)
        monkeypatch.setattr(metrics, "draw_loss", lambda *_: drawn.append(clock.monotonic()))
        for now in (100.0, 109.0, 111.0, 120.0, 121.5):
            clock.monotonic = lambda now=now: now
            log.draw(last=now == 120.0)
    assert drawn == [100.0, 111.0, 120.0]


def test_the_picture_of_a_bert_has_a_panel_for_the_order_and_what_guessing_costs(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file: (drawn.append(figure), file.touch()))
    records = [{"step": i, "loss": 9.0 - i, "mlm_loss": 8.0 - i, "order_accuracy": 0.5 + i / 10} for i in range(1, 4)]
    records[-1] |= {"val_loss": 6.5, "val_mlm_loss": 5.5, "val_order_accuracy": 0.75, "val_unigram_entropy": 6.25}
    draw_loss(records, tmp_path / "loss.png", "run")
    masked, order = (axes.get_legend_handles_labels()[1] for axes in drawn[0].axes)
    assert masked[1:] == ["validation, 5.500", "by frequency alone, 6.250"]
    assert order[1:] == ["validation, 75.0%", "by chance, 50%"]
    assert masked[0].startswith("training, 5.")


def test_the_last_lines_of_a_bert_say_how_far_it_is_from_guessing():
    assert verdict(math.log(20), {}, 99) == ["validation perplexity 20.00"]
    figures = {"mlm_loss": math.log(20), "order_loss": 0.6, "order_accuracy": 0.8, "unigram_entropy": math.log(500)}
    masked, order = verdict(math.log(20) + 0.6, figures, 1600)
    assert masked == (
        "validation perplexity 20.00 of masked tokens (2.996 nats); by their frequency alone 500.00 (6.215 nats)"
    )
    assert order == "order       80.0% ± 1.0% of 1,600 pairs right; by chance 50%"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_line_shows_what_a_person_watches_for(terminal):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=140)
    with Display(10, console).begin(0) as display:
        display.show(_record(1, mfu=0.5, loss_scale=4096.0))
        display.say("a message")
    text = output.getvalue()
    for word in (
        "1/10",
        "loss 8.9000",
        "ppl 7332",
        "lr 1.00e-03",
        "scale 4096",
        "200 tok/s",
        "0.1 TFLOP/s",
        "MFU 50.0%",
    ):
        assert word in text
    assert "a message" in text


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (
            140,
            [
                "loss 8.9000",
                "ppl 7332",
                "scale 4096",
                "lr 1.00e-03",
                "200 tok/s",
                "MFU 50.0%",
                "0.1 TFLOP/s",
                "300 tokens",
            ],
        ),
        (80, ["loss 8.9000", "ppl 7332", "scale 4096", "lr 1.00e-03", "200 tok/s"]),
        (60, ["loss 8.9000", "ppl 7332", "scale 4096"]),
        (40, ["loss 8.9000"]),
        (24, []),
    ],
)
def test_a_narrow_terminal_keeps_the_step_and_the_time_left_and_drops_what_matters_least(width, shown, monkeypatch):
    monkeypatch.setattr(rich.progress.Task, "time_remaining", 3723.0)
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width, color_system=None)
    with Display(300_000, console).begin(0) as display:
        for step in (1, 2, 3):
            display.show(_record(step, loss=8.9, mfu=0.5, loss_scale=4096.0))
    line = output.getvalue().replace("\x1b[2K", "").replace("\r", "\n").split("\n")
    (last,) = {text.strip() for text in line if text.startswith("step 3/300000")}
    figures, _, left = last.removeprefix("step 3/300000").strip().rpartition(" ")
    assert figures.strip().split("  ") == (shown or [""])
    assert left == "1:02:03"
    assert len(last) <= width


def test_the_averaged_curve_of_a_ramp_is_the_ramp():
    ramp = [10 - i / 100 for i in range(600)]
    assert smoothed(ramp) == pytest.approx(ramp, abs=1e-9)
    noisy = [x + (-1) ** i for i, x in enumerate(ramp)]
    assert smoothed(noisy) == pytest.approx(ramp, abs=0.3)
    assert smoothed(ramp[:20]) == ramp[:20]


def test_durations_are_read_at_a_glance():
    assert (duration(151), duration(10951)) == ("2:31", "3:02:31")
