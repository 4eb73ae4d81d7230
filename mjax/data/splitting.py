"""One text file as many documents: `mjax prepare --split-documents RULE`.

    blank-line   a document ends where one blank line or several follow
    N            a document is N lines

A book, a transcript or a whole corpus in one file is otherwise a single document, of which no part can be kept for
validation: datasets are split by documents.
"""

import re
from itertools import pairwise

from mjax.errors import UsageError

BLANK_LINE = "blank-line"


def advice(tokens: int, sample: int) -> str:
    """What to type where a dataset has too few documents to keep some for validation.

    Args:
      tokens: in the dataset.
      sample: tokens that a sample needs.
    """
    lines = min(max(tokens // (20 * sample), 1), 100)  # some twenty documents, where a line were a sample
    return (
        f"prepare it again with --split-documents {lines} --overwrite (a document every {lines} lines; {BLANK_LINE}: "
        "one a paragraph), or train without validation: --train.eval-interval 0"
    )


def check_rule(rule: str) -> None:
    """Refuse what is neither of the two.

    Raises:
      UsageError: it is not.
    """
    if rule != BLANK_LINE and not (re.fullmatch(r"[0-9]+", rule) and int(rule) > 0):
        raise UsageError(
            f"--split-documents {rule} is neither {BLANK_LINE} nor a number of lines; use {BLANK_LINE} for a document "
            "a paragraph, or a number such as 100 for one every 100 lines"
        )


def split_documents(text: str, rule: str) -> list[tuple[int, str]]:
    """The documents in a text, each with the number of its first line, from 1; those without text are left out."""
    lines = text.split("\n")
    if rule == BLANK_LINE:
        blank = [-1, *(number for number, line in enumerate(lines) if not line.strip()), len(lines)]
        parts = [range(before + 1, after) for before, after in pairwise(blank)]
    else:
        parts = [range(first, min(first + int(rule), len(lines))) for first in range(0, len(lines), int(rule))]
    documents = [(part.start + 1, "\n".join(lines[part.start : part.stop])) for part in parts]
    return [(line, document) for line, document in documents if document.strip()]
