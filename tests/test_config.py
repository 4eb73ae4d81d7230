"""Configs: the published models and runs, plain values and back, and the bounds of every number."""

import re
import shlex
from dataclasses import fields, make_dataclass, replace

import pytest

from mjax.commands.flags import parse
from mjax.commands.train import TrainArguments
from mjax.config import (
    Config,
    DataConfig,
    LlamaConfig,
    LogConfig,
    MeshConfig,
    TrainConfig,
    available_configs,
    differing_fields,
    from_dict,
    load_config,
    read_config,
    save_config,
    to_dict,
    to_flag,
)
from mjax.config.batch_size import BatchSizes
from mjax.config.checks import check_devices, validate
from mjax.config.model import REGISTRY, ModelConfig, convert_kind
from mjax.config.run import RENAMED
from mjax.errors import UsageError
from mjax.models.build import count_parameters
from tests.conftest import ROOT

# --- Published models and runs ----------------------------------------------------------------------------------------

# Of the models on Hugging Face the parameters, and of config.json rope_theta, rms_norm_eps and what has no parameters.
LLAMA3 = {"rope_scaling": "llama3", "rope_original_length": 8192}
NOAUX = {"router": "sigmoid"}
GEMMA3 = {"global_attention_interval": 6, "activation": "gelu_tanh"}
DECODERS = {
    "llama2_7b": (6_738_415_616, 1e4, 1e-5, {}),
    "llama3_8b": (8_030_261_248, 5e5, 1e-5, {}),
    "llama3_8b_128k": (8_030_261_248, 5e5, 1e-5, LLAMA3 | {"rope_factor": 8.0}),
    "llama3_70b": (70_553_706_496, 5e5, 1e-5, {}),
    "llama3_405b": (405_853_388_800, 5e5, 1e-5, LLAMA3 | {"rope_factor": 8.0}),
    "llama32_1b": (1_235_814_400, 5e5, 1e-5, LLAMA3 | {"rope_factor": 32.0}),
    "mistral_7b": (7_241_732_096, 1e4, 1e-5, {"window": 4096}),
    "mixtral_8x7b": (46_702_792_704, 1e6, 1e-5, {"experts_per_token": 2}),
    "olmo2_1b": (1_484_916_736, 5e5, 1e-6, {"norms": "post", "qk_norm": "heads"}),
    "olmo2_7b": (7_298_617_344, 5e5, 1e-6, {"norms": "post", "qk_norm": "heads"}),
    "olmoe_1b_7b": (
        6_919_161_856, 1e4, 1e-5, {"qk_norm": "heads", "experts_per_token": 8, "router_normalized": False},
    ),
    "qwen25_7b": (7_615_616_512, 1e6, 1e-6, {}),
    "qwen3_0_6b": (596_049_920, 1e6, 1e-6, {"qk_norm": "head"}),
    "qwen3_8b": (8_190_735_360, 1e6, 1e-6, {"qk_norm": "head"}),
    "qwen3_30b_a3b": (30_532_122_624, 1e6, 1e-6, {"qk_norm": "head", "experts_per_token": 8}),
    "qwen3_32b": (32_762_123_264, 1e6, 1e-6, {"qk_norm": "head"}),
    "smollm2_135m": (134_515_008, 1e5, 1e-5, {}),
    "gemma3_270m": (268_098_176, 1e6, 1e-6, GEMMA3 | {"window": 512}),
    "deepseek_v2_lite": (15_706_484_224, 1e4, 1e-6, {"experts_per_token": 6, "router_normalized": False}),
    "deepseek_v3": (682_636_487_424, 1e4, 1e-6, NOAUX | {"experts_per_token": 8, "router_scale": 2.5}),  # 11.6B of MTP
    "moonlight_16b_a3b": (15_960_110_208, 5e4, 1e-5, NOAUX | {"experts_per_token": 6, "router_scale": 2.446}),
    "kimi_k2": (1_026_408_232_448, 5e4, 1e-6, NOAUX | {"experts_per_token": 8, "router_scale": 2.827}),
    "gemma3_4b": (3_880_099_328, 1e6, 1e-6, GEMMA3 | {"window": 1024, "rope_scaling": "linear", "rope_factor": 8.0}),
}  # fmt: skip
WITHOUT_PARAMETERS = {
    "window": None, "global_attention_interval": None, "norms": "pre", "qk_norm": "none", "activation": "silu",
    "rotary_percent": 1.0, "rope_scaling": "none", "rope_factor": 1.0, "rope_original_length": None,
    "experts_per_token": 0, "router": "softmax", "router_normalized": True, "router_scale": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_config_has_published_numbers(name):
    model = load_config(name).model
    given = {key: getattr(model, key, default) for key, default in WITHOUT_PARAMETERS.items()}
    special = {key: value for key, value in given.items() if value != WITHOUT_PARAMETERS[key]}
    assert (count_parameters(model), model.rope_theta, model.norm_epsilon, special) == DECODERS[name]


# arXiv 2211.05100, table 3: parameters, layers, hidden size, heads, batch, learning rate, floor, billions of tokens.
BLOOM = {
    "bloom_560m": (559_214_592, 24, 1024, 16, 256, 3.0e-4, 1e-5, 341),
    "bloom_1b1": (1_065_314_304, 24, 1536, 16, 256, 2.5e-4, 1e-5, 341),
    "bloom_1b7": (1_722_408_960, 24, 2048, 16, 512, 2.0e-4, 1e-5, 341),
    "bloom_3b": (3_002_557_440, 30, 2560, 32, 512, 1.6e-4, 1e-5, 341),
    "bloom_7b1": (7_069_016_064, 30, 4096, 32, 512, 1.2e-4, 1e-5, 341),
    "bloom_176b": (176_247_271_424, 70, 14336, 112, 2048, 6.0e-5, 6e-6, 366),
}


@pytest.mark.parametrize("name", BLOOM)
def test_bloom_config_has_published_numbers(name):
    config = load_config(name)
    model, optimizer, train, batches = config.model, config.optimizer, config.train, BatchSizes.from_config(config)
    sizes = count_parameters(model), model.layers, model.hidden, model.heads, train.global_batch
    tokens, warmup, decay = (
        batches.samples_before(steps) * 2048 for steps in (train.steps, optimizer.warmup_steps, optimizer.decay_steps)
    )
    assert (*sizes, optimizer.learning_rate, optimizer.min_learning_rate, round(tokens / 1e9)) == BLOOM[name]
    assert (model.positions, model.embedding_layernorm, model.activation) == ("alibi", True, "gelu_tanh")
    assert (model.sequence, model.vocabulary, model.padded_vocabulary) == (2048, 250_880, 250_880)
    assert (optimizer.schedule, optimizer.beta1, optimizer.beta2) == ("cosine", 0.9, 0.95)
    assert (optimizer.weight_decay, optimizer.clip_norm, batches.size(0)) == (0.1, 1.0, 192)
    assert (warmup, decay) == pytest.approx((375e6, 410e9), rel=2e-3)


# arXiv 1909.08053, tables 1, 2 and 4: parameters, layers, hidden size, heads, GPUs.
MEGATRON = {
    "gpt_345m": (354_871_296, 24, 1024, 16, 64),
    "gpt_1b": (1_212_103_680, 40, 1536, 16, 64),
    "gpt_2b": (2_488_934_400, 54, 1920, 20, 128),
    "gpt_4b": (4_197_929_472, 64, 2304, 24, 256),
    "gpt_8b": (8_317_040_640, 72, 3072, 32, 512),
    "gpt_8b_24h": (8_317_040_640, 72, 3072, 24, 512),
    "bert_336m": (336_429_058, 24, 1024, 16, 128),
    "bert_1b": (1_281_001_474, 24, 2048, 32, 256),
    "bert_4b": (3_869_588_482, 48, 2560, 40, 512),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_config_has_published_numbers(name):
    config = load_config(name)
    model, optimizer, train = config.model, config.optimizer, config.train
    sizes = count_parameters(model), model.layers, model.hidden, model.heads, config.mesh.devices
    rates = optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_steps, optimizer.schedule
    assert sizes == MEGATRON[name]
    assert (model.hidden_dropout, optimizer.weight_decay, optimizer.clip_norm) == (0.1, 0.01, 1.0)
    if name.startswith("bert"):
        assert (model.kind, model.layernorm, model.sequence) == ("bert", "pre", 512)
        assert (*rates, train.global_batch, train.steps) == (1e-4, 1e-5, 10_000, "linear", 1024, 2_000_000)
    else:
        assert (*rates, train.global_batch, train.steps) == (1.5e-4, 1e-5, 3_000, "cosine", 512, 300_000)


# arXiv 2104.04473, table 1, and arXiv 2205.05198, table 3: parameters, GPUs, micro-batches of a replica, virtual stages
# of a device, layers in each.
PAPERS = {
    "gpt_1_7b": (1_652_230_656, 32, 1, 1, 24),
    "gpt_3_6b": (3_562_168_320, 64, 1, 1, 30),
    "gpt_7_5b": (7_467_786_240, 128, 1, 1, 36),
    "gpt_18b": (18_449_756_160, 256, 4, 1, 40),
    "gpt_39b": (39_096_041_472, 512, 12, 1, 24),
    "gpt_76b": (76_050_739_200, 1024, 28, 3, 5),
    "gpt_145b": (145_622_261_760, 1536, 48, 2, 5),
    "gpt_310b": (310_130_540_544, 1920, 144, 2, 3),
    "gpt_530b": (529_600_819_200, 2520, 280, 3, 1),
    "gpt_1t": (1_008_038_758_400, 3072, 512, 1, 2),
    "gpt_175b": (174_615_846_912, 1024, 192, 1, 6),
    "gpt_22b_sp": (22_074_273_792, 8, 1, 1, 48),
    "gpt_175b_sp": (174_615_846_912, 64, 64, 3, 4),
    "gpt_530b_sp": (529_600_819_200, 280, 280, 3, 1),
    "gpt_1t_sp": (1_008_038_758_400, 512, 512, 1, 2),
}


@pytest.mark.parametrize("name", PAPERS)
def test_pipelined_config_has_published_numbers(name):
    parameters, gpus, micro_batches, chunks, layers = PAPERS[name]
    config = load_config(name)
    model, mesh, train, optimizer = config.model, config.mesh, config.train, config.optimizer
    assert (count_parameters(model), mesh.devices, config.micro_batches) == (parameters, gpus, micro_batches)
    assert (model.sequence, model.padded_vocabulary, mesh.virtual_stages) == (2048, 51_200, chunks)
    assert model.layers == layers * mesh.pipe * chunks
    assert micro_batches * mesh.data * train.micro_batch == train.global_batch
    assert train.recompute == ("selective" if "_sp" in name else "full")
    if "_sp" not in name:  # 300 billion tokens, with the warm-up and decay of GPT-3
        batches = BatchSizes.from_config(config)
        steps = train.steps, optimizer.decay_steps, optimizer.warmup_steps
        tokens = [batches.samples_before(step) * 2048 for step in steps]
        assert tokens == pytest.approx([300e9, 260e9, 375e6], abs=train.global_batch * 2048)
        assert optimizer.min_learning_rate == pytest.approx(optimizer.learning_rate / 10)


def test_gpt_3_batch_starts_small_and_grows():
    """arXiv 2005.14165, appendix B: from 32 thousand tokens to the full batch over 12 billion."""
    batches = BatchSizes.from_config(load_config("gpt_175b"))
    assert batches.sizes() == list(range(16, 1537, 16))
    assert batches.pieces[-1][1] * 2048 == pytest.approx(12e9, rel=1e-3)


@pytest.mark.parametrize("name", available_configs())
def test_config_is_valid_and_documented(name):
    config = load_config(name)
    validate(replace(config, data=DataConfig(mock=True)), name)
    assert from_dict(to_dict(config)) == config
    assert config.mesh.sequence_parallel == (config.mesh.model > 1)
    text = (ROOT / "configs" / f"{name}.py").read_text()
    assert f"parameters   {count_parameters(config.model):,}" in text
    assert config.mesh.devices == 1 or re.search(rf"\b{config.mesh.devices:,}( GPUs|,)", text)


# --- Plain values and back --------------------------------------------------------------------------------------------


def test_save_config_replaces_whole_file(tmp_path):
    """A process that has the file open, or dies while writing, leaves the old one or the new one and no mixture."""
    config, file = load_config("gpt_8b"), tmp_path / "config.json"
    save_config(Config(), file)
    before = file.stat().st_ino
    save_config(config, file)
    assert file.stat().st_ino != before
    assert read_config(file) == config


def test_flag_text_parses_back():
    config = Config(
        data=DataConfig(path=("0.3", "my data", "0.7", "b"), mock=True),
        train=TrainConfig(batch_rampup=(16, 16, 5_859_375)),
        log=LogConfig(sample_prompts="my prompts.txt"),
    )
    flags = [to_flag(name, value) for name, (value, _) in differing_fields(config, Config()).items()]
    assert len(flags) == 4
    assert parse(TrainArguments, shlex.split(" ".join(flags)), "python train.py").settings == config


def test_differences_name_fields_of_both_models():
    found = differing_fields(Config(), Config(model=LlamaConfig(kv_heads=4)))
    assert (found["model.kv_heads"], found["model.positions"]) == ((None, 4), ("learned", None))


def test_other_architecture_keeps_only_changed_fields():
    model = replace(load_config("gpt_345m").model, init_std=0.01)
    changed = {"layers": 24, "hidden": 1024, "heads": 16, "vocabulary_multiple": 128, "init_std": 0.01}
    assert convert_kind(model, "llama") == LlamaConfig(**changed)


def test_llama_has_published_default_width():
    assert LlamaConfig(hidden=4096).mlp_width == 11_008  # 8/3, up to a multiple of 256: Llama 2 7B


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"modle": {}}, "did you mean model?"),
        ({"model": {"layers": True}}, "model.layers is True"),
        ({"optimizer": {"beta1": True}}, "optimizer.beta1 is True"),
        ({"train": {"recompute": "some"}}, "one of none, selective, full"),
        ({"train": {"batch_rampup": [8, 8]}}, "[a whole number, a whole number"),
        ({"model": 3}, "model. must be an object"),
        ({"model": {"kind": "gtp"}}, "did you mean gpt?"),
    ],
)
def test_invalid_config_json_names_field(values, words):
    with pytest.raises(UsageError, match=r"config\.json") as error:
        from_dict(values)
    assert words in str(error.value)


