"""Datasets of a config: blends, splits, and the metadata next to their tokens.

They are below `mjax.data`, so a config is checked and completed without opening the tokens.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from mjax.config.plain_values import check
from mjax.errors import UsageError
from mjax.utils.files import read_json
from mjax.utils.ranges import local_prefix
from mjax.utils.remote import locate

MAX_DATASETS = 32767  # their numbers are int16

# --- Blends -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blend:
    """Datasets by prefix, and their weights as typed; None: all samples of all datasets, once."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    @property
    def shares(self) -> list[float] | None:
        """Weights that sum to one."""
        return None if self.weights is None else normalize(self.weights)


def parse_blend(values: Sequence[str], flag: str = "--data.path") -> Blend:
    """Parse '0.3 data/a 0.7 data/b' (weights and prefixes, alternating) or 'data/a data/b'.

    Prefixes at s3:// and gs:// become local ones (`utils/ranges.py`).

    Megatron takes any odd number of values as prefixes, even numbers among them; here a number is always a weight,
    unless it is the only value.

    Raises:
      UsageError: weights are missing, not above 0, or misplaced, or there are too many datasets.
    """
    values = [value.strip() for value in values]
    numbers = [_number(value) for value in values]
    if len(values) == 1 or not any(number is not None for number in numbers):
        prefixes, weights = values, None
    else:
        prefixes, weights = values[1::2], [number or 0 for number in numbers[::2]]
    fits = weights is None or (len(weights) == len(prefixes) and all(0 < weight < math.inf for weight in weights))
    if not fits or not all(values) or len(prefixes) >= MAX_DATASETS:
        fix = f"write a weight above 0 before every prefix, such as {flag} 0.3 data/a 0.7 data/b, or before none"
        raise UsageError(f"{flag} {' '.join(values)} is not a blend of fewer than {MAX_DATASETS:,} datasets; {fix}")
    return Blend(tuple(map(local_prefix, prefixes)), weights and tuple(weights))


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, added in NumPy's order as in Megatron: the last bit decides between equals."""
    import numpy as np

    weights = np.asarray(weights, np.float64)
    return (weights / weights.sum()).tolist()


# --- Splits -----------------------------------------------------------------------------------------------------------


def split_sequences(split: str, sequences: int) -> tuple[range, range, range]:
    """Sequences of the training, validation and test parts: '949,50,1' of 1000 is 0–949, 949–999 and 999–1000.

    Missing parts are empty: '98,2' has no test part. Parts follow the order of the file. Megatron reads every run of
    digits and points as a number, whatever is in between ('949/50/1', '-1,2' as 1 and 2, '1e3' as 1 and 3); here only
    commas and spaces are allowed.

    Raises:
      UsageError: `split` is not one to three numbers, one of them above 0.
    """
    written = [part.strip() for part in split.split(",")]
    if not (len(written) <= 3 and all(re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", part) for part in written)):
        written = ["0"]
    parts = [float(part) for part in written]
    if not 0 < sum(parts) < float("inf"):
        fix = "give up to three numbers, one of them above 0, such as 949,50,1"
        raise UsageError(f"--data.split {split!r} is not proportions of training, validation and test; {fix}")
    import numpy as np

    total = float(np.sum(parts))  # Python's sum rounds differently from 3.12 on
    bounds = accumulate((part / total for part in parts + [0.0] * (3 - len(parts))), initial=0.0)
    training, validation, test = (range(*pair) for pair in pairwise(round(bound * sequences) for bound in bounds))
    return training, validation, test


# --- Metadata ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DatasetMetadata:
    """Origin and size of a dataset; every field is a plain JSON value.

    Attributes:
      tokenizer: scheme of the tokenizer in PREFIX.tokenizer.
      vocabulary: token ids run from 0 to vocabulary - 1.
      eod: id that ends a document.
      append_eod: whether every document that is not empty ends with `eod`.
      documents: documents, empty ones included.
      tokens: tokens, ends of documents included.
      text_bytes: bytes of the text in UTF-8.
      inputs: files the text was read from, in order.
      mjax_version: version that wrote it.
      sequences: one per document that is not empty, or one per sentence; None in files of older versions.
      sentences: language whose rules split documents into sentences; None if they were not split.
      malformed: malformed lines that were skipped.
      malformed_examples: the first of them, as FILE:LINE: reason.
      bos: id before the tokens of every document that is not empty; None: there is none.
      trained: of conversations, how many of their tokens the model is trained to write; None: it is text.
    """

    tokenizer: str
    vocabulary: int
    eod: int
    append_eod: bool
    documents: int
    tokens: int
    text_bytes: int
    inputs: list[str]
    mjax_version: str
    sequences: int | None = None
    sentences: str | None = None
    malformed: int = 0
    malformed_examples: list[str] = field(default_factory=list)
    bos: int | None = None
    trained: int | None = None

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token; converts a loss per token into one per byte."""
        return self.text_bytes / self.tokens


def metadata_file(prefix: str | Path) -> Path:
    """PREFIX.json."""
    return locate(Path(f"{prefix}.json"))


def read_metadata(prefix: str | Path) -> DatasetMetadata | None:
    """Read PREFIX.json; None if it does not exist, as for Megatron's datasets.

    Raises:
      UsageError: it is damaged.
    """
    file = metadata_file(prefix)
    if not file.is_file():
        return None
    fix = "prepare the data again, or delete it to train without metadata"
    values = read_json(file, fix)
    names = [field.name for field in dataclasses.fields(DatasetMetadata)]
    known = {name: values[name] for name in names if name in values} if isinstance(values, dict) else values
    metadata = check(DatasetMetadata, known, str(file), fix)
    counts = (metadata.documents, metadata.text_bytes, metadata.sequences or 0, metadata.malformed)
    if not 0 <= metadata.eod < metadata.vocabulary or metadata.tokens < 1 or min(counts) < 0:
        raise UsageError(f"{file} is damaged: its counts are impossible; {fix}")
    return metadata
