"""The data of a run: training and validation batches, and their tokenizer.

data.path    data/a                        one dataset, divided by data.split into training, validation and test
             0.3 data/a 0.7 data/b         a blend with weights, each dataset divided in the same way
             data/a data/b                 a blend of everything, once; conversations in whole epochs
data.train_path, valid_path                one blend each, of whole datasets
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mjax.config import Config
from mjax.config.batch_size import BatchSizes, training_samples
from mjax.config.datasets import Blend, DatasetMetadata, parse_blend, read_metadata, split_sequences
from mjax.config.model import KIND_FLAG
from mjax.data.batches import Batches
from mjax.data.bert import MLM_PROBABILITY, BertDataset, WordPieceVocabulary
from mjax.data.cache import IndexCache, cache_folders
from mjax.data.conversations import ConversationDataset, PaddedDataset
from mjax.data.indexed import IndexedDataset, digest_folder, tokenizer_folder
from mjax.data.samples import BlendedDataset, GPTDataset, MockDataset, add_labels, count_samples_per_dataset
from mjax.data.tokenizers import BertTokenizer, tokenizer_from_folder
from mjax.errors import UsageError

MAX_USUAL_EPOCHS = 10  # more epochs print a note about memorization (arXiv 2305.16264 finds little gain after four)
SPLITS = ("training", "validation")


@dataclass(frozen=True)
class TrainingData:
    """The data of a run.

    Attributes:
      training: batch of every step.
      validation: the batches of an evaluation, the same each time; None if there is no evaluation.
      tokenizer: folder of the tokens' tokenizer, or None if it is unknown.
      summary: one line about the datasets.
      notes: other messages, a sentence each.
    """

    training: Batches
    validation: Batches | None
    tokenizer: Path | None
    summary: str
    notes: tuple[str, ...] = ()


def open_data(config: Config, on_opened: Callable[[int], None] = lambda samples: None) -> TrainingData:
    """Open the data of `config.data` and draw the order of samples.

    Args:
      config: of the run.
      on_opened: called with the number of training samples after the files are opened and before their order is drawn,
        which may take minutes.

    Raises:
      UsageError: files are missing or damaged, or have too few samples, different tokenizers, or ids for which the
        model has no embedding.
    """
    data, model, train = config.data, config.model, config.train
    if model.samples is None:
        raise UsageError(f"{KIND_FLAG} {model.kind} is not for pre-training; remove it, or use mjax finetune")
    if data.custom:
        fix = "continue it there, or start from its weights with --init"
        raise UsageError(f"this run was trained on a program's batches (mjax.Trainer); {fix}")
    evaluates, eval_samples = train.eval_interval > 0, train.eval_batches * train.global_batch
    pairs, packed = model.samples == "pairs", data.conversations and not data.mock
    notes: dict[str, None] = {}  # each sentence once
    eod, tokenizer = None, None
    if data.mock:
        mock, summary = (MockBertDataset, "mock pairs of text") if pairs else (MockDataset, "mock tokens")
        training = mock(model.vocabulary, model.sequence, train.seed)
        validation = mock(model.vocabulary, model.sequence, train.seed + 1) if evaluates else None
    else:
        sources = _Datasets(config, notes.setdefault)
        eod, tokenizer = sources.eod, sources.tokenizer
        on_opened(training_samples(config))
        training = sources.open_split("training", training_samples(config))
        validation = sources.open_split("validation", eval_samples) if evaluates else None
        summary = _describe_blend(sources.blends["training"], training)
        datasets = training.datasets if isinstance(training, BlendedDataset) else [training]
        epochs = max(getattr(dataset, "epochs", 1) for dataset in datasets)
        if epochs > MAX_USUAL_EPOCHS:
            note = f"note: {epochs:,} epochs of the same text teach little after the first few"
            steps = max(train.steps * MAX_USUAL_EPOCHS // epochs, 1)
            notes[f"{note}; {MAX_USUAL_EPOCHS} of them are --train.steps {steps}"] = None

    transform = partial(add_labels, names=data.batch_types(), eod=eod, mask_eod=data.mask_eod_loss)
    if pairs or packed:
        transform = dict  # samples of these datasets are complete
    sizes, eval_sizes = BatchSizes.from_config(config), BatchSizes.constant(train.global_batch)
    if packed:
        training = PaddedDataset(training, sizes.samples_before(train.steps))
        validation = PaddedDataset(validation, eval_samples) if evaluates else None
    validation_batches = Batches(validation, eval_sizes, transform) if evaluates else None
    return TrainingData(Batches(training, sizes, transform), validation_batches, tokenizer, summary, tuple(notes))


def count_sequences(config: Config) -> dict[str, int]:
    """Count the sequences in an epoch of each split of the conversations of `config.data`; notes are printed.

    Raises:
      UsageError: as in `open_data`.
    """
    sources = _Datasets(config, print)
    return {split: sources.count_sequences(split) for split in SPLITS}


class _Datasets:
    """The datasets of a config, each opened once, with their common tokenizer.

    Attributes:
      blends: datasets of the training and validation split; None if there is none.
      tokenizer: its folder, or None if it is unknown.
      eod: end-of-document id; None: unknown.
    """

    def __init__(self, config: Config, print_line: Callable[[str], None]):
        data, model = config.data, config.model
        self.config, self.print_line = config, print_line
        if data.train_path:
            paths = {"--data.train-path": data.train_path, "--data.valid-path": data.valid_path}
            blends = [parse_blend(values, flag) if values else None for flag, values in paths.items()]
        else:
            blends = [parse_blend(data.path)] * len(SPLITS)
        self.blends = dict(zip(SPLITS, blends, strict=True))
        prefixes = list(dict.fromkeys(prefix for blend in blends if blend for prefix in blend.prefixes))
        self._opened = {prefix: IndexedDataset(prefix) for prefix in prefixes}
        metadata, self.tokenizer = _read_common_tokenizer(prefixes)
        if metadata is not None and metadata.vocabulary > model.vocabulary:
            fix = f"use --model.vocabulary {metadata.vocabulary}, or to continue a run prepare with --tokenizer run:RUN"
            ids = f"{prefixes[0]} has {metadata.vocabulary:,} ids and --model.vocabulary is {model.vocabulary:,}"
            raise UsageError(f"{ids}; {fix}")
        self._pieces = _read_word_pieces(prefixes, self.tokenizer) if model.samples == "pairs" else None
        self.eod = data.eod if data.eod is not None or metadata is None else metadata.eod
        if self.eod is None and (data.reset_positions or data.reset_attention or data.mask_eod_loss):
            raise UsageError(f"{prefixes[0]}.json does not exist, so give the end-of-document id with --data.eod")

    def open_split(self, split: str, samples: int) -> GPTDataset | BertDataset | BlendedDataset:
        """The dataset of a split, or its blend of several, with `samples` samples."""
        blend = self.blends[split]
        if self.config.data.conversations and blend.weights is None:
            return self._open_conversations(split, blend.prefixes, samples)
        if blend.weights is None and len(blend.prefixes) == 1:
            return self._open_dataset(split, blend.prefixes[0], samples)
        shares = blend.shares
        counts = [None] * len(blend.prefixes) if shares is None else count_samples_per_dataset(samples, shares)
        datasets = [self._open_dataset(split, *arguments) for arguments in zip(blend.prefixes, counts, strict=True)]
        return BlendedDataset(datasets, shares, samples, self._cache())

    def _open_conversations(self, split: str, prefixes: Sequence[str], samples: int):
        """Conversations of `prefixes`, all of them in each epoch; a validation has one epoch."""
        if split == "validation":  # a small file may have none
            prefixes = [prefix for prefix in prefixes if self._documents(split, prefix)] or prefixes[:1]
        datasets = [self._open_dataset(split, prefix, None) for prefix in prefixes]
        epoch = sum(dataset.sequences for dataset in datasets)
        samples = min(samples, epoch) if split == "validation" else samples
        if len(datasets) == 1:
            datasets[0].set_samples(samples)
            return datasets[0]
        for dataset in datasets:
            dataset.set_samples(math.ceil(samples / epoch) * dataset.sequences)
        return BlendedDataset(datasets, None, samples, self._cache())

    def count_sequences(self, split: str) -> int:
        """Sequences in an epoch of conversations."""
        prefixes = blend.prefixes if (blend := self.blends[split]) else ()
        used = [prefix for prefix in prefixes if self._documents(split, prefix)]
        return sum(self._open_dataset(split, prefix, None).sequences for prefix in used)

    def _open_dataset(self, split: str, prefix: str, samples: int | None) -> GPTDataset | BertDataset:
        data, model, indexed, name = self.config.data, self.config.model, self._opened[prefix], f"{split} split"
        arguments = (indexed, self._documents(split, prefix), samples, model.sequence, self.config.train.seed, name)
        options = {"vocabulary": model.vocabulary, "cache": self._cache(prefix)}
        if self._pieces is not None:
            return BertDataset(*arguments, pieces=self._pieces, **options)
        if data.conversations:
            return ConversationDataset(*arguments, pack=data.pack, **options)
        if indexed.has_mask:
            self.print_line(
                f"note: {prefix} holds conversations, and all of their text is trained, in sequences that cut them; "
                "set data.conversations in a config file to train what the assistant wrote"
            )
        return GPTDataset(*arguments, **options)

    def _documents(self, split: str, prefix: str) -> range:
        """Range of a split's sequences; for a BERT, whose sequences are sentences, of its documents."""
        data, indexed = self.config.data, self._opened[prefix]
        count = len(indexed) if self._pieces is None else indexed.documents
        return range(count) if data.train_path else split_sequences(data.split, count)[SPLITS.index(split)]

    def _cache(self, prefix: str | None = None) -> IndexCache:
        folders = cache_folders(prefix or next(iter(self._opened)), self.config.data.cache)
        return IndexCache(folders, self.print_line)


