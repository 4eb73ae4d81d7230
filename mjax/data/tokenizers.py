"""Tokenizers: text to token ids and back.

    --tokenizer                  tokens         documents end with    decode(encode(text))
    gpt2:vocab.json,merges.txt   byte pairs     <|endoftext|>         text
    bert-uncased:vocab.txt       WordPiece      [SEP]                 its words, in lower case
    bert-cased:vocab.txt         WordPiece      [SEP]                 its words
    sentencepiece:FILE.model     its pieces     </s>, <|endoftext|>   text, normalized by most foreign models
    hf:tokenizer.json            by its rules   <|endoftext|>, </s>…  by its rules
    bytes                        bytes          256                   text
    run:RUN                      the tokenizer of a run, such as one that `mjax convert from-hf` wrote

Two laws hold for all of them. No text encodes to the end-of-document id, `eod`, whatever it contains. `encode` adds
nothing that is not in the text; `encode_prompt` adds `bos` if the model was trained with it. A tokenizer is saved as a
folder next to the data and copied into the run folder, so you name it once, on the command line of `mjax prepare`.

In Hugging Face's tokenizers a text that contains `<|endoftext|>` or `[SEP]` encodes to that token. In Megatron's and in
mjax it does not: otherwise a web page about GPT-2 would end in the middle.

The backend splits and merges text exactly by the rules of its file. Settings that would change a corpus are disabled:
truncation and padding (some files truncate at 128 tokens), tokens added around the text, random merges (BPE dropout),
and special tokens matched inside the text. One of them ends documents.

A saved tokenizer is a folder with copies of its source files and `mjax_tokenizer.json`:

    {"kind": "gpt2", "vocabulary": 50257, "eod": 50256, "sha256": {"vocab.json": "…", "merges.txt": "…"}}

Loading it parses these files and nothing else: there is nothing to execute or unpickle. A changed file is rejected,
because other merges would silently give other tokens.

**GPT-2 and BERT.** GPT-2 splits text into words, each with the space before it, and merges the bytes of a word pair by
pair, pairs learned earlier first (Radford et al. 2019, §2.2). Any text can be encoded and decodes to itself. The files
write a byte as a printable character, the space as "Ġ". `vocab.json` (OpenAI's `encoder.json`) maps tokens to ids, and
each line of `merges.txt` (`vocab.bpe`) is a pair, in the order of learning.

BERT's `vocab.txt` has a piece per line, whose number is its id. Text is cleaned of control characters and split at
white space and around each punctuation mark and Chinese character. A word becomes its longest known beginning, then the
longest known continuation ("##…"), and so on (Devlin et al. 2019, §3). A word that cannot be encoded or has more than
100 characters is [UNK]: Hugging Face's limit, while Megatron's and Google's code has 200. White space is lost, so
decoding does not restore the text. The tokens [CLS], [SEP] and [MASK] are added when samples are built. No text encodes
to them, because their brackets are punctuation: `[MASK]` in a text is `[`, `mask`, `]`, as in Megatron.

**Training.** A sentencepiece model trained by mjax adds no leading space, collapses no spaces and normalizes nothing.
Characters without a piece become UTF-8 bytes. So `decode(encode(text)) == text`, except "▁" (U+2581), sentencepiece's
space.

For a BERT, sentencepiece learns byte pairs within the words of the text. It writes the beginning of a word as "▁": its
piece "▁un" becomes "un", and "believ" becomes "##believ".

    [PAD] [UNK] [CLS] [SEP] [MASK] · every letter, and "##" every letter · pieces, in the order of learning

Google chose BERT's vocabulary by the likelihood of the text rather than by frequency, with code that was never
published. Hugging Face's trainer counts pairs too, but breaks ties by the order of a hash table: three runs of
`trainers.WordPieceTrainer` on the same text gave three different vocabularies.
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
from tokenizers import Tokenizer as BackendTokenizer

from mjax.config.plain_values import check, read
from mjax.data.gigatoken import FastEncoder, make_fast_encoder
from mjax.data.tokenizer_trial import check_expansion, mark_trusted, try_tokenizer
from mjax.errors import UsageError, either, suggestion
from mjax.utils.files import is_hub_name, read_json, write_whole

MIN_GIGATOKEN_CHARACTERS = 2**16  # in one call; `tokenizers` encodes fewer before gigatoken has started
# One thread: workers are processes. `tokenizers` reads the variable when it encodes; a value of the user has priority.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

DESCRIPTION_FILE = "mjax_tokenizer.json"
EOD_PIECE = "<|endoftext|>"
Eod = str | int | None  # text or id of the token that ends documents; None: it is found
FETCH_AGAIN = "get its files again, they may be damaged"

SCHEMES = {
    "gpt2": ("gpt2:vocab.json,merges.txt", ("vocab.json", "merges.txt")),
    "bert-uncased": ("bert-uncased:vocab.txt", ("vocab.txt",)),
    "bert-cased": ("bert-cased:vocab.txt", ("vocab.txt",)),
    "sentencepiece": ("sentencepiece:FILE.model", ("tokenizer.model",)),
    "hf": ("hf:tokenizer.json or hf:tokenizer.json,eod=TOKEN", ("tokenizer.json",)),
    "bytes": ("bytes", ()),
}
"""By name on the command line and in `mjax_tokenizer.json`: the value of --tokenizer, and the files in a folder."""


class Tokenizer:
    """Text to token ids and back.

    Attributes:
      scheme: its kind, a key of SCHEMES.
      encoder: the package that encoded texts in `encode_flat`; "gigatoken" if it encoded some of them.
      contents: the bytes of its files, in the order of SCHEMES.
      vocabulary: number of ids.
      eod: id that ends a document; no text encodes to it.
      bos: id that precedes the tokens of every text in training; None: there is none.
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
          UsageError: the text contains half of a surrogate pair, which is not a character.
        """
        return self.encode_batch([text])[0]

    @property
    def prefix_id(self) -> int:
        """The id before the first token of a text: `bos`, or else `eod` of the previous document."""
        return self.eod if self.bos is None else self.bos

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text that a model continues: `encode` after `bos`."""
        return [*([] if self.bos is None else [self.bos]), *self.encode(text)]

    def find_bos(self) -> int | None:
        """Find the id that `transformers` inserts before every text with these files; None: it inserts none."""
        return None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, faster where the library allows; in one thread."""
        for text in texts:
            encode_utf8(text)
        with convert_errors(f"the {self.scheme} tokenizer cannot encode a text", FETCH_AGAIN):
            batch = self._encode(list(texts))
        for text, ids in zip(texts, batch, strict=True):
            check_expansion(text, len(ids), self.scheme)
        return batch

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, valid UTF-8; special tokens in it are ordinary text."""
        raise NotImplementedError

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts, one after the other, uint32 [tokens], and the tokens of each text, int64 [texts].

        Raises:
          UsageError: as in `encode`.
          EncoderMismatchError: gigatoken encodes a text differently.
        """
        ids = self.encode_batch(texts)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.uint32, lengths.sum()), lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; an end-of-document id becomes `<|endoftext|>`, bytes that are not UTF-8 become "�".

        Ids from `vocabulary` on, which a model with a larger vocabulary may generate, become "�" too.
        """
        text, run = [], []
        for token in ids:
            if token != self.eod and 0 <= token < self.vocabulary:
                run.append(int(token))  # sentencepiece rejects NumPy integers
            else:
                text += [self._decode(run), EOD_PIECE if token == self.eod else "\ufffd"]
                run = []
        return "".join([*text, self._decode(run)])

    def _decode(self, ids: list[int]) -> str:
        """Text of ids that have a token and are not `eod`."""
        raise NotImplementedError

    def trim_vocabulary(self, rows: int) -> list[str]:
        """Remove the ids from `rows` on if all are special tokens; returns the removed tokens, or none."""
        return []

    @property
    def files(self) -> dict[str, bytes]:
        """Contents of the files of its folder, by name."""
        return dict(zip(SCHEMES[self.scheme][1], self.contents, strict=True))

    def save(self, folder: Path) -> None:
        """Write the files, and last the description, which makes the folder a tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_whole(folder / name, content)
        begin = {} if self.bos is None else {"bos": self.bos}
        values = {"kind": self.scheme, "vocabulary": self.vocabulary, "eod": self.eod} | begin
        values["sha256"] = {name: hashlib.sha256(content).hexdigest() for name, content in self.files.items()}
        write_whole(folder / DESCRIPTION_FILE, json.dumps(values, indent=2) + "\n")


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 and an end-of-document id: no files and no training, but four times as many tokens."""

    scheme, vocabulary, eod = "bytes", 257, 256

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model; its end-of-sentence piece, or a control piece `<|endoftext|>`, ends documents.

    Most models add a leading space, and many collapse spaces and normalize to NFKC. One of `train_sentencepiece` does
    none of this.
    """

    scheme = encoder = "sentencepiece"

    def __init__(self, model: bytes, source: str):
        try_tokenizer(model, source, "sentencepiece")
        with convert_errors(f"{source} is not a sentencepiece model", "give the .model file of one"):
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocabulary = self.processor.vocab_size()
            # So that a piece that is not UTF-8 fails now, not in the middle of a text.
            pieces = [self.processor.id_to_piece(number) for number in range(self.vocabulary)]
        self.contents, self.eod = (model,), self.processor.eos_id()
        if self.eod < 0 and EOD_PIECE in pieces:
            self.eod = pieces.index(EOD_PIECE)
        if self.eod < 0 or not self.processor.is_control(self.eod):  # text encodes to any other piece
            fix = "use a model trained with one (--control_symbols), or leave --tokenizer out to train one"
            raise UsageError(f"{source} has no control piece that ends sentences or is {EOD_PIECE}; {fix}")

    def find_bos(self) -> int | None:
        """The piece that begins a sentence, if the model has one."""
        return None if (number := self.processor.bos_id()) < 0 else number

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.processor.encode(texts, num_threads=1)

    def _decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids)


EOD_TOKENS = (
    "<|endoftext|>",  # GPT-2, GPT-NeoX, Phi, Qwen, Falcon
    "<|end_of_text|>",  # Llama 3
    "<｜end▁of▁sentence｜>",  # DeepSeek
    "</s>",  # Llama 1 and 2, Mistral, T5, RoBERTa, BLOOM
    "<eos>",  # Gemma
    "[SEP]",  # BERT
)
"""Special tokens that end a document, by priority."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the package `tokenizers`.

    Args:
      backend: the tokenizer.
      scheme: its kind.
      contents: of its source files.
      name: of the first file, for errors.
      eod: text or id of the token that ends documents; None: the first of EOD_TOKENS that it has.

    Raises:
      UsageError: it has no token to end documents with, or the file is damaged.
    """

    encoder = "tokenizers"

    def __init__(self, backend: BackendTokenizer, scheme: str, contents: Sequence[bytes], name: str, eod: Eod = None):
        self.backend, self.scheme, self.contents, self.name = backend, scheme, tuple(contents), name
        backend.no_truncation()
        backend.no_padding()
        if hasattr(backend.model, "dropout"):
            backend.model.dropout = None
        backend.encode_special_tokens = True  # as ordinary text
        with convert_errors(f"{name} is not a tokenizer.json of Hugging Face", "give one that save_pretrained wrote"):
            self.vocabulary = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocabulary > (size := len(contents[0])):  # the embedding has a row for each id
            raise UsageError(f"{name} has the id {self.vocabulary - 1:,} in {size:,} bytes; {FETCH_AGAIN}")
        token = self._find_eod(eod)
        self.eod = backend.token_to_id(token)
        self._prevent_in_text(token)

    # --- Encoding and decoding ----------------------------------------------------------------------------------------

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not self._can_use_gigatoken(texts):
            return self._encode_with_backend(texts)
        ids, lengths = self._gigatoken.encode(texts)
        return [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode all texts; gigatoken returns arrays instead of lists."""
        if not self._can_use_gigatoken(texts):
            return super().encode_flat(texts)
        for text in texts:
            encode_utf8(text)
        self.encoder = "gigatoken"
        return self._gigatoken.encode(texts)

    @cached_property
    def _gigatoken(self) -> "FastEncoder | None":
        return make_fast_encoder(self.backend, self._encode_with_backend)

    def _can_use_gigatoken(self, texts: Sequence[str]) -> bool:
        return sum(map(len, texts)) >= MIN_GIGATOKEN_CHARACTERS and self._gigatoken is not None

    def _encode_with_backend(self, texts: Sequence[str]) -> list[list[int]]:
        # The fast method computes no character offsets.
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of the tokens of each text, and the characters text[begin:end] of each token."""
        for text in texts:
            encode_utf8(text)
        with convert_errors(f"the {self.scheme} tokenizer cannot encode a text", FETCH_AGAIN):
            encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def _decode(self, ids: list[int]) -> str:
        with convert_errors(f"the {self.scheme} tokenizer cannot decode these ids", FETCH_AGAIN):
            return self.backend.decode(ids, skip_special_tokens=False)

    # --- Special tokens -----------------------------------------------------------------------------------------------

    def find_bos(self) -> int | None:
        """Find the token that the post-processor inserts before a text; one after the text is ignored.

        Raises:
          UsageError: it inserts several.
        """
        processed, plain = (self.backend.encode("a", add_special_tokens=added).ids for added in (True, False))
        starts = range(len(processed) - len(plain) + 1)
        prefix = processed[: next((i for i in starts if processed[i : i + len(plain)] == plain), 0)]
        if len(prefix) > 1:
            tokens = " ".join(self.backend.id_to_token(number) for number in prefix)
            fix = f"leave one in its post_processor, or use it without any: --tokenizer hf:{self.name}"
            raise UsageError(f"{self.name} puts {len(prefix)} tokens before texts ({tokens}), mjax at most one; {fix}")
        return prefix[0] if prefix else None

    def trim_vocabulary(self, rows: int) -> list[str]:
        """Remove special tokens: a model may have fewer rows than its tokenizer has tokens, such as those for chats."""
        surplus = [self.backend.id_to_token(number) for number in range(rows, self.vocabulary)]
        if not {*surplus} <= {*self._special_tokens()} or self.eod >= rows:
            return []
        self.vocabulary = rows
        return surplus

    def _special_tokens(self) -> list[str]:
        return [token.content for token in self.backend.get_added_tokens_decoder().values() if token.special]

    def _find_eod(self, eod: Eod) -> str:
        """The token that ends documents: `eod`, by text or id, or the first of EOD_TOKENS."""
        token = self.backend.id_to_token(eod) if isinstance(eod, int) else eod
        if token in [added.content for added in self.backend.get_added_tokens_decoder().values()]:
            return token
        special, expected = self._special_tokens(), token or " ".join(EOD_TOKENS)
        if token is None and (known := [name for name in EOD_TOKENS if name in special]):
            return known[0]
        listed, fix = " ".join(special[:10]) or "it has none", f"name one: --tokenizer hf:{self.name},eod=TOKEN"
        raise UsageError(f"{expected} is not among the special tokens of {self.name} ({listed}); {fix}")

    def _prevent_in_text(self, token: str) -> None:
        """Make sure that text which spells `token`, an added one, does not encode to it."""
        # An added token that is not special would be matched in text.
        add_special_tokens(self.backend, token)
        if self._occurs_in_text(token):
            # Special tokens of a unigram model are pieces too: split the spelling of one after its first character.
            pattern = tokenizers.Regex(f"{re.escape(token[0])}(?={re.escape(token[1:])})")
            split, before = pre_tokenizers.Split(pattern, behavior="isolated"), self.backend.pre_tokenizer
            self.backend.pre_tokenizer = split if before is None else pre_tokenizers.Sequence([before, split])
        if self._occurs_in_text(token):
            fix = f"name another token: --tokenizer hf:{self.name},eod=TOKEN"
            raise UsageError(f"{self.name} reads {token} in any text, so it cannot end documents; {fix}")

    def _occurs_in_text(self, token: str) -> bool:
        return any(self.eod in ids for ids in self.encode_batch([token, f"a {token} b", f"a{token}b"]))


class BertTokenizer(HuggingFaceTokenizer):
    """A tokenizer with BERT's five special tokens; [SEP] ends documents, and there is no `bos`.

    Attributes:
      cls, sep, mask, pad, unk: ids of [CLS], [SEP], [MASK], [PAD] and [UNK].
    """

    special = ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]")

    def __init__(self, backend: BackendTokenizer, *arguments: Any):
        super().__init__(backend, *arguments)
        self.cls, self.sep, self.mask, self.pad, self.unk = map(backend.token_to_id, self.special)

    def find_bos(self) -> int | None:
        """None: [CLS] is added when samples are built."""
        return None


@contextmanager
def convert_errors(before: str, after: str) -> Iterator[None]:
    """Turn any error into the UsageError `before (…); after`, panics of a Rust library included."""
    try:
        yield
    except (UsageError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is not an Exception
        raise UsageError(f"{before} ({error}); {after}") from None


def encode_utf8(text: str) -> bytes:
    """The bytes of `text`; every `encode` calls it, so that backends get valid text only.

    Raises:
      UsageError: it contains half of a surrogate pair, which JSON can spell (`"\\ud83d"`) and UTF-8 cannot.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise UsageError(f"character {error.start} of the text is {half}, an unpaired surrogate; drop it") from None


