"""Configs: the published models, plain values and back, and what is refused before a device is touched."""

import ast
import shlex
from dataclasses import fields, replace
from typing import get_type_hints

import jax
import pytest

from mjax.batch_size import BatchSizes
from mjax.bounds import Bounds
from mjax.commands.train import TrainArguments
from mjax.config import (
    BERTConfig,
    Config,
    DataConfig,
    LlamaConfig,
    MeshConfig,
    as_flag,
    available_configs,
    differences,
    from_dict,
    load_config,
    read_config,
    save_config,
    to_dict,
)
from mjax.errors import UsageError
from mjax.flags import parse
from mjax.models.build import build_model, count_parameters
from mjax.validation import check_devices, validate
from tests.conftest import ROOT

PUBLISHED = {
    "bert_336m": 336_429_058,
    "bert_1b": 1_281_001_474,
    "bert_4b": 3_869_588_482,
    "bloom_560m": 559_214_592,  # those of BLOOM as the published models' cards give them
    "bloom_1b1": 1_065_314_304,
    "bloom_1b7": 1_722_408_960,
    "bloom_3b": 3_002_557_440,
    "bloom_7b1": 7_069_016_064,
    "bloom_176b": 176_247_271_424,
    "gpt_345m": 354_871_296,
    "gpt_1b": 1_212_103_680,
    "gpt_2b": 2_488_934_400,
    "gpt_4b": 4_197_929_472,
    "gpt_8b": 8_317_040_640,
    "gpt_8b_24h": 8_317_040_640,
    "gpt_1_7b": 1_652_230_656,
    "gpt_3_6b": 3_562_168_320,
    "gpt_7_5b": 7_467_786_240,
    "gpt_18b": 18_449_756_160,
    "gpt_39b": 39_096_041_472,
    "gpt_76b": 76_050_739_200,
    "gpt_145b": 145_622_261_760,
    "gpt_310b": 310_130_540_544,
    "gpt_530b": 529_600_819_200,
    "gpt_1t": 1_008_038_758_400,
    "gpt_175b": 174_615_846_912,
    "gpt_22b_sp": 22_074_273_792,
    "gpt_175b_sp": 174_615_846_912,
    "gpt_530b_sp": 529_600_819_200,
    "gpt_1t_sp": 1_008_038_758_400,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama32_1b": 1_235_814_400,
    "mistral_7b": 7_241_732_096,
    "qwen25_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_32b": 32_762_123_264,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "smollm2_135m": 134_515_008,
}

# As the papers print them: billions of parameters, GPUs, micro-batches of a replica, virtual stages of a device, layers
# in each, and the figure to beat (TFLOP/s a GPU in 2104.04473, where recomputation counts; MFU in 2205.05198).
PAPERS = {
    "gpt_1_7b": (1.7, 32, 1, 1, 24, "137 TFLOP/s"),
    "gpt_3_6b": (3.6, 64, 1, 1, 30, "138 TFLOP/s"),
    "gpt_7_5b": (7.5, 128, 1, 1, 36, "142 TFLOP/s"),
    "gpt_18b": (18.4, 256, 4, 1, 40, "135 TFLOP/s"),
    "gpt_39b": (39.1, 512, 12, 1, 24, "138 TFLOP/s"),
    "gpt_76b": (76.1, 1024, 28, 3, 5, "140 TFLOP/s"),
    "gpt_145b": (145.6, 1536, 48, 2, 5, "148 TFLOP/s"),
    "gpt_310b": (310.1, 1920, 144, 2, 3, "155 TFLOP/s"),
    "gpt_530b": (529.6, 2520, 280, 3, 1, "163 TFLOP/s"),
    "gpt_1t": (1008.0, 3072, 512, 1, 2, "163 TFLOP/s"),
    "gpt_175b": (174.6, 1024, 192, 1, 6, "140 TFLOP/s"),
    "gpt_22b_sp": (22.1, 8, 1, 1, 48, "41.5% MFU"),
    "gpt_175b_sp": (174.6, 64, 64, 3, 4, "51.4% MFU"),
    "gpt_530b_sp": (529.6, 280, 280, 3, 1, "56.0% MFU"),
    "gpt_1t_sp": (1008.0, 512, 512, 1, 2, "56.3% MFU"),
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_models_have_exactly_their_parameters(name, parameters):
    config = load_config(name)
    model = jax.eval_shape(lambda: build_model(0, config.model))
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == count_parameters(config.model) == parameters


@pytest.mark.parametrize(("name", "printed", "gpus"), [("336m", 0.336, 128), ("1b", 1.3, 256), ("4b", 3.9, 512)])
def test_berts_are_those_of_the_paper(name, printed, gpus):
    config = load_config(f"bert_{name}")
    model, optimizer, train = config.model, config.optimizer, config.train
    assert round(count_parameters(model) / 1e9, 3 if printed < 1 else 1) == printed
    assert (model.kind, model.layernorm, model.head_size, model.sequence) == ("bert", "pre", 64, 512)
    assert (config.mesh.devices, train.global_batch, train.steps) == (gpus, 1024, 2_000_000)
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.schedule) == (1e-4, 10_000, "linear")
    docstring = ast.get_docstring(ast.parse((ROOT / "configs" / f"bert_{name}.py").read_text()))
    assert f"{count_parameters(model):,} " in docstring
    assert f" {gpus} GPUs" in docstring
    validate(replace(config, data=DataConfig(mock=True)))


