"""Build models of megatron-core on the CPU, save them as Megatron does, and write down what they compute.

Run as a program, one process of each tensor rank, because megatron-core changes the process it is in:

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python write_megatron_core.py FOLDER KIND…

leaves FOLDER/KIND_FORMAT/iter_0000005 (KIND gpt, bert or one of DECODERS or MIXTURES; FORMAT stacked, single, torch or,
of some, apart), and FOLDER/KIND.npz with inputs and scores. Of MIXTURES one rank adds the losses of their training and
the gradients of their routers. EXPERT_RANKS=2 splits the experts over two ranks
instead of the matrices, PIPELINE_RANKS=3 the layers. SMALL=1 makes models with few numbers of 16 bits, as in
megatron_recorded.tar.xz.

KIND=CHECKPOINT builds the same model, loads CHECKPOINT, a folder of `mjax convert to-megatron`, and leaves
CHECKPOINT/scores.npy.
"""

import argparse
import contextlib
import copy
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch

VOCABULARY, PADDED, SEQUENCE = 29, 32, 10
SETTINGS = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 40}
SETTINGS |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
SMALL = os.environ.get("SMALL") == "1"
if SMALL:
    SETTINGS |= {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 12}
# Of TransformerConfig, and of GPTModel.
DECODERS = {
    "llama": (
        {"num_query_groups": 2, "kv_channels": 8, "qk_layernorm": True},
        {"rotary_base": 500_000, "rope_scaling": True, "rope_scaling_factor": 32.0},
    ),
    "narrow": (  # with fewer groups than there are ranks in one of the two cases
        {"num_query_groups": 1, "kv_channels": 12, "add_qkv_bias": True},
        {"rotary_base": 10_000, "rotary_percent": 0.5, "share_embeddings_and_output_weights": True},
    ),
}
OLD_GROUPED = {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True}
MIXTURES = {
    "mixtral": (
        {"num_query_groups": 2, "kv_channels": 8, "num_moe_experts": 4, "moe_router_topk": 2}
        | {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.25},
        {"rotary_base": 1_000_000},
    ),
    "before": (  # softmax before the choice, in the weights of the old grouped products where they are
        {"num_query_groups": 4, "kv_channels": 6, "qk_layernorm": True, "num_moe_experts": 8, "moe_router_topk": 3}
        | {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5, "moe_ffn_hidden_size": 12}
        | {"moe_shared_expert_intermediate_size": 16, **(OLD_GROUPED if version("megatron-core") < "0.17" else {})}
        | {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5},
        {"rotary_base": 10_000},
    ),
    "deepseek": (
        {"num_query_groups": 4, "kv_channels": 6, "num_moe_experts": 8, "moe_router_topk": 4}
        | {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5, "moe_ffn_hidden_size": 12}
        | {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_shared_expert_intermediate_size": 24},
        {"rotary_base": 10_000},
    ),
}
MIXTURES["dense"] = (  # with an MLP in the first layer
    {**MIXTURES["deepseek"][0], "moe_layer_freq": [0] + [1] * (SETTINGS["num_layers"] - 1)},
    MIXTURES["deepseek"][1],
)
LATENT = {
    "multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 14, "kv_lora_rank": 10, "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "moe_router_enable_expert_bias": True,
    "moe_layer_freq": [0] + [1] * (SETTINGS["num_layers"] - 1),
}  # fmt: skip
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7}
MIXTURES["latent"] = (
    {**MIXTURES["deepseek"][0], **LATENT, **YARN, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.2},
    {"rotary_base": 10_000},
)
MIXTURES["latent_softmax"] = (
    {**MIXTURES["before"][0], **LATENT, "q_lora_rank": None, "rope_type": "rope", "layernorm_epsilon": 1e-3}
    | {"moe_router_enable_expert_bias": False, "moe_router_num_groups": 4, "moe_router_group_topk": 3}
    | {"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"},
    {"rotary_base": 500_000},
)
HYBRIDS = {
    "hybrid": (
        {"num_query_groups": 2, "kv_channels": 8},
        {"rotary_base": 500_000, "hybrid_layer_pattern": "*-*-", "share_embeddings_and_output_weights": True},
    ),
    "hybrid_experts": (
        {"num_query_groups": 2, "kv_channels": 8, "num_moe_experts": 4, "moe_router_topk": 2},
        {"rotary_base": 10_000, "hybrid_layer_pattern": "*E*E"},
    ),
    "hybrid_both": (
        {"num_query_groups": 2, "kv_channels": 8, "num_moe_experts": 4, "moe_router_topk": 2}
        | {"moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 16},
        {"rotary_base": 10_000, "hybrid_layer_pattern": "*-*E*E"},
    ),
}
"""Layers of attention, MLPs and experts in the order of a pattern."""


def main(folder: Path, kinds: list[str]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    expert_ranks = int(os.environ.get("EXPERT_RANKS", "1"))
    stages = int(os.environ.get("PIPELINE_RANKS", "1"))
    tensor_ranks = world // expert_ranks // stages
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    # Without a GPU: calls that require one get the CPU.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_: self
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.moe import experts, moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tensor_ranks, stages, expert_model_parallel_size=expert_ranks)
    GroupedMLP = getattr(experts, "GroupedMLP", ())  # not in 0.19
    if GroupedMLP:
        from megatron.core.transformer.moe import grouped_gemm_util

        grouped_gemm_util.grouped_gemm, grouped_gemm_util.ops = object(), SimpleNamespace(gmm=products)
    # Which they ask for where TransformerEngine is not installed, too.
    moe_utils.te_general_gemm, multi_latent_attention.HAVE_TE = None, False
    shared = dict(
        **SETTINGS,
        tensor_model_parallel_size=tensor_ranks,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_activation_fusion=True,
        init_method_std=0.2,
        attention_backend=AttnBackend.local,
    )
    common = {
        "vocab_size": PADDED,
        "max_sequence_length": SEQUENCE,
        "share_embeddings_and_output_weights": True,
        "parallel_output": False,
    }
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (3, SEQUENCE), generator=random)
    positions = torch.arange(SEQUENCE).expand(3, SEQUENCE)
    labels = torch.randint(VOCABULARY, (3, SEQUENCE), generator=random)
    labels[:, :-1] = ids[:, 1:]
    later = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    common |= {"pre_process": stage == 0, "post_process": stage == stages - 1}
    for kind in kinds:
        kind, _, source = kind.partition("=")
        common["vocab_size"] = 128 * tensor_ranks if source else PADDED
        of_config, of_model = (DECODERS | MIXTURES | HYBRIDS).get(kind, ({}, {}))
        torch.manual_seed(0)
        config, model = build(kind, shared, common, of_config, of_model, source)
        if source:
            scores = score_export(model, kind, Path(source) / "release", (ids, positions, later))
            if scores is not None and rank == world - 1:
                np.save(Path(source) / "scores.npy", scores.numpy())
            continue
        with torch.no_grad():  # biases are 0 and LayerNorms 1 at first: a mistake could hide behind them
            for name, parameter in model.named_parameters():
                split = getattr(parameter, "tensor_model_parallel", False) or not getattr(parameter, "allreduce", True)
                torch.manual_seed(sum(map(ord, name)) + (rank if split else 0))
                parameter += 0.1 * torch.randn_like(parameter)
                parameter.copy_(parameter.bfloat16() if SMALL else parameter)
            for module in model.modules():
                if isinstance(module, GroupedMLP):  # which asserts bf16
                    module.config = copy.copy(module.config)
                    module.config.bf16 = True
            if kind != "bert":
                with without_prediction(model):
                    scores = {"scores": model(ids, positions, later)}
            else:
                types = (positions > 4).long()
                text = (positions < torch.tensor([10, 8, 5])[:, None]).long()
                of_tokens, of_order = model(ids, text, types)
                scores = {"scores": of_tokens, "order": of_order, "types": types, "text": text}
        if kind in MIXTURES and world == 1:
            model.output_layer.gather_output = False  # for its loss
            loss = model.train()(ids, positions, later, labels=labels).mean()
            loss.backward()
            routers = [parameter.grad for name, parameter in model.named_parameters() if "router" in name]
            tracker = moe_utils.get_moe_layer_wise_logging_tracker()
            scores |= {name: found["values"].sum() for name, found in tracker.items() if found["values"].any()}
            scores |= {"labels": labels, "loss": loss.detach(), "routers": torch.stack(routers)}
            for found in tracker.values():
                found["values"].zero_()
            if config.mtp_num_layers:
                tracker = MTPLossLoggingHelper.tracker
                scores["mtp_loss"] = tracker["loss_values" if "loss_values" in tracker else "values"].clone()
        if rank == 0:
            arrays = {name: array.numpy() for name, array in scores.items()}
            np.savez(folder / f"{kind}.npz", ids=ids.numpy(), **arrays)
        args = argparse.Namespace(
            **SETTINGS,
            kv_channels=SETTINGS["hidden_size"] // SETTINGS["num_attention_heads"],
            max_position_embeddings=SEQUENCE,
            padded_vocab_size=PADDED,
            make_vocab_size_divisible_by=PADDED // tensor_ranks,
            tensor_model_parallel_size=tensor_ranks,
            pipeline_model_parallel_size=1,
            norm_epsilon=1e-5,
            bias_gelu_fusion=True,
            position_embedding_type="learned_absolute",
            attention_backend=AttnBackend.local,
            params_dtype=torch.float32,
            save=folder,
        )
        if kind in DECODERS | MIXTURES | HYBRIDS:
            said = {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "bias_gelu_fusion": False}
            said |= {"group_query_attention": True, "position_embedding_type": "rope", **of_config}
            names = {"rope_scaling": "use_rope_scaling"}  # the argument of a setting of GPTModel
            said |= {names.get(name, name): value for name, value in of_model.items()}
            said["norm_epsilon"] = config.layernorm_epsilon
            tied = said.pop("share_embeddings_and_output_weights", False)
            said["untie_embeddings_and_output_weights"] = not tied
            said |= hybrid_arguments(**of_model) if kind in HYBRIDS else {}
            if "num_moe_experts" in of_config:
                said |= {name: value for name, value in vars(config).items() if name.startswith("moe_")} | of_config
                said |= {"num_experts": said.pop("num_moe_experts"), "expert_model_parallel_size": expert_ranks}
                said["expert_tensor_parallel_size"] = config.expert_tensor_parallel_size
            vars(args).update(said)
        beside = {"args": args, "checkpoint_version": 3.0, "iteration": 5}
        sharded = ("stacked", "single", *(["apart"] if kind in ("llama", *MIXTURES, *HYBRIDS) else []))
        for layout in sharded:
            there = folder / f"{kind}_{layout}" / "iter_0000005"
            there.mkdir(parents=True, exist_ok=True)
            metadata = {"non_homogeneous_layers": layout != "stacked", "singleton_local_shards": layout == "apart"}
            moments = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.x", torch.zeros(4), (0, rank, world))
            state = {"model": model.sharded_state_dict(metadata=metadata), "optimizer": {"x": moments}, **beside}
            dist_checkpointing.save(state, str(there))
        name = f"mp_rank_{rank % tensor_ranks:02}" + (f"_{rank // tensor_ranks:03}" if expert_ranks > 1 else "")
        there = folder / f"{kind}_torch" / "iter_0000005" / name
        there.mkdir(parents=True)
        state = {"model": model.state_dict_for_save_checkpoint(), **beside}
        state["rng_state"] = [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}]
        torch.save(state, there / "model_optim_rng.pt")
        for layout in (*sharded, "torch"):
            (folder / f"{kind}_{layout}" / "latest_checkpointed_iteration.txt").write_text("5")
    torch.distributed.barrier()