# --- From files and folders -------------------------------------------------------------------------------------------


def load_tokenizer(spec: str) -> Tokenizer:
    """Load the tokenizer of `--tokenizer SPEC`: KIND, KIND:FILES or run:RUN.

    Raises:
      UsageError: the kind is unknown, or a file is missing or has another format.
    """
    kind, _, files = spec.partition(":")
    if kind == "run":
        folder = Path(files) / "tokenizer"
        if not folder.is_dir():
            raise UsageError(f"--tokenizer {spec}: {files} has no folder tokenizer; give a run that has one")
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
    with convert_errors(f"--tokenizer {spec}: cannot read a file", "check its permissions"):
        contents = [Path(name).read_bytes() for name in names]
    if kind == "gpt2" and contents[1].lstrip()[:1] == b"{":  # no line of merges begins with it
        raise UsageError(f"the files are swapped; use --tokenizer gpt2:{names[1]},{names[0]}")
    return parse_tokenizer(kind, contents, names, eod or None)


def parse_tokenizer(kind: str, contents: Sequence[bytes], names: Sequence[str], eod: Eod = None) -> Tokenizer:
    """Build a tokenizer from its files.

    Args:
      kind: a key of SCHEMES.
      contents: of its files.
      names: of its files, for errors.
      eod: text or id of the token that ends documents, for a tokenizer.json.

    Raises:
      UsageError: a file has another format than the kind needs.
    """
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "sentencepiece":
        return SentencePieceTokenizer(contents[0], names[0])
    if kind == "hf":
        backend = open_backend(contents[0], names[0])
    elif kind == "gpt2":
        backend = gpt2_backend(contents, names)
    else:
        backend = bert_backend(contents[0], names[0], kind == "bert-uncased")
    return wrap_backend(backend, kind, contents, names[0], eod if kind == "hf" else None)


