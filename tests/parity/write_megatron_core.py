"""Build models of megatron-core on the CPU, save them as Megatron does, and write down what they compute.

Run as a program, one process of each tensor rank, because megatron-core changes the process it is in:

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python write_megatron_core.py FOLDER

leaves FOLDER/KIND_FORMAT/iter_0000005 (KIND gpt, bert or one of DECODERS; FORMAT stacked, single or torch), and
FOLDER/KIND.npz with inputs and scores.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

import numpy as np
import torch

VOCABULARY, PADDED, SEQUENCE = 29, 32, 10
SHAPE = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 40}
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
    "stretched": ({"num_query_groups": 4, "kv_channels": 6}, {"seq_len_interpolation_factor": 4}),
}


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    # Without a GPU: what asks for one is told that the CPU is it.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(world)
    shared = dict(
        **SHAPE,
        tensor_model_parallel_size=world,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        init_method_std=0.2,
        attention_backend=AttnBackend.local,
    )
    config = TransformerConfig(**shared)
    common = {
        "vocab_size": PADDED,
        "max_sequence_length": SEQUENCE,
        "share_embeddings_and_output_weights": True,
        "parallel_output": False,
    }
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (3, SEQUENCE), generator=random)
    positions = torch.arange(SEQUENCE).expand(3, SEQUENCE)
    for kind in ("gpt", "bert", *DECODERS):
        of_config, of_model = DECODERS.get(kind, ({}, {}))
        torch.manual_seed(0)
        if kind == "gpt":
            model = GPTModel(config, get_gpt_layer_local_spec(), **common).eval()
        elif kind in DECODERS:
            modern = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
            modern |= {"activation_func": torch.nn.functional.silu, "bias_activation_fusion": False}
            spec = get_gpt_layer_local_spec(qk_layernorm=of_config.get("qk_layernorm", False), normalization="RMSNorm")
            positions_of = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False} | of_model
            config = TransformerConfig(**{**shared, **modern, **of_config})
            model = GPTModel(config, spec, **{**common, **positions_of}).eval()
        else:
            model = BertModel(config, 2, bert_layer_local_spec, **common).eval()
        with torch.no_grad():  # biases are 0 and LayerNorms 1 at first: a mistake could hide behind them
            for name, parameter in model.named_parameters():
                split = getattr(parameter, "tensor_model_parallel", False)
                torch.manual_seed(sum(map(ord, name)) + (rank if split else 0))
                parameter += 0.1 * torch.randn_like(parameter)
            if kind != "bert":
                later = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
                scores = {"scores": model(ids, positions, later)}
            else:
                types = (positions > 4).long()
                text = (positions < torch.tensor([10, 8, 5])[:, None]).long()
                of_tokens, of_order = model(ids, text, types)
                scores = {"scores": of_tokens, "order": of_order, "types": types, "text": text}
        if rank == 0:
            arrays = {name: array.numpy() for name, array in scores.items()}
            np.savez(folder / f"{kind}.npz", ids=ids.numpy(), **arrays)
        args = argparse.Namespace(
            **SHAPE,
            kv_channels=6,
            max_position_embeddings=SEQUENCE,
            padded_vocab_size=PADDED,
            make_vocab_size_divisible_by=PADDED // world,
            tensor_model_parallel_size=world,
            pipeline_model_parallel_size=1,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            norm_epsilon=1e-5,
            init_method_std=0.2,
            bias_gelu_fusion=True,
            position_embedding_type="learned_absolute",
            attention_backend=AttnBackend.local,
            params_dtype=torch.float32,
            save=folder,
        )
        if kind in DECODERS:
            said = {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "bias_gelu_fusion": False}
            said |= {"group_query_attention": True, "position_embedding_type": "rope", **of_config}
            tied = of_model.get("share_embeddings_and_output_weights", False)
            said |= {
                "untie_embeddings_and_output_weights": not tied,
                "rotary_base": of_model.get("rotary_base", 10_000),
            }
            said |= {"rotary_percent": of_model.get("rotary_percent", 1.0)}
            said |= {"use_rope_scaling": of_model.get("rope_scaling", False)}
            said |= {"rope_scaling_factor": of_model.get("rope_scaling_factor", 8.0)}
            said |= {"rotary_seq_len_interpolation_factor": of_model.get("seq_len_interpolation_factor")}
            vars(args).update(said)
        beside = {"args": args, "checkpoint_version": 3.0, "iteration": 5}
        for layout in ("stacked", "single"):
            there = folder / f"{kind}_{layout}" / "iter_0000005"
            there.mkdir(parents=True, exist_ok=True)
            metadata = {"non_homogeneous_layers": layout == "single"}
            moments = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.x", torch.zeros(4), (0, rank, world))
            state = {"model": model.sharded_state_dict(metadata=metadata), "optimizer": {"x": moments}, **beside}
            dist_checkpointing.save(state, str(there))
        there = folder / f"{kind}_torch" / "iter_0000005" / f"mp_rank_{rank:02}"
        there.mkdir(parents=True)
        state = {"model": model.state_dict_for_save_checkpoint(), **beside}
        state["rng_state"] = [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}]
        torch.save(state, there / "model_optim_rng.pt")
        for layout in ("stacked", "single", "torch"):
            (folder / f"{kind}_{layout}" / "latest_checkpointed_iteration.txt").write_text("5")
    torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
