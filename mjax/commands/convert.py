"""`mjax convert`: import a model as a run folder, and export a run's checkpoint.

    from-hf DIR OUT         a Hugging Face folder → OUT/config.json, OUT/tokenizer, OUT/checkpoints/0
    from-megatron DIR OUT   the same for a Megatron-LM checkpoint
    to-hf RUN DIR           DIR/config.json, model.safetensors, generation_config.json, the tokenizer's files
    to-megatron RUN DIR     DIR/latest_checkpointed_iteration.txt, DIR/release, DIR/tokenizer

A run with adapters (LoRA) becomes a peft folder with --adapter and a whole model with --merged; from-hf reads a peft
folder on the run of its base.

All run on the CPU, with one layer of one weight in memory, whatever the size of the model.
"""

import dataclasses
import json
import math
import shlex
import shutil
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from mjax.checkpoint.arrays import read_in_blocks
from mjax.checkpoint.base import base_folder, check_base, digest_in_blocks, without_base
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import Base, check_run_folder, read_base, save_base
from mjax.commands.arguments import FromHfArguments, FromMegatronArguments, ToHfArguments, ToMegatronArguments
from mjax.config import Config, DataConfig, load_user_model, read_config, read_settings, save_config
from mjax.config.model import ModelConfig
from mjax.config.run import describe_missing_run
from mjax.data.tokenizers import HuggingFaceTokenizer, Tokenizer, load_tokenizer, stop_token_ids, tokenizer_from_folder
from mjax.errors import UsageError
from mjax.interop import convert as models
from mjax.interop import lora, model_folder, tokenizer_files, weights
from mjax.interop.convert import check_vocabulary, write_checkpoint, write_run
from mjax.interop.megatron import arguments as megatron
from mjax.interop.megatron import optimizer
from mjax.interop.megatron.checkpoint import MegatronCheckpoint, open_checkpoint, open_hybrid
from mjax.interop.megatron.export import Export, gather_tensors, make_command, plan_export, write_release
from mjax.interop.megatron.tensors import decoder_family, megatron_family, split_fused
from mjax.interop.tensor_files import Tensors, open_tensors, parse_shard_size, write_tensors
from mjax.interop.tokenizer_files import to_fast_tokenizer
from mjax.interop.torch_files import import_torch
from mjax.models.build import count_parameters
from mjax.models.huggingface.family import Family, config_values, model_config
from mjax.run.continuing import read_origin
from mjax.utils.files import is_hub_name, rename
from mjax.utils.progress import progress, status
from mjax.utils.stores import find_address, to_absolute, with_addresses

Import = FromHfArguments | FromMegatronArguments

# --- Import from Hugging Face -----------------------------------------------------------------------------------------


