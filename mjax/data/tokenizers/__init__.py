"""Tokenizers: text to token ids and back.

    --tokenizer                  split by       documents end with    decode(encode(text))
    gpt2:vocab.json,merges.txt   byte pairs     <|endoftext|>         text
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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from mjax.config.plain_values import check, read
from mjax.data.tokenizers.huggingface import BertTokenizer as BertTokenizer
from mjax.data.tokenizers.huggingface import HuggingFaceTokenizer as HuggingFaceTokenizer
from mjax.data.tokenizers.huggingface import open_library as open_library
from mjax.data.tokenizers.huggingface import wrap_library
from mjax.data.tokenizers.library import DESCRIPTION as DESCRIPTION
from mjax.data.tokenizers.library import EOD_PIECE as EOD_PIECE
from mjax.data.tokenizers.library import SCHEMES, ByteTokenizer, Tokenizer, library_errors, sha256
from mjax.data.tokenizers.library import SentencePieceTokenizer as SentencePieceTokenizer
from mjax.data.tokenizers.published import bert_library, gpt2_library
from mjax.data.tokenizers.training import TRAINABLE as TRAINABLE
from mjax.data.tokenizers.training import train_sentencepiece as train_sentencepiece
from mjax.data.tokenizers.training import train_wordpiece as train_wordpiece
from mjax.errors import UsageError
from mjax.utils.files import read_json, write_whole


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
        forms = ", ".join([*(form for form, _ in SCHEMES.values()), "run:RUN"])
        raise UsageError(f"--tokenizer {spec} is not a known kind; use {forms}")
    form, stored = SCHEMES[kind]
    files, _, eod = files.partition(",eod=") if kind == "hf" else (files, "", None)
    names = files.split(",") if kind == "gpt2" else [files] if files else []
    if len(names) != len(stored):
        raise UsageError(f"--tokenizer {spec} names {len(names)} files; use --tokenizer {form}")
    if missing := [name for name in names if not Path(name).is_file()]:
        raise UsageError(f"--tokenizer {spec}: there is no file {missing[0]}; use --tokenizer {form}")
    with library_errors(f"--tokenizer {spec}: cannot read a file", "check its permissions"):
        contents = [Path(name).read_bytes() for name in names]
    if kind == "gpt2" and contents[1].lstrip()[:1] == b"{":  # no line of merges begins with it
        raise UsageError(f"the files are swapped; use --tokenizer gpt2:{names[1]},{names[0]}")
    return parse_tokenizer(kind, contents, names, eod or None)


def parse_tokenizer(
    kind: str, contents: Sequence[bytes], names: Sequence[str], eod: str | int | None = None
) -> Tokenizer:
    """A tokenizer of a kind, from its files.

    Args:
      kind: of SCHEMES.
      contents: of its files.
      names: of its files, for errors.
      eod: text or id of the token that ends documents, for a tokenizer.json.

    Raises:
      UsageError: a file is not what the kind needs.
    """
    match kind:
        case "bytes":
            return ByteTokenizer()
        case "sentencepiece":
            return SentencePieceTokenizer(contents[0], names[0])
        case "hf":
            return wrap_library(open_library(contents[0], names[0]), kind, contents, names[0], eod)
        case "gpt2":
            return wrap_library(gpt2_library(contents, names), kind, contents, names[0])
    return wrap_library(bert_library(contents[0], names[0], kind == "bert-uncased"), kind, contents, names[0])


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
    values = _read_description(folder)
    kind, stated = values["kind"], (values["vocabulary"], values["eod"])
    if kind not in SCHEMES:
        raise UsageError(f"{description} is of kind {kind!r}; this mjax knows {', '.join(SCHEMES)}")
    files = [folder / name for name in SCHEMES[kind][1]]
    contents = [_read_verified(file, values["sha256"].get(file.name)) for file in files]
    tokenizer = parse_tokenizer(kind, contents, [*map(str, files)], stated[1])
    if tokenizer.vocabulary > stated[0]:
        tokenizer.leave_out(stated[0])
    tokenizer.bos = values.get("bos")
    bos = None if tokenizer.bos is None else tokenizer.bos_of_files()
    if (tokenizer.vocabulary, tokenizer.eod, tokenizer.bos) != (*stated, bos):
        raise UsageError(
            f"{description} states vocabulary, end of document and beginning of texts {*stated, tokenizer.bos}, but "
            f"the files beside it give {tokenizer.vocabulary, tokenizer.eod, bos}; restore the folder or prepare the "
            "data again"
        )
    return tokenizer


def _read_verified(file: Path, checksum: str | None) -> bytes:
    """The content of a tokenizer's file with this checksum."""
    fix = "restore the folder or prepare the data again"
    if not file.is_file():
        raise UsageError(f"{file} does not exist, but {file.with_name(DESCRIPTION)} lists it; {fix}")
    content = file.read_bytes()
    if sha256(content) != checksum:
        raise UsageError(f"{file} was changed (its sha256 differs); {fix}")
    return content


def bos_of(folder: Path) -> int | None:
    """The id that begins texts of the tokenizer that `Tokenizer.save` wrote into `folder`, which is not opened."""
    return _read_description(folder).get("bos")


class _Description(TypedDict):
    kind: str
    vocabulary: int
    eod: int
    sha256: dict[str, str]
    bos: NotRequired[int | None]


def _read_description(folder: Path) -> _Description:
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
    saved = [_read_description(folder) for folder in (one, other)]
    return all(saved[0][name] == saved[1][name] for name in ("kind", "sha256"))
