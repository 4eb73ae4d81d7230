"""Train models of megatron-core on the CPU with its own optimizer and schedule, from and into its checkpoints.

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python train_megatron_core.py REQUEST…

Each REQUEST is a JSON file with the fields of `Request`. BATCHES holds tokens and labels [steps, B, s]; the losses of
the steps are written beside it. One process, because megatron-core changes the process it is in.
"""

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from write_megatron_core import DECODERS, MIXTURES, SEQUENCE, SETTINGS, build

BATCH = 4
OPTIMIZER = {"lr": 5e-3, "min_lr": 5e-4, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-6}
OPTIMIZER |= {"clip_grad": 0.5}
SCHEDULE = {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "lr_decay_iters": 12, "train_iters": 14}


@dataclass
class Request:
    """One training.

    Attributes:
      kind: gpt, or one of DECODERS or MIXTURES.
      batches: npz file.
      rows: of the padded embedding.
      load: checkpoint folder to start from, and `steps` of the batches to skip.
      save: folder to write: form → torch_dist or torch.
      form: distributed, plain (without the distributed optimizer), or torch (plain, in the format torch).
      bf16: weights in bf16 with float32 master weights.
      sharding: of the distributed optimizer.
    """

    kind: str
    batches: str
    rows: int = 32
    load: str = ""
    save: str = ""
    form: str = "distributed"
    bf16: bool = False
    sharding: str = "fully_reshardable"


