"""Tokenizers from files: of a spec on the command line, of a folder, and of GPT-2's and BERT's published vocabularies.

GPT-2 cuts text into words, each with the space before it, and merges the bytes of a word pair by pair, pairs learned
earlier first (Radford et al. 2019, §2.2). Any text can be encoded and decodes to itself. The files write a byte as a
printable character, the space as "Ġ". `vocab.json` (OpenAI's `encoder.json`) maps tokens to ids, and each line of
`merges.txt` (`vocab.bpe`) is a pair, in the order of learning.

BERT's `vocab.txt` has a piece per line, whose number is its id. Text is cleaned of control characters and cut at white
space and around each punctuation mark and Chinese character. A word becomes its longest known beginning, then the
longest known continuation ("##…"), and so on (Devlin et al. 2019, §3). A word that cannot be encoded is [UNK], and so
is one of more than 100 characters: that is Hugging Face's limit, while Megatron's and Google's code has 200. White
space is lost, so decoding does not restore the text. [CLS], [SEP] and [MASK] are added when samples are made; no text
encodes to them, because their brackets are punctuation: `[MASK]` in a text is `[`, `mask`, `]`, as in Megatron.
"""

import json
import string
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from mjax.config.plain_values import check, read
from mjax.data.tokenizer_trial import try_tokenizer
from mjax.data.tokenizers.kinds import (
    DESCRIPTION,
    EOD_PIECE,
    SCHEMES,
    BertTokenizer,
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    library_errors,
    sha256,
)
from mjax.errors import UsageError
from mjax.utils.files import read_json, write_whole


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `--tokenizer SPEC` names, SPEC being KIND, KIND:FILES or run:RUN.

    Raises:
      UsageError: the kind is unknown, or a file is missing or not what the kind needs.
    """
    kind, _, files = spec.partition(":")
    if kind == "run":
        folder = Path(files) / "tokenizer"
        if not folder.is_dir():
            raise UsageError(f"--tokenizer {spec}: {files} has no folder tokenizer, so it is not a run that has one")
        return tokenizer_from_folder(folder)
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
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "sentencepiece":
        return SentencePieceTokenizer(contents[0], names[0])
    if kind == "hf":
        library = open_library(contents[0], names[0])
    elif kind == "gpt2":
        library = gpt2_library(contents, names)
    else:
        library = bert_library(contents[0], names[0], kind == "bert-uncased")
    return wrap_library(library, kind, contents, names[0], eod if kind == "hf" else None)


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
        fix = "give the tokenizer's own files with --tokenizer KIND:FILES, such as gpt2:vocab.json,merges.txt"
        raise UsageError(f"{folder} has no {DESCRIPTION}, so no tokenizer of mjax is there; {fix}")
    values = _read_description(folder)
    kind, stated = values["kind"], (values["vocabulary"], values["eod"])
    if kind not in SCHEMES:
        raise UsageError(f"{description} is of kind {kind!r}; this mjax knows {', '.join(SCHEMES)}")
    files, fix = [folder / name for name in SCHEMES[kind][1]], "restore the folder or prepare the data again"
    contents = [file.read_bytes() if file.is_file() else None for file in files]
    for file, content in zip(files, contents, strict=True):
        if content is None:
            raise UsageError(f"{file} does not exist, but {description} lists it; {fix}")
        if sha256(content) != values["sha256"].get(file.name):
            raise UsageError(f"{file} was changed (its sha256 differs); {fix}")
    tokenizer = parse_tokenizer(kind, contents, [*map(str, files)], stated[1])
    if tokenizer.vocabulary > stated[0]:
        tokenizer.leave_out(stated[0])
    tokenizer.bos = values.get("bos")
    bos = None if tokenizer.bos is None else tokenizer.bos_of_files()
    if (tokenizer.vocabulary, tokenizer.eod, tokenizer.bos) != (*stated, bos):
        there = f"vocabulary, end and beginning of texts {*stated, tokenizer.bos}"
        found = (tokenizer.vocabulary, tokenizer.eod, bos)
        raise UsageError(f"{description} states {there}, but the files beside it give {found}; {fix}")
    return tokenizer


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


# --- Libraries --------------------------------------------------------------------------------------------------------


def wrap_library(
    library: Library, scheme: str, contents: Sequence[bytes], name: str, eod: str | int | None = None
) -> HuggingFaceTokenizer:
    """The tokenizer around a library's, a BERT's if it has BERT's special tokens; arguments as above."""
    bert = all(library.token_to_id(token) is not None for token in BertTokenizer.special)
    return (BertTokenizer if bert else HuggingFaceTokenizer)(library, scheme, contents, name, eod)


