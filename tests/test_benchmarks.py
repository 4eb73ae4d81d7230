"""The benchmark runs from its command line to its table, and a contender that cannot run has its reason there."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import fault_runs, grouped
from benchmarks.command import check_peers
from benchmarks.fault_runs import Ended, Outcome, Place
from benchmarks.fitting import Measurement
from mjax.config import DataConfig, load_config
from mjax.errors import UsageError
from mjax.hardware import gpu_named
from mjax.planner.calibration import H100, read_calibration
from mjax.planner.compile import SHEETS, _without_compilation_cache
from mjax.planner.memory import predict_memory
from mjax.planner.time import predict_time
from mjax.state.manifest import write_manifest
from tests.compiler import needs_compiler
from tests.conftest import ROOT
from tests.test_train_command import CONFIG, environment

TEXT = str(ROOT / "requirements.txt")


def run(*flags, code=0):
    command = [sys.executable, str(ROOT / "benchmarks" / "train_step.py"), "--config", CONFIG, *flags]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == code, result.stdout[-3000:] + result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def measured():
    return json.loads(run("--peers", "none", "--rounds", "3", "--steps", "2", "--json").stdout)


@pytest.mark.ci
def test_the_benchmark_of_a_tiny_config_has_every_figure(measured):
    (row,) = measured["rows"]
    assert row["name"] == "mjax"
    assert row["failed"] is None
    assert row["mfu"] is None, "no peak of this machine's CPU is known"
    assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert row["against_mjax"] == 1.0
    assert row["tokens_per_second"] == pytest.approx(8 * 16 / (row["ms"] / 1e3))
    assert row["first_loss"] == pytest.approx(5.55, abs=0.1), "the logarithm of 257 tokens"
    assert row["tflops"] > 0
    assert 0.05 < row["memory_gib"] < 4
    assert row["first_step_seconds"] > row["ms"] / 1e3


@pytest.mark.ci
def test_the_record_says_what_was_measured(measured):
    assert measured["config"]["data"]["mock"] is True
    assert measured["config"]["train"]["global_batch"] == 8
    remarks = "\n".join(measured["notes"])
    for what in ("2 layers", "micro-batches of 2", "fp32", "take turns", "attention xla_blocks", "jax "):
        assert what in remarks
    assert "--rounds 3" in measured["command"]


@pytest.mark.ci
def test_a_contender_that_fails_is_a_row_with_its_reason():
    output = run("--peers", "none", "--mesh.model", "2", code=1).stdout
    assert "mjax failed: " in output
    assert "2 devices" in output
    assert "ms a step" in output


def test_a_peer_that_does_not_exist_is_refused():
    assert "names 'keras'; use eager" in run("--peers", "keras", code=2).stderr


@pytest.mark.ci
def test_the_benchmark_of_indices_prints_a_row_for_everything_it_measures():
    sizes = ["--rounds", "1", "--tokens", "100000", "--samples", "1000", "--sequences", "1000", "--batch", "4"]
    # Without megatron-core, whose ten processes need a minute to import it; tests/parity compares the indices.
    alone = (
        "import runpy, sys; sys.modules['megatron'] = None; runpy.run_module('benchmarks.index', run_name='__main__')"
    )
    command = [sys.executable, "-c", alone, *sizes]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.split("|")[1].split(",")[0].split()[0] for line in result.stdout.splitlines() if line.startswith("| ")]
    assert rows == ["what", "---", *["build"] * 3, "start", *["blend"] * 4, *["read"] * 2, "open"]


@pytest.mark.ci
def test_the_benchmark_of_grouped_products_counts_the_tiles_of_each_load(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grouped.py", "--shape", "tiny", "--rounds", "1", "--rows", "5", "100"])
    assert grouped.main() == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    found = {tuple(row[:3]): float(row[3]) for row in rows if row and row[0] in grouped.LOADS}
    # 100 rows, 4 experts: ragged_dot computes them for each, and its masks cost something besides.
    assert all(4 <= found[load, "ragged_dot", "–"] < 5 for load in grouped.LOADS)
    assert [found[load, "xla", "100"] for load in grouped.LOADS] == [4, 4, 4, 1]
    for load in grouped.LOADS:
        counts = np.bincount(grouped.assigned(grouped.SHAPES["tiny"], load), minlength=4)
        assert found[load, "xla", "5"] == sum(-(-counts // 5)) * 5 / 100


@needs_compiler
@pytest.mark.parametrize("triton", [True, False], ids=["Triton", "cuBLAS"])
def test_on_an_h100_the_flops_of_ragged_dot_are_those_of_dense_products(triton):
    from jax.experimental.topologies import get_topology_desc

    sheet = (SHEETS / "h100.txtpb").read_text()
    (device,) = get_topology_desc(platform="cuda", topology="1x1x1", target_config=sheet).devices
    shapes = ((256, 64), "bfloat16"), ((8, 64, 128), "bfloat16"), ((8,), "int32")
    there = jax.sharding.SingleDeviceSharding(device)
    arrays = [jax.ShapeDtypeStruct(*each, sharding=there) for each in shapes]
    with _without_compilation_cache():
        options = {"xla_gpu_enable_triton_gemm": triton}
        compiled = jax.jit(jax.lax.ragged_dot).lower(*arrays).compile(compiler_options=options)
    assert grouped.flops_of(compiled, on_gpu=True) == 8 * 2 * 256 * 64 * 128


def test_the_benchmark_of_grouped_products_sees_a_wrong_result(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grouped.py", "--shape", "tiny", "--rounds", "1"])
    monkeypatch.setattr("mjax.parallel.grouped.grouped_product", lambda x, kernels, *_, **__: x @ kernels[0])
    assert grouped.main() == 1
    assert "y of xla differs from that of ragged_dot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        ("bert_samples", ["--samples", "0"], "--samples is 0; it must be at least 1"),
        ("calibrate", ["--output", "none/rates.json"], "--output none/rates.json: there is no folder none; create it"),
        ("calibrate", ["--output", "."], "--output . is a folder; name a file"),
        ("calibrate", ["--output", "x.json", "--shrink", "0"], "--shrink is 0; it must be at least 1"),
        ("calibrate", ["--output", "x.json", "--gpu", "v100", "--compute", "bf16"], "v100 has no bf16; use --compute"),
        ("calibrate", ["--output", "x.json", "--gpu", "h100", "--kinds", "attention"], "nothing that can be measured"),
        ("dedup", ["none.jsonl", "none.jsonl"], "there is no file none.jsonl; give .txt, .jsonl"),
        ("dedup", ["a", "b", "--workers", "0"], "--workers is 0; it must be at least 1"),
        ("dedup", [TEXT, TEXT, "--thresholds", "0.7", "0"], "--threshold 0 is not a Jaccard similarity"),
        ("grouped", ["--rows", "64", "0"], "--rows is 0; it must be at least 1"),
        (
            "grouped",
            ["--shape", "qwen3_30b"],
            "--shape qwen3_30b needs an NVIDIA GPU and this process runs on cpu; use",
        ),
        ("index", ["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        ("index", ["--tokens", "5000"], "--tokens is 5,000; with --batch 3072 use 18874368 or more"),
        ("memory", ["--write", "none/table.json"], "--write none/table.json: there is no folder none; create it"),
        ("memory", ["--only", "gpt_5"], "--only gpt_5: no row of compiled_memory.json has that in its name"),
        ("pipeline_bubble", ["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        ("pipeline_bubble", ["--unit-ms", "-1"], "--unit-ms is -1; it must be above 0"),
        ("planning", ["--config", "wrong"], "there is no config 'wrong'"),
        ("planning", ["--devices", "0"], "--devices is 0; it must be at least 1"),
        ("planning", ["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        ("prepare", ["none.jsonl"], "there is no file none.jsonl; give .txt, .jsonl"),
        ("prepare", ["none.jsonl", "--workers", "1", "0"], "--workers is 0; it must be at least 1"),
        ("train_step", ["--config", "wrong"], "there is no config 'wrong'"),
        ("train_step", ["--steps", "0"], "--steps is 0; it must be at least 1"),
        ("train_step", ["--threads", "-1"], "--threads is -1; it must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[-40:],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence_before_anything_is(
    name, flags, sentence, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
    assert importlib.import_module(f"benchmarks.{name}").main() == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"{name}.py: error: ")
    assert sentence in shown.err
    assert shown.err.count("\n") == 1


def test_packages_that_are_not_there_are_named_with_what_to_type():
    check_peers("json")
    with pytest.raises(UsageError, match=r"^no_such_peer not installed; type: pip install -r"):
        check_peers("json", "no_such_peer")


@pytest.mark.parametrize(("gpu", "compute"), [("v100", "fp16"), ("h100", "bf16")])
def test_rates_are_measured_in_the_16_bits_that_a_gpu_has(gpu, compute, tmp_path, monkeypatch):
    from benchmarks import calibrate

    asked = []

    def measure(arguments, compute):
        asked.append(compute)
        return [Measurement("launch", (10,), 3e-5)]

    file = tmp_path / "rates.json"
    monkeypatch.setattr(calibrate, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "--gpu", gpu, "--output", str(file)])
    assert calibrate.main() == 0
    assert asked == [compute]
    assert read_calibration(file).gpu == gpu


def test_attention_is_not_measured_where_a_run_could_not_have_cudnns(monkeypatch, capsys):
    from benchmarks import calibrate

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # one on which the kernel does not run
    arguments = calibrate.Arguments(output=Path("x.json"), kinds=("attention",), rounds=1, shrink=16)
    assert list(calibrate.measure(arguments, "bf16")) == []
    assert "attention is not measured: the attention kernel cudnn does not run here" in capsys.readouterr().out


@pytest.fixture
def predicted(monkeypatch):
    """benchmarks/predicted.py as a function of its flags, on steps whose times are given."""
    from benchmarks import predicted

    def run(*flags, seconds=()):
        times = iter(seconds)
        monkeypatch.setattr(predicted, "measure", lambda *_: (next(times), 3.0 * 2**30, "a slow device"))
        monkeypatch.setattr(sys, "argv", ["predicted.py", "--gpu", "h100", *flags])
        return predicted.main()

    return run


def test_measured_steps_stand_beside_their_predictions_and_give_the_error_bar_but_no_rate(predicted, tmp_path, capsys):
    file = tmp_path / "rates.json"
    assert predicted("--configs", CONFIG, CONFIG, "--write", str(file), seconds=[0.9, 1.1]) == 0
    header, *rows = capsys.readouterr().out.splitlines()[:3]
    assert "predicted ms" in header
    cells = [row.split() for row in rows]
    assert [row[2] for row in cells] == ["900.0", "1,100.0"]
    memory = predict_memory(replace(load_config(CONFIG), data=DataConfig(mock=True))).total / 2**30
    assert [row[6:9] for row in cells] == [[f"{memory:.2f}", "3.00", f"{memory / 3 - 1:+.1%}"]] * 2
    found = read_calibration(file)
    predicted_seconds = float(cells[0][1].replace(",", "")) / 1000
    assert found.error == pytest.approx(1 - predicted_seconds / 1.1, abs=1e-3)
    length = load_config(CONFIG).model.sequence
    assert (found.sequences, found.devices) == ((length, length), (1, 1))
    assert found.sources["error"] == "2 training steps of mjax on one a slow device"
    compared = ("error", "sequences", "parameters", "devices", "date", "sources")
    assert found == replace(H100, **{name: getattr(found, name) for name in compared})


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--calibration", "none.json"], "none.json does not exist; write one with"),
        (["--write", "none/rates.json"], "--write none/rates.json: there is no folder none; create it"),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["--configs", "gpt_345m", "--gpu", "v100"], "no bf16 peak is known for v100"),
    ],
)
def test_what_could_not_be_kept_or_predicted_is_refused_before_a_step_runs(predicted, capsys, flags, sentence):
    assert predicted("--configs", CONFIG, CONFIG, *flags) == 2
    assert sentence in capsys.readouterr().err


def test_a_process_is_ended_where_a_measurement_breaks_off(monkeypatch):
    from benchmarks import predicted

    class Broken:
        stopped = False

        def measure(self, steps):
            raise KeyboardInterrupt

        def stop(self):
            self.stopped = True

    process = Broken()
    monkeypatch.setattr(predicted, "Process", lambda *_: process)
    with pytest.raises(KeyboardInterrupt):
        predicted.measure("tiny", load_config(CONFIG), predicted.Arguments(), "cpu")
    assert process.stopped


@pytest.mark.ci
@pytest.mark.parametrize(("gpu", "compute"), [("h100", "bf16"), ("v100", "fp16")])
def test_the_five_models_of_the_comparison_can_run_on_one_device(gpu, compute):
    from benchmarks.predicted import CASES, Arguments, cases

    found = cases(Arguments(), gpu_named(gpu))
    assert len(found) == len(CASES) == 5
    for _, config in found:
        assert config.mesh.devices == 1
        assert config.micro_batches > 1
        assert config.precision.compute == compute
        step = predict_time(config, gpu_named(gpu))
        assert 0.01 < step.total < 30


# --- Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "output", "broken"),
    [
        (0, "all is well", ""),
        (1, "mjax: error: no", "exit code 1, not 0"),
        (None, "step 5", "exit code None, not 0"),
        (0, "Traceback (most recent call last):\nValueError: x", "traceback: ValueError: x"),
    ],
)
def test_the_campaign_of_faults_sees_what_a_process_must_not_do(code, output, broken):
    outcome = Outcome("killed")
    Ended(code, output).judge(outcome, 0)
    assert outcome.words.startswith(broken)
    assert outcome.sound == (not broken)
    assert (outcome.hang, outcome.traceback) == (code is None, "Traceback" in output)


def test_the_campaign_of_faults_sees_other_losses_and_other_weights(tmp_path, monkeypatch):
    place = Place(tmp_path, tmp_path, 0.0, {fault_runs.STEPS: (1.5, None)}, {fault_runs.STEPS: {"weight": b"1"}})
    checkpoint = tmp_path / "run" / "checkpoints" / str(fault_runs.STEPS)
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, fault_runs.STEPS, {})
    for loss, weight, words in ((1.5, b"1", ""), (1.5000001, b"1", "other losses; "), (1.5, b"2", "other weights; ")):
        (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": fault_runs.STEPS, "loss": loss}) + "\n")
        monkeypatch.setattr(fault_runs, "arrays_of", lambda *_, weight=weight: {"weight": weight})
        outcome = Outcome("killed")
        place.compare("run", outcome)
        assert (outcome.silent, outcome.words) == (bool(words), words)


@pytest.mark.all
def test_the_campaign_of_faults_ends_with_its_table():
    flags = ["--only", "damage,poisonings", "--tries", "1", "--workers", "1", "--markdown"]
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "| damage | 1 | 1 | 0 | 0 | 0 | 0 |" in result.stdout
    assert "| poisonings | 1 | 1 | 0 | 0 | 0 | 0 |" in result.stdout
