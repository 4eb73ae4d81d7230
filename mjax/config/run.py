"""Every option of a run, typed, documented and checked before a device is touched.

One `Config` describes one run. A short Python file defines it (`configs/gpt_8b.py`), flags change its fields
(`--mesh.data 64`), and `config.json` in the run folder stores plain values, so opening a run executes no code. This
module imports no JAX, so `--help` is fast.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mjax.config.bounds import Bounds, Count, CountOrZero, NotNegative, Seed, Share
from mjax.config.marks import (
    BLEND,
    DTYPES,
    FILE_ONLY,
    FREE,
    PER_PROCESS,
    PLANNED,
    RATE,
    SEARCHED,
    UNPLANNED,
    Only,
    Synonyms,
    names_with,
)
from mjax.config.model import REGISTRY, Arrays, ModelConfig, config_class, is_user_defined, placeholder_class
from mjax.config.model_file import describe_change, read_model_file, refuse_unknown, source_file
from mjax.config.plain_values import build, fits
from mjax.errors import UsageError, check_folder, shorten_list, suggestion
from mjax.utils.files import is_hub_name, read_json, write_whole

Compute = Literal["bf16", "fp8", "fp16", "fp32", "fp64"]
ComputeDtype = Annotated[Literal["bf16", "fp16", "fp32"] | None, tyro.conf.arg(name="precision.compute"), DTYPES]
"""Of commands that use a trained model."""
Recompute = Literal["none", "selective", "full", "offload"]
RECOMPUTE_SYNONYMS = Synonyms(
    "recompute-activations=selective recompute-granularity gradient-checkpointing=full activation-checkpoint.mode"
)
WSD = Only("optimizer.schedule", "wsd")
SCALED = Only("optimizer.parametrization", "mup completep")
Schedule = Literal["cosine", "linear", "constant", "inverse_square_root", "wsd"]
TEXT = Only("samples", "text")
"""Mark of fields for next-token prediction."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh. Ranks of `model` should share a server, so keep it within one.

    `--mesh.pp`, `dp`, `tp`, `ep` and `cp` are accepted for pipe, data, model, expert and context.
    """

    pipe: Annotated[Count, Synonyms("pipeline-parallel pp")] = 1
    """Pipeline stages, each with its share of the layers (1: no pipeline)."""
    data: Annotated[Count, Synonyms("data-parallel data-parallel-shard dp-shard dp gpus")] = 1
    """Data-parallel replicas."""
    model: Annotated[Count, Synonyms("tensor-parallel tp")] = 1
    """Devices that split every layer's matrices (Megatron's tensor parallelism)."""
    expert: Annotated[Count, Synonyms("expert-parallel ep")] = 1
    """Data-parallel replicas that share the experts: each computes its experts for the tokens of all replicas. It
    divides data."""
    context: Annotated[Count, Synonyms("context-parallel cp")] = 1
    """Devices that split every sequence (context parallelism): each has a part of its positions and activations."""
    context_attention: Annotated[Literal["auto", "ulysses", "allgather"], Synonyms("cp-comm-type~")] = "auto"
    """Attention with --mesh.context above 1. ulysses: all-to-all, each rank attends with some heads over all positions.
    allgather: ranks gather all keys and values. auto: ulysses if `context` divides the heads."""
    sequence_parallel: Annotated[bool, Synonyms("sp")] = False
    """Split LayerNorm, dropout and the residual stream by tokens over `model` too (arXiv 2205.05198): less memory, same
    communication. No effect with `model` 1."""
    schedule: Annotated[Literal["gpipe", "1f1b"], FILE_ONLY, Synonyms("pipeline-parallel-schedule~")] = "1f1b"
    """Order of forward and backward passes in the pipeline. With virtual_stages above 1, 1f1b is interleaved."""
    virtual_stages: Annotated[Count, Synonyms("layers-per-virtual-pipeline-stage~ virtual-pipeline-parallel")] = 1
    """Virtual stages per pipeline rank, V (interleaved 1F1B, arXiv 2104.04473): the bubble is V times smaller."""
    zero: Annotated[Literal[0, 1, 3], Synonyms("distributed-optimizer=1 zero-stage fsdp=3 torch-fsdp2=3")] = 0
    """Sharding over `data`. 0: none. 1: weights and moments between steps (ZeRO-1). 3: also weights during the step,
    gathered layer by layer (ZeRO-3, FSDP)."""
    replicate: Annotated[Count, Synonyms("distributed-optimizer-instances dp-replicate data-parallel-replicate")] = 1
    """Groups of data-parallel replicas with a copy of all weights (HSDP): ZeRO shards within a group, and groups
    all-reduce the gradients of their shards once a step. It divides data."""
    stage_layers: Annotated[
        tuple[int, ...],
        Synonyms("pipeline-parallel-layout~ decoder-first-pipeline-num-layers~ decoder-last-pipeline-num-layers~"),
    ] = ()
    """Layers of each virtual stage, in order (by default as equal as possible). Fewer on the last stage make up for the
    head."""

    @property
    def devices(self) -> int:
        """Devices of the mesh; `replicate` and `expert` only divide those of `data`."""
        return self.pipe * self.data * self.context * self.model

    @property
    def splits_tokens(self) -> bool:
        """True if sequence parallelism splits the residual stream over several ranks of `model`."""
        return self.sequence_parallel and self.model > 1


@dataclass(frozen=True)
class DataConfig:
    """Sources of samples."""

    path: Annotated[tuple[str, ...], BLEND, PLANNED, Synonyms("data data-path dataset data-dir train-file")] = ()
    """Prefixes of indexed datasets, written by `mjax prepare` or Megatron's preprocess_data. Several are blended by
    weight, such as 0.3 data/a 0.7 data/b, or without weights by size."""
    split: str = "949,50,1"
    """Proportions of documents for training, validation and test, as in Megatron: 949,50,1 is 94.9%, 5% and 0.1%. Not
    used with train_path."""
    train_path: Annotated[tuple[str, ...], BLEND, Synonyms("train-data train-data-path")] = ()
    """Instead of path: a blend for training only, together with valid_path."""
    valid_path: Annotated[tuple[str, ...], BLEND, Synonyms("valid-data-path val-data validation-file")] = ()
    """With train_path: a blend for validation only."""
    mock: Annotated[bool, PLANNED, Synonyms("mock-data")] = False
    """Train on synthetic tokens instead of data.path, to measure speed."""
    custom: Annotated[bool, FILE_ONLY] = False
    """Batches come from the caller of `mjax.Trainer`, which sets this field."""
    train_samples: Count | None = None
    """Training samples in the drawn order (by default the samples of all steps). Set it to lengthen a run later without
    changing Megatron's order. The last batch of conversations is padded."""
    reset_positions: Annotated[bool, PLANNED, TEXT, Synonyms("reset-position-ids")] = False
    """Restart positions at 0 after each end of document."""
    reset_attention: Annotated[bool, PLANNED, TEXT, Synonyms("reset-attention-mask")] = False
    """Let a token attend only to tokens of its document."""
    mask_eod_loss: Annotated[bool, TEXT, Synonyms("eod-mask-loss")] = False
    """Ignore the loss of the token after an end of document, which cannot be predicted."""
    conversations: Annotated[bool, FILE_ONLY, Only("samples", "text conversations")] = False
    """Samples are whole conversations of `mjax prepare --chat` that do not attend to each other. Only the turns of the
    assistant are trained. A new run's data sets it."""
    pack: Annotated[bool, Only("samples", "conversations")] = True
    """Pack as many conversations into a sequence as fit. Without it, one each, padded."""
    eod: CountOrZero | None = None
    """End-of-document id for the resets and the mask above (by default from the data's tokenizer)."""
    cache: Annotated[str | None, FREE, PER_PROCESS, Synonyms("data-cache-path")] = None
    """Folder of the index cache (by default PREFIX.cache, or ~/.cache/mjax if that is not writable)."""

    def __post_init__(self):
        for name in BLENDS:
            value = getattr(self, name)
            if value is None or isinstance(value, str):  # one prefix or none
                object.__setattr__(self, name, (value,) if value else ())

    def batch_types(self) -> dict[str, str]:
        """The arrays [B, s] of a batch and their dtypes.

        tokens     the sample
        labels     the next token of each token
        loss_mask  True if a label counts; optional in batches of `data.custom`
        positions  position of a token in its document or conversation
        documents  number of a token's document within the sample
        """
        types = {"tokens": "int32", "labels": "int32"}
        if self.custom or self.conversations or self.mask_eod_loss:
            types["loss_mask"] = "bool"
        if self.reset_positions or self.conversations:
            types["positions"] = "int32"
        if self.reset_attention or self.conversations:
            types["documents"] = "int32"
        return types