def tokenizer_files(spec: str) -> list[Path]:
    """The files that `load_tokenizer(spec)` reads."""
    kind, _, files = spec.partition(":")
    return sorted((Path(files) / "tokenizer").iterdir()) if kind == "run" else [*map(Path, files.split(","))]


def tokenizer_from_folder(folder: str | Path) -> Tokenizer:
    """Load the tokenizer that `Tokenizer.save` wrote into `folder`.

    Raises:
      UsageError: the folder has no tokenizer, a damaged one, or one of an unknown kind.
    """
    folder = Path(folder)
    description = folder / DESCRIPTION_FILE
    if not description.is_file():
        fix = "give the tokenizer's files with --tokenizer KIND:FILES, such as gpt2:vocab.json,merges.txt"
        raise UsageError(f"{folder} is not a tokenizer of mjax, it has no {DESCRIPTION_FILE}; {fix}")
    values = _read_description(folder)
    kind, expected = values["kind"], (values["vocabulary"], values["eod"], values.get("bos"))
    if kind not in SCHEMES:
        raise UsageError(f"{description} is of kind {kind!r}; this mjax knows {', '.join(SCHEMES)}")
    files, fix = [folder / name for name in SCHEMES[kind][1]], "restore the folder or prepare the data again"
    contents = [file.read_bytes() if file.is_file() else None for file in files]
    for file, content in zip(files, contents, strict=True):
        if content is None or hashlib.sha256(content).hexdigest() != values["sha256"].get(file.name):
            raise UsageError(f"{file} is missing or was changed (its sha256 differs); {fix}")
    tokenizer = parse_tokenizer(kind, contents, [*map(str, files)], expected[1])
    if tokenizer.vocabulary > expected[0]:
        tokenizer.trim_vocabulary(expected[0])
    tokenizer.bos = expected[2]
    actual = (tokenizer.vocabulary, tokenizer.eod, None if tokenizer.bos is None else tokenizer.find_bos())
    if actual != expected:
        values = f"vocabulary, eod and bos {expected}, and the files have {actual}"
        raise UsageError(f"{description} states {values}; {fix}")
    return tokenizer


