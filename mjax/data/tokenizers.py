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

In Hugging Face's tokenizers a text that contains `<|endoftext|>` or `[SEP]` encodes to that token. In Megatron's it
does not, nor here: otherwise a web page about GPT-2 would end in the middle.

The library splits and merges text exactly as its file says. Settings that would silently change a corpus are switched
off: truncation and padding (some files cut at 128 tokens), tokens added around the text, random merges (BPE dropout),
and special tokens recognized inside the text, one of which ends documents.

A saved tokenizer is a folder with the files it was made from, byte for byte, and `mjax_tokenizer.json`:

    {"kind": "gpt2", "vocabulary": 50257, "eod": 50256, "sha256": {"vocab.json": "…", "merges.txt": "…"}}

Loading it parses these files and nothing else: there is nothing to execute or unpickle. A file that has changed since
is refused, because other merges would silently give other tokens.

**GPT-2 and BERT.** GPT-2 cuts text into words, each with the space before it, and merges the bytes of a word pair by
pair, pairs learned earlier first (Radford et al. 2019, §2.2). Any text can be encoded and decodes to itself. The files
write a byte as a printable character, the space as "Ġ". `vocab.json` (OpenAI's `encoder.json`) maps tokens to ids, and
each line of `merges.txt` (`vocab.bpe`) is a pair, in the order of learning.

BERT's `vocab.txt` has a piece per line, whose number is its id. Text is cleaned of control characters and cut at white
space and around each punctuation mark and Chinese character. A word becomes its longest known beginning, then the
longest known continuation ("##…"), and so on (Devlin et al. 2019, §3). A word that cannot be encoded is [UNK], and so
is one of more than 100 characters: that is Hugging Face's limit, while Megatron's and Google's code has 200. White
space is lost, so decoding does not restore the text. [CLS], [SEP] and [MASK] are added when samples are made; no text
encodes to them, because their brackets are punctuation: `[MASK]` in a text is `[`, `mask`, `]`, as in Megatron.

**Training.** A sentencepiece model trained here adds no space in front, folds no spaces and normalises nothing, and
encodes as UTF-8 bytes what it has no piece for. So `decode(encode(text)) == text`, except "▁" (U+2581), which
sentencepiece uses for the space.

For a BERT, sentencepiece learns byte pairs within the words of the text. It writes the beginning of a word as "▁": its
piece "▁un" becomes "un", and "believ" becomes "##believ".

    [PAD] [UNK] [CLS] [SEP] [MASK] · every letter, and "##" every letter · pieces, in the order of learning

BERT's own vocabulary was chosen by the likelihood of the text rather than by frequency, with code that was never
published; Hugging Face's trainer counts pairs too. It is not used here because it breaks ties by the order of a hash
table: three runs of `trainers.WordPieceTrainer` on the same text gave three different vocabularies.
"""

import hashlib
import io
import json
import os
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from mjax.config.plain_values import check, read
from mjax.data.gigatoken import FastEncoder, fast_encoder
from mjax.data.tokenizer_trial import check_expansion, remember, try_tokenizer
from mjax.errors import UsageError, either, suggestion
from mjax.utils.files import is_hub_name, read_json, write_whole

MIN_GIGATOKEN_CHARACTERS = 2**16  # characters in a call; less is encoded before gigatoken is ready
# One thread each: workers are processes. The library reads this when it encodes, and a user's own setting wins.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

DESCRIPTION = "mjax_tokenizer.json"
EOD_PIECE = "<|endoftext|>"
WHOLE_FILES = "get its files again, they may be damaged"

SCHEMES = {
    "gpt2": ("gpt2:vocab.json,merges.txt", ("vocab.json", "merges.txt")),
    "bert-uncased": ("bert-uncased:vocab.txt", ("vocab.txt",)),
    "bert-cased": ("bert-cased:vocab.txt", ("vocab.txt",)),
    "sentencepiece": ("sentencepiece:FILE.model", ("tokenizer.model",)),
    "hf": ("hf:tokenizer.json or hf:tokenizer.json,eod=TOKEN", ("tokenizer.json",)),
    "bytes": ("bytes", ()),
}
"""By name on the command line and in `mjax_tokenizer.json`: what to type, and the files in a folder."""


class Tokenizer:
    """Text to token ids and back; rebuilt from the files it was made from.

    Attributes:
      scheme: its kind, of SCHEMES.
      encoder: the package that has encoded texts for `encode_flat`; gigatoken if it took some of them.
      contents: the bytes of its files, in the order of SCHEMES.
      vocabulary: ids run from 0 to vocabulary - 1.
      eod: id that ends a document; no text encodes to it.
      bos: id that begins every text the model saw, before its tokens; None: there is none.
    """

    scheme: str
    encoder: str = "mjax"
    contents: tuple[bytes, ...] = ()
    vocabulary: int
    eod: int
    bos: int | None = None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without an end-of-document id or any other that is not in the text.

        Raises:
          UsageError: the text holds half of a surrogate pair, which is not a character.
        """
        return self.encode_batch([text])[0]

    @property
    def start(self) -> int:
        """The id before the first token of a text: `bos`, or the end of the document before it."""
        return self.eod if self.bos is None else self.bos

    def prompt(self, text: str) -> list[int]:
        """Ids of a text that a model continues: `encode` after `bos`."""
        return [*([] if self.bos is None else [self.bos]), *self.encode(text)]

    def read_bos(self) -> int | None:
        """The id that `transformers` puts before every text with these files; None: it puts none."""
        return None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, faster where the library allows; in one thread."""
        for text in texts:
            utf8(text)
        with library_errors(f"the {self.scheme} tokenizer cannot encode a text", WHOLE_FILES):
            batch = self._encode(list(texts))
        for text, ids in zip(texts, batch, strict=True):
            check_expansion(text, len(ids), self.scheme)
        return batch

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, which is valid; special tokens written out in it are text like any other."""
        raise NotImplementedError

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts, one after the other, uint32 [tokens], and the tokens of each text, int64 [texts].

        Raises:
          UsageError: as `encode`.
          EncodersDiffer: gigatoken encodes a text differently.
        """
        ids = self.encode_batch(texts)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.uint32, lengths.sum()), lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; an end-of-document id becomes `<|endoftext|>`, bytes that are not UTF-8 become "�".

        So do ids from `vocabulary` on, which a model with a larger vocabulary may draw.
        """
        text, run = [], []
        for token in ids:
            if token != self.eod and 0 <= token < self.vocabulary:
                run.append(int(token))  # sentencepiece takes no NumPy integers
            else:
                text += [self._text(run), EOD_PIECE if token == self.eod else "\ufffd"]
                run = []
        return "".join([*text, self._text(run)])

    def _text(self, ids: list[int]) -> str:
        """Text of ids of which each has a token and none ends a document."""
        raise NotImplementedError

    def leave_out(self, rows: int) -> list[str]:
        """Count no ids from `rows` on, if they are special tokens, which no text encodes to; their names, or none."""
        return []

    @property
    def files(self) -> dict[str, bytes]:
        """The files of its folder, by name."""
        return dict(zip(SCHEMES[self.scheme][1], self.contents, strict=True))

    def save(self, folder: Path) -> None:
        """Write the files, and last the description, which makes the folder a tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_whole(folder / name, content)
        begin = {} if self.bos is None else {"bos": self.bos}
        values = {"kind": self.scheme, "vocabulary": self.vocabulary, "eod": self.eod} | begin
        values["sha256"] = {name: sha256(content) for name, content in self.files.items()}
        write_whole(folder / DESCRIPTION, json.dumps(values, indent=2) + "\n")


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 and an end-of-document id: no files and no training, but four times as many tokens."""

    scheme, vocabulary, eod = "bytes", 257, 256

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def _text(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model; its end-of-sentence piece, or a control piece `<|endoftext|>`, ends documents.

    A model does what it was trained to do: most add a space in front, many fold spaces and normalise to NFKC. One that
    is trained here (`training.py`) does neither.
    """

    scheme = encoder = "sentencepiece"

    def __init__(self, model: bytes, source: str):
        try_tokenizer(model, source, "sentencepiece")
        with library_errors(f"{source} is not a sentencepiece model", "give the .model file of one"):
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocabulary = self.processor.vocab_size()
            # A piece that is not UTF-8 fails here, not in the middle of a text.
            pieces = [self.processor.id_to_piece(number) for number in range(self.vocabulary)]
        self.contents, self.eod = (model,), self.processor.eos_id()
        if self.eod < 0 and EOD_PIECE in pieces:
            self.eod = pieces.index(EOD_PIECE)
        if self.eod < 0 or not self.processor.is_control(self.eod):  # text encodes to any other piece
            fix = "use a model trained with one (--control_symbols), or leave --tokenizer out to train one"
            raise UsageError(f"{source} has no control piece that ends sentences or is {EOD_PIECE}; {fix}")

    def read_bos(self) -> int | None:
        """The piece that begins a sentence, if the model has one."""
        return None if (number := self.processor.bos_id()) < 0 else number

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.processor.encode(texts, num_threads=1)

    def _text(self, ids: list[int]) -> str:
        return self.processor.decode(ids)


ENDS = (
    "<|endoftext|>",  # GPT-2, GPT-NeoX, Phi, Qwen, Falcon
    "<|end_of_text|>",  # Llama 3
    "<｜end▁of▁sentence｜>",  # DeepSeek
    "</s>",  # Llama 1 and 2, Mistral, T5, RoBERTa, BLOOM
    "<eos>",  # Gemma
    "[SEP]",  # BERT
)
"""Special tokens that end a document, in the order in which they are looked for."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the library; documents end with the token that is named, or else with one of the usual ones.

    Args:
      library: the tokenizer.
      scheme: its kind.
      contents: of the files it was made from.
      name: of the first of them, for errors.
      eod: text or id of the token that ends documents.

    Raises:
      UsageError: it has no token to end documents with, or the file is damaged.
    """

    encoder = "tokenizers"

    def __init__(
        self, library: Library, scheme: str, contents: Sequence[bytes], name: str, eod: str | int | None = None
    ):
        self.library, self.scheme, self.contents, self.name = library, scheme, tuple(contents), name
        library.no_truncation()
        library.no_padding()
        if hasattr(library.model, "dropout"):
            library.model.dropout = None
        library.encode_special_tokens = True  # as ordinary text
        with library_errors(f"{name} is not a tokenizer.json of Hugging Face", "give one that save_pretrained wrote"):
            self.vocabulary = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocabulary > (size := len(contents[0])):  # a model would have a row for each id
            raise UsageError(f"{name} has the id {self.vocabulary - 1:,} in {size:,} bytes; {WHOLE_FILES}")
        token = self._find_eod(eod)
        self.eod = library.token_to_id(token)
        self._refuse_in_text(token)

    # --- Encoding and decoding ----------------------------------------------------------------------------------------

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not self._is_worth(texts):
            return self._encode_slowly(texts)
        ids, lengths = self._fast.encode(texts)
        return [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode all texts as any tokenizer does, and without lists where gigatoken can."""
        if not self._is_worth(texts):
            return super().encode_flat(texts)
        for text in texts:
            utf8(text)
        self.encoder = "gigatoken"
        return self._fast.encode(texts)

    @cached_property
    def _fast(self) -> "FastEncoder | None":
        return fast_encoder(self.library, self._encode_slowly)

    def _is_worth(self, texts: Sequence[str]) -> bool:
        return sum(map(len, texts)) >= MIN_GIGATOKEN_CHARACTERS and self._fast is not None

    def _encode_slowly(self, texts: Sequence[str]) -> list[list[int]]:
        # The fast method keeps no track of which token came from which characters.
        return [encoding.ids for encoding in self.library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_characters(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of the tokens of each text, and the characters text[begin:end] that each token was made of."""
        for text in texts:
            utf8(text)
        with library_errors(f"the {self.scheme} tokenizer cannot encode a text", WHOLE_FILES):
            encodings = self.library.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def _text(self, ids: list[int]) -> str:
        with library_errors(f"the {self.scheme} tokenizer cannot decode these ids", WHOLE_FILES):
            return self.library.decode(ids, skip_special_tokens=False)

    # --- Special tokens -----------------------------------------------------------------------------------------------

    def read_bos(self) -> int | None:
        """The one token that the post-processor puts before a text; one that it puts behind is not carried.

        Raises:
          UsageError: it puts several there.
        """
        with_it, alone = (self.library.encode("a", add_special_tokens=added).ids for added in (True, False))
        starts = range(len(with_it) - len(alone) + 1)
        before = with_it[: next((i for i in starts if with_it[i : i + len(alone)] == alone), 0)]
        if len(before) > 1:
            tokens = " ".join(self.library.id_to_token(number) for number in before)
            fix = f"leave one in its post_processor, or take it without any: --tokenizer hf:{self.name}"
            raise UsageError(f"{self.name} puts {len(before)} tokens before texts ({tokens}), mjax at most one; {fix}")
        return before[0] if before else None

    def leave_out(self, rows: int) -> list[str]:
        """Leave special tokens out: a model may have fewer rows than its tokenizer has tokens for chats."""
        surplus = [self.library.id_to_token(number) for number in range(rows, self.vocabulary)]
        if not {*surplus} <= {*self._special()} or self.eod >= rows:
            return []
        self.vocabulary = rows
        return surplus

    def _special(self) -> list[str]:
        return [token.content for token in self.library.get_added_tokens_decoder().values() if token.special]

    def _find_eod(self, eod: str | int | None) -> str:
        """The token that ends documents: the one given, by text or id, or the first of the usual ones."""
        token = self.library.id_to_token(eod) if isinstance(eod, int) else eod
        if token in [one.content for one in self.library.get_added_tokens_decoder().values()]:
            return token
        special = self._special()
        if token is None and (usual := [one for one in ENDS if one in special]):
            return usual[0]
        wanted, fix = token or " ".join(ENDS), f"name the one that ends documents: --tokenizer hf:{self.name},eod=TOKEN"
        there = " ".join(special[:10]) or "it has none"
        raise UsageError(f"{wanted} is not among the special tokens of {self.name} ({there}); {fix}")

    def _refuse_in_text(self, token: str) -> None:
        """Make sure that text which spells `token`, an added one, does not encode to it."""
        # A token can be added without being special, and would then be found in text.
        self.library.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        if self._is_in_text(token):
            # A unigram model knows its special tokens as pieces too: cut what looks like one after its first character.
            cut = tokenizers.Regex(f"{re.escape(token[0])}(?={re.escape(token[1:])})")
            cuts = pre_tokenizers.Split(cut, behavior="isolated")
            before = self.library.pre_tokenizer
            self.library.pre_tokenizer = cuts if before is None else pre_tokenizers.Sequence([before, cuts])
        if self._is_in_text(token):
            fix = f"name another token: --tokenizer hf:{self.name},eod=TOKEN"
            raise UsageError(f"{self.name} reads {token} in any text, so it cannot end documents; {fix}")

    def _is_in_text(self, token: str) -> bool:
        return any(self.eod in ids for ids in self.encode_batch([token, f"a {token} b", f"a{token}b"]))


class BertTokenizer(HuggingFaceTokenizer):
    """A tokenizer with BERT's five special tokens; [SEP] ends documents, and nothing begins texts.

    Attributes:
      cls, sep, mask, pad, unk: ids of [CLS], [SEP], [MASK], [PAD] and [UNK].
    """

    special = ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]")

    def __init__(self, library: Library, *arguments, **named):
        super().__init__(library, *arguments, **named)
        self.cls, self.sep, self.mask, self.pad, self.unk = map(library.token_to_id, self.special)

    def read_bos(self) -> int | None:
        """None: [CLS] is added when samples are made."""
        return None


@contextmanager
def library_errors(before: str, after: str) -> Iterator[None]:
    """Turn any error into the UsageError `before (…); after`, panics of a Rust library included."""
    try:
        yield
    except (UsageError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is not an Exception
        raise UsageError(f"{before} ({error}); {after}") from None


def sha256(content: bytes) -> str:
    """Checksum of a file's content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def utf8(text: str) -> bytes:
    """The bytes of `text`; called by every `encode`, so that the libraries see valid text only.

    Raises:
      UsageError: it holds half of a surrogate pair, which JSON can spell (`"\\ud83d"`) and UTF-8 cannot.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise UsageError(f"character {error.start} of the text is {half}, half of a surrogate pair; drop it") from None


# --- From files and folders -------------------------------------------------------------------------------------------


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
        if is_hub_name(Path(spec)):
            name = spec.rpartition("/")[2]
            fetch = f"`hf download {spec} tokenizer.json --local-dir {name}`, then --tokenizer hf:{name}/tokenizer.json"
            raise UsageError(f"--tokenizer {spec}: nothing is downloaded by its Hugging Face name; type {fetch}")
        forms = either([*(form for form, _ in SCHEMES.values()), "run:RUN"])
        raise UsageError(f"--tokenizer {spec} is not a known kind; {suggestion(kind, SCHEMES, f'use {forms}')}")
    form, stored = SCHEMES[kind]
    files, _, eod = files.partition(",eod=") if kind == "hf" else (files, "", None)
    names = files.split(",") if kind == "gpt2" else [files] if files else []
    if len(names) != len(stored):
        raise UsageError(f"--tokenizer {spec} does not name {len(stored)} files; write --tokenizer {form}")
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


def tokenizer_files(spec: str) -> list[Path]:
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
        if content is None or sha256(content) != values["sha256"].get(file.name):
            raise UsageError(f"{file} is missing or was changed (its sha256 differs); {fix}")
    tokenizer = parse_tokenizer(kind, contents, [*map(str, files)], stated[1])
    if tokenizer.vocabulary > stated[0]:
        tokenizer.leave_out(stated[0])
    tokenizer.bos = values.get("bos")
    bos = None if tokenizer.bos is None else tokenizer.read_bos()
    if (tokenizer.vocabulary, tokenizer.eod, tokenizer.bos) != (*stated, bos):
        there = f"vocabulary, end and beginning of texts {*stated, tokenizer.bos}"
        found = (tokenizer.vocabulary, tokenizer.eod, bos)
        raise UsageError(f"{description} states {there}, but the files beside it give {found}; {fix}")
    return tokenizer


def bos_token_id(folder: Path) -> int | None:
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


def end_token_ids(folder: Path, eod: int, given: str | None = None) -> list[int]:
    """The ids that end a generated text: the end of document, and those that the model's generation_config.json names,
    in the tokenizer's folder, unless another tokenizer is `given`, as KIND:FILES.

    Raises:
      UsageError: the file is damaged.
    """
    file = folder / "generation_config.json"
    ids = optional_object(file).get("eos_token_id") if given is None else None
    ids = ids if isinstance(ids, list) else [ids]
    return sorted({eod, *(token for token in ids if type(token) is int and 0 <= token < 2**31)})


def add_end_tokens(folder: Path, eod: int, ids: Iterable[int]) -> None:
    """Name ids that end a text in the generation_config.json of a tokenizer's folder, unless `end_token_ids` has them.

    Raises:
      UsageError: the file is damaged.
    """
    known, file = end_token_ids(folder, eod), folder / "generation_config.json"
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


# --- Training ---------------------------------------------------------------------------------------------------------

CHUNK = 2**14  # characters given to sentencepiece at once in training
TRAINABLE = ("bert-uncased", "bert-cased")
FIRST_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPACE = "▁"  # U+2581, sentencepiece's


def train_sentencepiece(texts: Iterable[str], vocabulary: int) -> SentencePieceTokenizer:
    """Train a byte-pair vocabulary of exactly `vocabulary` pieces; the same texts give the same model.

    Byte pairs and unigram, sentencepiece's two algorithms, give tokens of the same length (3.46 and 3.45 bytes at 4,096
    pieces of Wikipedia), and byte pairs train over ten times faster (0.4 s and 6 s for 5 MB).

    Raises:
      UsageError: there is no text, or it has too few words for the vocabulary or too many characters; says what works.
    """
    model = train_byte_pairs(
        texts,
        vocabulary,
        byte_fallback=True,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,  # indentation in few tokens
        user_defined_symbols=["\n"],  # a line break is always a separate token
        eos_id=1,
        eos_piece=EOD_PIECE,
    )
    remember(model, "sentencepiece")
    return SentencePieceTokenizer(model, "the trained tokenizer")


def train_wordpiece(texts: Iterable[str], vocabulary: int, scheme: str) -> HuggingFaceTokenizer:
    """Train a WordPiece vocabulary of exactly `vocabulary` pieces; the same texts give the same one.

    The rarest letters, together less than a 2,000th of the text, are left out; a word with one of them is [UNK], as in
    every BERT.

    Args:
      scheme: "bert-uncased" or "bert-cased".

    Raises:
      UsageError: there is no text, or it has too few words for the vocabulary or too many letters; says what works.
    """
    lowercase = scheme == "bert-uncased"
    always = set() if lowercase else {*string.ascii_uppercase}  # by which a cased vocabulary is recognised

    def size(letters: int) -> int:
        return len(FIRST_PIECES) + 2 * letters

    model = train_byte_pairs(
        _join_words(texts, lowercase),
        vocabulary,
        size_for=lambda characters: size(characters - 2 + len(always)),  # which has an unknown piece and the space
        character_coverage=0.9995,
        split_by_unicode_script=False,  # a word ends where BERT ends it, and nowhere else
        split_by_number=False,
        eos_id=-1,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    learned_pieces = [pieces.id_to_piece(number) for number in range(1, pieces.vocab_size())]  # 0 is the unknown piece
    letters = sorted({piece for piece in learned_pieces if len(piece) == 1} - {SPACE} | always)
    if size(len(letters)) > vocabulary:
        raise _too_small(vocabulary, size(len(letters)))
    alphabet = [*letters, *(f"##{letter}" for letter in letters)]
    longer = [piece[1:] if piece.startswith(SPACE) else f"##{piece}" for piece in learned_pieces if len(piece) > 1]
    lines = list(dict.fromkeys([*FIRST_PIECES, *alphabet, *longer]))[:vocabulary]
    content, name = ("\n".join(lines) + "\n").encode(), "the vocabulary that was trained"
    return wrap_library(bert_library(content, name, lowercase), scheme, [content], name)


def _join_words(texts: Iterable[str], lowercase: bool) -> Iterator[str]:
    """BERT's words of the texts, a space between two, in chunks that end with a word."""
    normalizer, splitter = bert_normalizer(lowercase), pre_tokenizers.BertPreTokenizer()
    for text in texts:
        utf8(text)
        line, size = [], 0
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)):
            line.append(word)
            size += len(word) + 1
            if size >= CHUNK // 2:
                yield " ".join(line)
                line, size = [], 0
        yield " ".join(line)


def train_byte_pairs(
    texts: Iterable[str], vocabulary: int, size_for: Callable[[int], int] = lambda characters: characters, **settings
) -> bytes:
    """Train a sentencepiece model of exactly `vocabulary` byte-pair pieces on the text as it is.

    Args:
      texts: to train on.
      vocabulary: pieces.
      size_for: size of the user's vocabulary that a model of so many characters makes.
      settings: of sentencepiece's trainer.

    Raises:
      UsageError: there is no text, or this size does not fit it.
    """
    model, interruption = io.BytesIO(), []

    def chunks() -> Iterator[str]:
        # Bounded, because sentencepiece passes over what is longer than max_sentence_length.
        try:
            for text in texts:
                yield from (text[start : start + CHUNK] for start in range(0, len(text), CHUNK))
        except BaseException as error:  # sentencepiece turns whatever its iterator raises into a RuntimeError
            interruption.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chunks(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=4 * CHUNK,  # in bytes
            unk_id=0,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
            **settings,
        )
    except RuntimeError as error:
        raise (interruption[0] if interruption else _translate(error, vocabulary, size_for)) from None
    return model.getvalue()


def _translate(error: RuntimeError, vocabulary: int, size_for: Callable[[int], int]) -> Exception:
    """The meaning of a message of sentencepiece."""
    message = str(error)
    if match := re.search(r"too high.*<= (\d+)", message):
        fix = f"use --vocabulary {match[1]} or less, or give more text"
        return UsageError(f"--vocabulary {vocabulary} is too large for this little text; {fix}")
    if match := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return _too_small(vocabulary, size_for(int(match[1])))
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return UsageError("there is no text to train a tokenizer on; give files that hold text")
    return error


def _too_small(vocabulary: int, least: int) -> UsageError:
    fix = f"use --vocabulary {least} or more, or --tokenizer bytes"
    return UsageError(f"--vocabulary {vocabulary} is too small for the characters of this text; {fix}")