BLENDS = names_with(BLEND, DataConfig)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate. Weight decay applies to matrices and embeddings, never to biases or
    LayerNorm."""

    name: Annotated[Literal["adamw", "muon"], PLANNED, Synonyms("optimizer~ optim~")] = "adamw"
    """adamw, or muon: orthogonalized momentum for the matrices of the layers, AdamW for embeddings, heads, norms and
    biases."""

    learning_rate: Annotated[NotNegative, RATE, Synonyms("lr peak-lr max-lr")] = 1.5e-4
    """Peak learning rate."""
    min_learning_rate: Annotated[NotNegative, RATE, Synonyms("min-lr min-lr-factor~")] = 1e-5
    """Learning rate at the end of the schedule."""
    schedule: Annotated[Schedule, RATE, Synonyms("decay-style scheduler scheduler-type decay-lr~")] = "cosine"
    """Shape of the decay after warm-up (wsd: warm-up, stable, decay)."""
    warmup_steps: Annotated[CountOrZero, RATE, Synonyms("warmup-iters warmup-steps warmup-ratio~ warmup-fraction~")] = 0
    """Steps of linear warm-up."""
    decay_steps: Annotated[Count | None, RATE, Synonyms("decay-iters decay-steps decay-ratio~")] = None
    """Step at which min_learning_rate is reached (by default train.steps)."""
    wsd_decay_steps: Annotated[Count | None, RATE, WSD, Synonyms("wsd-decay-iters")] = None
    """wsd only: length of the final decay, in steps (by default a tenth of decay_steps)."""
    wsd_decay: Annotated[Literal["exponential", "linear", "minus_sqrt"], RATE, WSD] = "exponential"
    """wsd only: shape of the final decay. minus_sqrt: 1 − √x after a fraction x of it (arXiv 2405.18392)."""
    weight_decay: Annotated[NotNegative, Synonyms("wd")] = 0.01
    """Decoupled weight decay."""
    beta1: Annotated[Share, FILE_ONLY, Synonyms("adam-beta1")] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[Share, FILE_ONLY, Synonyms("adam-beta2")] = 0.999
    """Decay of the second moment."""
    epsilon: Annotated[float, Bounds(gt=0, such_as="1e-8"), FILE_ONLY, Synonyms("adam-eps adam-epsilon eps")] = 1e-8
    """Added to the square root of the second moment. With 0 a weight without gradient would become 0 / 0."""
    clip_norm: Annotated[NotNegative, Synonyms("clip-grad grad-clip gradient-clip-val max-grad-norm max-norm")] = 1.0
    """Largest global L2 norm of the gradient (0: no clipping)."""
    parametrization: Literal["standard", "mup", "completep"] = "standard"
    """Initial weights, learning rates and ε by the kind of weight, so that a learning rate tuned on a small model fits
    a wider one (mup, arXiv 2203.03466), and also a deeper one (completep, arXiv 2505.01618)."""
    base_width: Annotated[Count | None, SCALED, FILE_ONLY] = None
    """mup and completep: hidden size of the model whose learning rate was tuned; other widths are in proportion."""
    base_depth: Annotated[Count | None, Only("optimizer.parametrization", "completep"), FILE_ONLY] = None
    """completep: its layers."""
    base_head_size: Annotated[Count | None, SCALED, FILE_ONLY] = None
    """mup and completep: its attention head size (by default this model's, which then has more heads)."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of the computation. Parameters and moments are always float32, as are the sums in LayerNorm, softmax,
    cross entropy and gradients."""

    compute: Annotated[Compute, DTYPES] = "bf16"
    """Dtype of activations and matmuls. fp8: bf16, with linear layers' matmuls in float8 in training. fp16: with loss
    scaling. fp64 (parameters too): for tests, with JAX_ENABLE_X64=1 in the environment."""
    initial_loss_scale: Annotated[float, Bounds(ge=1), FILE_ONLY] = 2.0**32
    """fp16 only: initial loss scale."""
    loss_scale_window: Annotated[Count, FILE_ONLY] = 1000
    """fp16 only: finite steps in a row after which the loss scale doubles."""


@dataclass(frozen=True)
class TrainConfig:
    """Length of training, batches and recomputation."""

    steps: Annotated[Count, FREE, Synonyms("train-iters max-steps epochs~ train-epochs~ train-samples~")] = 300_000
    """Optimizer steps, an epoch being tokens of the data / (global batch × sequence) steps."""
    tokens: Annotated[str | None, FREE, Synonyms("train-tokens total-tokens max-tokens")] = None
    """Instead of steps: training tokens, such as 300B or 1.5T (K, M, B, T: thousands to trillions), rounded up to whole
    steps. The run's config.json contains the steps."""
    global_batch: Annotated[Count, Synonyms("batch global-batch gradient-accumulation-steps~")] = 512
    """Sequences per step over all devices. With a ramp-up, the final batch."""
    batch_rampup: Annotated[
        tuple[int, int, int] | None, tyro.conf.arg(metavar="START INCREMENT SAMPLES"), Synonyms("rampup-batch")
    ] = None
    """Megatron's --rampup-batch-size, such as 16 16 100000: begin with START sequences per step and add INCREMENT
    at a time, in equal portions of the first SAMPLES samples, up to global_batch."""
    batch_history: Annotated[tuple[tuple[int, int], ...], FILE_ONLY, FREE] = ()
    """(steps, sequences per step) before the batch size was changed (`--allow-change`): data, tokens and learning rate
    continue from these samples. A run writes it. It has no flag."""
    micro_batch: Annotated[Count, FREE, SEARCHED, Synonyms("batch micro-batch local-batch per-device-train-batch")] = 8
    """Sequences per forward pass and data-parallel replica. Gradients are accumulated over the step's
    micro-batches."""
    recompute: Annotated[Recompute, FREE, SEARCHED, RECOMPUTE_SYNONYMS] = "none"
    """Activation recomputation. none: store all. selective: attention core and elementwise work. full: whole layers.
    offload: full, with layer inputs in host memory (needs a loop over the layers, no pipeline)."""
    unroll: Annotated[Literal["auto", "on", "off"], FREE] = "auto"
    """Compile the layers without a loop: faster on a GPU, longer to compile. auto: on GPUs if it fits into memory, but
    not in a pipeline, with FSDP or beyond 80 layers."""
    loss_chunks: Annotated[int, Bounds(ge=1, le=64), FREE, SEARCHED] = 1
    """Chunks of the vocabulary for logits and loss, computed one after the other. Above 1 the full logits are never in
    memory, for one more output-layer matmul in the backward pass."""
    seed: Annotated[Seed, UNPLANNED, Synonyms("random-seed")] = 1234
    """Determines initial weights, sample order and dropout, on any mesh."""
    eval_interval: Annotated[CountOrZero, FREE, UNPLANNED, Synonyms("eval-steps~ eval-every")] = 1000
    """Steps between validations (0: none)."""
    eval_batches: Annotated[Count, FREE, UNPLANNED, Synonyms("eval-iters")] = 10
    """Global batches per validation."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    interval: Annotated[CountOrZero, Synonyms("save-interval save-steps save-every checkpoint-interval every")] = 1000
    """Steps between checkpoints (0: none). The last step and an interruption always save."""
    keep_last: Annotated[Count, Synonyms("save-total-limit")] = 2
    """Number of most recent checkpoints to keep."""
    keep_every: Count | None = None
    """Keep every checkpoint at a multiple of this step, such as 10000."""


@dataclass(frozen=True)
class HealthConfig:
    """Health checks. A step is unhealthy if it is skipped because of non-finite values, or if its loss spikes."""

    spike: Literal["warn", "skip", "rollback", "ignore"] = "warn"
    """Response to a loss spike (six standard deviations above the mean of 100 steps). warn: report. skip: drop the
    update. rollback: reload the last good checkpoint, skip batches before the spike. ignore: nothing."""


@dataclass(frozen=True)
class LogConfig:
    """Logging and display."""

    interval: Annotated[Count, Synonyms("every log-every log-interval logging-steps log-freq")] = 1
    """Steps between lines of metrics.jsonl and TensorBoard scalars."""
    tensorboard: Annotated[bool, FILE_ONLY, PER_PROCESS, Synonyms("tensorboard-dir tensorboard logging-dir")] = True
    """Write TensorBoard scalars into the run folder."""
    wandb: Annotated[str | None, PER_PROCESS, Synonyms("wandb-project wandb report-to~")] = None
    """Weights & Biases project to log to (needs the wandb package)."""
    trackio: Annotated[str | None, PER_PROCESS] = None
    """Trackio project to log to (needs the trackio package)."""
    scaling: Annotated[str | None, PER_PROCESS] = None
    """The scaling.json of `mjax scale`: its forecast is drawn into loss.png, and a validation loss outside of its
    interval is reported."""
    prompt: Annotated[str | None, FILE_ONLY] = None
    """Prompt for the text sample at the end of training (by default the first tokens of validation data)."""
    sample_prompts: str | None = None
    """File of prompts, one per line, that the model continues or (conversations) answers at each validation, into
    samples.jsonl."""
    sample_tokens: CountOrZero = 96
    """Tokens in the text sample at the end of training (0: no sample)."""


@dataclass(frozen=True)
class Config:
    """One run of mjax."""

    model: ModelConfig = field(default_factory=lambda: REGISTRY["gpt"]())
    mesh: Annotated[MeshConfig, FREE, SEARCHED] = field(default_factory=MeshConfig)
    data: Annotated[DataConfig, UNPLANNED] = field(default_factory=DataConfig)
    optimizer: Annotated[OptimizerConfig, UNPLANNED] = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: Annotated[CheckpointConfig, FREE, UNPLANNED] = field(default_factory=CheckpointConfig)
    health: Annotated[HealthConfig, FREE, UNPLANNED] = field(default_factory=HealthConfig)
    log: Annotated[LogConfig, FREE, UNPLANNED] = field(default_factory=LogConfig)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a data-parallel replica in a step, m."""
        return self.train.global_batch // (self.mesh.data * self.train.micro_batch)

    @property
    def samples(self) -> Literal["text", "conversations", "pairs", "examples"]:
        """The kind of training data; `examples` belong to a labelled task."""
        if self.model.samples == "text" and self.data.conversations:
            return "conversations"
        return self.model.samples or "examples"

    @property
    def context_attention(self) -> Literal["ulysses", "allgather"] | None:
        """Exchange of positions over `context` in attention, with auto resolved; None: a rank has whole sequences."""
        if self.mesh.context == 1:
            return None
        if self.mesh.context_attention != "auto":
            return self.mesh.context_attention
        return "allgather" if self.model.heads // self.mesh.model % self.mesh.context else "ulysses"

    @property
    def sequence_chunks(self) -> int:
        """Chunks of a sequence: two for each rank of `context` with allgather, otherwise 1."""
        return 2 * self.mesh.context if self.context_attention == "allgather" else 1

    def batch_arrays(self) -> Arrays:
        """The arrays of a batch: shape of one sample, [s] or [], and dtype."""
        return self.model.batch(self.data)


# --- Finding and loading a config -------------------------------------------------------------------------------------


def config_folders() -> list[Path]:
    """Folders with configs: of the working directory, the source tree and the installed package."""
    package = Path(__file__).resolve().parents[1]
    folders = [Path.cwd() / "configs", package.parent / "configs", package / "configs"]
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def available_configs() -> list[str]:
    """Names accepted by `--config`."""
    return sorted({file.stem for folder in config_folders() for file in folder.glob("*.py") if file.stem != "__init__"})


def load_config(name: str) -> Config:
    """Load `configs/NAME.py` or NAME.py, or the file itself when `name` ends in .py or .json, and return its `config`.

    Raises:
      UsageError: there is no such config, there are two, the file raises an error, or it defines no `config`.
    """
    if name.endswith(".json"):  # of a run
        return read_config(Path(name))
    file = _config_file(name)
    config = getattr(_execute(file), "config", None)
    if not isinstance(config, Config):
        raise UsageError(f"{file} defines no `config = Config(...)`; see configs/gpt_demo.py for the form")
    return config


def load_user_model(name: str | None, run: Path, print_line: Callable[[str], None]) -> None:
    """Register the custom model of the run in folder `run`; its settings still come from config.json.

    Args:
      name: as for `load_config`, but the file needs no `config`; None: nothing is loaded.
      run: folder of the run.
      print_line: called with a note if the file that defines the model has changed since the run was trained.

    Raises:
      UsageError: the run has a model of mjax, or the file raises an error or registers no such model.
    """
    model = read_settings(run / "config.json").model
    if name is not None:
        if not is_user_defined(type(model)):
            raise UsageError(f"--config {name} has no effect on {run}, which has {model.title}; remove it")
        _execute(_config_file(name))
        if model.kind not in REGISTRY:
            known = read_model_file(run)
            where = f"; it was defined in {known.file}" if known and known.file else ""
            raise UsageError(f"--config {name} registers no {model.kind!r}, the model of {run}{where}")
    if model.kind in REGISTRY and (note := describe_change(run, REGISTRY[model.kind])):
        print_line(note)


def has_user_model(run: Path) -> bool:
    """True if the run in folder `run` has a custom model.

    Raises:
      UsageError: its config.json is missing or damaged.
    """
    return is_user_defined(type(read_settings(run / "config.json").model))


def _execute(file: Path) -> types.ModuleType:
    """Execute a config file, as a module of its path; files of the same name are different modules.

    Raises:
      UsageError: the file raises an error.
    """
    path = str(file.absolute())
    name = f"mjax_config_{file.stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = path
    try:
        exec(compile(file.read_bytes(), path, "exec"), module.__dict__)  # not from __pycache__, which may be older
    except (UsageError, OSError):
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        field = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        new = next((names[field[1]] for names in RENAMED.values() if field and field[1] in names), None)
        now = f"; {field[1]} is now {new}" if new else ""
        line = error.lineno if isinstance(error, SyntaxError) and error.filename == path else (lines or [None])[-1]
        problem = error.msg if isinstance(error, SyntaxError) else error
        place = f"{file}{f', line {line},' if line else ''} raises {type(error).__name__}: {problem}{now}"
        raise UsageError(f"{place}; fix the file, python {shlex.quote(str(file))} shows the traceback") from error
    return module


def _config_file(name: str) -> Path:
    """The Python file of `--config NAME`."""
    local, known = Path(name if name.endswith(".py") else f"{name}.py"), available_configs()
    files = [] if name.endswith(".py") else [folder / local for folder in config_folders()]
    files = [file for file in (*files, local) if file.is_file()]
    if (Path(name) / "config.json").is_file():
        raise UsageError(f"{name} is a run folder; type --run {name}, or --config {name}/config.json for a new run")
    if not files:
        if name.endswith(".py"):
            raise UsageError(f"there is no config file {name}; give the path of one, or a name of `mjax configs`")
        near = suggestion(name, known, "give a name or the path of a .py file:")
        raise UsageError(f"there is no config {name}; {near} `mjax configs` lists all {len(known)}")
    if files[-1] == local and not local.samefile(files[0]):
        raise UsageError(f"--config {name} is {files[0]} or ./{local}; type --config ./{local} for the local one")
    return files[0]


# --- As plain values --------------------------------------------------------------------------------------------------


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, as in config.json."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], source: str = "config.json") -> Config:
    """The inverse of `to_dict`; missing fields have their defaults.

    Raises:
      UsageError: a field is unknown or has a value of another type; `source` is the origin in messages.
    """
    return _from_dict(values, source, lambda model: config_class(model["kind"], source))


def _from_dict(values: Any, source: str, class_of: Callable[[dict[str, Any]], type[ModelConfig]]) -> Config:
    if not isinstance(values, dict) or not isinstance(values.get("model", {}), dict):
        return build(Config, values, source)  # raises
    values = _upgrade(values, source)
    model = {"kind": "gpt", **values.get("model", {})}
    rest = {name: value for name, value in values.items() if name != "model"}
    config, cls = build(Config, rest, source), class_of(model)
    try:
        return replace(config, model=build(cls, model, source, "model."))
    except UsageError as error:
        if (file := source_file(cls)) is None:
            raise
        raise UsageError(f"{error}; {cls.__name__} is defined in {file}") from None


OLD_NAMES = json.loads(Path(__file__).with_name("names_0_2.json").read_text(encoding="utf-8"))
"""Names of mjax 0.2.0: fields, values and flags with their names since, and removed fields with the value that now
applies. To be removed after mjax 0.4."""
RENAMED, RENAMED_VALUES, REMOVED = (OLD_NAMES[kind] for kind in ("fields", "values", "removed"))


def _upgrade(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the sections of a config with the fields of today.

    Raises:
      UsageError: one of the fields `REMOVED` has another value.
    """
    sections = {name: dict(section) for name, section in values.items() if isinstance(section, dict)}
    model, health = sections.get("model", {}), sections.get("health", {})
    cls = REGISTRY.get(str(model.get("kind")))
    taken = {knob.name for knob in dataclasses.fields(cls)} if cls else set()  # by a custom model
    for section, names in RENAMED.items():
        fields = sections.get(section, {})
        for old, new in names.items():
            if old in fields and new not in fields and (section != "model" or old not in taken):
                fields[new] = fields.pop(old)
    for name, renamed in RENAMED_VALUES.items():
        section, _, knob = name.partition(".")
        if (old := str(sections.get(section, {}).get(knob))) in renamed:
            sections[section][knob] = renamed[old]
    if health.get("spike_deviations") == 0.0:
        health |= {"spike": "ignore", "spike_deviations": 6.0}
    rank, alpha = model.get("lora_rank"), model.get("lora_alpha")
    if model.get("lora_rslora") is True and fits(rank, int) and fits(alpha, float | None):
        model |= {"lora_alpha": (2 * rank if alpha is None else alpha) * rank**0.5, "lora_rslora": False}
    for name, only in REMOVED.items():
        section, _, knob = name.partition(".")
        if (value := sections.get(section, {}).pop(knob, only)) != only:
            always = f"and since mjax 0.2.0 it is always {only!r}; remove it there to continue with that"
            raise UsageError(f"{source}: {name} is {value!r}, {always}")
    return values | sections


def save_config(config: Config, file: Path) -> None:
    """Write `config` as JSON, atomically."""
    write_whole(file, json.dumps(to_dict(config), indent=2) + "\n")


def read_config(file: Path) -> Config:
    """Read a `config.json`.

    Raises:
      UsageError: the file is missing, is not JSON or not a config, or its model is not registered.
    """

    def find_class(model: dict[str, Any]) -> type[ModelConfig]:
        if isinstance(model["kind"], str) and model["kind"] not in REGISTRY:
            refuse_unknown(file.parent, model["kind"])
        return config_class(model["kind"], str(file))

    return _from_dict(_read_values(file), str(file), find_class)


def read_settings(file: Path) -> Config:
    """Read the settings of a `config.json`, without the class of a custom model: its model cannot be built.

    Raises:
      UsageError: the file is missing, or is not JSON or not a config.
    """
    return _from_dict(_read_values(file), str(file), lambda model: placeholder_class(model, str(file)))


def _read_values(file: Path) -> Any:
    if not file.exists():
        raise UsageError(describe_missing_run(file.parent))
    values = read_json(file, "restore it, or start a new run with --name")
    if isinstance(values, dict) and "model_type" in values:
        folder = file.parent
        raise UsageError(f"{folder} is a Hugging Face folder, not a run; type mjax convert from-hf {folder} RUN")
    return values


def describe_missing_run(folder: Path) -> str:
    """Say that a folder is not a run, and name a similar run or the existing ones."""
    problem = "is not a run folder: it has no config.json" if folder.exists() else "does not exist"
    if is_hub_name(folder):
        convert = f"`hf download {folder} --local-dir {folder.name}` and `mjax convert from-hf {folder.name} RUN`"
        return f"{folder} does not exist, and no model is downloaded by its name; type {convert}"
    for near in (Path("runs") / folder, *folder.parents):
        if (near / "config.json").is_file():
            step = f" --step {folder.name}" if folder.name.isdigit() else ""
            return f"{folder} {problem}; did you mean {near}{step}?"
    place = folder if folder.is_dir() else folder.parent
    runs = sorted(file.parent.name for file in place.glob("*/checkpoints"))
    shown = f"runs in {place}: {', '.join(shorten_list(runs, 8))}" if runs else "give a run folder such as runs/demo"
    step = f", and --step {folder.name} for its checkpoint" if folder.name.isdigit() else ""
    return f"{folder} {problem}; {suggestion(folder.name, runs, shown + step, f'{place}/{{}}')}"


def differing_fields(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs differ, by dotted name: {'mesh.data': (1, 8)}."""
    changes = {}
    for section, a in vars(first).items():
        b = getattr(second, section)
        names = dict.fromkeys(knob.name for settings in (a, b) for knob in dataclasses.fields(settings))
        pairs = {name: (getattr(a, name, None), getattr(b, name, None)) for name in names}
        changes |= {f"{section}.{name}": values for name, values in pairs.items() if values[0] != values[1]}
    return changes


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """`config` with other values for fields with these dotted names: with_values(config, {"mesh.zero": 3})."""
    for name, value in values.items():
        section, field = name.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{field: value})})
    return config