def from_hf(arguments: FromHfArguments) -> None:
    """`mjax convert from-hf`.

    Raises:
      UsageError: something in the source is missing, damaged or not supported, or the output exists; nothing was
        written.
    """
    source, output = arguments.source, arguments.output
    check_run_folder(output)
    model_folder.check_output(output)
    if not source.is_dir():
        folder = f"{source} is not a folder with config.json and model.safetensors; give one of save_pretrained"
        raise UsageError(describe_missing_run(source) if is_hub_name(source) else folder)
    if (source / lora.ADAPTER_CONFIG).is_file() and not (source / "config.json").is_file():
        return _from_peft(arguments)
    if arguments.base is not None:
        raise UsageError(f"--base is for a folder with {lora.ADAPTER_CONFIG}, and {source} has no such file; remove it")
    file = source / "config.json"
    values = model_folder.read_object(file)
    family = models.find_family(values, file)
    model = model_config(family, values, str(file), arguments.vocabulary_multiple)
    model = models.scale_rope(model, arguments.rope, str(source))
    rope = models.describe_rope(model, arguments.rope)
    tokenizer, carried = _find_tokenizer(arguments, values, model)
    left_out = check_vocabulary(tokenizer, model)
    card = model_folder.make_card(source, f"a {family.model}", rope)
    tensors = open_tensors(source, arguments.allow_pickle)
    model = weights.without_absent_layers(family, tensors, model)
    config = models.import_config(model, str(source), tensors)
    family = weights.with_stored_experts(family, tensors)
    tensor_names = weights.match_tensors(family, tensors, model, str(source), arguments.init_missing_heads)
    absent = weights.find_missing_heads(family, model, tensor_names)

    with progress("reading", 4 * count_parameters(model)) as read:
        drawn = models.init_weights(config, tuple(absent))
        blocks = weights.make_block_reader(family, tensors, tensor_names, model, read, drawn)
        write_run(output, config, tokenizer, blocks, carried, card)
    print(f"{output}: {count_parameters(model):,} {family.model} parameters, checkpoint 0")
    if coefficient := values.get("router_aux_loss_coef"):
        # transformers' loss pools the layers and is k when balanced; the one of mjax is of each layer, and 1.
        flag = f"--model.aux-loss-coef {coefficient * model.experts_per_token / model.expert_layers:g}"
        print(f"router_aux_loss_coef {coefficient:g} is a setting of training; to train with it type {flag}")
    if values.get("num_nextn_predict_layers") and not getattr(model, "mtp_layers", 0):
        print("multi-token prediction, num_nextn_predict_layers, is left out")
    if left_out:
        print(f"the embedding has no rows for {', '.join(left_out[:8])}, which no text encodes to: left out")
    if isinstance(tokenizer, HuggingFaceTokenizer):
        print(f"texts end with {tokenizer.backend.id_to_token(tokenizer.eod)}, id {tokenizer.eod}")
    if tokenizer is not None and tokenizer.bos is not None:
        print(f"texts begin with id {tokenizer.bos}, as in transformers")
    for name in (tokenizer_files.GENERATION_CONFIG, tokenizer_files.CHAT_TEMPLATE):
        if tokenizer is not None and not carried and (source / name).is_file():
            print(f"{source / name} is left out: it needs the folder's tokenizer and tokenizer_config.json")
    if absent:
        print(f"not in {source}, initialised from seed {config.train.seed}: {', '.join(map(family.heads.get, absent))}")
    _print_next_steps(arguments, rope, config, tokenizer)


def _from_peft(arguments: FromHfArguments) -> None:
    """Convert a peft folder into a run with adapters on the run `--base`."""
    source, output, run = arguments.source, arguments.output, arguments.base
    if run is None:
        raise UsageError(f"{source} holds adapters; add --base RUN, the run that from-hf makes of their base model")
    config = read_settings(run / "config.json")
    if config.model.lora_rank:
        raise UsageError(f"--base {run} holds adapters itself; give the run of their base")
    model, adapters = lora.load_adapters(source, config.model, models.export_family(config.model))
    step = _newest(run, config)
    with status("reading the base", Console(stderr=True)):
        digest = digest_in_blocks(run / "checkpoints" / str(step))
    config = dataclasses.replace(config, model=model, data=DataConfig())
    with model_folder.new_folder(output) as folder:
        save_config(config, folder / "config.json")
        save_base(folder, Base(to_absolute(run), step, digest))
        if (run / "tokenizer").is_dir():
            shutil.copytree(run / "tokenizer", folder / "tokenizer")
        target = without_base(models.abstract_model(config))
        write_checkpoint(folder / "checkpoints", {"model": target}, lambda name, first, end: adapters[name][first:end])
    print(f"{output}: adapters of rank {model.lora_rank} on checkpoint {step} of {run}, checkpoint 0")
    print(f'generate     mjax generate --run {shlex.quote(str(output))} --prompt "…"')


# --- Import from Megatron-LM ------------------------------------------------------------------------------------------


