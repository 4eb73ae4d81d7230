"""Predicted bytes against those that XLA's ahead-of-time compile for GPUs allocates, and the rules they come from."""

import json
from dataclasses import replace

import pytest
from matplotlib import rc_context

from mjax import cli
from mjax.config import from_dict, load_config, to_dict
from mjax.hardware import USABLE_FRACTION, gpu_named
from mjax.models.build import count_parameters
from mjax.models.kernels import attention_on_gpu
from mjax.parallel.axes import copies
from mjax.parallel.schedules import build_schedule
from mjax.planner.memory import _in_flight, kept_by_layer, predict_memory
from mjax.planner.memory_figure import draw_memory, variants
from mjax.planner.memory_section import memory_section
from mjax.planner.time import predict_time
from mjax.planner.unrolling import with_unrolling
from mjax.planner.weights import held_by
from tests.conftest import ROOT
from tests.products import one_in

COMPILED = json.loads((ROOT / "tests" / "planner" / "compiled_memory.json").read_text())
ROWS = COMPILED["rows"]


def config_of(row):
    values = to_dict(load_config(row["config"]))
    values["data"]["mock"] = True
    values["train"] |= {"batch_rampup": None, "batch_schedule": None}
    for flag, value in row["flags"].items():
        section, knob = flag.split(".")
        values[section][knob] = value
    return from_dict(values)


def error(row):
    return predict_memory(config_of(row)).total / row["total"] - 1


@pytest.mark.parametrize("row", one_in(4, ROWS), ids=lambda row: row["name"])
def test_predicted_memory_is_within_five_percent_of_what_xla_allocates(row):
    assert abs(error(row)) < 0.05


OFFLOADED = [row for row in ROWS if "host" in row]


@pytest.mark.parametrize("row", OFFLOADED, ids=lambda row: row["name"])
def test_with_offload_host_memory_has_the_bytes_that_full_recomputation_keeps_on_the_device(row):
    config = config_of(row)
    memory = predict_memory(config)
    full = predict_memory(replace(config, train=replace(config.train, recompute="full")))
    assert config.model.sequence >= 8192
    assert memory.activations == 0 < memory.host == full.activations == row["host"]
    assert full.total - memory.total == pytest.approx(memory.host)
    assert full.host == 0


def test_the_plan_has_a_row_for_host_memory_of_a_device_and_of_a_server():
    config = config_of(next(row for row in OFFLOADED if row["config"] == "llama3_8b_128k"))
    h100 = gpu_named("h100")
    section = memory_section(config, h100)
    words = "4.00 GiB for each device: the inputs of all layers; 32.0 of the 1,863 GiB of a server"
    assert words in section.text
    assert {"host": 4 * 2**30, "host_of_server": 32 * 2**30, "host_memory": 2e12, "fits": True}.items() <= (
        section.values.items()
    )
    small = memory_section(config, replace(h100, host_memory_per_node=16 * 2**30))
    assert "32.0 of the 16 GiB of a server, which is too much: use --train.recompute full" in small.text
    assert not small.values["fits"]
    unknown = memory_section(config, gpu_named("h100-pcie"))
    assert "32.0 GiB in a server, whose memory is not known" in unknown.text
    assert "4.00 GiB for each device: the inputs of all layers\n" in memory_section(config).text
    full = memory_section(replace(config, train=replace(config.train, recompute="full")), h100)
    assert "host memory" not in full.text
    assert full.values["host"] == 0


def test_the_compiled_configs_are_of_all_sizes_and_modes():
    configs = [config_of(row) for row in ROWS]
    assert len(ROWS) >= 24
    sizes = [count_parameters(config.model) for config in configs]
    assert min(sizes) < 3.6e8
    assert max(sizes) > 1.7e11
    assert {config.model.kind for config in configs} == {"gpt", "bert", "llama", "mixture"}
    assert {config.model.biased_scores for config in configs} == {False, True}
    assert {config.train.recompute for config in configs} == {"none", "selective", "full", "offload"}
    assert {config.mesh.zero for config in configs} == {0, 1, 3}
    assert {config.mesh.sequence_parallel for config in configs} == {False, True}
    assert {config.mesh.schedule for config in configs if config.mesh.pipe > 1} == {"gpipe", "1f1b", "zb-h1"}
    assert {1, 3} <= {config.mesh.chunks for config in configs}
    assert {attention_on_gpu(config) for config in configs} == {"cudnn", "flash", "xla"}
    assert {config.across for config in configs} == {None, "heads", "gather"}
    assert {config.precision.compute for config in configs} == {"bf16", "fp16", "fp32"}


def test_configs_that_the_formula_was_not_written_with_are_predicted_as_well():
    held_out = [abs(error(row)) for row in ROWS if row["held_out"]]
    assert len(held_out) >= 4
    assert max(held_out) < 0.05


def test_attention_that_writes_its_scores_is_not_predicted_too_low_where_they_are_most_of_the_memory():
    rows = [row for row in ROWS if row["flags"].get("model.sequence", 0) >= 4096]
    assert len(rows) >= 8
    assert all(attention_on_gpu(config_of(row)) == "xla" for row in rows)
    assert {config_of(row).train.recompute for row in rows} == {"selective", "full"}
    assert min(map(error, rows)) > -0.02