def bos_token_id(folder: Path) -> int | None:
    """Read the `bos` of a saved tokenizer without loading it."""
    return _read_description(folder).get("bos")


class _Description(TypedDict):
    kind: str
    vocabulary: int
    eod: int
    sha256: dict[str, str]
    bos: NotRequired[int | None]


def _read_description(folder: Path) -> _Description:
    file, fix = folder / DESCRIPTION_FILE, "prepare the data again"
    return check(_Description, read_json(file, fix), f"{file} does not describe a tokenizer", fix)


def stop_token_ids(folder: Path, eod: int, tokenizer: str | None = None) -> list[int]:
    """The ids that end a generated text: `eod`, and `eos_token_id` of generation_config.json in the tokenizer's folder.

    Args:
      folder: of the run's tokenizer.
      eod: end-of-document id.
      tokenizer: KIND:FILES of another tokenizer, to which the file does not apply.

    Raises:
      UsageError: the file is damaged.
    """
    file = folder / "generation_config.json"
    ids = read_optional_json(file).get("eos_token_id") if tokenizer is None else None
    ids = ids if isinstance(ids, list) else [ids]
    return sorted({eod, *(token for token in ids if type(token) is int and 0 <= token < 2**31)})


def add_stop_tokens(folder: Path, eod: int, ids: Iterable[int]) -> None:
    """Add ids to `eos_token_id` of generation_config.json in a tokenizer's folder, unless `stop_token_ids` has them.

    Raises:
      UsageError: the file is damaged.
    """
    known, file = stop_token_ids(folder, eod), folder / "generation_config.json"
    if not {*ids} <= {*known}:
        values = read_optional_json(file) | {"eos_token_id": sorted({*known, *ids})}
        write_whole(file, json.dumps(values, indent=2) + "\n")


