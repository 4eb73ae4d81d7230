"""Tokenizers: text to token ids and back.

    --tokenizer                  split by       documents end with    decode(encode(text))
    gpt2:vocab.json,merges.txt   byte pairs     <|endoftext|>         text
    gpt2:FILE.tiktoken           byte pairs     <|endoftext|>         text
    bert-uncased:vocab.txt       WordPiece      [SEP]                 its words, in lower case
    bert-cased:vocab.txt         WordPiece      [SEP]                 its words
    sentencepiece:FILE.model     its pieces     </s>, <|endoftext|>   text, except what a foreign model normalises
    hf:tokenizer.json            as it says     <|endoftext|>, </s>…  as it says
    bytes                        nothing        256                   text
    run:RUN                      the tokenizer of a run, such as one that `mjax convert from-hf` wrote

Two laws hold for all of them. No text encodes to the end-of-document id, `eod`, whatever it contains; and `encode` adds
nothing that is not in the text; `prompt` adds the token that begins texts, where a model was trained with one. A
tokenizer is saved as a folder next to the data and copied into the run folder, so
you name it once, on the command line of `mjax prepare`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from mjax.config.plain_values import check, read
from mjax.data.tokenizers.bert import BertTokenizer as BertTokenizer
from mjax.data.tokenizers.bert import CasedBertTokenizer, UncasedBertTokenizer
from mjax.data.tokenizers.bert import train_wordpiece as train_wordpiece
from mjax.data.tokenizers.gpt2 import GPT2Tokenizer
from mjax.data.tokenizers.huggingface import HuggingFaceTokenizer
from mjax.data.tokenizers.library import DESCRIPTION as DESCRIPTION
from mjax.data.tokenizers.library import EOD_PIECE as EOD_PIECE
from mjax.data.tokenizers.library import ByteTokenizer, Tokenizer, sha256
from mjax.data.tokenizers.pieces import SentencePieceTokenizer
from mjax.data.tokenizers.pieces import train_sentencepiece as train_sentencepiece
from mjax.errors import UsageError
from mjax.utils.files import read_json, write_whole

SCHEMES: dict[str, type[Tokenizer]] = {
    tokenizer.scheme: tokenizer
    for tokenizer in (
        GPT2Tokenizer,
        UncasedBertTokenizer,
        CasedBertTokenizer,
        SentencePieceTokenizer,
        HuggingFaceTokenizer,
        ByteTokenizer,
    )
}


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `--tokenizer SPEC` names, SPEC being KIND, KIND:FILES or run:RUN.

    Raises:
      UsageError: the kind is unknown, or a file is missing or not what the kind needs.
    """
    kind, _, files = spec.partition(":")
    if kind == "run":
        if not (Path(files) / "tokenizer").is_dir():
            raise UsageError(
                f"--tokenizer {spec}: {files or '.'} has no folder tokenizer, so it is not a run that has one"
            )
        return tokenizer_from_folder(Path(files) / "tokenizer")
    if kind not in SCHEMES:
        forms = ", ".join([*(tokenizer.form for tokenizer in SCHEMES.values()), "run:RUN"])
        raise UsageError(f"--tokenizer {spec} is not a known kind; use {forms}")
    return SCHEMES[kind].from_files(files)


def files_of(spec: str) -> list[Path]:
    """The files that `load_tokenizer(spec)` reads."""
    kind, _, files = spec.partition(":")
    return sorted((Path(files) / "tokenizer").iterdir()) if kind == "run" else [*map(Path, files.split(","))]


def tokenizer_from_folder(folder: str | Path) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote into `folder`.

    Raises:
      UsageError: the folder has no tokenizer, a damaged one, or one of an unknown kind.
    """
    folder = Path(folder)
    description = folder / DESCRIPTION
    if not description.is_file():
        raise UsageError(
            f"{folder} has no {DESCRIPTION}, so it is not a tokenizer that `mjax prepare` saved; "
            "give the tokenizer's own files with --tokenizer KIND:FILES, such as gpt2:vocab.json,merges.txt"
        )
    values = _described(folder)
    kind, stated, sums = values["kind"], (values["vocabulary"], values["eod"]), values["sha256"]
    if kind not in SCHEMES:
        raise UsageError(f"{description} is of kind {kind!r}; this mjax knows {', '.join(SCHEMES)}")

    contents = []
    for name in SCHEMES[kind].stored:
        file = folder / name
        if not file.is_file():
            raise UsageError(f"{file} does not exist, but {description} lists it; prepare the data again")
        contents.append(file.read_bytes())
        if sha256(contents[-1]) != sums.get(name):
            raise UsageError(f"{file} was changed (its sha256 differs); restore the folder or prepare the data again")
    names = [str(folder / name) for name in SCHEMES[kind].stored]
    tokenizer = SCHEMES[kind].from_contents(contents, names, stated[1])
    if tokenizer.vocabulary > stated[0]:
        tokenizer.leave_out(stated[0])
    tokenizer.bos = values.get("bos")
    if tokenizer.bos not in (None, tokenizer.bos_of_files()):
        raise UsageError(
            f"{description} says that texts begin with id {tokenizer.bos}, and the files beside it "
            f"{tokenizer.bos_of_files()}; restore the folder or prepare the data again"
        )
    if (tokenizer.vocabulary, tokenizer.eod) != stated:
        raise UsageError(
            f"{description} states vocabulary and end of document {stated}, but the files beside it give "
            f"{(tokenizer.vocabulary, tokenizer.eod)}; restore the folder or prepare the data again"
        )
    return tokenizer


def bos_of(folder: Path) -> int | None:
    """The id that begins texts of the tokenizer that `Tokenizer.save` wrote into `folder`, which is not opened."""
    return _described(folder).get("bos")


class _Vocabulary(TypedDict):
    kind: str
    vocabulary: int
    eod: int
    sha256: dict[str, str]


class _Description(_Vocabulary, total=False):
    bos: int | None


def _described(folder: Path) -> _Description:
    file, fix = folder / DESCRIPTION, "prepare the data again"
    return check(_Description, read_json(file, fix), f"{file} does not describe a tokenizer", fix)


def ends_of_text(folder: Path, eod: int, given: str | None = None) -> list[int]:
    """The ids that end a generated text: the end of document, and those that the model's generation_config.json names,
    in the tokenizer's folder, unless another tokenizer is `given`, as KIND:FILES.

    Raises:
      UsageError: the file is damaged.
    """
    file = folder / "generation_config.json"
    ids = optional_object(file).get("eos_token_id") if given is None else None
    ids = ids if isinstance(ids, list) else [ids]
    return sorted({eod, *(token for token in ids if type(token) is int and 0 <= token < 2**31)})


def add_ends_of_text(folder: Path, eod: int, ids: Iterable[int]) -> None:
    """Name ids that end a text in the generation_config.json of a tokenizer's folder, unless `ends_of_text` has them.

    Raises:
      UsageError: the file is damaged.
    """
    known, file = ends_of_text(folder, eod), folder / "generation_config.json"
    if not {*ids} <= {*known}:
        write_whole(file, json.dumps(optional_object(file) | {"eos_token_id": sorted({*known, *ids})}, indent=2) + "\n")


def optional_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none.

    Raises:
      UsageError: the file is damaged.
    """
    return read(dict[str, Any], file, "restore it") if file.is_file() else {}


def same_files(one: Path, other: Path) -> bool:
    """True if two folders of `Tokenizer.save` hold the same tokenizer, which may end documents differently."""
    saved = [_described(folder) for folder in (one, other)]
    return all(saved[0][name] == saved[1][name] for name in ("kind", "sha256"))
