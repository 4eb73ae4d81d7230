"""One contender of a benchmark, in a separate process: it builds a model and takes training steps on request.

The process reads requests from its standard input and answers them, each as one line of JSON:

    {"config": …, "platform": "cpu" or "gpu", "threads": …}   build, take the first step   → {"loss", "device", …}
    {"steps": k}                                              take one more, then k        → {"seconds"}, of the k
    {"stop": true}                                            end                          → {"peak_bytes"}

Memory is counted for this process: the largest resident set on a CPU, the allocator's peak on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mjax.cluster.huge_pages import restart_with_huge_pages
from mjax.config import Config, from_dict
from mjax.config.checks import check_devices
from mjax.data.sources import open_data
from mjax.errors import RunError, UsageError

DISTINCT_BATCHES = 4  # tokens are drawn before the clock runs, and used in turn


class Contender(Protocol):
    """The interface that a benchmark needs from a library.

    Attributes:
      device: it runs on, as the library names it.
      versions: of the packages it consists of.
    """

    device: str
    versions: dict[str, str]

    def step(self, index: int) -> Callable[[], float]:
        """Start training step `index` on the next batch; calling the result waits for the loss in nats per token."""

    def peak_bytes(self) -> int:
        """Peak memory so far."""


class Mjax:
    """The step of `mjax train`: the same program, with the kernel that a run would use."""

    def __init__(self, config: Config, platform: str, threads: int):
        import jax

        from mjax.cluster.processes import trim_memory
        from mjax.parallel.mesh import make_mesh
        from mjax.step.layout import with_kernel
        from mjax.step.step import build_program

        if jax.default_backend() != platform:
            raise RunError(f"jax runs on {jax.default_backend()}, this benchmark on {platform}")
        check_devices(config, jax.device_count(), "this benchmark")
        config = with_kernel(config)
        trim_memory()
        self.jax = jax
        self.program = build_program(config, make_mesh(config.mesh))
        self.state = self.program.initialize()
        self.batches = draw_batches(config)
        self.device = jax.devices()[0].device_kind
        self.versions = {name: metadata.version(name) for name in ("jax", "flax", "optax")} | {
            "attention": config.model.attention
        }
        self.versions["layers"] = "without a loop" if config.train.unroll == "on" else "in a loop"

    def step(self, index: int) -> Callable[[], float]:
        batch = self.program.put_on_devices(self.batches[index % DISTINCT_BATCHES])
        self.state, metrics = self.program.train_step(self.state, batch)
        return lambda: float(metrics.loss)

    def peak_bytes(self) -> int:
        stats = self.jax.devices()[0].memory_stats()
        return stats["peak_bytes_in_use"] if stats else resident_bytes()


class Torch:
    """transformers' GPT2LMHeadModel with torch's fused kernels: attention (sdpa), GELU, AdamW.

    bf16 and fp16 are autocast over float32 weights, fp16 with a gradient scaler.
    """

    def __init__(self, config: Config, platform: str, threads: int, compiled: bool):
        if config.mesh.devices > 1:
            raise RunError("this peer runs on one device only")
        if config.precision.compute == "fp64":
            raise RunError("this peer runs in bf16, fp16 or fp32")
        if config.data.batch_types().keys() > {"tokens", "labels"}:
            raise RunError("this peer knows of no documents within a sample and counts every label")
        missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
        if missing:
            raise RunError(f"{' and '.join(missing)} not installed")
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.manual_seed(config.train.seed)
        torch.set_float32_matmul_precision("high")  # TF32 on GPUs, as XLA multiplies float32 there
        self.torch, self.config, self.platform = torch, config, platform
        self.place = torch.device("cuda" if platform == "gpu" else "cpu")
        model = config.model
        self.model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=model.padded_vocabulary,
                n_positions=model.sequence,
                n_embd=model.hidden,
                n_layer=model.layers,
                n_head=model.heads,
                n_inner=model.mlp_width,
                activation_function="gelu_pytorch_tanh" if model.activation == "gelu_tanh" else "gelu",
                resid_pdrop=model.hidden_dropout,
                embd_pdrop=model.hidden_dropout,
                attn_pdrop=model.attention_dropout,
                layer_norm_epsilon=model.layernorm_epsilon,
                initializer_range=model.init_std,
                attn_implementation="sdpa",
                use_cache=False,
            )
        ).to(self.place)
        self.model.train()
        if config.train.recompute != "none":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        matrices = [p for name, p in self.model.named_parameters() if not name.endswith("bias") and ".ln_" not in name]
        others = [p for name, p in self.model.named_parameters() if name.endswith("bias") or ".ln_" in name]
        knobs = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": knobs.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=knobs.learning_rate,
            betas=(knobs.beta1, knobs.beta2),
            eps=knobs.epsilon,
            fused=True,
        )
        self.scaler = torch.amp.GradScaler(self.place.type, enabled=config.precision.compute == "fp16")
        self.loss = torch.compile(self._loss) if compiled else self._loss
        self.batches = [
            {name: torch.tensor(ids, dtype=torch.long) for name, ids in batch.items()} for batch in draw_batches(config)
        ]
        self.device = torch.cuda.get_device_name() if platform == "gpu" else "cpu"
        self.versions = {name: metadata.version(name) for name in ("torch", "transformers")}

    def step(self, index: int) -> Callable[[], float]:
        torch, config = self.torch, self.config
        batch = self.batches[index % DISTINCT_BATCHES]
        size, parts = config.train.micro_batch, config.micro_batches
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.place)
        for part in range(parts):
            rows = slice(part * size, (part + 1) * size)
            tokens, labels = (batch[name][rows].to(self.place, non_blocking=True) for name in ("tokens", "labels"))
            loss = self.loss(tokens, labels) / parts
            self.scaler.scale(loss).backward()
            total += loss.detach()
        if config.optimizer.clip_norm > 0:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

        def wait() -> float:
            if self.platform == "gpu":
                torch.cuda.synchronize()
            return total.item()

        return wait

    def _loss(self, tokens, labels):
        torch, compute = self.torch, self.config.precision.compute
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute)
        with torch.autocast(self.place.type, narrow) if narrow else contextlib.nullcontext():
            logits = self.model(input_ids=tokens).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def peak_bytes(self) -> int:
        return self.torch.cuda.max_memory_allocated() if self.platform == "gpu" else resident_bytes()


def draw_batches(config: Config) -> list[dict]:
    """The batches every contender trains on: arrays [B, s] that depend on the config alone.

    They are mock samples, each of them one document unless `data.eod` marks ends: masks cost the same.
    """
    train = replace(config.train, batch_rampup=None)
    drawn = open_data(replace(config, data=replace(config.data, mock=True), train=train)).training
    return [drawn.batch_at(step) for step in range(DISTINCT_BATCHES)]


def resident_bytes() -> int:
    """Peak resident set size of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


