"""Sentences: Megatron's `--split-sentences`, which BERT is trained on.

Punkt (Kiss and Strunk, Computational Linguistics 32:4, 2006) ends a sentence at a full stop unless what stands before
it is an abbreviation, an initial or a number, as learned from plain text of the language. The algorithm is NLTK's, so
the sentences are those of Megatron's preprocess_data. The learned tables are not part of NLTK: `punkt_tab`, plain text
in a folder tokenizers/punkt_tab/LANGUAGE under $NLTK_DATA or one of NLTK's usual places. Megatron's older `punkt` is a
pickle, which can execute anything; it is never opened.
"""

from typing import Any

from mjax.errors import UsageError

PIECE = 1_000_000  # characters that Megatron splits at a time; the cuts between them end a sentence too


def load_splitter(language: str) -> Any:
    """NLTK's Punkt with the tables of a language, such as "english"; sentences do not include the spaces between them.

    Raises:
      UsageError: the language's tables are missing; says where to get them.
    """
    from nltk.tokenize.punkt import PunktTokenizer  # takes a second to import

    try:
        return PunktTokenizer(language)
    except (LookupError, ValueError):
        raise UsageError(
            f"the sentence rules of {language!r} are missing; type `python -m nltk.downloader punkt_tab`, or set "
            f"NLTK_DATA to a folder that holds tokenizers/punkt_tab/{language}"
        ) from None


def split(text: str, splitter: Any) -> list[str]:
    """The sentences of a text, as Megatron's preprocess_data splits it: a million characters at a time."""
    return [
        sentence for start in range(0, len(text), PIECE) for sentence in splitter.tokenize(text[start : start + PIECE])
    ]