OF_BEFORE = [
    ({"mesh": {"pipe": 2, "schedule": "zb-h1"}}, {"mesh": {"pipe": 2}}),
    ({"health": {"spike_deviations": 0.0, "window": 100}}, {"health": {"spike": "ignore"}}),
    ({"health": {"spike_deviations": 6, "window": 100}, "train": {"batch_schedule": None}}, {}),
    ({"model": {"lora_rank": 4, "lora_rslora": True}}, {"model": {"lora_rank": 4, "lora_alpha": 16.0}}),
    ({"model": {"lora_alpha": 3.0, "lora_rslora": False}}, {"model": {"lora_alpha": 3.0}}),
    (
        {"mesh": {"chunks": 2, "context_attention": "heads"}},
        {"mesh": {"virtual_stages": 2, "context_attention": "ulysses"}},
    ),
    (
        {"health": {"spike": "announce"}, "data": {"samples": 8}},
        {"health": {"spike": "warn"}, "data": {"train_samples": 8}},
    ),
    (
        {"model": {"kind": "mixture", "balance_over": "sequence", "tied": True}},
        {"model": {"kind": "mixture", "tie_embeddings": True}},
    ),
]


@pytest.mark.parametrize(("before", "now"), OF_BEFORE, ids=str)
def test_config_with_removed_fields_opens(before, now):
    assert from_dict(before) == from_dict(now)