# arXiv 2211.05100, table 3: layers, hidden size, heads, batch, learning rate and its floor, billions of tokens.
BLOOM = {
    "bloom_560m": (24, 1024, 16, 256, 3.0e-4, 1e-5, 341),
    "bloom_1b1": (24, 1536, 16, 256, 2.5e-4, 1e-5, 341),
    "bloom_1b7": (24, 2048, 16, 512, 2.0e-4, 1e-5, 341),
    "bloom_3b": (30, 2560, 32, 512, 1.6e-4, 1e-5, 341),
    "bloom_7b1": (30, 4096, 32, 512, 1.2e-4, 1e-5, 341),
    "bloom_176b": (70, 14336, 112, 2048, 6.0e-5, 6e-6, 366),
}


@pytest.mark.parametrize("name", BLOOM)
def test_blooms_are_those_of_the_paper(name):
    config = load_config(name)
    model, optimizer, train, batches = config.model, config.optimizer, config.train, BatchSizes.of(config)
    tokens = batches.samples_before(train.steps) * model.sequence
    rates = optimizer.learning_rate, optimizer.min_learning_rate
    found = (model.layers, model.hidden, model.heads, train.global_batch, *rates, round(tokens / 1e9))
    assert found == BLOOM[name]
    assert (model.positions, model.embedding_layernorm, model.activation) == ("alibi", True, "gelu_tanh")
    assert (model.sequence, model.vocabulary, model.padded_vocabulary) == (2048, 250_880, 250_880)
    assert (optimizer.schedule, optimizer.beta1, optimizer.beta2) == ("cosine", 0.9, 0.95)
    assert (optimizer.weight_decay, optimizer.clip_norm) == (0.1, 1.0)
    assert batches.size(0) == 192
    warm_up, decay = (batches.samples_before(n) * 2048 for n in (optimizer.warmup_steps, optimizer.decay_steps))
    assert (warm_up, decay) == pytest.approx((375e6, 410e9), rel=2e-3)
    docstring = " ".join(ast.get_docstring(ast.parse((ROOT / "configs" / f"{name}.py").read_text())).split())
    for words in (
        f"{count_parameters(model):,} ",
        f" {config.mesh.devices} GPUs",
        f" {len(batches.sizes())} batch sizes",
    ):
        assert words in docstring