def hybrid_arguments(hybrid_layer_pattern, **_):
    """The arguments of `HybridModel`, with a boundary of stages in the pattern."""
    half = len(hybrid_layer_pattern) // 2
    return {
        "hybrid_layer_pattern": f"{hybrid_layer_pattern[:half]}|{hybrid_layer_pattern[half:]}",
        "num_layers": 2 * half,
        "is_hybrid_model": True,
        "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    }


def hybrid_model(config, vocab_size, max_sequence_length, hybrid_layer_pattern, **values):
    """A `HybridModel` of 0.18 and later, or the `MambaModel` before, without TransformerEngine."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for name in ("triton", "triton.language"):  # imported for inference on a GPU
        sys.modules.setdefault(name, MagicMock())
    if version("megatron-core") < "0.18":
        from megatron.core.models.mamba import MambaModel as Model
        from megatron.core.post_training.modelopt.mamba import model_specs
        from megatron.core.ssm import mamba_block as block

        make_spec = model_specs.get_mamba_stack_modelopt_spec
    else:
        from megatron.core.models.hybrid import hybrid_block as block
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model
        from megatron.core.post_training.modelopt.hybrid import model_specs

        make_spec = model_specs.get_hybrid_stack_modelopt_spec
    model_specs.Norm = block.TENorm = WrappedTorchNorm
    pattern = "hybrid_override_pattern" if version("megatron-core") < "0.17" else "hybrid_layer_pattern"
    values |= {pattern: hybrid_layer_pattern}
    return Model(config, make_spec(local_core_attention=True), vocab_size, max_sequence_length, **values)


def build(kind: str, shared: dict, common: dict, of_config: dict, of_model: dict, export: str) -> tuple:
    """The config and the model of a kind; for an `export`, a folder, with a matrix for each expert."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.parallel_state import get_expert_model_parallel_world_size
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    config = TransformerConfig(**shared)
    if kind == "gpt":
        return config, GPTModel(config, get_gpt_layer_local_spec(), **common).eval()
    if kind == "bert":
        return config, BertModel(config, 2, bert_layer_local_spec, **common).eval()
    if export:
        of_config = {name: value for name, value in of_config.items() if name not in OLD_GROUPED}
    modern = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
    modern |= {"activation_func": torch.nn.functional.silu, "bias_activation_fusion": False}
    modern |= {"expert_model_parallel_size": get_expert_model_parallel_world_size()} if kind in MIXTURES else {}
    positions_of = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False} | of_model
    modern |= {"num_layers": len(of_model["hybrid_layer_pattern"])} if kind in HYBRIDS else {}
    latent = of_config.get("multi_latent_attention")
    modern |= {"rotary_base": of_model["rotary_base"]} if latent else {}
    config = (MLATransformerConfig if latent else TransformerConfig)(**{**shared, **modern, **of_config})
    if kind in HYBRIDS:
        return config, hybrid_model(config, **{**common, **positions_of}).eval()
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        sparse, names = "moe_layer" in repr(layer.submodules.mlp), layer.submodules.sharded_state_dict_keys_map
        if latent:  # which is for TransformerEngine alone
            layer.submodules.self_attention.submodules.core_attention = CoreAttention
            names |= {
                f"self_attention.{part}_layernorm.": f"self_attention.linear_{part}_up_proj.layer_norm_"
                for part in ("q", "kv")
            }
            names |= {} if sparse else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        elif sparse and export and not export.endswith("local"):  # the name with TransformerEngine
            names.pop("pre_mlp_layernorm.", None)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return config, GPTModel(config, spec, mtp_block_spec=mtp, **{**common, **positions_of}).eval()