def from_megatron(arguments: FromMegatronArguments) -> None:
    """`mjax convert from-megatron`.

    Raises:
      UsageError: something in the source is missing, damaged or not supported, torch is not installed, or the output
        exists; nothing was written.
    """
    source, output = arguments.source, arguments.output
    check_run_folder(output)
    model_folder.check_output(output)
    if arguments.optimizer and arguments.rope is not None:
        raise UsageError("--optimizer continues a run as it is, and --rope changes the model; leave out one of the two")
    checkpoint = open_checkpoint(source, arguments.step)
    folder = str(checkpoint.folder)
    settings = megatron.drop_ignored(checkpoint.arguments, arguments.ignore, folder)
    checkpoint = open_hybrid(dataclasses.replace(checkpoint, arguments=settings))
    model, family, tensors = _model(checkpoint, arguments)
    model = models.scale_rope(model, arguments.rope, folder)
    rope = models.describe_rope(model, arguments.rope)
    places = (checkpoint.folder / "tokenizer", checkpoint.folder.parent / "tokenizer")  # of Megatron-Bridge, of mjax
    from_assets = dataclasses.replace(arguments, source=next(filter(Path.is_dir, places), source))
    tokenizer, carried = _find_tokenizer(from_assets, {}, model)
    rows = model.vocabulary
    vocabulary = _vocabulary(arguments.vocabulary, tokenizer, checkpoint, rows)
    model = dataclasses.replace(model, vocabulary=vocabulary, vocabulary_multiple=arguments.vocabulary_multiple)
    check_vocabulary(tokenizer, model)
    config = models.import_config(model, folder, tensors)
    slots, scalars = {"param": tensors}, {}
    if arguments.optimizer:
        config, scalars = optimizer.read_optimizer(checkpoint, config)
        slots = {slot: _open_slot(checkpoint, slot, model) for slot in optimizer.SLOTS}
    names = {slot: weights.match_tensors(family, slots[slot], model, folder) for slot in slots}
    card = model_folder.make_card(source, family.model, rope)
    step = int(scalars.get(optimizer.STEP, 0))

    with progress("reading", 4 * count_parameters(model) * len(slots)) as read:
        blocks = {slot: weights.make_block_reader(family, slots[slot], names[slot], model, read) for slot in slots}
        reader = optimizer.make_state_reader(blocks, scalars) if arguments.optimizer else blocks["param"]
        write_run(output, config, tokenizer, reader, carried, card, step)
    print(f"{output}: {count_parameters(model):,} parameters of {family.model}, checkpoint {step}, from {folder}")
    padding = f"{rows - model.vocabulary} of padding left out" if rows > model.vocabulary else "none of them padding"
    print(f"embedding: {rows:,} rows, {padding}", end="\n" if checkpoint.arguments is not None else " · ")
    if checkpoint.arguments is None:
        print(f"no arguments in it: {model.heads} heads, {model.activation}, epsilon {model.layernorm_epsilon:g}")
    elif assumed := megatron.assume_arguments(checkpoint.arguments, checkpoint.architecture):
        listed = ", ".join(f"{name} {value}" for name, value in assumed.items())
        print(f"arguments missing in it: assumed {listed}")
    if checkpoint.version_missing:
        origin = "from before megatron-core" if checkpoint.old_names else "of megatron-core"
        print(f"no checkpoint_version in it: assumed {checkpoint.version:g}, because its names are {origin}")
    if checkpoint.architecture == "decoder":
        print("".join(f"{line}\n" for line in megatron.describe_differences(checkpoint.arguments, folder)), end="")
    if arguments.optimizer:
        print(f"continue     python train.py --run {shlex.quote(str(output))} --data.path data/corpus")
    _print_next_steps(arguments, rope, config, tokenizer)


def _open_slot(checkpoint: MegatronCheckpoint, slot: str, model: ModelConfig) -> Tensors:
    """The tensors of a moment, or the main weights in float32, by the names of the model's family."""
    tensors = checkpoint.open_slot(slot)
    return split_fused(tensors, model, str(checkpoint.folder)) if checkpoint.architecture == "decoder" else tensors