def _describe_blend(blend: Blend, dataset: GPTDataset | BertDataset | BlendedDataset) -> str:
    """`data/a: 1,000 tokens in 10 documents, 2 epochs`, or for a blend its datasets with their shares, joined by +."""
    if not isinstance(dataset, BlendedDataset):
        return f"{blend.prefixes[0]}: {_describe_dataset(dataset)}"
    parts = zip(dataset.shares, blend.prefixes, dataset.datasets, strict=True)
    return " + ".join(f"{share:.1%} {prefix} ({_describe_dataset(part)})" for share, prefix, part in parts)


def _describe_dataset(dataset: GPTDataset | BertDataset) -> str:
    if isinstance(dataset, BertDataset):
        samples = f"{len(dataset):,} samples of sentences"
    elif isinstance(dataset, ConversationDataset):
        samples = f"{dataset.sequences:,} sequences with {dataset.padding:.1%} padding, "
        samples += f"{len(dataset) / dataset.sequences:.1f} epochs"
    else:
        samples = f"{dataset.epochs} epoch{'s' * (dataset.epochs > 1)}"
    return f"{dataset.indexed.tokens:,} tokens in {dataset.indexed.documents:,} documents, {samples}"


def _read_word_pieces(prefixes: list[str], folder: Path | None) -> WordPieceVocabulary:
    """The word pieces for a BERT's masking, from the tokenizer in `folder` of the datasets.

    Raises:
      UsageError: the tokenizer does not exist or is not BERT's, or documents end with end-of-document tokens.
    """
    fix = "type mjax prepare FILES --tokenizer bert-uncased:vocab.txt --split-sentences --no-append-eod"
    prefix = prefixes[0]
    if folder is None:
        raise UsageError(f"{prefix} has no {tokenizer_folder(prefix)}, which a BERT needs to mask words; {fix}")
    tokenizer = tokenizer_from_folder(folder)
    if not isinstance(tokenizer, BertTokenizer):
        raise UsageError(f"{prefix} was made with a tokenizer of kind {tokenizer.scheme}, not a BERT's; {fix}")
    for prefix in prefixes:
        if (metadata := read_metadata(prefix)) is not None and metadata.append_eod:
            raise UsageError(f"{prefix} ends each text with an end-of-document token, which a BERT's must not; {fix}")
    return WordPieceVocabulary.from_tokenizer(tokenizer)