def read_optional_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty if the file does not exist.

    Raises:
      UsageError: the file is damaged.
    """
    return read(dict[str, Any], file, "restore it") if file.is_file() else {}


def is_same_tokenizer(first: Path, second: Path) -> bool:
    """True if two saved tokenizers have the same kind and files; their `eod` may differ."""
    saved = [_read_description(folder) for folder in (first, second)]
    return all(saved[0][name] == saved[1][name] for name in ("kind", "sha256"))


# --- Backends ---------------------------------------------------------------------------------------------------------


def wrap_backend(backend: BackendTokenizer, *arguments: Any) -> HuggingFaceTokenizer:
    """Wrap a backend: a BertTokenizer if it has BERT's special tokens; arguments as in `HuggingFaceTokenizer`."""
    bert = all(backend.token_to_id(token) is not None for token in BertTokenizer.special)
    return (BertTokenizer if bert else HuggingFaceTokenizer)(backend, *arguments)


def open_backend(content: bytes, name: str) -> BackendTokenizer:
    """Open a tokenizer.json, after a trial in a child process.

    Raises:
      UsageError: it is damaged, or needs too much time or memory.
    """
    try_tokenizer(content, name, "tokenizers")
    with convert_errors(f"{name} is not a tokenizer.json of Hugging Face", "give one that save_pretrained wrote"):
        return BackendTokenizer.from_str(content.decode("utf-8"))


