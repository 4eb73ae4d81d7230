"""The interface of a tokenizer, those of bytes and of sentencepiece, and the parts that all kinds share.

In Hugging Face's tokenizers a text that contains `<|endoftext|>` or `[SEP]` encodes to that token. In Megatron's it
does not, nor here: otherwise a web page about GPT-2 would end in the middle.

A saved tokenizer is a folder with the files it was made from, byte for byte, and `mjax_tokenizer.json`:

    {"kind": "gpt2", "vocabulary": 50257, "eod": 50256, "sha256": {"vocab.json": "…", "merges.txt": "…"}}

Loading it parses these files and nothing else: there is nothing to execute or unpickle. A file that has changed since
is refused, because other merges would silently give other tokens.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import sentencepiece

from mjax.data.tokenizer_trial import check_expansion, try_tokenizer
from mjax.errors import UsageError
from mjax.utils.files import write_whole

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

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Bytes of each text in UTF-8."""
        return [list(utf8(text)) for text in texts]

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
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocabulary = self._processor.vocab_size()
            # A piece that is not UTF-8 fails here, not in the middle of a text.
            pieces = [self._processor.id_to_piece(number) for number in range(self.vocabulary)]
        self.contents, self.eod = (model,), self._processor.eos_id()
        if self.eod < 0 and EOD_PIECE in pieces:
            self.eod = pieces.index(EOD_PIECE)
        if self.eod < 0 or not self._processor.is_control(self.eod):  # text encodes to any other piece
            problem = "has neither an end-of-sentence piece nor a piece" if self.eod < 0 else "ends documents with"
            raise UsageError(
                f"{source} {problem} {EOD_PIECE if self.eod < 0 else pieces[self.eod]}, which is not a control piece, "
                "so text can hold it; use a model trained with it among --control_symbols, or leave --tokenizer out to "
                "train one"
            )

    def bos_of_files(self) -> int | None:
        """The piece that begins a sentence, if the model has one."""
        return None if (number := self._processor.bos_id()) < 0 else number

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of the pieces of each text; a `<|endoftext|>` in it is encoded as text and ends no document."""
        for text in texts:
            utf8(text)
        ids = self._processor.encode(list(texts), num_threads=1)
        for text, tokens in zip(texts, ids, strict=True):
            check_expansion(text, len(tokens), self.scheme)
        return ids

    def _text(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


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