def to_flag(name: str, value: Any) -> str:
    """Return a field and its value as a flag: `model.kv_heads`, 8 → `--model.kv-heads 8`."""
    section, _, knob = name.replace("_", "-").partition(".")
    if knob.startswith("lora-"):
        section, knob = knob.split("-", 1)
    if isinstance(value, bool):
        return f"--{section}.{'' if value else 'no-'}{knob}"
    return f"--{section}.{knob} {shlex.join(map(str, value if isinstance(value, tuple) else (value,)))}"


# --- As a Python file with the differences from the defaults, formatted as by ruff ------------------------------------


def check_new(file: Path, flag: str = "--write") -> None:
    """Check that an output file can be written, before any work is done.

    Raises:
      UsageError: it is not a .py file, it exists already, or its folder does not.
    """
    if file.suffix != ".py":
        raise UsageError(f"{flag} {file} is not a Python file; use a name that ends in .py")
    if file.exists():
        raise UsageError(f"{flag} {file} already exists and is not overwritten; use another file, or move it away")
    check_folder(flag, file)


def write_config(config: Config, file: Path, about: str) -> None:
    """Write `config` into the new file `file`, atomically; `load_config` returns exactly this config.

    Args:
      config: the config.
      file: its path, ending in .py.
      about: docstring of the file: a first line, an empty one, and further text.

    Raises:
      UsageError: the file exists already, or its folder does not.
    """
    text = config_source(config, about)
    check_new(file)
    write_whole(file, text)


