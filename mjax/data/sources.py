"""The data of a run: training and validation batches, and their tokenizer.

data.path    data/a                        one dataset, split by data.split into training, validation and test
             0.3 data/a 0.7 data/b         a blend with weights, each dataset split like that
             data/a data/b                 a blend of everything, once; of conversations, in whole epochs
data.train_path, valid_path                one blend each, of whole datasets
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mjax.config import Config
from mjax.config.batch_size import BatchSizes, training_samples
from mjax.config.datasets import Blend, DatasetMetadata, parse_blend, read_metadata, split_sequences
from mjax.config.model import KIND_FLAG, model_kind
from mjax.data.batches import Batches
from mjax.data.bert import PROBABILITY, BertDataset, WordPieces
from mjax.data.cache import IndexCache, cache_folders
from mjax.data.conversations import ConversationDataset, PaddedDataset
from mjax.data.indexed import IndexedDataset, folder_digest, tokenizer_folder
from mjax.data.samples import BlendedDataset, GPTDataset, MockDataset, add_labels, split_samples
from mjax.data.tokenizers import BertTokenizer, tokenizer_from_folder
from mjax.errors import UsageError

MAX_USUAL_EPOCHS = 10
"""Above this a model is told that it learns the text by heart (arXiv 2305.16264 finds little gain after four)."""
PARTS = ("training", "validation")


@dataclass(frozen=True)
class TrainingData:
    """The data of a run.

    Attributes:
      training: batch of every step.
      validation: the batches of an evaluation, the same each time; None if there is no evaluation.
      tokenizer: folder of the tokenizer of the tokens, or None if it is unknown.
      summary: one line about it.
      notes: other messages, a sentence each.
    """

    training: Batches
    validation: Batches | None
    tokenizer: Path | None
    summary: str
    notes: tuple[str, ...] = ()


def open_data(config: Config, before_drawing: Callable[[int], None] = lambda samples: None) -> TrainingData:
    """Open the data of `config.data` and draw the order of samples.

    Args:
      config: of the run.
      before_drawing: called with the number of training samples once the files are opened; drawing the order of many
        takes minutes.

    Raises:
      UsageError: files are missing or damaged, have too few samples or far too few, different tokenizers, or ids for
        which the model has no embedding.
    """
    data, model, train = config.data, config.model, config.train
    if model.samples is None:
        raise UsageError(f"{KIND_FLAG} {model_kind(model)} is not for pre-training; remove it, or use mjax finetune")
    if data.custom:
        fix = "continue it there, or start from its weights with --init"
        raise UsageError(f"this run was trained on batches of a program (mjax.Trainer); {fix}")
    evaluates = train.eval_interval > 0
    notes: dict[str, None] = {}  # each sentence once
    eod, tokenizer = None, None
    if data.mock:
        mock, summary = MockDataset, "mock tokens"
        if model.samples == "pairs":
            mock, summary = MockPairs, "mock pairs of text"
        training = mock(model.vocabulary, model.sequence, train.seed)
        validation = mock(model.vocabulary, model.sequence, train.seed + 1) if evaluates else None
    else:
        files = _Files(config, notes.setdefault)
        eod, tokenizer = files.eod, files.tokenizer
        before_drawing(training_samples(config))
        training = files.draw("training", training_samples(config))
        validation = files.draw("validation", train.eval_batches * train.global_batch) if evaluates else None
        summary = _summary(files.blends["training"], training)
        parts = training.parts if isinstance(training, BlendedDataset) else [training]
        epochs = max(getattr(part, "epochs", 1) for part in parts)
        if epochs > MAX_USUAL_EPOCHS:
            taught = f"note: {epochs:,} epochs of the same text teach little after the first few"
            steps = max(train.steps * MAX_USUAL_EPOCHS // epochs, 1)
            notes[f"{taught}; {MAX_USUAL_EPOCHS} of them are --train.steps {steps}"] = None

    packed = data.conversations and not data.mock

    label = partial(add_labels, names=data.batch_types(), eod=eod, mask_eod=data.mask_eod_loss)
    if model.samples == "pairs" or packed:
        label = dict  # its dataset makes a complete sample
    sizes, whole = BatchSizes.from_config(config), BatchSizes.constant(train.global_batch)
    if packed:
        training = PaddedDataset(training, sizes.samples_before(train.steps))
        validation = PaddedDataset(validation, train.eval_batches * train.global_batch) if evaluates else None
    return TrainingData(
        training=Batches(training, sizes, label),
        validation=Batches(validation, whole, label) if evaluates else None,
        tokenizer=tokenizer,
        summary=summary,
        notes=tuple(notes),
    )


def count_sequences(config: Config) -> dict[str, int]:
    """The sequences of an epoch of each part of the conversations of `config.data`; notices are printed.

    Raises:
      UsageError: as `open_data`.
    """
    files = _Files(config, print)
    return {part: files.count(part) for part in PARTS}


class _Files:
    """The datasets of a config, each opened once, with their common tokenizer, and samples drawn from them.

    Attributes:
      blends: datasets of the training and validation part; None if there is none.
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
            blends = [parse_blend(data.path)] * len(PARTS)
        self.blends = dict(zip(PARTS, blends, strict=True))
        prefixes = list(dict.fromkeys(prefix for blend in blends if blend for prefix in blend.prefixes))
        self._opened = {prefix: IndexedDataset(prefix) for prefix in prefixes}
        metadata, self.tokenizer = _common_tokenizer(prefixes)
        if metadata is not None and metadata.vocabulary > model.vocabulary:
            fix = f"use --model.vocabulary {metadata.vocabulary}, or to continue a run prepare with --tokenizer run:RUN"
            ids = f"{prefixes[0]} has {metadata.vocabulary:,} ids and --model.vocabulary is {model.vocabulary:,}"
            raise UsageError(f"{ids}; {fix}")
        self._pieces = _word_pieces(prefixes, self.tokenizer) if model.samples == "pairs" else None
        self.eod = data.eod if data.eod is not None or metadata is None else metadata.eod
        if self.eod is None and (data.reset_positions or data.reset_attention or data.mask_eod_loss):
            raise UsageError(
                f"the end-of-document id of {prefixes[0]} is unknown, without .json; give it with --data.eod"
            )

    def draw(self, part: str, samples: int) -> GPTDataset | BertDataset | BlendedDataset:
        """`samples` of a part, from its dataset or its blend of several."""
        blend = self.blends[part]
        if self.config.data.conversations and blend.weights is None:
            return self._draw_epochs(part, blend.prefixes, samples)
        if blend.weights is None and len(blend.prefixes) == 1:
            return self._draw_one(part, blend.prefixes[0], samples)
        shares = blend.shares
        wanted = [None] * len(blend.prefixes) if shares is None else split_samples(samples, shares)
        drawn = [self._draw_one(part, prefix, number) for prefix, number in zip(blend.prefixes, wanted, strict=True)]
        return BlendedDataset(drawn, shares, samples, self._cache(next(iter(self._opened))))

    def _draw_epochs(self, part: str, prefixes: Sequence[str], samples: int) -> ConversationDataset | BlendedDataset:
        """Conversations of `prefixes`, all of them in each epoch, of which a validation has one."""
        if part == "validation":  # of a small file there may be no part
            prefixes = [prefix for prefix in prefixes if self._documents(part, prefix)] or prefixes[:1]
        drawn = [self._draw_one(part, prefix, None) for prefix in prefixes]
        epoch = sum(dataset.sequences for dataset in drawn)
        samples = min(samples, epoch) if part == "validation" else samples
        if len(drawn) == 1:
            drawn[0].draw(samples)
            return drawn[0]
        for dataset in drawn:
            dataset.draw(math.ceil(samples / epoch) * dataset.sequences)
        return BlendedDataset(drawn, None, samples, self._cache(next(iter(self._opened))))

    def count(self, part: str) -> int:
        """Sequences of an epoch of conversations."""
        prefixes = blend.prefixes if (blend := self.blends[part]) else ()
        return sum(self._draw_one(part, prefix, None).sequences for prefix in prefixes if self._documents(part, prefix))

    def _draw_one(self, part: str, prefix: str, samples: int | None) -> GPTDataset | BertDataset:
        data, indexed, cache = self.config.data, self._opened[prefix], self._cache(prefix)
        drawn = (indexed, self._documents(part, prefix), samples, self.config.model.sequence, self.config.train.seed)
        if self._pieces is not None:
            return BertDataset(*drawn, self._pieces, f"{part} part", cache=cache)
        if data.conversations:
            options = {"vocabulary": self.config.model.vocabulary, "pack": data.pack, "cache": cache}
            return ConversationDataset(*drawn, f"{part} part", **options)
        if indexed.masked:
            self.print_line(
                f"note: {prefix} holds conversations, and all of their text is trained, in sequences that cut them; "
                "set data.conversations in a config file to train what the assistant wrote"
            )
        return GPTDataset(*drawn, f"{part} part", vocabulary=self.config.model.vocabulary, cache=cache)

    def _documents(self, part: str, prefix: str) -> range:
        """Numbers of a part's documents: for a GPT each is one sequence, for a BERT each sentence is."""
        data, indexed = self.config.data, self._opened[prefix]
        count = len(indexed) if self._pieces is None else indexed.documents
        return range(count) if data.train_path else split_sequences(data.split, count)[PARTS.index(part)]

    def _cache(self, prefix: str) -> IndexCache:
        return IndexCache(cache_folders(prefix, self.config.data.cache), self.print_line)


