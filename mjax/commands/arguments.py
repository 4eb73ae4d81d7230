"""The flags of commands that take seconds to import: for --help, which does not wait for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mjax.commands.flags import RunArguments
from mjax.config.bounds import Count
from mjax.generation.sampling import Sampling


@dataclass(frozen=True)
class _ImportArguments:
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Run folder to create, such as runs/gpt2; must not exist or be empty."""
    vocabulary_multiple: Count = 128
    """Pad the embedding with zero rows to a multiple of this, so that --mesh.model divides it; padding is never
    predicted."""
    rope: Annotated[str | None, tyro.conf.arg(metavar="KIND:FACTOR")] = None
    """Lower the rotary frequencies for longer sequences: yarn:8, llama3:8 or linear:4, for a model of 8,192 positions
    65,536 or 32,768. By default positions stay as they are."""


@dataclass(frozen=True)
class FromHfArguments(_ImportArguments):
    """Convert a Hugging Face model (GPT-2, BLOOM, BERT, Llama, Mistral, Qwen, OLMo, Gemma 3 or a mixture) into a run
    folder, to generate, evaluate or train."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder with config.json and model.safetensors, as written by save_pretrained; or one of peft, with --base."""
    tokenizer: str | None = None
    """KIND:FILES as in `mjax prepare`; by default the tokenizer in the source folder."""
    allow_pickle: bool = False
    """Let torch read an old pytorch_model.bin, tensors only; for folders without a safetensors file."""
    base: Path | None = None
    """For a peft folder: the run of the model that its adapters belong to, such as one of from-hf."""
    draw_heads: bool = False
    """Initialise the BERT heads that are missing in the folder at random (MLM head, pooler, order head)."""


@dataclass(frozen=True)
class FromMegatronArguments(_ImportArguments):
    """Convert a Megatron-LM checkpoint (a GPT, BERT, Llama or mixture of experts; formats torch and torch_dist) into a
    run folder."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of Megatron's --save, or of one checkpoint in it, such as release or iter_0300000."""
    step: int | None = None
    """Checkpoint to convert; by default the one in latest_checkpointed_iteration.txt."""
    tokenizer: str | None = None
    """KIND:FILES as in `mjax prepare`, such as gpt2:vocab.json,merges.txt: Megatron stores none."""
    vocabulary: int | None = None
    """Number of embedding rows that are tokens; the others are padding. By default the size of the tokenizer, or all
    rows without one."""
    heads: int | None = None
    """Attention heads; required if the checkpoint does not say."""
    activation: Literal["gelu_tanh", "gelu_erf"] | None = None
    """GELU, if the checkpoint does not say; by default gelu_tanh for a GPT and gelu_erf for a BERT."""


@dataclass(frozen=True)
class ToHfArguments:
    """Export a run's checkpoint as a folder for transformers."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, such as runs/demo; same as --run RUN."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder to create."""
    step: int | None = None
    """Checkpoint to convert; by default the newest intact one."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the tensors; mjax stores fp32, bf16 rounds to half the size."""
    shard_size: str = "50GB"
    """Maximum size of a file, such as 5GB; larger models are split into several files."""
    tokenizer: str | None = None
    """KIND:FILES as in `mjax prepare`, for a run that has none; `none` exports no tokenizer."""
    overwrite: bool = False
    """Replace an existing model folder."""
    adapter: bool = False
    """Of a run with adapters (LoRA): write these alone, as a peft folder."""
    merged: bool = False
    """Of a run with adapters: add them to the weights of their base, and write a whole model."""
    base_name: str | None = None
    """With --adapter: the base model as peft finds it, a folder or its name on the hub; by default the base's run."""


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(RunArguments):
    """Continue prompts with a trained model."""

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Prompt; may be given several times. Without it, or for -, each line of stdin is one."""
    num_samples: Count = 1
    """Continuations of each prompt."""
    chat: bool = False
    """Talk with the model by its chat template: each prompt is a question. Without a prompt, ask on a terminal, or read
    stdin: lines are the questions of one conversation, JSON is whole conversations."""
    system: str | None = None
    """With --chat: the system message."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    compute: Annotated[Literal["bf16", "fp16", "fp32"] | None, tyro.conf.arg(name="precision.compute")] = None
    """Dtype of activations and matrix products; by default as in training, and for an import that of its files."""
    model_parallel: Annotated[int, tyro.conf.arg(name="mesh.model")] = 1
    """Devices that share every layer's matrices; may differ from training."""
    json: bool = False
    """Print one JSON object per continuation, each on its own line."""