def open_library(content: bytes, name: str) -> Library:
    """The tokenizer in a tokenizer.json, tried in a child process first.

    Raises:
      UsageError: it is damaged, or takes too much time or memory.
    """
    try_tokenizer(content, name, "tokenizers")
    with library_errors(f"{name} is not a tokenizer.json of Hugging Face", "give one that save_pretrained wrote"):
        return Library.from_str(content.decode("utf-8"))


def add_special(library: Library, *tokens: str) -> Library:
    """The library's tokenizer, in which these tokens are special."""
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return library


def utf8_lines(content: bytes, name: str) -> list[str]:
    """Lines of a text file that may come from Windows.

    Only a line feed ends a line: to `str.splitlines` U+2028 and U+0085 do too, and vocabularies hold them as tokens.

    Raises:
      UsageError: it is not UTF-8.
    """
    with library_errors(f"{name} is not a text file in UTF-8", "give the right file"):
        lines = content.decode("utf-8").removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines]


# --- BERT -------------------------------------------------------------------------------------------------------------


def bert_library(vocab: bytes, name: str, lowercase: bool) -> Library:
    """BERT's tokenizer, of words in lower case without accents, or of words as they are.

    Raises:
      UsageError: the file is no vocabulary, or of the other case: half of the words would be [UNK], or half of the
        pieces unused.
    """
    # As in Google's code the line number is the id, and the last of equal pieces counts.
    ids = {piece.rstrip(): number for number, piece in enumerate(utf8_lines(vocab, name))}
    if missing := [piece for piece in BertTokenizer.special if piece not in ids]:
        raise UsageError(f"{name} lacks {', '.join(missing)}; give BERT's vocab.txt, which has one piece a line")
    capitals = [letter in ids for letter in string.ascii_uppercase]
    if lowercase and all(capitals):
        raise UsageError(f"{name} has pieces in capitals; use --tokenizer bert-cased:{name}")
    if not lowercase and not any(capitals):
        raise UsageError(f"{name} has no capital letters; use --tokenizer bert-uncased:{name}")
    library = Library(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    library.normalizer, library.pre_tokenizer = bert_normalizer(lowercase), pre_tokenizers.BertPreTokenizer()
    # Without the clean-up of "it ' s" the text of a beginning is always a beginning of the text.
    library.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    library.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return add_special(library, *BertTokenizer.special)


def bert_normalizer(lowercase: bool) -> normalizers.Normalizer:
    """BERT's cleaning of text, with or without capitals and accents."""
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=lowercase, lowercase=lowercase
    )


# --- GPT-2 ------------------------------------------------------------------------------------------------------------


def gpt2_library(contents: Sequence[bytes], names: Sequence[str]) -> Library:
    """GPT-2's tokenizer from its vocab.json and merges.txt; `<|endoftext|>` ends documents.

    Raises:
      UsageError: a file is not what its name says, or the two do not belong together.
    """
    with library_errors(f"{names[0]} is not GPT-2's vocab.json, also called encoder.json", "give the right file"):
        ids = json.loads(contents[0])
        if sorted(ids.values()) != list(range(len(ids))):
            raise ValueError(f"its ids are not 0 to {len(ids) - 1}, each once")
        if missing := {*byte_characters()} - {*ids}:
            raise ValueError(f"it has no token for {len(missing)} of the 256 bytes")
    if EOD_PIECE not in ids:
        raise UsageError(f"{names[0]} has no token {EOD_PIECE} to end documents with; give GPT-2's vocab.json")
    lines = utf8_lines(contents[1], names[1])
    merges = [tuple(line.split(" ")) for line in lines[lines[0].startswith("#version") :] if line]
    with library_errors(f"{names[1]} does not belong to {names[0]}", "give a matching pair"):
        library = byte_level(ids, merges)
    library.post_processor = processors.TemplateProcessing(
        single=f"{EOD_PIECE} $A", special_tokens=[(EOD_PIECE, ids[EOD_PIECE])]
    )
    return library


def byte_level(ids: dict[str, int], pairs: Sequence[tuple[str, str]], words: bool = True) -> Library:
    """Byte pairs of the library, within GPT-2's `words` or over the whole text."""
    library = Library(models.BPE(ids, [*pairs]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    library.decoder = decoders.ByteLevel()
    return add_special(library, EOD_PIECE)


@cache
def byte_characters() -> list[str]:
    """Characters for the 256 bytes in GPT-2's files: itself where it is printable in Latin-1, else from U+0100 on."""
    known = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(character) for character in known if ord(character) < 256}
    others = iter(known[len(printable) :])
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]
