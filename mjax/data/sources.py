"""The data of a run: training and validation batches, and the tokenizer that travels with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mjax.batch_size import BatchSizes
from mjax.config import Config
from mjax.data.batches import Batches, Samples
from mjax.data.indexed import IndexedDataset
from mjax.data.metadata import read_metadata, tokenizer_folder
from mjax.data.samples import GPTDataset, MockDataset, split_sequences
from mjax.errors import UsageError


@dataclass(frozen=True)
class TrainingData:
    """What a run reads.

    Attributes:
      training: batch of every step.
      validation: the batches of an evaluation, the same each time; None where there is no evaluation.
      tokenizer: folder of the tokenizer the tokens were made with, or None where it is not known.
      summary: one line about it.
    """

    training: Batches
    validation: Batches | None
    tokenizer: Path | None
    summary: str


def open_data(config: Config) -> TrainingData:
    """Open what `config.data` names and draw the order of samples.

    Raises:
      UsageError: files are missing or damaged, hold too little, or hold ids the model has no embedding for.
    """
    model, train = config.model, config.train
    evaluates = train.eval_interval > 0
    if config.data.mock:
        training = MockDataset(model.vocabulary, model.sequence, train.seed)
        validation = MockDataset(model.vocabulary, model.sequence, train.seed + 1) if evaluates else None
        return _bundle(config, training, validation, None, "mock tokens")

    prefix = Path(config.data.path)
    indexed = IndexedDataset(prefix)
    metadata = read_metadata(prefix)
    if metadata is not None and metadata.vocabulary > model.vocabulary:
        raise UsageError(
            f"{prefix} was made with a tokenizer of {metadata.vocabulary:,} ids and --model.vocabulary is "
            f"{model.vocabulary:,}; use --model.vocabulary {metadata.vocabulary}"
        )
    parts = split_sequences(config.data.split, len(indexed))
    training = GPTDataset(indexed, parts[0], config.training_samples, model.sequence, train.seed)
    validation = None
    if evaluates:
        samples = train.eval_batches * train.global_batch
        validation = GPTDataset(indexed, parts[1], samples, model.sequence, train.seed, "validation part")
    epochs = f"{training.epochs} epoch{'s' * (training.epochs > 1)}"
    summary = f"{indexed.tokens:,} tokens in {indexed.documents:,} documents, {epochs}"
    tokenizer = tokenizer_folder(prefix)
    return _bundle(config, training, validation, tokenizer if tokenizer.is_dir() else None, f"{prefix}: {summary}")


def _bundle(config, training, validation, tokenizer, summary) -> TrainingData:
    vocabulary, whole = config.model.vocabulary, BatchSizes.constant(config.train.global_batch)
    return TrainingData(
        training=Batches(_InVocabulary(training, vocabulary), BatchSizes.of(config)),
        validation=Batches(_InVocabulary(validation, vocabulary), whole) if validation is not None else None,
        tokenizer=tokenizer,
        summary=summary,
    )


class _InVocabulary:
    """Samples whose ids are checked: a lookup on the device would clip an id that is too large, without a word."""

    def __init__(self, samples: Samples, vocabulary: int):
        self.samples, self.vocabulary = samples, vocabulary

    def __getitem__(self, index: int):
        tokens = self.samples[index]
        if tokens.max() >= self.vocabulary or tokens.min() < 0:
            wrong = int(tokens.max()) if tokens.max() >= self.vocabulary else int(tokens.min())
            raise UsageError(
                f"sample {index} of the data holds the id {wrong} and the model's vocabulary is {self.vocabulary:,}; "
                "set --model.vocabulary to that of the tokenizer the data was prepared with"
            )
        return tokens