def _model(checkpoint: MegatronCheckpoint, arguments: FromMegatronArguments) -> tuple[ModelConfig, Family, Tensors]:
    """The model, its family, and its tensors by the names of the family."""
    folder, settings, tensors = str(checkpoint.folder), checkpoint.arguments, checkpoint.tensors
    kind, version = checkpoint.architecture, checkpoint.version
    if kind != "decoder":
        of_user = arguments.heads, arguments.activation
        model = megatron.model_config(settings, tensors, kind, folder, *of_user, checkpoint.old_names)
        layernorm = getattr(model, "layernorm", "pre")
        if layernorm == "post" and not checkpoint.old_names:
            problem = "apply_residual_connection_post_layernorm is set, which megatron-core ignores"
            raise UsageError(f"{folder}: {problem}; convert a BERT of the years before it")
        return model, megatron_family(kind, version, layernorm, model.layers), tensors
    if flags := [name for name in ("heads", "activation") if getattr(arguments, name) is not None]:
        raise UsageError(f"{folder} says everything of its model itself; leave out --{flags[0]}")
    model = megatron.decoder_config(settings, tensors, folder, version)
    return model, decoder_family(model), split_fused(tensors, model, folder)


def _vocabulary(flag: int | None, tokenizer: Tokenizer | None, checkpoint: MegatronCheckpoint, rows: int) -> int:
    """The number of embedding rows that are tokens.

    Megatron pads the tokens of its tokenizer to a multiple of 128 for each tensor rank. A tokenizer that leaves more
    rows than that is probably the wrong one.
    """
    if flag is not None:
        if not 1 <= flag <= rows:
            raise UsageError(f"--vocabulary is {flag}; the embedding has {rows:,} rows; use 1 to {rows}")
        return flag
    settings = checkpoint.arguments or {}
    if settings.get("tokenizer_type") is None and settings.get("vocab_size") in range(1, rows + 1):  # of to-megatron
        return settings["vocab_size"]
    if tokenizer is None or tokenizer.vocabulary > rows:  # check_vocabulary rejects a larger vocabulary
        return rows
    ranks = checkpoint.tensor_ranks or settings.get("tensor_model_parallel_size") or 1
    multiple = (settings.get("make_vocab_size_divisible_by") or 128) * ranks
    if rows - tokenizer.vocabulary >= multiple:
        padded = f"the embedding {rows:,} rows, more than padding to a multiple of {multiple} explains"
        fix = f"give the model's tokenizer, or add --vocabulary {tokenizer.vocabulary}"
        raise UsageError(f"the tokenizer has {tokenizer.vocabulary:,} ids and {padded}; {fix}")
    return tokenizer.vocabulary


# --- Both imports -----------------------------------------------------------------------------------------------------


def _find_tokenizer(arguments: Import, values: dict, model: ModelConfig) -> tuple[Tokenizer | None, dict[str, bytes]]:
    """The tokenizer of an import, and the files next to it that the run carries until `to-hf` (not those it writes)."""
    tokenizer = tokenizer_files.open_tokenizer(arguments.source, arguments.tokenizer)
    if tokenizer is None or arguments.tokenizer is not None or not model.causal:
        return tokenizer, {}
    positions = None if arguments.rope is None else model.max_positions
    carried = tokenizer_files.collect_tokenizer_files(arguments.source, values, positions)
    return tokenizer, {name: content for name, content in carried.items() if name not in tokenizer.files}