def add_special_tokens(backend: BackendTokenizer, *tokens: str) -> BackendTokenizer:
    """Add special tokens to the backend, and return it."""
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return backend


def split_utf8_lines(content: bytes, name: str) -> list[str]:
    """Lines of a text file that may come from Windows.

    Only a line feed ends a line; `str.splitlines` would split at U+2028 and U+0085, which are tokens of vocabularies.

    Raises:
      UsageError: it is not UTF-8.
    """
    with convert_errors(f"{name} is not a text file in UTF-8", "give the right file"):
        lines = content.decode("utf-8").removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines]


# --- BERT -------------------------------------------------------------------------------------------------------------


def bert_backend(vocab: bytes, name: str, lowercase: bool) -> BackendTokenizer:
    """BERT's tokenizer; `lowercase` also removes accents.

    Raises:
      UsageError: the file is not a vocabulary, or of the other case: half of the words would be [UNK], or half of the
        pieces unused.
    """
    # As in Google's code the line number is the id, and the last of equal pieces wins.
    ids = {piece.rstrip(): number for number, piece in enumerate(split_utf8_lines(vocab, name))}
    if missing := [piece for piece in BertTokenizer.special if piece not in ids]:
        raise UsageError(f"{name} lacks {', '.join(missing)}; give BERT's vocab.txt, which has one piece a line")
    capitals = [letter in ids for letter in string.ascii_uppercase]
    if lowercase and all(capitals):
        raise UsageError(f"{name} has pieces in capitals; use --tokenizer bert-cased:{name}")
    if not lowercase and not any(capitals):
        raise UsageError(f"{name} has no capital letters; use --tokenizer bert-uncased:{name}")
    backend = BackendTokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    backend.normalizer, backend.pre_tokenizer = bert_normalizer(lowercase), pre_tokenizers.BertPreTokenizer()
    # Without the cleanup of "it ' s" the text of the first tokens is always the beginning of the whole text.
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return add_special_tokens(backend, *BertTokenizer.special)


