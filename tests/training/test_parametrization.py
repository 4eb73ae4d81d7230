"""Parametrizations: a mixture, Muon, meshes and sentences. `parity/test_mup.py` compares with `mup` and torch."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from mjax.config import MeshConfig
from mjax.config.checks import validate
from mjax.errors import UsageError
from mjax.parallel.mesh import make_mesh
from mjax.step.parametrization import weight_scales
from mjax.step.step import build_program
from tests.against_reference import in_layer_order
from tests.small import batch_of, program_of, small_config

SCALED = {"parametrization": "completep", "base_width": 8, "base_depth": 2}  # m = 4, l = 2


def config_of(kind="gpt", compute="fp32", mesh=None, model=None, **optimizer):
    config = small_config(kind=kind, layers=4, compute=compute, dropout=0.0, micro_batch=2, **(model or {}))
    return replace(
        config, mesh=MeshConfig(**(mesh or {})), optimizer=replace(config.optimizer, **{**SCALED, **optimizer})
    )


def scales_of(config):
    return weight_scales(config, program_of(config).abstract_state.model)


def test_scales_of_a_mixture_with_muon():
    """Check θ, initial std, rate and ε against the table in the module."""
    scales = scales_of(config_of("mixture", name="muon", model={"kv_heads": 2, "shared_expert_ffn_hidden": 16}))
    found = {name: tuple(scale) for name, scale in scales.items() if "attention" not in name}
    assert found == {
        "blocks.mlp.down": (0.5, 0.5 * (2 / 4) ** 0.5, 0.25, 1 / 8),
        "blocks.mlp.router.kernel": (0.25, 0.25, 0.25, 1 / 8),
        "blocks.mlp.shared.down.kernel": (0.5, 0.5 * (2 / 4) ** 0.5, 0.25, 1 / 8),
        "blocks.mlp.shared.up.kernel": (1, 0.5, 0.5, 1 / 8),
        "blocks.mlp.up": (1, 0.5, 0.5, 1 / 8),
        "blocks.mlp_norm.scale": (1, 1, 1, 1 / 8),
        "embedding.table": (1, 1, 1, 1 / 4),
        "final_norm.scale": (1, 1, 1, 1 / 4),
        "head.table": (0.25, 0.25, 0.25, 1 / 4),
    }


DEEPSEEK = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "first_dense_layers": 2, "mtp_layers": 1, "experts": 4, "experts_per_token": 2,
}  # fmt: skip


def test_scales_of_a_deepseek():
    """Check latents and multi-token prediction, whose layer has no depth, but an initial std of 1 / √(2 layers)."""
    scales = scales_of(config_of("deepseek", model=DEEPSEEK))
    hidden, into_stream = (1, 0.5, 0.25), (1, 0.5 * 2**0.5, 0.25)
    for name in ("q_down", "q_up", "kv_down", "kv_up"):
        assert scales[f"blocks.1.attention.{name}.kernel"] == (*hidden, 1 / 8), name
        assert scales[f"mtp.block.attention.{name}.kernel"] == (*hidden, 1 / 4), name
    assert scales["blocks.1.attention.out.kernel"] == (0.5, 0.5 * (2 / 4) ** 0.5, 0.125, 1 / 8)
    for name in ("attention.out.kernel", "mlp.down"):
        assert scales[f"mtp.block.{name}"] == (*into_stream, 1 / 4), name
    assert scales["mtp.projection.kernel"] == (*hidden, 1 / 4)
    assert scales["mtp.block.mlp.router.kernel"] == scales["head.table"] == (0.25, 0.25, 0.25, 1 / 4)
    with pytest.raises(UsageError, match="base_head_size 6 is not supported for a DeepSeek: no weight has a part q"):
        scales_of(config_of("deepseek", model=DEEPSEEK, base_head_size=6))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_base_model_is_the_standard_one(name):
    """Compare a step at m = l = 1 in both."""
    steps = []
    for parametrization in ("standard", "completep"):
        config = config_of(name=name, parametrization=parametrization, base_width=32, base_depth=4)
        program = program_of(config)
        state, metrics = program.train_step(program.initialize(), program.put_on_devices(batch_of(config)))
        steps.append((in_layer_order(state.model, config), float(metrics.grad_norm)))
    np.testing.assert_allclose(steps[1][1], steps[0][1], rtol=1e-6)
    for weight, array in steps[0][0].items():
        np.testing.assert_allclose(steps[1][0][weight], array, rtol=1e-5, atol=1e-7, err_msg=weight)


@pytest.mark.parametrize("mesh", [{"data": 2, "model": 2, "expert": 2, "zero": 3}, {"pipe": 2, "virtual_stages": 2}])
def test_mixture_is_the_same_on_a_mesh(mesh):
    found = []
    with jax.enable_x64(True):
        for there in ({}, mesh):
            config = config_of("mixture", "fp64", there, {"kv_heads": 2}, name="muon", base_head_size=16)
            program = build_program(config, make_mesh(config.mesh))
            state = program.initialize()
            for step in range(3):
                state, metrics = program.train_step(state, program.put_on_devices(batch_of(config, step)))
            found.append(in_layer_order(state.model, config) | {"norm": metrics.grad_norm, "loss": metrics.loss})
    for name, array in found[0].items():
        np.testing.assert_allclose(found[1][name], array, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        (
            "gpt",
            {"base_width": None},
            "needs optimizer.base_width of the model whose learning rate was tuned; set it in the config file",
        ),
        ("gpt", {"base_depth": None}, r"such as OptimizerConfig\(base_depth=4\)"),
        ("gpt", {"parametrization": "mup"}, "--optimizer.base-depth 2 is for --optimizer.parametrization completep"),
        ("gpt", {"parametrization": "standard", "base_depth": None}, "--optimizer.base-width 8 is for"),
        ("bert", {}, "completep is not supported for a BERT; remove it"),
        ("gemma3", {}, r"not supported for a Gemma 3 \(its embedding grows with √hidden\); remove it"),
    ],
)
def test_unsupported_setting_is_rejected(kind, changes, sentence):
    with pytest.raises(UsageError, match=sentence):
        validate(config_of(kind, **changes))


@pytest.mark.parametrize(
    ("model", "changes", "sentence"),
    [
        ({"norms": "post"}, {}, "with --model.norms post, which undoes its scale of a layer's result; use mup"),
        (
            {"qk_norm": "head"},
            {"base_head_size": 2},
            "optimizer.base_head_size 2 is not supported with --model.qk-norm",
        ),
        ({"lora_rank": 2}, {}, "completep is not supported for --lora.rank 2; remove it"),
    ],
)
def test_unsupported_llama_is_rejected(model, changes, sentence):
    with pytest.raises(UsageError, match=sentence):
        validate(config_of("llama", model={"kv_heads": 2, **model}, **changes))


def test_weight_without_dims_is_rejected():
    config = config_of()
    model = nnx.merge(*nnx.split(program_of(config).abstract_state.model))
    model.extra = nnx.Param(jax.ShapeDtypeStruct((2, 3), "float32"))
    with pytest.raises(UsageError, match="completep needs the dims of extra; make the weight with"):
        weight_scales(config, model)
    del model.extra, model.final_norm
    with pytest.raises(UsageError, match="name it in after_layers, which has final_norm, head"):
        weight_scales(config, model)