def _summary(blend: Blend, dataset: GPTDataset | BertDataset | BlendedDataset) -> str:
    """`data/a: 1,000 tokens in 10 documents, 2 epochs`, or for a blend its datasets with their shares, joined by +."""
    if not isinstance(dataset, BlendedDataset):
        return f"{blend.prefixes[0]}: {_extent(dataset)}"
    return " + ".join(
        f"{share:.1%} {prefix} ({_extent(part)})"
        for share, prefix, part in zip(dataset.shares, blend.prefixes, dataset.parts, strict=True)
    )


def _extent(dataset: GPTDataset | BertDataset) -> str:
    if isinstance(dataset, BertDataset):
        drawn = f"{len(dataset):,} samples of sentences"
    elif isinstance(dataset, ConversationDataset):
        drawn = f"{dataset.sequences:,} sequences with {dataset.padding:.1%} padding, "
        drawn += f"{len(dataset) / dataset.sequences:.1f} epochs"
    else:
        drawn = f"{dataset.epochs} epoch{'s' * (dataset.epochs > 1)}"
    return f"{dataset.indexed.tokens:,} tokens in {dataset.indexed.documents:,} documents, {drawn}"


def _word_pieces(prefixes: list[str], folder: Path | None) -> WordPieces:
    """The word pieces for a BERT's masking, from the tokenizer of datasets in `folder`.

    Raises:
      UsageError: its tokenizer does not exist or is not BERT's, or its documents end with end-of-document tokens.
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
    return WordPieces.from_tokenizer(tokenizer)


def _common_tokenizer(prefixes: Sequence[str]) -> tuple[DatasetMetadata | None, Path | None]:
    """The common tokenizer of datasets that are read together: its metadata, and its folder.

    Raises:
      UsageError: there are two.
    """
    known = [(prefix, metadata) for prefix in prefixes if (metadata := read_metadata(prefix)) is not None]
    if not known:
        return None, None
    identities = [(m.tokenizer, m.vocabulary, m.eod, folder_digest(tokenizer_folder(prefix))) for prefix, m in known]
    for (prefix, _), identity in zip(known, identities, strict=True):
        if identity != identities[0]:
            kinds = "; ".join(
                f"{kind} of {size:,} ids, {eod} at the end" for kind, size, eod, _ in (identities[0], identity)
            )
            fix = "prepare one of them again with the other's --tokenizer"
            raise UsageError(f"{known[0][0]} and {prefix} were made with different tokenizers ({kinds}); {fix}")
    folder = tokenizer_folder(known[0][0])
    return known[0][1], folder if folder.is_dir() else None


# --- Synthetic pairs of segments for a BERT, which can be learned; for measuring speed, and for tests -----------------


FIRST, MASK = 0, 1  # ids for [CLS] and padding, and for [MASK]; text counts through the others


class MockPairs:
    """A sample counts upwards from a random start, in two segments, which are swapped in half of the samples.

    Sample i depends on the seed and i alone; there is no last one. Samples are s/2 to s tokens long, the rest is
    padding.

    Args:
      vocabulary: ids, at least 3.
      sequence: s, at least 3.
      seed: determines everything.
    """

    def __init__(self, vocabulary: int, sequence: int, seed: int):
        self.vocabulary, self.sequence, self.seed = vocabulary, sequence, seed

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`: the arrays of `Config.batch_arrays`."""
        random = np.random.default_rng([self.seed, index])
        text = random.integers(max(self.sequence // 2, 3), self.sequence + 1) - 1  # tokens after the first
        start, cut = random.integers(self.vocabulary), random.integers(1, text)
        counted = MASK + 1 + (start + np.arange(text)) % (self.vocabulary - MASK - 1)
        swapped = random.integers(2)
        if swapped:
            counted, cut = np.concatenate([counted[cut:], counted[:cut]]), text - cut
        position = np.arange(self.sequence)
        labels = np.full(self.sequence, FIRST)
        labels[1 : text + 1] = counted
        masked = (random.random(self.sequence) < PROBABILITY) & (position > 0) & (position <= text)
        masked[random.integers(1, text + 1)] = True
        sample = {
            "tokens": np.where(masked, MASK, labels),
            "labels": labels,
            "token_types": (position > cut) & (position <= text),
            "documents": position > text,
            "sentence_order": swapped,
        }
        return {name: np.asarray(array, np.int32) for name, array in sample.items()} | {"loss_mask": masked}
