"""Tokenizers that Hugging Face's library `tokenizers` runs: a tokenizer.json, and the files of GPT-2 and BERT.

Text is split and merged exactly as the file says. Settings that would silently change a corpus are switched off:
truncation and padding (some files cut at 128 tokens), tokens added around the text, random merges (BPE dropout), and
special tokens recognised inside the text, one of which ends documents.
"""

import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from mjax.data.tokenizer_trial import check_expansion, try_tokenizer
from mjax.data.tokenizers.fast import WORTH, FastEncoder, fast_encoder
from mjax.data.tokenizers.library import WHOLE_FILES, Tokenizer, library_errors, utf8
from mjax.errors import UsageError

# One thread each: workers are processes. The library reads this when it encodes, and a user's own setting wins.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

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


def wrap_library(
    library: tokenizers.Tokenizer, scheme: str, contents: Sequence[bytes], name: str, eod: str | int | None = None
) -> HuggingFaceTokenizer:
    """The tokenizer around a library's, a BERT's if it has BERT's special tokens; arguments as above."""
    bert = all(library.token_to_id(token) is not None for token in BertTokenizer.special)
    return (BertTokenizer if bert else HuggingFaceTokenizer)(library, scheme, contents, name, eod)


def open_library(content: bytes, name: str) -> tokenizers.Tokenizer:
    """The tokenizer in a tokenizer.json, tried in a child process first.

    Raises:
      UsageError: it is damaged, or takes too much time or memory.
    """
    try_tokenizer(content, name, "tokenizers")
    with library_errors(f"{name} is not a tokenizer.json of Hugging Face", "give one that save_pretrained wrote"):
        return tokenizers.Tokenizer.from_str(content.decode("utf-8"))