@pytest.mark.parametrize("name", PAPERS)
def test_runs_of_the_papers_have_their_devices_their_cut_and_their_figure_to_beat(name):
    billions, gpus, micro_batches, chunks, layers, figure = PAPERS[name]
    config = load_config(name)
    model, mesh, train = config.model, config.mesh, config.train
    assert round(count_parameters(model) / 1e9, 1) == billions
    assert (model.sequence, model.padded_vocabulary, mesh.devices) == (2048, 51_200, gpus)
    assert (mesh.chunks, model.layers) == (chunks, layers * mesh.pipe * chunks)
    assert config.micro_batches == micro_batches
    assert micro_batches * mesh.data * train.micro_batch == train.global_batch
    assert chunks == 1 or micro_batches % mesh.pipe == 0
    assert train.recompute == ("selective" if "_sp" in name else "full")
    docstring = ast.get_docstring(ast.parse((ROOT / "configs" / f"{name}.py").read_text()))
    for words in (f"{count_parameters(model):,} ", f" {gpus:,} GPUs", f" {figure}"):
        assert words in docstring


@pytest.mark.parametrize("name", [name for name in PAPERS if "_sp" not in name])
def test_long_runs_take_300_billion_tokens_with_the_warm_up_and_decay_of_gpt_3(name):
    config = load_config(name)
    batches = BatchSizes.of(config)
    steps = (config.train.steps, config.optimizer.decay_steps, config.optimizer.warmup_steps)
    tokens = [batches.samples_before(n) * config.model.sequence for n in steps]
    assert tokens == pytest.approx([300e9, 260e9, 375e6], abs=config.train.global_batch * config.model.sequence)
    rates = config.optimizer
    assert rates.min_learning_rate == pytest.approx(rates.learning_rate / 10)


def test_gpt_3_begins_with_32_thousand_tokens_and_reaches_its_batch_after_12_billion():
    config = load_config("gpt_175b")
    batches = BatchSizes.of(config)
    assert batches.size(0) * 2048 == 32_768
    assert batches.sizes() == list(range(16, 1537, 16))
    _, last_sample, size = batches.pieces[-1]
    assert size == 1536
    assert last_sample * 2048 == pytest.approx(12e9, rel=1e-3)


def test_published_models_are_padded_to_51200_by_default():
    padded = replace(load_config("gpt_1b").model, vocabulary_multiple=1024)
    assert (padded.padded_vocabulary, count_parameters(padded)) == (51_200, 1_213_479_936)
    assert load_config("gpt_8b").model.padded_vocabulary == 51_200


@pytest.mark.parametrize("name", available_configs())
def test_every_config_is_valid_and_says_what_it_costs(name):
    config = load_config(name)
    validate(replace(config, data=DataConfig(mock=True)), name)
    assert from_dict(to_dict(config)) == config
    assert config.mesh.sequence_parallel == (config.mesh.model > 1)


def test_a_config_is_read_back_as_it_was_saved(tmp_path):
    config = load_config("gpt_8b")
    save_config(config, tmp_path / "config.json")
    assert read_config(tmp_path / "config.json") == config


def test_a_field_is_a_flag_that_can_be_typed():
    schedule = as_flag("train.batch_schedule", "0:768 250B:1536")
    assert parse(TrainArguments, shlex.split(schedule), "mjax train").settings.train.batch_schedule == "0:768 250B:1536"
    assert as_flag("data.path", ("0.3", "my data", "0.7", "b")) == "--data.path 0.3 'my data' 0.7 b"


def test_differences_are_named():
    config = Config()
    assert differences(config, replace(config, mesh=MeshConfig(data=8))) == {"mesh.data": (1, 8)}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"modle": {}}, "unknown field modle, did you mean 'model'?"),
        ({"model": {"layer": 3}}, "unknown field model.layer, did you mean 'layers'?"),
        ({"model": {"layers": "3"}}, "model.layers is '3', which is not a whole number"),
        ({"model": {"layers": True}}, "model.layers is True, which is not a whole number"),
        ({"train": {"recompute": "some"}}, "train.recompute is 'some', which is not one of none, selective, full"),
        ({"model": 3}, "model. must be an object"),
        ({"model": {"kind": []}}, "there is no model []; there are gpt, bert, bert_task"),
        ({"model": {"kind": "gtp"}}, "there is no model 'gtp', did you mean 'gpt'?"),
        ([], "the config must be an object"),
    ],
)
def test_a_config_json_that_is_off_is_named(values, words):
    with pytest.raises(UsageError, match=r"config\.json") as error:
        from_dict(values)
    assert words in str(error.value)


