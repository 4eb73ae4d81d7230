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
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from mjax.data.tokenizer_trial import check_expansion, try_tokenizer
from mjax.data.tokenizers.fast import WORTH, FastEncoder, fast_encoder
from mjax.errors import UsageError
from mjax.utils.files import write_whole

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
            raise UsageError(
                f"{name} has the id {self.vocabulary - 1:,} in {size:,} bytes; get the file again, it is damaged"
            )
        token = self._find_eod(eod)
        self.eod = library.token_to_id(token)
        self._keep_out_of_text(token)

    # --- Encoding and decoding ----------------------------------------------------------------------------------------

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of the tokens of each text; special tokens written out in it are text like any other."""
        if self._is_worth(texts):
            ids, lengths = self._fast.encode(texts)
            return [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]
        return self._encode_slowly(texts)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode all texts as any tokenizer does, and without lists where gigatoken can."""
        if not self._is_worth(texts):
            return super().encode_flat(texts)
        self.encoder = "gigatoken"
        return self._fast.encode(texts)

    def begin_file(self) -> None:
        """Let gigatoken's ids of the first texts that follow be compared."""
        if self._fast is not None:
            self._fast.compare()

    @cached_property
    def _fast(self) -> FastEncoder | None:
        return fast_encoder(self.library, self._encode_slowly)

    def _is_worth(self, texts: Sequence[str]) -> bool:
        """True if gigatoken encodes these texts; they are checked to be valid."""
        if sum(map(len, texts)) < WORTH or self._fast is None:
            return False
        for text in texts:
            utf8(text)
        return True

    def _encode_slowly(self, texts: Sequence[str]) -> list[list[int]]:
        # The fast method keeps no track of which token came from which characters.
        return [encoding.ids for encoding in self._encode(texts, self.library.encode_batch_fast)]

    def encode_with_characters(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of the tokens of each text, and the characters text[begin:end] that each token was made of."""
        return [(encoding.ids, encoding.offsets) for encoding in self._encode(texts, self.library.encode_batch)]

    def _encode(self, texts: Sequence[str], encode: Callable[..., Any]) -> list[tokenizers.Encoding]:
        for text in texts:
            utf8(text)
        with library_errors(f"the {self.scheme} tokenizer cannot encode a text", WHOLE_FILES):
            encodings = encode(list(texts), add_special_tokens=False)
        for text, encoding in zip(texts, encodings, strict=True):
            check_expansion(text, len(encoding), self.scheme)
        return encodings

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
            raise UsageError(
                f"{self.name} puts {len(before)} tokens before every text ({tokens}), and mjax puts at most one; leave "
                f"one in its post_processor, or take it without any: --tokenizer hf:{self.name}"
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
        wanted = f"none of {' '.join(ENDS)} is" if token is None else f"{token} is not"
        raise UsageError(
            f"{wanted} among the special tokens of {self.name} ({' '.join(special[:10]) or 'it has none'}); name the "
            f"one that ends documents: --tokenizer hf:{self.name},eod=TOKEN"
        )

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
            raise UsageError(
                f"{self.name} reads {token} in any text, so it cannot end documents; name another token: "
                f"--tokenizer hf:{self.name},eod=TOKEN"
            )

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