@contextlib.contextmanager
def without_prediction(model: torch.nn.Module) -> Iterator[None]:
    """Without the layer of multi-token prediction, which asks for labels."""
    layers, process = model.config.mtp_num_layers, getattr(model, "mtp_process", False)
    model.config.mtp_num_layers, model.mtp_process = None, False
    yield
    model.config.mtp_num_layers, model.mtp_process = layers, process


class CoreAttention(torch.nn.Module):
    """Attention with values of another width than queries and keys, of which megatron-core has none itself."""

    def __init__(self, softmax_scale, **_):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, q, k, v, mask, **_):
        scores = torch.einsum("sbnd,tbnd->bnst", q, k) * self.softmax_scale
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
        return torch.einsum("bnst,tbnd->sbnd", weights, v).flatten(2)


def score_export(
    model: torch.nn.Module, kind: str, folder: Path, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor | None:
    """Load an export as Megatron does; returns the scores, of the last stage."""
    from megatron.core import dist_checkpointing, parallel_state

    stage, stages = (
        getattr(parallel_state, f"get_pipeline_model_parallel_{what}")() for what in ("rank", "world_size")
    )
    if (folder / "metadata.json").is_file():
        metadata = dist_checkpointing.load_content_metadata(str(folder))
        sharded = {"model": model.sharded_state_dict(metadata=metadata)}
        state = dist_checkpointing.load(sharded, str(folder))
    else:
        name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02}" + (f"_{stage:03}" if stages > 1 else "")
        expert_ranks = parallel_state.get_expert_model_parallel_world_size()
        name += f"_{parallel_state.get_expert_model_parallel_rank():03}" if expert_ranks > 1 else ""
        state = torch.load(folder / name / "model_optim_rng.pt", weights_only=False)
    model.load_state_dict(state["model"], strict=True)
    ids, positions, later = inputs
    text, types = (positions < torch.tensor([10, 8, 5])[:, None]).long(), (positions > 4).long()
    hidden = torch.empty(SEQUENCE, len(ids), SETTINGS["hidden_size"])
    if stage:
        torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    with torch.no_grad(), without_prediction(model):
        outputs = model(ids, text, types) if kind == "bert" else model(ids, positions, later)
    if stage < stages - 1:
        torch.distributed.send(outputs, parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    return outputs[0] if kind == "bert" else outputs


def products(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor, trans_b: bool) -> torch.Tensor:
    """The grouped product of the package that only GPUs have: rows, sorted by expert, times the expert's matrix."""
    assert not trans_b
    return torch.cat([some @ matrix for some, matrix in zip(rows.split(counts.tolist()), matrices, strict=True)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
