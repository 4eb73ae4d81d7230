"""`mjax plan --gpu`: the time of a step as it is printed and as JSON, and what is refused."""

import json
from dataclasses import replace

import pytest

from benchmarks.published import whole_rows
from mjax import cli
from mjax.config import load_config
from mjax.hardware import gpu_named
from mjax.planner.calibration import H100, MEGATRON_A100, write_calibration
from mjax.planner.software import MEGATRON_2021
from mjax.planner.time import predict_time
from mjax.planner.time_section import run_tokens, time_section
from mjax.training.flops import hardware_flops

A100 = gpu_named("a100")


def test_the_json_holds_the_prediction_and_says_how_mfu_was_counted():
    config = load_config("gpt_145b")
    found, step = time_section(config, A100).values, predict_time(config, A100)
    assert found["seconds"] == step.total == pytest.approx(sum(found["parts"].values()))
    assert found["mfu"] == pytest.approx(found["model_flops"] / step.total / 1536 / 312e12)
    assert found["mfu_causal"] < found["mfu"]
    assert found["hardware_tflops"] / found["model_tflops"] == pytest.approx(
        found["hardware_flops"] / found["model_flops"]
    )
    assert found["tokens_per_second"] == pytest.approx(2304 * 2048 / step.total)
    assert found["run"]["seconds"] == pytest.approx(config.train.steps * step.total)
    json.dumps(found)


def test_gpt_3_takes_the_34_days_on_1024_a100s_that_2104_04473_estimates():
    # Section 5.1 and equation 4: 300 billion tokens at 140 TFLOP/s a GPU, recomputation counted. The estimate counts
    # 8 T P FLOPs, fewer than the products of the model.
    config = whole_rows(load_config("gpt_175b"))
    config = replace(config, precision=replace(config.precision, compute="fp16"))
    step = predict_time(config, A100, MEGATRON_A100, MEGATRON_2021)
    assert run_tokens(config) == pytest.approx(300e9, rel=1e-4)
    assert hardware_flops(config) / step.total / 1024 / 1e12 == pytest.approx(140, rel=0.06)
    assert step.mean * config.train.steps / 86_400 == pytest.approx(34, rel=0.06)


def test_a_run_whose_batch_grows_takes_each_step_at_its_own_batch():
    config = load_config("gpt_345m")
    config = replace(config, train=replace(config.train, global_batch=512, steps=100, batch_schedule="0:256 10M:512"))
    small = replace(config, train=replace(config.train, global_batch=256, batch_schedule=None))
    large = replace(config, train=replace(config.train, batch_schedule=None))
    begun = -(-10_000_000 // 1024 // 256)  # steps of 256 until 10M tokens
    expected = begun * predict_time(small, A100).total + (100 - begun) * predict_time(large, A100).total
    assert 0 < begun < 100
    assert time_section(config, A100).values["run"]["seconds"] == pytest.approx(expected, rel=1e-3)


def test_the_plan_has_a_section_on_time_where_a_gpu_is_named(capsys):
    flags = ["plan", "--config", "gpt_145b", "--gpu", "a100"]
    assert cli.main(flags) == 0
    printed = capsys.readouterr().out
    assert "--- Time on a100, predicted ---" in printed
    assert "error bar  ±35% of the measured time, so 1" in printed
    assert "rates      none measured on a100; matmul, inner: fitted to 18 runs of Megatron-LM" in printed
    assert "beyond" not in printed
    assert cli.main([*flags, "--json"]) == 0
    step = predict_time(load_config("gpt_145b"), A100)
    assert json.loads(capsys.readouterr().out)["time"]["seconds"] == step.total
    assert cli.main(flags[:-2]) == 0
    assert "Time on" not in capsys.readouterr().out


def test_longer_sequences_than_were_compared_have_no_error_bar(capsys):
    assert cli.main(["plan", "--config", "llama3_8b", "--gpu", "h100"]) == 0
    printed = capsys.readouterr().out
    assert "rates      matmul measured on h100; matmul: 798 TFLOP/s in a product of 8192³" in printed
    assert "beyond     no error bar at 8,192 positions: it was found on runs of 512 to 2,048" in printed
    assert "error bar  none for sequences of this length; others were compared with 29 steps" in printed
    found = time_section(load_config("llama3_8b"), gpu_named("h100")).values
    assert (found["error"], found["between"]) == (None, None)


def test_a_calibration_of_the_users_own_is_used(capsys, tmp_path):
    file = tmp_path / "mine.json"
    measured = {"measured": ("matmul", "memory"), "sources": {"matmul": "measured on one H100", "error": "five steps"}}
    write_calibration(replace(H100, matmul=0.3, error=0.07, **measured), file)
    flags = ["plan", "--config", "gpt_145b", "--gpu", "h100", "--calibration", str(file)]
    assert cli.main([*flags, "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)["time"]
    assert slow["error"] == 0.07
    assert slow["between"] == pytest.approx([slow["seconds"] / 1.07, slow["seconds"] / 0.93])
    assert slow["seconds"] > 1.5 * predict_time(load_config("gpt_145b"), gpu_named("h100")).total
    assert slow["not_measured"] == ["inner", "attention", "launch", "node", "network", "collective"]
    assert cli.main(flags) == 0
    printed = capsys.readouterr().out
    assert "ms: five steps" in printed
    assert "rates      matmul, memory measured on h100; matmul: measured on one H100; inner, " in printed


@pytest.mark.parametrize(("gpu", "compute"), [("v100", "bf16"), ("h100", "fp64")])
def test_without_a_peak_only_the_time_is_not_said(capsys, gpu, compute):
    assert cli.main(["plan", "--config", "gpt_8b", "--gpu", gpu, "--precision.compute", compute, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["memory"]["gpu"] == gpu
    assert plan["communication"]["collectives"] == 10 * 72 + 7 + 17  # of layers, others over `model`; gradients, loss
    widths = {record["dtype"] for record in plan["communication"]["records"] if record["axes"] == ["data"]}
    assert widths == {"float64" if compute == "fp64" else "float32"}
    sentence = f"no {compute} peak is known for {gpu}, so its time cannot be predicted; use --precision.compute "
    assert plan["time"]["seconds"] is None
    assert plan["time"]["why"].startswith(sentence)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--gpu", "h10"], "--gpu h10 is not known, did you mean 'h100'?"),
        (
            ["--gpu", "v100", "--model.attention", "cudnn", "--model.attention-dropout", "0"],
            "--model.attention cudnn cannot be used: it needs compute capability 8.0 or more",
        ),
        (["--calibration", "x.json"], "--calibration x.json is for a GPU; add --gpu, such as --gpu h100"),
        (["--gpu", "h100", "--calibration", "none.json"], "none.json does not exist; write one with"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_a_sentence(capsys, flags, sentence):
    assert cli.main(["plan", "--config", "gpt_8b", *flags]) == 2
    assert sentence in capsys.readouterr().err
