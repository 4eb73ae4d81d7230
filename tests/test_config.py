"""Configs: the published models, plain values and back, and what is refused before a device is touched."""

from dataclasses import replace

import jax
import pytest

from mjax.config import (
    Config,
    DataConfig,
    MeshConfig,
    available_configs,
    differences,
    from_dict,
    load_config,
    read_config,
    save_config,
    to_dict,
)
from mjax.errors import UsageError
from mjax.models.gpt import build_gpt
from mjax.validation import check_devices, validate

PUBLISHED = {
    "gpt_345m": 354_871_296,
    "gpt_1b": 1_212_103_680,
    "gpt_2b": 2_488_934_400,
    "gpt_4b": 4_197_929_472,
    "gpt_8b": 8_317_040_640,
    "gpt_8b_24h": 8_317_040_640,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_models_have_exactly_their_parameters(name, parameters):
    config = load_config(name)
    model = jax.eval_shape(lambda: build_gpt(0, config.model))
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == config.model.parameters == parameters


def test_published_models_are_padded_to_51200_by_default():
    padded = replace(load_config("gpt_1b").model, vocabulary_multiple=1024)
    assert (padded.padded_vocabulary, padded.parameters) == (51_200, 1_213_479_936)
    assert load_config("gpt_8b").model.padded_vocabulary == 51_200


@pytest.mark.parametrize("name", available_configs())
def test_every_config_is_valid_and_says_what_it_costs(name):
    config = load_config(name)
    validate(replace(config, data=DataConfig(mock=True)), name)
    assert from_dict(to_dict(config)) == config


def test_a_config_is_read_back_as_it_was_saved(tmp_path):
    config = load_config("gpt_8b")
    save_config(config, tmp_path / "config.json")
    assert read_config(tmp_path / "config.json") == config


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
        (_with(model={"vocabulary_multiple": 1}, mesh={"model": 2}), "does not divide padded vocabulary 50257"),
        (_with(model={"heads": 7}), "--model.heads 7 does not divide hidden size 1024; use 1, 2, 4, 8"),
        (_with(mesh={"data": 3}), "--train.global-batch 512 does not divide over --mesh.data 3"),
        (_with(train={"micro_batch": 3}), "--train.micro-batch 3 does not divide the 512 sequences"),
        (_with(train={"global_batch": -8}), "--train.global-batch is -8; it must be at least 1"),
        (_with(train={"seed": -1}), "--train.seed is -1; it must be 0 or more"),
        (_with(train={"seed": 2**32}), "it must be below 2^32"),
        (_with(model={"hidden_dropout": 1.0}), "--model.hidden-dropout is 1.0; it must be at least 0 and below 1"),
        (_with(optimizer={"warmup_steps": 300_000}), "must be below the 300000 steps of the schedule"),
        (_with(optimizer={"min_learning_rate": 1.0}), "is above --optimizer.learning-rate"),
        (_with(precision={"loss_scale": 8.0}), "--precision.loss-scale needs --precision.compute fp16"),
        (_with(data={"samples": 7}), "--data.samples 7 is below the 153600000 samples"),
        (_with(data={"mock": False}), "has no data: prepare some with `python -m mjax prepare"),
        (_with(mesh={"pipe": 2}), "--mesh.pipe 2 is not supported yet"),
        (_with(optimizer={"learning_rate": float("nan")}), "--optimizer.learning-rate is nan"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(config, words):
    with pytest.raises(UsageError) as error:
        validate(config)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mesh_of_another_size_than_the_machine_says_what_to_type():
    with pytest.raises(UsageError) as error:
        check_devices(load_config("gpt_8b"), 1, "gpt_8b")
    assert str(error.value) == (
        "gpt_8b needs 512 devices (data 64 × model 8); 1 found: set --mesh.data and --mesh.model, or --simulate 512"
    )


def test_an_unknown_config_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'gpt_8b'"):
        load_config("gpt_8")