def _print_next_steps(arguments: Import, rope: str, config: Config, tokenizer: Tokenizer | None) -> None:
    """Print the next commands after an import."""
    run, causal = shlex.quote(str(arguments.output)), config.model.causal
    if rope:
        print(f"{rope}; evaluate it with --task positions, and train it on long texts")
    if tokenizer is None:
        remedy = "convert again with --tokenizer KIND:FILES, or pass it to generate and evaluate each time"
        print(f"no tokenizer in {arguments.source}; {remedy}")
    elif causal:
        print(f'generate     mjax generate --run {run} --prompt "…"')
    if tokenizer is not None:
        flags = f"--tokenizer {shlex.quote(f'run:{arguments.output}')}"
        flags += "" if causal else " --split-sentences --no-append-eod"
        print(f"your text    mjax prepare corpus.jsonl --output data/corpus {flags}")
    faster = " --precision.compute bf16" if config.precision.compute == "fp32" else ""
    config_file = shlex.quote(f"{arguments.output}/config.json")
    start = f"python train.py --config {config_file} --init {run} --name NEW"
    print(f"train on     {start} --data.path data/corpus{faster}")
    if causal and tokenizer is not None:
        print(f"on chats     mjax sft --data chat.jsonl --init {run} --name NEW")


# --- Export to Hugging Face -------------------------------------------------------------------------------------------


def to_hf(arguments: ToHfArguments) -> None:
    """`mjax convert to-hf`.

    Raises:
      UsageError: the run has no such checkpoint, transformers has no class for the model or no equivalent tokenizer, or
        the output exists; nothing was written.
      RunError: the checkpoint is damaged.
    """
    run, output = arguments.run, arguments.output
    largest_file = parse_shard_size(arguments.shard_size)
    if find_address(output):
        raise UsageError(f"{output} is in a store, and mjax convert to-hf writes files; give a folder, and copy it")
    model_folder.check_output(output, arguments.overwrite)
    load_user_model(arguments.config, run, print)
    config = read_config(run / "config.json")
    model = config.model.without_lora()
    family = models.export_family(model)
    _check_adapters(arguments, config)
    files = _TokenizerExport(run, arguments.tokenizer, config.model, family.generates)
    tokenizer, carried = files.tokenizer, files.carried

    step = _newest(run, config, arguments.step)
    saved = run / "checkpoints" / str(step)
    torch_name, dtype = models.DTYPES[arguments.dtype]
    if arguments.adapter:
        return _to_peft(arguments, config, family, saved, dtype)
    blocks, into = _read_weights(run, config, saved)
    shapes = {name: place.shape for name, place in weights.tensor_layouts(family, model).items()}
    generation = _generation_config(arguments, tokenizer, carried)
    ids = {"pad_token_id": getattr(tokenizer, "pad", None)}
    if family.generates:
        ids = {name: generation.get(name) for name in ("bos_token_id", "eos_token_id")}
    with model_folder.new_folder(output) as folder:
        values = {
            "architectures": [family.model],
            "model_type": family.model_type,
            **config_values(family, model),
            **ids,
            **models.label_settings(config.model),
            "torch_dtype": torch_name,
        }
        model_folder.write_object(folder / "config.json", values)
        if family.generates:
            model_folder.write_object(folder / tokenizer_files.GENERATION_CONFIG, generation)
        files.write(folder)
        parameters = sum(map(math.prod, shapes.values()))
        card = _card(arguments, family, model, parameters, step, tokenizer is not None)
        (folder / model_folder.MODEL_CARD).write_text(card, encoding="utf-8")
        with progress("writing", parameters * dtype.itemsize) as wrote:
            parts = weights.iterate_tensors(family, model, blocks)
            names = write_tensors(folder, shapes, parts, dtype, largest_file, wrote)

    run = find_address(run) or run
    size = f"{parameters * dtype.itemsize / 1e6:,.1f} MB in {names[0]}"
    print(f"{output}: checkpoint {step} of {run}{into} as {family.model}, {size}", end="")
    print(f" and {len(names) - 2} more" if len(names) > 1 else "")
    if tokenizer is None and arguments.tokenizer is None:
        print(f"{run} has no tokenizer, and {output} neither; to add it: --tokenizer KIND:FILES --overwrite")