def main(requests: list[Request]) -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    # Without a GPU: calls that require one get the CPU.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_: self
    plain_type = torch.Tensor.type
    torch.Tensor.type = lambda self, *args: (
        plain_type(self, *args) if args else plain_type(self).replace("torch.", "torch.cuda.")
    )
    for name in ("tensor", "zeros", "empty"):
        make = getattr(torch, name)
        setattr(torch, name, lambda *args, make=make, **values: make(*args, **to_cpu(values)))
    from megatron.core import optimizer, parallel_state
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1)
    for request in requests:
        train(request)


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the state of TransformerEngine's and Apex's: the count is in the groups."""

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode=True, bias_correction=True, capturable=False):
        assert (adam_w_mode, capturable) == (True, False)
        values = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, values | {"bias_correction": bias_correction})

    def load_state_dict(self, state):
        assert all(values.keys() <= {"exp_avg", "exp_avg_sq"} for values in state["state"].values())
        super().load_state_dict(state)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            step = group["step"] = group.get("step", 0) + 1
            assert group["bias_correction"]
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                for name, power, beta in (("exp_avg", 1, beta1), ("exp_avg_sq", 2, beta2)):
                    moment = state.setdefault(name, torch.zeros_like(parameter))
                    moment.mul_(beta).add_(gradient**power, alpha=1 - beta)
                scale = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
                direction = state["exp_avg"] / (1 - beta1**step) / scale + group["weight_decay"] * parameter
                parameter.sub_(lr * direction)


def to_cpu(values: dict) -> dict:
    return values | ({"device": "cpu"} if values.get("device") in ("cuda", "cpu") else {})


def train(request: Request) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core import optimizer as optimizers
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.enums import AttnBackend

    shared = dict(
        **SETTINGS,
        use_cpu_initialization=True,
        bias_activation_fusion=True,
        init_method_std=0.2,
        attention_backend=AttnBackend.local,
        bf16=request.bf16,
        params_dtype=torch.bfloat16 if request.bf16 else torch.float32,
    )
    common = {
        "vocab_size": request.rows, "max_sequence_length": SEQUENCE, "share_embeddings_and_output_weights": True,
        "parallel_output": False,
    }  # fmt: skip
    torch.manual_seed(0)
    of_config, of_model = (DECODERS | MIXTURES).get(request.kind, ({}, {}))
    config, model = build(request.kind, shared, common, of_config, of_model, export="release")
    model = model.train()
    if request.bf16:
        model = model.bfloat16()
    distributed = request.form == "distributed"
    config.gradient_accumulation_fusion = False
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model
    )
    settings = OptimizerConfig(optimizer="adam", bf16=request.bf16, use_distributed_optimizer=distributed, **OPTIMIZER)
    optimizers.USING_PYTORCH_OPTIMIZER = not distributed
    optimizer = get_megatron_optimizer(settings, [wrapped])
    schedule = OptimizerParamScheduler(
        optimizer, 0.0, OPTIMIZER["lr"], OPTIMIZER["min_lr"], SCHEDULE["lr_warmup_iters"] * BATCH,
        SCHEDULE["lr_decay_iters"] * BATCH, SCHEDULE["lr_decay_style"], OPTIMIZER["weight_decay"],
        OPTIMIZER["weight_decay"], SCHEDULE["train_iters"] * BATCH, "constant",
    )  # fmt: skip
    begin = 0
    if request.load:
        folder = Path(request.load)
        begin = int((folder / "latest_checkpointed_iteration.txt").read_text())
        there = folder / f"iter_{begin:07d}"
        if request.form == "torch":
            state = torch.load(there / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
        else:
            metadata = dist_checkpointing.load_content_metadata(str(there))
            sharded = model.sharded_state_dict(metadata=metadata)
            moments = optimizer.sharded_state_dict({"model": sharded}, is_loading=True, metadata=metadata)
            state = dist_checkpointing.load({"model": sharded, "optimizer": moments}, str(there))
        model.load_state_dict(state["model"], strict=True)
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["opt_param_scheduler"])
        assert state["iteration"] == begin
    with np.load(request.batches) as file:
        batches = {name: torch.tensor(file[name].astype(np.int64)) for name in ("tokens", "labels")}
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    later = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    losses = []
    for tokens, labels in zip(batches["tokens"], batches["labels"], strict=True):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        logits = wrapped(tokens, positions, later).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        assert optimizer.step()[0]
        schedule.step(BATCH)
        losses.append(loss.item())
    np.save(f"{request.batches}.losses.npy", np.array(losses))
    if request.save:
        save(request, config, model, optimizer, schedule, begin + len(losses))


def save(request, config, model, optimizer, schedule, step: int) -> None:
    from megatron.core import dist_checkpointing

    args = argparse.Namespace(
        **SETTINGS, **OPTIMIZER, **SCHEDULE,
        kv_channels=SETTINGS["hidden_size"] // SETTINGS["num_attention_heads"],
        max_position_embeddings=SEQUENCE, seq_length=SEQUENCE, padded_vocab_size=request.rows,
        norm_epsilon=1e-5, bias_gelu_fusion=True, position_embedding_type="learned_absolute",
        optimizer="adam", global_batch_size=BATCH, micro_batch_size=BATCH, seed=7,
        consumed_train_samples=step * BATCH, skipped_train_samples=0, bf16=request.bf16,
        use_distributed_optimizer=request.form == "distributed",
    )  # fmt: skip
    state = {"args": args, "checkpoint_version": 3.0, "iteration": step, "opt_param_scheduler": schedule.state_dict()}
    of_config, of_model = (DECODERS | MIXTURES).get(request.kind, ({}, {}))
    if request.kind != "gpt":
        said = {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "bias_gelu_fusion": False}
        said |= {"group_query_attention": True, "position_embedding_type": "rope", **of_config}
        said |= {{"rope_scaling": "use_rope_scaling"}.get(name, name): value for name, value in of_model.items()}
        said["untie_embeddings_and_output_weights"] = not said.pop("share_embeddings_and_output_weights", False)
        if "num_moe_experts" in of_config:
            said |= {name: value for name, value in vars(config).items() if name.startswith("moe_")} | of_config
            said["num_experts"] = said.pop("num_moe_experts")
        vars(args).update(said)
    folder = Path(request.save)
    there = folder / f"iter_{step:07d}"
    there.mkdir(parents=True)
    if request.form == "torch":
        (there / "mp_rank_00").mkdir()
        state |= {"model": model.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
        torch.save(state, there / "mp_rank_00" / "model_optim_rng.pt")
    else:
        metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        metadata |= {"distrib_optim_sharding_type": request.sharding} if request.form == "distributed" else {}
        sharded = model.sharded_state_dict(metadata=metadata)
        state |= {"model": sharded, "optimizer": optimizer.sharded_state_dict({"model": sharded}, metadata=metadata)}
        dist_checkpointing.save(state, str(there), content_metadata=metadata)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


if __name__ == "__main__":
    main([Request(**json.loads(Path(file).read_text())) for file in sys.argv[1:]])