def _with(**sections):
    config = Config(data=DataConfig(mock=True))
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (_with(mesh={"model": 3}), "--mesh.model 3 does not divide heads 16; use 1, 2, 4, 8 or 16"),
        (_with(model={"feed_forward": 1000}, mesh={"model": 16}), "does not divide feed-forward width 1000"),
        (
            replace(_with(mesh={"model": 8}), model=LlamaConfig(hidden=384, heads=24, kv_heads=12)),
            "--mesh.model 8 neither divides nor is a multiple of key-value heads 12; use 1, 2 or 4",
        ),
        (
            replace(_with(mesh={"pipe": 2}), model=LlamaConfig(layers=6, window=8, full_attention_every=2)),
            "--model.full-attention-every 2 does not divide the 3 layers that a pipeline stage runs in a row",
        ),
        (
            replace(_with(), model=LlamaConfig(full_attention_every=2)),
            "--model.full-attention-every 2 does nothing without a window; add --model.window",
        ),
        (_with(model={"vocabulary_multiple": 1}, mesh={"model": 2}), "does not divide padded vocabulary 50257"),
        (_with(model={"heads": 7}), "--model.heads 7 does not divide hidden size 1024; use 1, 2, 4, 8"),
        (_with(mesh={"data": 3}), "--train.global-batch 512 does not divide over --mesh.data 3"),
        (
            _with(mesh={"pipe": 2}, train={"unroll": "on"}),
            "--train.unroll on does not work with --mesh.pipe 2, whose stages keep activations by slot; leave it out",
        ),
        (
            _with(mesh={"pipe": 2}, train={"recompute": "offload"}),
            "--train.recompute offload does not work with --mesh.pipe 2, whose stages keep activations by slot on the "
            "device; use --train.recompute full",
        ),
        (
            _with(train={"recompute": "offload", "unroll": "on"}),
            "--train.recompute offload does not work with --train.unroll on: without a loop over the layers XLA copies "
            "their inputs to the host only in the backward pass, which saves nothing; leave it out, or use --train.re",
        ),
        (
            _with(mesh={"model": 2}, train={"recompute": "offload", "streams": 2}),
            "--train.recompute offload does not work with --train.streams 2: without a loop",
        ),
        (_with(train={"loss_chunks": 0}), "--train.loss-chunks is 0; it must be at least 1 and at most 64"),
        (_with(train={"loss_chunks": 65}), "--train.loss-chunks is 65; it must be at least 1 and at most 64"),
        (_with(train={"streams": 2}), "--train.streams 2 hides the communication of --mesh.model, which is 1 here"),
        (
            _with(mesh={"model": 2, "pipe": 2}, train={"streams": 2}),
            "--train.streams 2 does not work with --mesh.pipe 2",
        ),
        (
            _with(mesh={"model": 2, "data": 2, "zero": 3}, train={"streams": 2}),
            "--train.streams 2 does not work with --mesh.zero 3, which gathers weights layer by layer; use --mesh.zero",
        ),
        (
            _with(mesh={"model": 2}, train={"streams": 2, "unroll": "off"}),
            "--train.streams 2 needs layers without a loop; leave out --train.unroll off",
        ),
        (
            _with(mesh={"model": 2}, precision={"compute": "fp8"}, train={"streams": 2}),
            "--train.streams 2 does not work with --precision.compute fp8; use bf16",
        ),
        (
            _with(mesh={"model": 2}, train={"streams": 2, "micro_batch": 1}),
            "--train.streams 2 cannot cut a --train.micro-batch of 1 in two halves; use a multiple of 2",
        ),
        (
            _with(model={"sequence": 1022}, mesh={"model": 4, "sequence_parallel": True}, train={"micro_batch": 1}),
            "cannot split the 1022 tokens of a micro-batch over --mesh.model 4; use a --train.micro-batch that is a "
            "multiple of 4, or --mesh.no-sequence-parallel",
        ),
        (_with(train={"micro_batch": 3}), "--train.micro-batch 3 does not divide the 512 sequences"),
        (_with(train={"batch_rampup": (0, 8, 100)}), "must each be at least 1; type --train.batch-rampup 8 8 100"),
        (
            _with(train={"batch_rampup": (512, 8, 100)}),
            "below --train.global-batch 512; type --train.batch-rampup 504 8 100",
        ),
        (_with(train={"batch_rampup": (504, 5, 100)}), "in whole increments; type --train.batch-rampup 504 8 100"),
        (
            _with(train={"batch_rampup": (4, 4, 100)}),
            "not a multiple of 8 (data 1 × micro-batch 8); type --train.batch-rampup 8 8",
        ),
        (
            _with(mesh={"pipe": 4, "chunks": 2}, train={"batch_rampup": (256, 16, 100_000)}),
            "a batch of 272 from step 26 on, which is not a multiple of 32 (data 1 × micro-batch 8 × pipe 4, for the "
            "interleaved pipeline); type --train.batch-rampup 256 32 100000",
        ),
        (
            _with(train={"batch_rampup": (4, 4, 9), "global_batch": 8}),
            "leave it out, or type --train.global-batch 16",
        ),
        (_with(train={"batch_schedule": "0:8 1K:16"}), "ends with 16 and --train.global-batch is 512; use"),
        (
            _with(train={"batch_schedule": "0:20 1M:512"}),
            "type --train.batch-schedule '0:16 1M:512'",
        ),
        (_with(optimizer={"warmup_steps": 300_000}), "must be below the 300000 steps of the schedule"),
        (_with(optimizer={"min_learning_rate": 1.0}), "is above --optimizer.learning-rate"),
        (_with(precision={"loss_scale": 8.0}), "--precision.loss-scale needs --precision.compute fp16"),
        (_with(data={"samples": 7}), "--data.samples 7 is below the 153600000 samples"),
        (_with(data={"mock": False}), "has no data: prepare some with `python -m mjax prepare"),
        (_with(mesh={"pipe": 5}), "--mesh.pipe 5 does not divide 24 layers"),
        (
            _with(mesh={"pipe": 5, "chunks": 2}),
            "24 layers; use --model.layers 20 or 30, or --mesh.pipe 2, 3, 4, 6 or 12",
        ),
        (_with(mesh={"pipe": 2, "chunks": 24}), "does not divide 24 layers; use --model.layers 48, or --mesh.chunks 1"),
        (_with(model={"layers": 1}, mesh={"pipe": 2}), "use --model.layers 2, or --mesh.pipe 1"),
        (_with(mesh={"chunks": 2}), "--mesh.chunks 2 needs a pipeline"),
        (
            _with(health={"spike": "skip", "spike_deviations": 0.0}),
            "--health.spike skip needs --health.spike-deviations above 0",
        ),
        (
            replace(_with(data={"reset_attention": True}), model=BERTConfig()),
            "--data.reset-attention is for text, with --model.kind gpt; leave it out",
        ),
        (
            _with(model={"positions": "alibi"}, data={"reset_positions": True}),
            "--data.reset-positions is for --model.positions learned; leave it out, ALiBi counts distances",
        ),
        (
            _with(data={"mask_probability": 0.3}),
            "--data.mask-probability 0.3 is for pairs of text",
        ),
        (
            _with(data={"short_probability": 0.0}),
            "--data.short-probability 0.0 is for pairs of text",
        ),
        (replace(_with(), model=BERTConfig(vocabulary=2)), "--model.vocabulary 2 is too small for a BERT"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(config, words):
    with pytest.raises(UsageError) as error:
        validate(config)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


OUT_OF_BOUNDS = [
    ("model.layers", 0), ("model.feed_forward", 0), ("model.hidden_dropout", 1.0), ("model.attention_dropout", -0.1),
    ("model.init_std", -0.1), ("mesh.pipe", 0), ("mesh.data", -1), ("mesh.model", 0),
    ("data.mask_probability", 0.0), ("data.mask_probability", 1.0), ("data.short_probability", -0.1),
    ("data.short_probability", 1.1), ("data.short_probability", float("nan")), ("data.samples", 0), ("data.eod", -1),
    ("optimizer.learning_rate", float("nan")), ("optimizer.learning_rate", -1.0), ("optimizer.beta2", 1.0),
    ("optimizer.epsilon", 0.0), ("optimizer.decay_steps", 0), ("precision.loss_scale", 0.5),
    ("train.global_batch", -8), ("train.seed", -1), ("train.seed", 2**32), ("train.eval_interval", -1),
    ("checkpoint.keep_last", 0), ("checkpoint.keep_every", 0), ("health.replica_interval", -1), ("health.window", 1),
    ("health.unhealthy_share", 0.0), ("health.unhealthy_share", 1.1), ("health.skipped_in_a_row", 0),
    ("health.spike_deviations", -1.0), ("log.interval", 0), ("log.sample_tokens", -1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OUT_OF_BOUNDS)
def test_a_number_out_of_its_bounds_is_refused_with_its_flag_and_its_value(name, value):
    section, knob = name.split(".")
    with pytest.raises(UsageError) as error:
        validate(_with(**{section: {knob: value}}))
    assert str(error.value).startswith(f"--{name.replace('_', '-')} is {value}; it must be ")


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (Bounds(ge=1), "at least 1"),
        (Bounds(ge=0), "0 or more"),
        (Bounds(ge=0, lt=1), "at least 0 and below 1"),
        (Bounds(gt=0, le=1, such_as="0.5"), "above 0 and at most 1, such as 0.5"),
        (Bounds(ge=0, lt=2**32), "at least 0 and below 2^32"),
    ],
)
def test_bounds_say_what_they_allow(bounds, said):
    assert str(bounds) == said


