"""Kinds of tokenizers: bytes, a sentencepiece model, and what Hugging Face's library `tokenizers` runs.

In Hugging Face's tokenizers a text that contains `<|endoftext|>` or `[SEP]` encodes to that token. In Megatron's it
does not, nor here: otherwise a web page about GPT-2 would end in the middle.

The library splits and merges text exactly as its file says. Settings that would silently change a corpus are switched
off: truncation and padding (some files cut at 128 tokens), tokens added around the text, random merges (BPE dropout),
and special tokens recognized inside the text, one of which ends documents.

A saved tokenizer is a folder with the files it was made from, byte for byte, and `mjax_tokenizer.json`:

    {"kind": "gpt2", "vocabulary": 50257, "eod": 50256, "sha256": {"vocab.json": "…", "merges.txt": "…"}}

Loading it parses these files and nothing else: there is nothing to execute or unpickle. A file that has changed since
is refused, because other merges would silently give other tokens.

**gigatoken.** Byte pairs at the speed of memory, for texts that `tokenizers` encodes equally.

gigatoken is optional: `pip install 'mjax[fast]'`. Its word rules are older than those of `tokenizers` by a version of
Unicode, so a text goes to `tokenizers` if it holds

- a code point that Unicode 16 lacks: gigatoken takes a new letter for one, and finds the contraction in `X's`;
- a token that `tokenizers` finds in text, such as Qwen's `<think>`;
- where the tokenizer normalizes to NFC, a combining mark, or anything that NFC changes.

A tokenizer that gigatoken does not know, or misreads (`_is_read`), or that normalizes in another way, goes to
`tokenizers` altogether. Both encode the beginning of the first 1,000 texts of every file, and are compared.
MJAX_GIGATOKEN=0 switches gigatoken off.
"""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from mjax.data.tokenizer_trial import check_expansion, try_tokenizer
from mjax.errors import UsageError
from mjax.utils.files import write_whole

COMPARED, BEGINNING = 1000, 1024
"""Texts of a file that are compared, and their first characters: `tokenizers` takes half a second for these."""
WORTH = 2**16  # characters in a call; less is encoded before gigatoken is ready
SWITCH = "MJAX_GIGATOKEN"
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

    def bos_of_files(self) -> int | None:
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

    def begin_file(self) -> None:
        """Compare the first texts that follow with another encoder, where there are two."""

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

    def bos_of_files(self) -> int | None:
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
        self,
        library: tokenizers.Tokenizer,
        scheme: str,
        contents: Sequence[bytes],
        name: str,
        eod: str | int | None = None,
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
        self._keep_out_of_text(token)

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

    def begin_file(self) -> None:
        """Let gigatoken's ids of the first texts that follow be compared."""
        if self._fast is not None:
            self._fast.compare()

    @cached_property
    def _fast(self) -> "FastEncoder | None":
        return fast_encoder(self.library, self._encode_slowly)

    def _is_worth(self, texts: Sequence[str]) -> bool:
        return sum(map(len, texts)) >= WORTH and self._fast is not None

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

    def bos_of_files(self) -> int | None:
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
            raise UsageError(
                f"{self.name} puts {len(before)} tokens before every text ({tokens}), mjax at most one; {fix}"
            )
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

    def _keep_out_of_text(self, token: str) -> None:
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

    def __init__(self, library: tokenizers.Tokenizer, *arguments, **named):
        super().__init__(library, *arguments, **named)
        self.cls, self.sep, self.mask, self.pad, self.unk = map(library.token_to_id, self.special)

    def bos_of_files(self) -> int | None:
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
        raise UsageError(
            f"character {error.start} of the text is {half}, half of a surrogate pair; replace or drop it"
        ) from None


# --- gigatoken --------------------------------------------------------------------------------------------------------


class EncodersDiffer(UsageError):
    """gigatoken and `tokenizers` encode a text differently; the message says which."""