CONTENDERS: dict[str, Callable[[Config, str, int], Contender]] = {
    "mjax": Mjax,
    "eager": lambda *arguments: Torch(*arguments, compiled=False),
    "compile": lambda *arguments: Torch(*arguments, compiled=True),
}


def serve(name: str) -> None:
    """Answer the requests of one benchmark until it asks to stop."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log, not among the answers

    def answer(**values) -> None:
        print(json.dumps(values), file=answers)

    try:
        request = json.loads(sys.stdin.readline())
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request["threads"]])  # XLA sizes its pool by it
        contender = CONTENDERS[name](from_dict(request["config"]), request["platform"], request["threads"])
        steps = count()
        loss = contender.step(next(steps))()
        answer(loss=loss, device=contender.device, versions=contender.versions)
        while "steps" in (request := json.loads(sys.stdin.readline())):
            contender.step(next(steps))()  # not counted: threads of the one before still spin, and caches are cold
            start = time.perf_counter()
            for _ in range(request["steps"]):
                wait = contender.step(next(steps))
            wait()
            answer(seconds=time.perf_counter() - start)
        answer(peak_bytes=contender.peak_bytes())
    except Exception as error:  # the benchmark shows the reason in this contender's row
        lines = str(error).strip().splitlines() or [""]
        reason = lines[0] if isinstance(error, (UsageError, RunError)) else f"{type(error).__name__}: {lines[0]}"
        answer(failed=reason)


if __name__ == "__main__":
    if sys.argv[1] == "mjax":
        restart_with_huge_pages()
    serve(sys.argv[1])