def _read_common_tokenizer(prefixes: Sequence[str]) -> tuple[DatasetMetadata | None, Path | None]:
    """The metadata and the folder of the tokenizer that all datasets have in common.

    Raises:
      UsageError: there are two tokenizers.
    """
    known = [(prefix, metadata) for prefix in prefixes if (metadata := read_metadata(prefix)) is not None]
    if not known:
        return None, None
    identities = [(m.tokenizer, m.vocabulary, m.eod, digest_folder(tokenizer_folder(prefix))) for prefix, m in known]
    first, metadata = known[0]
    for (prefix, _), identity in zip(known, identities, strict=True):
        if identity != identities[0]:
            kinds = (f"{kind} of {size:,} ids, {eod} at the end" for kind, size, eod, _ in (identities[0], identity))
            fix = "prepare one of them again with the other's --tokenizer"
            raise UsageError(f"{first} and {prefix} were made with different tokenizers ({'; '.join(kinds)}); {fix}")
    folder = tokenizer_folder(first)
    return metadata, folder if folder.is_dir() else None


# --- Learnable synthetic pairs of segments for a BERT, for benchmarks and tests ---------------------------------------


CLS_ID, MASK_ID = 0, 1  # of [CLS] and padding, and of [MASK]; text has the other ids


class MockBertDataset(MockDataset):
    """A sample counts upwards from a random start, in two segments, which are swapped in half of the samples.

    Samples are s/2 to s tokens long, the rest is padding. The vocabulary and s are at least 3.
    """

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`: the arrays of `Config.batch_arrays`."""
        random = np.random.default_rng([self.seed, index])
        text = random.integers(max(self.sequence // 2, 3), self.sequence + 1) - 1  # tokens after the first
        start, cut = random.integers(self.vocabulary), random.integers(1, text)
        counted = MASK_ID + 1 + (start + np.arange(text)) % (self.vocabulary - MASK_ID - 1)
        swapped = random.integers(2)
        if swapped:
            counted, cut = np.concatenate([counted[cut:], counted[:cut]]), text - cut
        position = np.arange(self.sequence)
        labels = np.full(self.sequence, CLS_ID)
        labels[1 : text + 1] = counted
        masked = (random.random(self.sequence) < MLM_PROBABILITY) & (position > 0) & (position <= text)
        masked[random.integers(1, text + 1)] = True
        sample = {
            "tokens": np.where(masked, MASK_ID, labels),
            "labels": labels,
            "token_types": (position > cut) & (position <= text),
            "documents": position > text,
            "sentence_order": swapped,
        }
        return {name: np.asarray(array, np.int32) for name, array in sample.items()} | {"loss_mask": masked}