def bert_normalizer(lowercase: bool) -> normalizers.Normalizer:
    """BERT's cleaning of text; `lowercase` also removes accents."""
    return normalizers.BertNormalizer(strip_accents=lowercase, lowercase=lowercase)


# --- GPT-2 ------------------------------------------------------------------------------------------------------------


def gpt2_backend(contents: Sequence[bytes], names: Sequence[str]) -> BackendTokenizer:
    """GPT-2's tokenizer from its vocab.json and merges.txt; `<|endoftext|>` ends documents.

    Raises:
      UsageError: a file's content does not match its name, or the two do not belong together.
    """
    with convert_errors(f"{names[0]} is not GPT-2's vocab.json, also called encoder.json", "give the right file"):
        ids = json.loads(contents[0])
        if sorted(ids.values()) != list(range(len(ids))):
            raise ValueError(f"its ids are not 0 to {len(ids) - 1}, each once")
        if missing := {*bytes_to_unicode()} - {*ids}:
            raise ValueError(f"it has no token for {len(missing)} of the 256 bytes")
    if EOD_PIECE not in ids:
        raise UsageError(f"{names[0]} has no token {EOD_PIECE} to end documents with; give GPT-2's vocab.json")
    lines = split_utf8_lines(contents[1], names[1])
    merges = [tuple(line.split(" ")) for line in lines[lines[0].startswith("#version") :] if line]
    with convert_errors(f"{names[1]} does not belong to {names[0]}", "give a matching pair"):
        backend = byte_level_bpe(ids, merges)
    backend.post_processor = prepend_token(EOD_PIECE, ids[EOD_PIECE])
    return backend


def prepend_token(token: str, number: int) -> processors.TemplateProcessing:
    """The post-processor that inserts a token before every text."""
    return processors.TemplateProcessing(single=[token, "$A"], special_tokens=[(token, number)])