class FastEncoder:
    """Encodes with gigatoken the texts that both encode equally, and all others by `slow`.

    Raises:
      Exception: gigatoken is not there, or does not know this tokenizer.
    """

    def __init__(self, library: tokenizers.Tokenizer, slow: Callable[[Sequence[str]], list[list[int]]]):
        from gigatoken.gigatoken_rs import load_hf_json  # optional

        values = json.loads(library.to_str())
        self._slow, self._normalizes = slow, values["normalizer"] is not None
        self._added = [token["content"] for token in values["added_tokens"] if not token["special"]]
        if not _is_read(**values):
            raise ValueError("gigatoken misreads this kind of byte pairs")
        # Special tokens are text here, which to gigatoken no added token is.
        self._library = load_hf_json(json.dumps({**values, "added_tokens": [], "post_processor": None}))
        self.compare()

    def compare(self) -> None:
        """Compare the first of the texts that follow."""
        self._left = COMPARED

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts, one after the other, uint32 [tokens], and the tokens of each text, int64 [texts].

        Raises:
          EncodersDiffer: a text that is compared has two encodings.
        """
        is_fast = [self._is_fast(text) for text in texts]
        if self._left:
            self._compare([text[:BEGINNING] for text, fast in zip(texts, is_fast, strict=True) if fast][: self._left])
            self._left = max(self._left - len(texts), 0)
        slow = iter(self._slow([text for text, fast in zip(texts, is_fast, strict=True) if not fast]))
        rows = [
            self._library.encode(text) if fast else np.array(next(slow), np.uint32)
            for text, fast in zip(texts, is_fast, strict=True)
        ]
        return np.concatenate(rows), np.fromiter(map(len, rows), np.int64, len(rows))

    def _is_fast(self, text: str) -> bool:
        if any(token in text for token in self._added):
            return False
        if text.isascii():
            return True
        if self._normalizes and not unicodedata.is_normalized("NFC", text):
            return False
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        found = _classes(COMMON if codes.max() < COMMON else 0x110000)[codes].max()
        return found < (MARK if self._normalizes else UNKNOWN)

    def _compare(self, texts: list[str]) -> None:
        for text, ids in zip(texts, self._slow(texts), strict=True):
            if self._library.encode(text).tolist() != ids:
                raise EncodersDiffer(
                    f"gigatoken and tokenizers encode {text[:60]!r} differently; to use tokenizers alone set {SWITCH}=0"
                )


def _is_read(model: dict[str, Any], pre_tokenizer: Any = None, normalizer: Any = None, **_: Any) -> bool:
    """True if gigatoken reads every field of a tokenizer.json as `tokenizers` does.

    Of a ByteLevel it ignores `use_regex`; of a Split it ignores `behavior`; of a model it ignores affixes of subwords
    and `dropout`. It refuses patterns that it does not know, and vocabularies without some byte.
    """
    read = ("type", "vocab", "merges", "ignore_merges", "unk_token", "fuse_unk")
    if normalizer not in (None, {"type": "NFC"}):  # only NFC is known to change few texts
        return False
    if model["type"] != "BPE" or any(value for name, value in model.items() if name not in read):
        return False
    *splits, last = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    of_bytes = tuple(map(last.get, ("type", "add_prefix_space", "use_regex")))
    return of_bytes == ("ByteLevel", False, not splits) and all(
        split["type"] == "Split" and (split["behavior"], split["invert"]) in (("Isolated", False), ("Removed", True))
        for split in splits
    )


MARK, UNKNOWN = 1, 2
COMMON = 0x20000  # code points; more take a second, and are in few texts


@cache
def _classes(end: int) -> np.ndarray:
    """For each code point before `end` UNKNOWN if Unicode lacks it, MARK if it combines with the one before, else 0."""
    classes = {"Cn": UNKNOWN, "Mn": MARK, "Mc": MARK, "Me": MARK}
    categories = map(unicodedata.category, map(chr, range(end)))
    return np.fromiter((classes.get(category, 0) for category in categories), np.uint8, end)


def fast_encoder(library: tokenizers.Tokenizer, slow: Callable[[Sequence[str]], list[list[int]]]) -> FastEncoder | None:
    """A FastEncoder, or None if gigatoken is missing, switched off, or does not know the tokenizer."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return FastEncoder(library, slow)
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic of Rust is not an Exception
        return None
