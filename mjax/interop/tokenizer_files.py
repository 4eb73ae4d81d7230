"""The tokenizer of a model, between a run folder and a Hugging Face model folder.

An export contains the files it was made from and `mjax_tokenizer.json`, so that an import restores it. For
`transformers.AutoTokenizer` it has a tokenizer.json with the same ids (`fast_tokenizer.py`).

BERT's is a vocab.txt and a flag for capitals; newer folders have both in a tokenizer.json. A tokenizer that only
resembles BERT's, with other rules for accents or with added tokens, is opened by its tokenizer.json or not at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from mjax.config.model import ModelConfig
from mjax.data.tokenizers import (
    DESCRIPTION,
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
from mjax.data.tokenizers.bert import LONGEST_WORD, SPECIAL
from mjax.data.tokenizers.huggingface import check_sizes
from mjax.data.tokenizers.library import library_errors
from mjax.errors import UsageError
from mjax.interop.model_folder import read_object, write_object

ADDED = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Settings of an added token."""
FOUND_BY_FILES = (HuggingFaceTokenizer, GPT2Tokenizer, SentencePieceTokenizer)
"""In search order: tokens added to a model later are in tokenizer.json only."""


def find_tokenizer(folder: Path, given: str | None) -> Tokenizer | None:
    """The tokenizer `given` as in `mjax prepare --tokenizer`, or that of a model folder, with the token that begins its
    texts; None: it has none.

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
            _check_kind(kind, folder)
            if kind is HuggingFaceTokenizer:
                tokenizer = _find_fast(folder)
            else:
                tokenizer = kind(*(file.read_bytes() for file in files), *map(str, files))
            if kind is HuggingFaceTokenizer or _adds_bos(folder):
                tokenizer.bos = tokenizer.bos_of_files()
            return tokenizer
    return None


def _adds_bos(folder: Path) -> bool:
    """Whether `transformers` puts the first token before a text where no tokenizer.json says so itself."""
    said = folder / "tokenizer_config.json"
    return said.is_file() and read_object(said).get("add_bos_token") is True


def _find_fast(folder: Path) -> HuggingFaceTokenizer:
    """From tokenizer.json, with the tokens that only tokenizer_config.json has, and its end token."""
    file, said = folder / "tokenizer.json", folder / "tokenizer_config.json"
    settings = read_object(said) if said.is_file() else {}
    content, added = file.read_bytes(), settings.get("added_tokens_decoder") or {}
    check_sizes(content, str(file))
    with library_errors(f"{file} is not a tokenizer.json of Hugging Face", "give one that save_pretrained wrote"):
        library = Library.from_str(content.decode("utf-8"))
    try:
        listed = sorted((int(number), {**token}) for number, token in added.items())
        missing = [one for one in listed if library.token_to_id(one[1]["content"]) is None]
        settings_of = lambda token: {name: token[name] for name in ADDED if name in token}  # noqa: E731
        tokens = [(number, AddedToken(**settings_of(token))) for number, token in missing]
    except (TypeError, ValueError, AttributeError, KeyError):
        raise UsageError(f"{said}: added_tokens_decoder does not describe tokens; restore the file") from None
    for number, token in tokens:
        (library.add_special_tokens if token.special else library.add_tokens)([token])
        if library.token_to_id(token.content) != number:
            raise UsageError(
                f"{said} gives {token.content} the id {number}, where {file} has {library.token_to_id(token.content)} "
                "for the next one; save the tokenizer again with save_pretrained of transformers"
            )
    end = settings.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    name = str(file)
    return HuggingFaceTokenizer(library.to_str().encode() if tokens else content, name, end if end in known else None)


def _check_kind(kind: type[Tokenizer], folder: Path) -> None:
    """Refuse vocab.json and merges.txt of a tokenizer that cuts text into words by other rules than GPT-2's."""
    said = folder / "tokenizer_config.json"
    if kind is not GPT2Tokenizer or not said.is_file():
        return
    name = read_object(said).get("tokenizer_class") or "GPT2Tokenizer"
    if str(name).removesuffix("Fast") != "GPT2Tokenizer":
        raise UsageError(
            f"{folder} has vocab.json and merges.txt of a {name}, which cuts text into words otherwise than GPT-2 "
            "does; add its tokenizer.json, which save_pretrained of transformers writes"
        )


def _find_bert(folder: Path) -> BertTokenizer | None:
    """The WordPiece tokenizer of a model folder: from tokenizer.json if it exists, else from vocab.txt."""
    whole, pieces, said = (folder / name for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json"))
    if whole.is_file():
        try:
            check_sizes(whole.read_bytes(), str(whole))
            with library_errors(str(whole), ""):
                # Omitted settings are filled in.
                values = json.loads(Library.from_buffer(whole.read_bytes()).to_str())
        except UsageError:  # it is damaged; the next reader reports it
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
    """Whether words are lower-cased; None if unknown, or if accents or Chinese are handled differently from BERT."""
    small = values.get(lowercase) if isinstance(values, dict) else None
    usual = (
        isinstance(small, bool) and values.get("strip_accents") in (None, small) and values.get(chinese) is not False
    )
    return small if usual else None


def _pieces(values: dict[str, Any]) -> bytes | None:
    """The vocab.txt in a tokenizer.json; None if it describes another tokenizer than BERT's."""
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


def write_tokenizer(tokenizer: Tokenizer, library: Library, folder: Path, model: ModelConfig) -> None:
    """Write a tokenizer into a model folder: its own files, for mjax, and a tokenizer.json, for `transformers`.

    Args:
      tokenizer: the tokenizer.
      library: the result of `fast_tokenizer`.
      folder: the model folder.
      model: the exported model. A GPT's tokenizer adds at most `bos` to a text and matches no special token in it, as
        in mjax. A BERT's adds [CLS] and [SEP] and matches a written [MASK], as users of BERTs expect.
    """
    pairs = model.samples != "text"
    content = library.to_str(pretty=True).encode()
    if isinstance(tokenizer, HuggingFaceTokenizer):  # whose own file has that name
        bos, tokenizer = tokenizer.bos, HuggingFaceTokenizer(content, "tokenizer.json", tokenizer.eod)
        tokenizer.bos = bos
    tokenizer.save(folder)
    (folder / "tokenizer.json").write_bytes(content)
    end, begin = library.id_to_token(tokenizer.eod), library.id_to_token(tokenizer.start)
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.sequence,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": not pairs,
        "model_input_names": ["input_ids", *(["token_type_ids"] if pairs else []), "attention_mask"],
    }
    if isinstance(tokenizer, BertTokenizer):
        values |= {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
        values |= {"do_lower_case": tokenizer.lowercase, "tokenize_chinese_chars": True, "strip_accents": None}
    if not pairs:
        values |= {"bos_token": begin, "eos_token": end}
    write_object(folder / "tokenizer_config.json", values)
