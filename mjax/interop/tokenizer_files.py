"""The tokenizer that travels with a model, between a run's folder and a model folder of Hugging Face.

On its way out it takes along the files it was made from and `mjax_tokenizer.json`, so that it comes back as it was; a
tokenizer_config.json tells `transformers.AutoTokenizer` how to open them, where it can.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from mjax.data.tokenizers import (
    DESCRIPTION,
    EOD_PIECE,
    GPT2Tokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_from_folder,
)
from mjax.interop.model_folder import write_object

FOUND_BY_FILES = (HuggingFaceTokenizer, GPT2Tokenizer, SentencePieceTokenizer)
"""In the order in which they are looked for: tokens that were added to a model later are in tokenizer.json only."""


def find_tokenizer(folder: Path, given: str | None) -> Tokenizer | None:
    """The tokenizer that is `given` as in `mjax prepare --tokenizer`, or that of a model folder; None: it has none.

    Raises:
      UsageError: its files are damaged.
    """
    if given is not None:
        return load_tokenizer(given)
    if (folder / DESCRIPTION).is_file():
        return tokenizer_from_folder(folder)
    for kind in FOUND_BY_FILES:
        files = [folder / name for name in kind.stored]
        if all(file.is_file() for file in files):
            return kind(*(file.read_bytes() for file in files), *map(str, files))
    return None


def write_tokenizer(tokenizer: Tokenizer, stored: Path, folder: Path, positions: int) -> bool:
    """Copy the folder `stored` that `tokenizer` was read from into a model folder, and describe it to `transformers`.

    Args:
      tokenizer: the tokenizer.
      stored: its folder in a run.
      folder: the model folder.
      positions: of the model.

    Returns:
      Whether `transformers` can open it: a vocabulary of sentencepiece or of bytes comes along for mjax alone.
    """
    for name in (*tokenizer.stored, DESCRIPTION):
        shutil.copy(stored / name, folder / name)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        kind, eod = "PreTrainedTokenizerFast", tokenizer.library.id_to_token(tokenizer.eod)
    elif isinstance(tokenizer, GPT2Tokenizer):
        kind, eod = "GPT2Tokenizer", EOD_PIECE
    else:
        return False
    values = {"tokenizer_class": kind, "model_max_length": positions, "clean_up_tokenization_spaces": False}
    values |= {"bos_token": eod, "eos_token": eod}
    write_object(folder / "tokenizer_config.json", values)
    return True