def _generation_config(arguments: ToHfArguments, tokenizer: Tokenizer | None, carried: dict[str, bytes]) -> dict:
    """The values of generation_config.json: those that the run carries, or the ids that end a text."""
    if stored := json.loads(carried.get(tokenizer_files.GENERATION_CONFIG, b"{}")):
        return stored
    eod = None if tokenizer is None else tokenizer.eod
    ends = [] if eod is None else stop_token_ids(arguments.run / "tokenizer", eod, arguments.tokenizer)
    return dict.fromkeys(tokenizer_files.SPECIAL_ID_FIELDS, eod) | ({"eos_token_id": ends} if len(ends) > 1 else {})


def _check_adapters(arguments: ToHfArguments, config: Config) -> None:
    """Refuse flags of adapters for a run without them, and a run with them without a flag."""
    flags = [name for name in ("adapter", "merged", "base_name") if getattr(arguments, name)]
    if not config.model.lora_rank and flags:
        flag = flags[0].replace("_", "-")
        raise UsageError(f"--{flag} is for a run with adapters, and {arguments.run} has no adapters; remove it")
    if config.model.lora_rank and flags not in (["adapter"], ["merged"], ["adapter", "base_name"]):
        remedy = "add --merged for a whole model, or --adapter for a folder of peft, if you like with --base-name"
        raise UsageError(f"{arguments.run} holds adapters; {remedy}")


def _newest(run: Path, config: Config, step: int | None = None, whole: bool = False) -> int:
    """The checkpoint of an export: `step`, or the newest intact one, with its optimizer if `whole`."""
    notices = Console(stderr=True, highlight=False)
    with Checkpoints(run / "checkpoints", on_notice=lambda line: notices.print(line, markup=False)) as checkpoints:
        if whole:
            return checkpoints.find(models.abstract_state(config), step)
        return checkpoints.find(without_base(models.abstract_model(config)), step, field="model")


def _read_weights(run: Path, config: Config, saved: Path) -> tuple[lora.BlockReader, str]:
    """A reader of the weights of a checkpoint, in the base of its adapters if it has any, and words about the base,
    whose numbers are compared first."""
    if not config.model.lora_rank:
        return partial(read_in_blocks, saved), ""
    base = read_base(run)
    folder = base_folder(base, run)
    checkpoint = folder / "checkpoints" / str(_newest(folder, read_settings(folder / "config.json"), base.step))
    with status("reading the base", Console(stderr=True)):
        check_base(base, digest_in_blocks(checkpoint), folder, run)
    adapters = lora.read_adapters(saved, config.model)
    blocks = lora.merge_adapters(partial(read_in_blocks, checkpoint), config.model, adapters)
    return blocks, f", merged into checkpoint {base.step} of {base.run}"


def _to_peft(arguments: ToHfArguments, config: Config, family: Family, saved: Path, dtype: np.dtype) -> None:
    """Write the adapters of a checkpoint as a peft folder."""
    run, output = arguments.run, arguments.output
    modules, base = lora.adapter_modules(family, config.model), read_base(run)
    tensors = list(lora.peft_tensors(modules, lora.read_adapters(saved, config.model)))
    with model_folder.new_folder(output) as folder:
        values = lora.adapter_config(config.model, modules, arguments.base_name or base.run)
        model_folder.write_object(folder / lora.ADAPTER_CONFIG, values)
        shapes = {name: part.shape for name, _, part in tensors}
        (file,) = write_tensors(folder, shapes, tensors, dtype, sys.maxsize)
        rename(folder / file, folder / lora.ADAPTER_WEIGHTS)
        if (template := run / "tokenizer" / tokenizer_files.CHAT_TEMPLATE).is_file():
            shutil.copy(template, folder)
    origin = f"checkpoint {saved.name} of {with_addresses(str(run))}"
    print(f"{output}: {len(modules)} adapters of rank {config.model.lora_rank}, {origin}")
    print(f"base: {values['base_model_name_or_path']}, with the digest {base.digest}")


