"""Losses, router, kernels, sizes and refusals of a mixture of experts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import load_config
from mjax.config.checks import validate
from mjax.config.kernels import choose_moe_kernel
from mjax.errors import UsageError
from mjax.models.build import count_parameters
from mjax.models.parts.router import Router
from mjax.parallel.mesh import abstract_mesh
from mjax.planner.layer import model_flops
from mjax.step.step import build_program
from tests.against_reference import in_layer_order
from tests.small import batch_of, gradient_program, small_config
from tests.traced import equations, traced_step

MIXTURE = {
    "kind": "mixture",
    "moe_kernel": "xla",
    "layers": 4,
    "experts": 4,
    "experts_per_token": 2,
    "moe_ffn_hidden": 24,
    "aux_loss_coef": 0.1,
    "z_loss": 0.01,
    "sequence": 15,  # a number of tokens that no tile divides
}
DEEPSEEK = {
    "experts": 8, "experts_per_token": 3, "router": "sigmoid", "router_n_groups": 4, "router_topk_groups": 2,
    "router_scale": 2.5, "shared_expert_ffn_hidden": 20,
}  # fmt: skip


def config_of(data=1, model=1, micro_batch=2, recompute="none", mesh=None, unroll="off", samples=None, **changes):
    dropout = changes.pop("dropout", 0.1)
    return small_config(
        data, model, micro_batch, recompute, "fp64", dropout, mesh=mesh, unroll=unroll, samples=samples,
        **{**MIXTURE, **changes},
    )  # fmt: skip


# --- What the losses depend on ----------------------------------------------------------------------------------------


def means_of(config):
    with jax.enable_x64(True):
        program, place = gradient_program(config)
        found, gradients = program(place(), batch_of(config), jnp.int32(3), jnp.float64(1.0))
        return np.asarray(found), in_layer_order(gradients, config)


@pytest.mark.parametrize(
    ("over", "same"), [("sequence", True), pytest.param("micro_batch", False, marks=pytest.mark.ci)]
)
def test_micro_batch_size_changes_only_the_balance_loss_of_megatron(over, same):
    def found(micro_batch):
        return means_of(config_of(1, 1, micro_batch, dropout=0.0, aux_loss_scope=over, layers=1))

    (one, gradients), (four, others) = (found(size) for size in (1, 4))
    np.testing.assert_allclose(one[[0, 1, 3]], four[[0, 1, 3]], rtol=1e-13)
    differences = [np.abs(gradients[name] - others[name]).max() for name in gradients]
    assert (abs(one[2] - four[2]) < 1e-13) == same
    assert (max(differences) < 1e-13) == same


@pytest.mark.parametrize(
    ("zero", "unroll", "rank"),
    [pytest.param(1, "on", 0, marks=pytest.mark.ci), (3, "off", 0), (0, "off", 2)],  # with adapters it is frozen
)
def test_router_weight_is_float32_in_bf16(zero, unroll, rank, monkeypatch):
    seen, choose = [], Router.__call__

    def call(self, x):
        seen.append((x.dtype.name, self.kernel[...].dtype.name))
        return choose(self, x)

    monkeypatch.setattr(Router, "__call__", call)
    config = small_config(
        2, 1, 4, "none", "bf16", mesh={"zero": zero}, unroll=unroll, lora_rank=rank,
        **{**MIXTURE, "layers": 3, "sequence": 14},
    )  # fmt: skip
    program = build_program(config, abstract_mesh(config.mesh))
    program.train_step.trace(program.abstract_state, program.abstract_batch)
    program.eval_step.trace(program.abstract_state.model, program.abstract_batch)
    assert set(seen) == {("bfloat16", "float32")}
    assert len(seen) > 1


@pytest.mark.parametrize(("recompute", "unroll"), [("selective", "off"), ("full", "on")])
def test_experts_are_chosen_once_whatever_is_recomputed(recompute, unroll):
    """A score that differs in its last bit when it is computed again could choose another expert."""
    config = small_config(1, 1, 8, recompute, unroll=unroll, **{**MIXTURE, "layers": 3})
    assert len(list(equations(traced_step(config)[1], "top_k"))) == 1


# --- Kernels, FLOPs, refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "capability", "changes", "chosen", "why"),
    [
        ("cpu", (9, 0), {}, "xla", "it needs an NVIDIA GPU and this process runs on cpu"),
        ("gpu", (7, 0), {}, "xla", "it needs compute capability 8.0 (A100) or more, and the GPU has 7.0"),
        (
            "gpu",
            (8, 0),
            {"moe_ffn_hidden": 72},
            "xla",
            "it needs sizes that are multiples of 16 and an expert's matrix has a dim of 36 on a GPU",
        ),
        ("gpu", (8, 0), {"moe_ffn_hidden": 64}, "pallas", None),
        ("gpu", (9, 0), {"moe_kernel": "xla"}, "xla", None),
    ],
)
def test_pallas_is_chosen_where_it_can_run(platform, capability, changes, chosen, why):
    config = small_config(model=2, **{**MIXTURE, "moe_kernel": "auto", "moe_ffn_hidden": 32, **changes})
    assert choose_moe_kernel(config, platform, capability) == (chosen, why)
    if why:
        asked = replace(config, model=replace(config.model, moe_kernel="pallas"))
        with pytest.raises(UsageError) as error:
            choose_moe_kernel(asked, platform, capability)
        assert str(error.value) == (
            f"--model.moe-kernel pallas is not supported here ({why}); change that, or use auto"
        )


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("mixtral_8x7b", 46_702_792_704, 12_879_925_248),
        ("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704),
        ("olmoe_1b_7b", 6_919_161_856, 1_282_017_280),
    ],
)
def test_published_mixtures_have_their_parameters_and_flops(name, parameters, active):
    config = load_config(name)
    model, tokens = config.model, config.train.global_batch * config.model.sequence
    assert count_parameters(model) == parameters
    unused = model.experts - model.experts_per_token
    assert parameters - model.layers * unused * 3 * model.hidden * model.expert_width == active
    vectors = model.layers * 2 * model.hidden + model.hidden  # norms of the stream, which are not matmuls
    if model.qk_norm != "none":
        heads = (model.heads + model.groups) if model.qk_norm == "heads" else 2
        vectors += model.layers * heads * model.head_size
    embedding = model.padded_vocabulary * model.hidden  # looked up
    scores = 4 * model.layers * model.sequence * model.heads * model.head_size
    assert model_flops(config) / tokens == 3 * (2 * (active - vectors - embedding) + scores)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 5}, "--model.experts-per-token 5 is more than the 4 experts that a token can choose"),
        ({"router_n_groups": 3}, "--model.router-n-groups 3 and --model.router-topk-groups 3 do not cut 4 experts"),
        ({"router_n_groups": 4}, "do not cut 4 experts into groups of 2 or more"),
        ({"router_n_groups": 2, "router_topk_groups": 1, "experts_per_token": 3}, "more than the 2 experts"),
        ({"norms": "post"}, "--model.norms post is not supported for a mixture of experts"),
        ({"compute": "fp8"}, "--precision.compute fp8 is not supported for a mixture of experts"),
    ],
)
def test_impossible_mixture_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        validate(small_config(**{**MIXTURE, **changes}), "a test")