@pytest.mark.parametrize(("kind", "limit"), [("dense", 0.01), ("mixture", 0.025), ("over context", 0.03)])
def test_predictions_are_off_by_one_percent_on_average_and_by_less_than_three_for_mixtures_and_over_context(
    kind, limit
):
    def kind_of(row):
        config = config_of(row)
        if config.mesh.context > 1:
            return "over context"
        return "mixture" if config.model.parted_experts() else "dense"

    errors = [abs(error(row)) for row in ROWS if kind_of(row) == kind]
    assert len(errors) >= 5
    assert sum(errors) / len(errors) < limit


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_masters_and_moments_are_the_arguments_of_the_compiled_step(row):
    memory, config = predict_memory(config_of(row)), config_of(row)
    masters = 4 * held_by(config.model, config.mesh).stored
    batch = sum(_elements(shape) * {"int32": 4, "bool": 1}[kind] for shape, kind in config.batch_arrays().values())
    expected = masters + memory.optimizer + batch * config.train.global_batch / copies(config.mesh)
    assert row["argument"] == pytest.approx(expected, rel=1e-5, abs=1e5)  # the counters of the loss scale, alignment


def _elements(shape):
    return shape[0] if shape else 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_what_is_in_flight_is_what_the_schedule_has_slots_for(name, stages, chunks):
    config = load_config("gpt_8b")
    for micro_batches in (stages, 2 * stages, 5 * stages, 1, 2 * stages + 1)[: 5 if chunks == 1 else 3]:
        schedule = build_schedule(name, stages, micro_batches, chunks)
        mesh = replace(config.mesh, pipe=stages, data=1, schedule=name, chunks=chunks)
        train = replace(config.train, micro_batch=1, global_batch=micro_batches)
        expected = schedule.residual_slots, schedule.pending_slots
        assert _in_flight(replace(config, mesh=mesh, train=train)) == expected


@pytest.mark.parametrize(
    ("recompute", "whole", "split"), [("none", 11.25, 7.75), ("selective", 6, 2.5), ("full", 2, 0.25)]
)
def test_a_layer_keeps_the_multiples_of_sbh_that_the_docs_count(recompute, whole, split):
    # docs/how-it-works.md, section 9, counts them in the traced layers; with cuDNN's kernel its own copy of the context
    # is added, 2 / p, and a float32 number for each row of each head.
    config = load_config("gpt_8b")
    model = replace(config.model, attention="cudnn", attention_dropout=0.0)
    config = replace(config, model=model, train=replace(config.train, recompute=recompute))
    sbh = config.train.micro_batch * model.sequence * model.hidden
    for expected, sequence_parallel in ((whole, False), (split, True)):
        mesh = replace(config.mesh, sequence_parallel=sequence_parallel)
        assert kept_by_layer(replace(config, mesh=mesh)) / sbh == pytest.approx(expected, abs=0.01)


def test_memory_and_time_are_those_of_the_attention_kernel_that_the_gpu_has():
    config = load_config("gpt_345m")
    config = replace(
        config,
        model=replace(config.model, attention_dropout=0.0),
        precision=replace(config.precision, compute="fp16"),
    )
    for name, kernel in (("v100", "xla"), ("a100", "cudnn")):
        named, gpu = replace(config, model=replace(config.model, attention=kernel)), gpu_named(name)
        values = memory_section(config, gpu).values
        needed = predict_memory(with_unrolling(named, gpu.usable_bytes)).total
        assert (values["attention"], values["total"]) == (kernel, needed)
        assert predict_time(config, gpu).total == predict_time(named, gpu).total


def test_the_picture_has_totals_the_limit_of_the_gpu_and_says_what_is_too_much(tmp_path):
    config, file = load_config("gpt_8b"), tmp_path / "memory.svg"
    config = replace(config, model=replace(config.model, attention_dropout=0.0))
    totals = {name: memory.total / 2**30 for name, memory in variants(config).items()}
    tight = replace(gpu_named("h100"), memory_bytes=totals["selective"] / 0.98 * 2**30 / USABLE_FRACTION)
    with rc_context({"svg.fonttype": "none"}):
        draw_memory(config, file, tight)
        picture = file.read_text()
        draw_memory(config, file)
    assert ">26.2, 2.0% free<" in picture
    assert ">35.0, too much<" in picture
    assert f">{totals['full']:.1f}<" in picture
    assert ">h100: 26.7 usable of 29.7<" in picture
    assert "attention by cudnn" in picture
    without = file.read_text()
    assert all(f">{total:.1f}<" in without for total in totals.values())
    assert "usable" not in without
    assert set(totals) == {
        f"{name}{split}" for name in ("none", "selective", "full", "offload") for split in ("", ", sequence parallel")
    }
    piped = replace(config, mesh=replace(config.mesh, data=8, pipe=8))
    assert "offload" not in variants(piped)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({}, False), ({"full_attention_every": 4}, True), ({"full_attention_every": 4, "unroll": "on"}, False)],
    ids=["one window", "a pattern", "without a loop"],
)
def test_the_plan_says_where_a_pattern_of_windows_takes_more_than_it_predicts(changes, said):
    config = load_config("qwen3_8b")
    unroll = changes.pop("unroll", "off")
    train = replace(config.train, unroll=unroll)
    config = replace(config, model=replace(config.model, window=1024, **changes), train=train)
    (row,) = [line for line in memory_section(config, gpu_named("h100")).lines if line.startswith("layers")]
    assert ("a pattern of windows then took more" in row) == said


def test_the_plan_shows_bytes_by_kind_that_add_up(capsys, tmp_path):
    file = tmp_path / "memory.png"
    flags = ["plan", "--config", "gpt_8b", "--model.attention-dropout", "0"]
    assert cli.main([*flags, "--json", "--memory-figure", str(file)]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    kinds = ("parameters", "optimizer", "gradients", "activations", "logits", "workspace")
    assert memory["total"] == sum(memory[kind] for kind in kinds)
    assert memory["attention"] == "cudnn"
    assert file.read_bytes().startswith(b"\x89PNG")
    assert cli.main(flags) == 0
    printed = capsys.readouterr().out
    assert f"{memory['total'] / 2**30:8.2f} GiB on each device" in printed