def _card(arguments: ToHfArguments, family: Family, model: ModelConfig, size: int, step: int, tokenizer: bool) -> str:
    """README.md of an export: the card of the run, with a block about the export."""
    card, run = model_folder.read_card(arguments.run), arguments.run
    after = f"trained for {step:,} steps" if step else "the weights as they were converted"
    if step and (origin := read_origin(run)):
        after += f", from checkpoint {origin.step:,} of `{Path(origin.run).name}`"
    lines = [*model_folder.read_history(card), f"- checkpoint {step:,} of the run `{run.resolve().name}`: {after}"]
    name, (dtype, _) = arguments.output.resolve().name, models.DTYPES[arguments.dtype]
    block = model_folder.describe_export(name, family, model, size, dtype, lines, tokenizer)
    return model_folder.replace_block(card, block)


# --- Export to Megatron-LM --------------------------------------------------------------------------------------------


def to_megatron(arguments: ToMegatronArguments) -> None:
    """`mjax convert to-megatron`.

    Raises:
      UsageError: the run has no such checkpoint, megatron-core lacks the model or the split, torch is not installed, or
        the output exists; nothing was written.
      RunError: the checkpoint is damaged.
    """
    run, output, form = arguments.run, arguments.output, arguments.format
    if find_address(output):
        raise UsageError(f"{output} is in a store, and mjax convert to-megatron writes files; give a folder")
    model_folder.check_output(output)
    split = {name: getattr(arguments, name) for name in ("tensor", "pipeline", "expert")}
    config = read_settings(run / "config.json")
    _check_megatron_flags(arguments, split, config)
    import_torch("checkpoints of Megatron are written by torch")
    model = config.model.without_lora()
    export = plan_export(model, run, **split, transformer_impl=arguments.transformer_impl)
    if arguments.optimizer:
        settings = optimizer.optimizer_arguments(config, run)
        export = dataclasses.replace(export, arguments=export.arguments | settings)
        if config.precision.compute != "fp32":  # float32 weights are part of the optimizer
            arguments = dataclasses.replace(arguments, dtype="bf16")
    files = _TokenizerExport(run, arguments.tokenizer, model, model.causal)
    step = _newest(run, config, arguments.step, arguments.optimizer)
    saved = run / "checkpoints" / str(step)
    blocks, into = _read_weights(run, config, saved)
    _, dtype = models.DTYPES[arguments.dtype]
    common = optimizer.common_state(config, saved, export.arguments) if arguments.optimizer else {}
    sources = {"": (blocks, dtype)}
    for slot, prefix in optimizer.SLOTS.items() if arguments.optimizer else ():
        moments = partial(_read_moments, blocks, prefix)
        sources[f"optimizer.state.{slot}."] = moments, np.dtype(np.float32)
    with model_folder.new_folder(output) as folder:
        itemsize = sum(dtype.itemsize for _, dtype in sources.values())
        with progress("reading", count_parameters(model) * itemsize) as read:
            trees = {
                prefix: gather_tensors(export, reader, dtype, folder.parent / f"scratch{number}", read)
                for number, (prefix, (reader, dtype)) in enumerate(sources.items())
            }
        with status("writing", Console(stderr=True)):
            write_release(folder, export, trees, form, common)
        if files.tokenizer is not None:
            (folder / "tokenizer").mkdir()
            files.write(folder / "tokenizer")
    size, ranks = sum(array.nbytes for array in trees[""].values()) / 1e6, len(list(export.ranks))
    origin = f"checkpoint {step} of {find_address(run) or run}{into}"
    split_words = f" for {ranks} ranks" if ranks > 1 else ""
    print(f"{output}: {origin} as {export.family.model}, {size:,.1f} MB in {form}{split_words}")
    _print_megatron_command(arguments, export, files.tokenizer)