def _float_fields():
    return [
        (section.name, knob)
        for section in fields(Config)
        for knob, kind in get_type_hints(type(getattr(Config(), section.name))).items()
        if "float" in str(kind)
    ]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_no_number_of_a_config_may_be_infinite_or_nan(value):
    assert len(_float_fields()) > 15
    for section, knob in _float_fields():
        flag = f"--{section}.{knob}".replace("_", "-")
        with pytest.raises(UsageError, match=f"{flag} is {value}; it must be a finite number"):
            validate(_with(**{section: {knob: value}}))


def test_a_mesh_of_another_size_than_the_machine_says_what_to_type():
    with pytest.raises(UsageError) as error:
        check_devices(load_config("gpt_8b"), 1, "gpt_8b")
    assert str(error.value) == (
        "gpt_8b needs 512 devices (data 64 × model 8); 1 found: set --mesh.data and --mesh.model, or --simulate 512"
    )
    with pytest.raises(
        UsageError, match=r"set --mesh\.pipe, --mesh\.data, --mesh\.context and --mesh\.model, or --sim"
    ):
        check_devices(_with(mesh={"pipe": 2, "context": 4, "data": 2, "expert": 2}), 1)


def test_a_config_is_found_where_one_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_gpt.py").write_text("from mjax.config import *\nconfig = Config(train=TrainConfig(7))")
    assert load_config("my_gpt").train.steps == 7
    assert load_config("./my_gpt").train.steps == 7
    (tmp_path / "my_gpt.py").rename(tmp_path / "gpt_8b.py")
    with pytest.raises(UsageError, match=r"or \./gpt_8b\.py; type --config \./gpt_8b\.py for the one that is here"):
        load_config("gpt_8b")
    assert load_config("./gpt_8b.py").train.steps == 7


def test_an_unknown_config_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'gpt_8b'"):
        load_config("gpt_8")
