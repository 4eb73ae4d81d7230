"""What `mjax prepare` notes beside a dataset: PREFIX.json, and the tokenizer's folder PREFIX.tokenizer.

Megatron's datasets have neither; mjax trains on them all the same, but cannot show their text.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from mjax.errors import UsageError


@dataclass(frozen=True)
class DatasetMetadata:
    """How a dataset came about; every field is a plain JSON value."""

    tokenizer: str
    """Kind of the tokenizer whose files lie in PREFIX.tokenizer."""
    vocabulary: int
    """Token ids run from 0 to vocabulary - 1."""
    eod: int
    """Id that ends a document."""
    append_eod: bool
    """Whether every document that is not empty ends with `eod`."""
    documents: int
    """Documents, empty ones included."""
    tokens: int
    """Tokens, ends of documents included."""
    text_bytes: int
    """Bytes of the text in UTF-8."""
    inputs: list[str]
    """Files the text was read from, in order."""
    mjax_version: str
    """Version that wrote it."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text that a token stands for: turns a loss per token into one per byte."""
        return self.text_bytes / self.tokens


def metadata_file(prefix: str | Path) -> Path:
    """PREFIX.json."""
    return Path(f"{prefix}.json")


def tokenizer_folder(prefix: str | Path) -> Path:
    """PREFIX.tokenizer."""
    return Path(f"{prefix}.tokenizer")


def read_metadata(prefix: str | Path) -> DatasetMetadata | None:
    """What `mjax prepare` noted about PREFIX; None where there is no PREFIX.json, as for Megatron's datasets.

    Raises:
      UsageError: there is one, but it is damaged.
    """
    file = metadata_file(prefix)
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return DatasetMetadata(**{field.name: values[field.name] for field in dataclasses.fields(DatasetMetadata)})
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is damaged ({error!r}); prepare the data again, or delete it to do without") from None


def write_metadata(prefix: str | Path, metadata: DatasetMetadata) -> None:
    """Write PREFIX.json, atomically."""
    temporary = Path(f"{metadata_file(prefix)}.tmp")
    temporary.write_text(
        json.dumps(dataclasses.asdict(metadata), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    temporary.replace(metadata_file(prefix))