def byte_level_bpe(ids: dict[str, int], pairs: Sequence[tuple[str, str]], words: bool = True) -> BackendTokenizer:
    """Byte-level BPE, within GPT-2's `words` or over the whole text."""
    backend = BackendTokenizer(models.BPE(ids, [*pairs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.decoder = decoders.ByteLevel()
    return add_special_tokens(backend, EOD_PIECE)


@cache
def bytes_to_unicode() -> list[str]:
    """Characters of the 256 bytes in GPT-2's files: the byte itself if printable in Latin-1, else from U+0100 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {character for character in alphabet if ord(character) < 256}
    replacements = iter(alphabet[len(printable) :])
    return [chr(byte) if chr(byte) in printable else next(replacements) for byte in range(256)]


# --- Training ---------------------------------------------------------------------------------------------------------

CHUNK_CHARACTERS = 2**14  # of a text for sentencepiece's trainer
TRAINABLE_WORDPIECE = ("bert-uncased", "bert-cased")
BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPACE = "▁"  # U+2581, sentencepiece's


def train_sentencepiece(texts: Iterable[str], vocabulary: int) -> SentencePieceTokenizer:
    """Train a byte-pair vocabulary of exactly `vocabulary` pieces; the same texts give the same model.

    Byte pairs and unigram, sentencepiece's two algorithms, give tokens of the same length: 3.46 and 3.45 bytes at 4,096
    pieces of Wikipedia. Byte pairs train over ten times faster (0.4 s and 6 s for 5 MB).

    Raises:
      UsageError: there is no text, or it has too few words for the vocabulary or too many characters.
    """
    model = train_bpe(
        texts,
        vocabulary,
        byte_fallback=True,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,  # indentation in few tokens
        user_defined_symbols=["\n"],  # a line break is always a separate token
        eos_id=1,
        eos_piece=EOD_PIECE,
    )
    mark_trusted(model, "sentencepiece")
    return SentencePieceTokenizer(model, "the trained tokenizer")


def train_wordpiece(texts: Iterable[str], vocabulary: int, scheme: str) -> HuggingFaceTokenizer:
    """Train a WordPiece vocabulary of exactly `vocabulary` pieces; the same texts give the same one.

    The rarest letters, together less than a 2,000th of the text, are left out; a word with one of them is [UNK], as in
    every BERT.

    Args:
      texts: to train on.
      vocabulary: number of pieces.
      scheme: "bert-uncased" or "bert-cased".

    Raises:
      UsageError: there is no text, or it has too few words for the vocabulary or too many letters.
    """
    lowercase = scheme == "bert-uncased"
    required = set() if lowercase else {*string.ascii_uppercase}  # they identify a cased vocabulary

    def min_size(letters: int) -> int:
        return len(BERT_SPECIAL_TOKENS) + 2 * letters

    model = train_bpe(
        _join_words(texts, lowercase),
        vocabulary,
        min_size=lambda characters: min_size(characters - 2 + len(required)),  # without unknown piece and space
        character_coverage=0.9995,
        split_by_unicode_script=False,  # only BERT's pre-tokenizer ends words
        split_by_number=False,
        eos_id=-1,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    learned_pieces = [pieces.id_to_piece(number) for number in range(1, pieces.vocab_size())]  # 0 is the unknown piece
    letters = sorted({piece for piece in learned_pieces if len(piece) == 1} - {SPACE} | required)
    if min_size(len(letters)) > vocabulary:
        raise _vocabulary_too_small(vocabulary, min_size(len(letters)))
    alphabet = [*letters, *(f"##{letter}" for letter in letters)]
    longer = [piece[1:] if piece.startswith(SPACE) else f"##{piece}" for piece in learned_pieces if len(piece) > 1]
    lines = list(dict.fromkeys([*BERT_SPECIAL_TOKENS, *alphabet, *longer]))[:vocabulary]
    content, name = ("\n".join(lines) + "\n").encode(), "the vocabulary that was trained"
    return wrap_backend(bert_backend(content, name, lowercase), scheme, [content], name)


def _join_words(texts: Iterable[str], lowercase: bool) -> Iterator[str]:
    """BERT's words of the texts, separated by spaces, in chunks that end with a word."""
    normalizer, splitter = bert_normalizer(lowercase), pre_tokenizers.BertPreTokenizer()
    for text in texts:
        encode_utf8(text)
        line, size = [], 0
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)):
            line.append(word)
            size += len(word) + 1
            if size >= CHUNK_CHARACTERS // 2:
                yield " ".join(line)
                line, size = [], 0
        yield " ".join(line)


def train_bpe(
    texts: Iterable[str], vocabulary: int, min_size: Callable[[int], int] = lambda characters: characters, **settings
) -> bytes:
    """Train a sentencepiece model of exactly `vocabulary` byte-pair pieces on unnormalized text.

    Args:
      texts: to train on.
      vocabulary: number of pieces.
      min_size: smallest vocabulary for a number of characters.
      settings: of sentencepiece's trainer.

    Raises:
      UsageError: there is no text, or this size does not fit it.
    """
    model, errors = io.BytesIO(), []

    def chunks() -> Iterator[str]:
        # Bounded, because sentencepiece skips a text above max_sentence_length.
        try:
            for text in texts:
                yield from (text[start : start + CHUNK_CHARACTERS] for start in range(0, len(text), CHUNK_CHARACTERS))
        except BaseException as error:  # sentencepiece converts every exception of its iterator to a RuntimeError
            errors.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chunks(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=4 * CHUNK_CHARACTERS,  # in bytes
            unk_id=0,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
            **settings,
        )
    except RuntimeError as error:
        raise (errors[0] if errors else _to_usage_error(error, vocabulary, min_size)) from None
    return model.getvalue()


def _to_usage_error(error: RuntimeError, vocabulary: int, min_size: Callable[[int], int]) -> Exception:
    """Convert an error of sentencepiece's trainer, by its message."""
    message = str(error)
    if match := re.search(r"too high.*<= (\d+)", message):
        fix = f"use --vocabulary {match[1]} or less, or give more text"
        return UsageError(f"--vocabulary {vocabulary} is too large for this little text; {fix}")
    if match := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return _vocabulary_too_small(vocabulary, min_size(int(match[1])))
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return UsageError("there is no text to train a tokenizer on; give files that hold text")
    return error


def _vocabulary_too_small(vocabulary: int, minimum: int) -> UsageError:
    fix = f"use --vocabulary {minimum} or more, or --tokenizer bytes"
    return UsageError(f"--vocabulary {vocabulary} is too small for the characters of this text; {fix}")
