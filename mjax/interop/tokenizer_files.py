"""The tokenizer that travels with a model, between a run's folder and a model folder of Hugging Face.

On its way out it takes along the files it was made from and `mjax_tokenizer.json`, so that it comes back as it was; a
tokenizer_config.json tells `transformers.AutoTokenizer` how to open them, where it can.

BERT's is a vocab.txt and a word on capitals; newer folders have both in a tokenizer.json. A tokenizer that only looks
like BERT's, with other rules for accents or with tokens added, is opened by its tokenizer.json or not at all.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from mjax.data.tokenizers import (
    DESCRIPTION,
    EOD_PIECE,
    BertTokenizer,
    CasedBertTokenizer,
    GPT2Tokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    UncasedBertTokenizer,
    load_tokenizer,
    tokenizer_from_folder,
)
from mjax.data.tokenizers.bert import LONGEST_WORD
from mjax.interop.model_folder import read_object, write_object

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
    if (bert := _find_bert(folder)) is not None:
        return bert
    for kind in FOUND_BY_FILES:
        files = [folder / name for name in kind.stored]
        if all(file.is_file() for file in files):
            return kind(*(file.read_bytes() for file in files), *map(str, files))
    return None


def _find_bert(folder: Path) -> BertTokenizer | None:
    """The WordPiece of a model folder: from tokenizer.json where there is one, else from vocab.txt."""
    whole, pieces, said = (folder / name for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json"))
    if whole.is_file():
        try:
            values = json.loads(Library.from_buffer(whole.read_bytes()).to_str())  # all that it leaves out is filled in
        except Exception:  # it is a plain one; who reads it next says what is wrong with it
            return None
        vocab, lowercase = _pieces(values), _says_lowercase(values["normalizer"], "lowercase", "handle_chinese_chars")
        name = whole
    elif pieces.is_file() and said.is_file():
        vocab, name = pieces.read_bytes(), pieces
        lowercase = _says_lowercase(read_object(said), "do_lower_case", "tokenize_chinese_chars")
    else:
        return None
    if vocab is None or lowercase is None:
        return None
    return (UncasedBertTokenizer if lowercase else CasedBertTokenizer)(vocab, str(name))


def _says_lowercase(values: Any, lowercase: str, chinese: str) -> bool | None:
    """Whether words are put in small letters; None where it is not said, or accents or Chinese are not as in BERT."""
    small = values.get(lowercase) if isinstance(values, dict) else None
    usual = (
        isinstance(small, bool) and values.get("strip_accents") in (None, small) and values.get(chinese) is not False
    )
    return small if usual else None


def _pieces(values: dict[str, Any]) -> bytes | None:
    """The vocab.txt in a tokenizer.json; None where it describes another tokenizer than BERT's."""
    model = values["model"]
    described = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    described |= {"max_input_chars_per_word": LONGEST_WORD}
    if values["pre_tokenizer"] != {"type": "BertPreTokenizer"} or any(
        model.get(name) != value for name, value in described.items()
    ):
        return None
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    added = {token["content"]: token["id"] for token in values["added_tokens"]}
    in_order = [model["vocab"][piece] for piece in pieces] == list(range(len(pieces)))
    if not in_order or not added.items() <= model["vocab"].items():
        return None
    return "".join(f"{piece}\n" for piece in pieces).encode()


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
    values = {"model_max_length": positions, "clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, BertTokenizer):
        values |= {"tokenizer_class": "BertTokenizer", "do_lower_case": tokenizer.lowercase}
        values |= {"tokenize_chinese_chars": True, "strip_accents": None}
        values |= {f"{name.lower()}_token": f"[{name}]" for name in ("CLS", "SEP", "MASK", "PAD", "UNK")}
        write_object(folder / "tokenizer_config.json", values)
        return True
    if isinstance(tokenizer, HuggingFaceTokenizer):
        kind, eod = "PreTrainedTokenizerFast", tokenizer.library.id_to_token(tokenizer.eod)
    elif isinstance(tokenizer, GPT2Tokenizer):
        kind, eod = "GPT2Tokenizer", EOD_PIECE
    else:
        return False
    values |= {"tokenizer_class": kind, "bos_token": eod, "eos_token": eod}
    write_object(folder / "tokenizer_config.json", values)
    return True