def config_source(config: Config, about: str) -> str:
    """The text of a config file."""
    names, own_models, of_folders, calls, default = ["Config"], "", "", "", Config()
    for name, section in vars(config).items():
        if section == getattr(default, name):
            continue
        cls, file = type(section), source_file(type(section))
        if file is None and is_user_defined(cls):
            of_folders += f"from {cls.__module__} import {cls.__name__}\n"
        else:
            names.append(cls.__name__ if file is None else "load_config")
        own_models += f"{cls.__name__} = type(load_config({_literal(file)}).model)\n\n" if file else ""
        values = ((knob, getattr(section, knob.name)) for knob in dataclasses.fields(section))
        changed = ((knob.name, value) for knob, value in values if value != knob.default)
        arguments = "".join(f"        {knob}={_literal(value)},\n" for knob, value in changed)
        calls += f"    {name}={cls.__name__}(\n{arguments}    ),\n"
    docstring = about.strip().replace("\\", "\\\\").replace('"""', "'''")
    imports = "from mjax.config import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")"
    return f'"""{docstring}\n"""\n\n{imports}\n{of_folders}\n{own_models}config = Config(\n{calls})\n'


def _literal(value: Any) -> str:
    """A value as Python source; whole numbers with underscores."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:_}"
    if isinstance(value, tuple):
        parts = [_literal(part) for part in value]
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