def test_renamed_fields_exist():
    """Each is a field of a class of models; a field of two names is rejected."""
    classes = {"model": list(REGISTRY.values())} | {
        name: [type(section)] for name, section in vars(Config()).items() if name != "model"
    }
    for section, names in RENAMED.items():
        known = {field.name for cls in classes[section] for field in fields(cls)}
        assert set(names.values()) <= known
        assert not names.keys() & known
    with pytest.raises(UsageError, match=r"unknown field mesh\.chunks"):
        from_dict({"mesh": {"chunks": 2, "virtual_stages": 2}})


def test_hugging_face_folder_is_named_where_a_run_is_expected(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(UsageError, match=r"is a Hugging Face folder, not a run; type mjax convert from-hf \S+ RUN"):
        read_config(tmp_path / "config.json")


def test_custom_model_keeps_field_with_an_old_name(monkeypatch):
    own = make_dataclass("Own", [("answers", int, 3)], bases=(ModelConfig,), frozen=True)
    monkeypatch.setitem(REGISTRY, "own", own)
    assert from_dict({"model": {"kind": "own", "answers": 5}}).model.answers == 5


def test_old_name_in_config_file_leads_to_new_one(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from mjax.config import Config, MeshConfig\n\nconfig = Config(mesh=MeshConfig(pipe=2, chunks=2))\n"
    )
    with pytest.raises(
        UsageError, match=r"mine.py, line 3, raises .* argument 'chunks'; chunks is now virtual_stages; fix"
    ):
        load_config(str(file))


def test_removed_field_with_another_value_is_named():
    words = "train.batch_schedule is '0:8 1K:16', and since mjax 0.2.0 it is always None; remove it there to"
    with pytest.raises(UsageError, match=re.escape(f"config.json: {words}")):
        from_dict({"train": {"batch_schedule": "0:8 1K:16"}})


# --- Numbers and devices ----------------------------------------------------------------------------------------------

OUT_OF_BOUNDS = [
    ("model", "layers", 0),
    ("model", "hidden_dropout", 1.0),
    ("mesh", "data", 0),
    ("data", "train_samples", 0),
    ("optimizer", "learning_rate", float("inf")),
    ("optimizer", "epsilon", 0.0),
    ("optimizer", "weight_decay", -0.1),
    ("precision", "initial_loss_scale", 0.5),
    ("train", "seed", 2**32),
    ("train", "eval_interval", -1),
    ("train", "loss_chunks", 65),
    ("checkpoint", "keep_last", 0),
    ("log", "interval", 0),
]
"""One of each section, and of each kind of bounds."""


@pytest.mark.parametrize(("section", "knob", "value"), OUT_OF_BOUNDS)
def test_number_out_of_bounds_is_rejected_with_its_flag(section, knob, value):
    config, flag = Config(data=DataConfig(mock=True)), f"--{section}.{knob}".replace("_", "-")
    with pytest.raises(UsageError, match=rf"^{flag} is {value}; it must be "):
        validate(replace(config, **{section: replace(getattr(config, section), **{knob: value})}))


def test_mesh_larger_than_machine_says_what_to_type():
    with pytest.raises(UsageError) as error:
        check_devices(load_config("gpt_8b"), 1, "gpt_8b")
    assert str(error.value) == (
        "gpt_8b needs 512 devices (data 64 × model 8); 1 available: set --mesh.data and other axes, or --simulate 512"
    )
    config = Config(mesh=MeshConfig(pipe=2, context=4, data=2, expert=2))
    check_devices(config, 16)
    with pytest.raises(UsageError, match=r"pipe 2 × data 2 \(expert 2\) × context 4 × model 1"):
        check_devices(config, 1)


def test_config_name_finds_own_file_before_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "from mjax.config import *\nconfig = Config(train=TrainConfig(7))"
    (tmp_path / "my_gpt.py").write_text(source)
    assert load_config("my_gpt").train == load_config("./my_gpt").train == TrainConfig(7)
    (tmp_path / "my_gpt.py").rename(tmp_path / "gpt_8b.py")
    with pytest.raises(UsageError, match=r"or \./gpt_8b\.py; type --config \./gpt_8b\.py for the local one"):
        load_config("gpt_8b")
    assert load_config("./gpt_8b.py").train.steps == 7
    (tmp_path / "configs").mkdir()
    (tmp_path / "gpt_8b.py").rename(tmp_path / "configs" / "gpt_8b.py")
    assert load_config("gpt_8b").train.steps == 7