def _check_megatron_flags(arguments: ToMegatronArguments, split: dict[str, int], config: Config) -> None:
    """Reject flags that contradict each other, or the run."""
    run = arguments.run
    if arguments.optimizer and arguments.format == "torch":
        raise UsageError("--optimizer is for --format torch_dist, which loads into any split; remove --format torch")
    ignored = {name: ranks for name, ranks in split.items() if not (arguments.optimizer and name == "expert")}
    flags = [f"--{name} {ranks}" for name, ranks in ignored.items() if ranks > 1]
    if arguments.format != "torch" and flags:
        raise UsageError(f"{flags[0]} is for --format torch; remove it: torch_dist loads into any split")
    if arguments.merged != bool(config.model.lora_rank):
        problem = "has no adapters; remove --merged" if arguments.merged else "holds adapters; add --merged"
        raise UsageError(f"{run} {problem}")
    if arguments.merged and arguments.optimizer:
        raise UsageError(f"--merged --optimizer: {run} has moments of its adapters only; {optimizer.OPTIONAL}")


def _read_moments(blocks: lora.BlockReader, prefix: str, name: str, rank: int) -> Iterable[tuple[int, np.ndarray]]:
    """Read a moment of a weight in blocks, by the name of the weight."""
    return blocks(name.replace("model.", prefix, 1), rank)


def _print_megatron_command(arguments: ToMegatronArguments, export: Export, tokenizer: Tokenizer | None) -> None:
    """Print what the user needs to know to load an export, and the command."""
    run, model = arguments.run, export.model
    print(f"embedding: {model.vocabulary:,} tokens, padded to {export.arguments['padded_vocab_size']:,} rows")
    if tokenizer is None:
        print(f"no tokenizer in {run}; add Megatron's --tokenizer-type and its files to the command")
    kind, flag, file = MEGATRON_TOKENIZERS.get(getattr(tokenizer, "scheme", ""), MEGATRON_TOKENIZERS["hf"])
    place = arguments.output.absolute()  # for a command in the folder of Megatron-LM
    flags = ["--tokenizer-type", kind, flag, str(place / "tokenizer" / file)] if tokenizer is not None else []
    if export.arguments.get("use_rope_scaling") and (factor := export.arguments["rope_scaling_factor"]) != 8:
        print(f"pretrain_gpt.py ignores --rope-scaling-factor {factor:g} and computes with 8; pass it to GPTModel")
    print(f"load it      {shlex.join(make_command(export, place, arguments.format, arguments.dtype, flags))}")


MEGATRON_TOKENIZERS = {
    "bert-uncased": ("BertWordPieceLowerCase", "--vocab-file", "vocab.txt"),
    "bert-cased": ("BertWordPieceCase", "--vocab-file", "vocab.txt"),
    "hf": ("HuggingFaceTokenizer", "--tokenizer-model", ""),
}
"""Megatron's --tokenizer-type, and the flag and the name of its file; hf of all others, too."""


class _TokenizerExport:
    """The tokenizer of an export, and its files for transformers."""

    def __init__(self, run: Path, flag: str | None, model: ModelConfig, generates: bool):
        """Choose the run's tokenizer, the given one, or none.

        Raises:
          UsageError: it has more ids than the model, or there is no equivalent in transformers.
        """
        stored = run / "tokenizer"
        self.tokenizer = None if flag == "none" else load_tokenizer(flag) if flag is not None else None
        if flag is None and stored.is_dir():
            self.tokenizer = tokenizer_from_folder(stored)
        check_vocabulary(self.tokenizer, model)
        self.carried = tokenizer_files.export_tokenizer_files(stored) if flag is None and generates else {}
        convert = self.tokenizer is not None and not self.carried
        self._library = to_fast_tokenizer(self.tokenizer, model.samples != "text") if convert else None
        self._model = model

    def write(self, folder: Path) -> None:
        """Write the files, except generation_config.json."""
        if self._library is not None:
            tokenizer_files.write_tokenizer(self.tokenizer, self._library, folder, self._model)
        elif self.carried:
            self.tokenizer.save(folder)
            for name in self.carried.keys() - {tokenizer_files.GENERATION_CONFIG}:
                (folder / name).write_bytes(self.carried[name])
