"""Any fast tokenizer of Hugging Face, from its tokenizer.json.

Text is split and merged exactly as the file says. Settings that would silently change a corpus are switched off:
truncation and padding (some files cut at 128 tokens), tokens added around the text, random merges (BPE dropout), and
special tokens recognised inside the text, one of which ends documents.
"""

import re
from typing import Self

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from mjax.data.tokenizer_trial import try_tokenizer
from mjax.data.tokenizers.library import LibraryTokenizer, library_errors, read_given
from mjax.errors import UsageError

ENDS = (
    "<|endoftext|>",  # GPT-2, GPT-NeoX, Phi, Qwen, Falcon
    "<|end_of_text|>",  # Llama 3
    "<｜end▁of▁sentence｜>",  # DeepSeek
    "</s>",  # Llama 1 and 2, Mistral, T5, RoBERTa, BLOOM
    "<eos>",  # Gemma
    "[SEP]",  # BERT
)
"""Special tokens that end a document, in the order in which they are looked for."""


class HuggingFaceTokenizer(LibraryTokenizer):
    """A tokenizer.json; documents end with the token that is named, or else with one of the usual special tokens."""

    scheme = "hf"
    form = "hf:tokenizer.json or hf:tokenizer.json,eod=TOKEN"
    stored = ("tokenizer.json",)

    def __init__(self, content: bytes, name: str, eod: str | int | None = None):
        self.library = open_library(content, name)
        with library_errors(f"{name} is not a tokenizer.json of Hugging Face", "give one that save_pretrained wrote"):
            self.library.no_truncation()
            self.library.no_padding()
            if hasattr(self.library.model, "dropout"):
                self.library.model.dropout = None
            self.library.encode_special_tokens = True  # as ordinary text
            vocabulary = self.library.get_vocab(with_added_tokens=True)
        self.contents, self.name = (content,), name
        self.vocabulary = max(vocabulary.values(), default=-1) + 1
        if self.vocabulary > len(content):  # a model would have a row for each id
            largest = self.vocabulary - 1
            raise UsageError(
                f"{name} has the id {largest:,} in {len(content):,} bytes; get the file again, it is damaged"
            )
        token = self._find_eod(name, eod)
        self.eod = self.library.token_to_id(token)
        self._keep_out_of_text(token, name)

    @classmethod
    def from_files(cls, files: str) -> Self:
        """Make it from the files that follow the kind on the command line: a tokenizer.json, and perhaps
        `,eod=TOKEN`."""
        file, _, eod = files.partition(",eod=")
        return cls(read_given(cls, files, file), file, eod or None)

    @classmethod
    def from_contents(cls, contents, names, eod: int) -> Self:
        """Make it from the files of a folder that `save` wrote; the id says which token was chosen."""
        return cls(*contents, *names, eod)

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
        added = self.library.get_added_tokens_decoder()
        surplus = [self.library.id_to_token(number) for number in range(rows, self.vocabulary)]
        special = {token.content for token in added.values() if token.special}
        if not set(surplus) <= special or self.eod >= rows:
            return []
        self.vocabulary = rows
        return surplus

    def _find_eod(self, name: str, eod: str | int | None) -> str:
        """The token that ends documents: the one given, by text or id, or the first of the usual ones."""
        added = self.library.get_added_tokens_decoder().values()
        token = self.library.id_to_token(eod) if isinstance(eod, int) else eod
        if token is not None and token in [one.content for one in added]:
            return token
        special = [one.content for one in added if one.special]
        usual = [one for one in ENDS if one in special]
        if token is None and usual:
            return usual[0]
        wanted = f"none of {' '.join(ENDS)} is" if token is None else f"{token} is not"
        raise UsageError(
            f"{wanted} among the special tokens of {name} ({' '.join(special[:10]) or 'it has none'}); name the one "
            f"that ends documents: --tokenizer hf:{name},eod=TOKEN"
        )

    def _keep_out_of_text(self, token: str, name: str) -> None:
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
                f"{name} reads {token} in any text, so it cannot end documents; name another token: "
                f"--tokenizer hf:{name},eod=TOKEN"
            )

    def _is_in_text(self, token: str) -> bool:
        return any(self.eod in ids for ids in self.encode_batch([token, f"a {token} b", f"a{token}b"]))


def open_library(content: bytes, name: str) -> tokenizers.Tokenizer:
    """The tokenizer in a tokenizer.json, tried in a child process first.

    Raises:
      UsageError: it is damaged, or takes too much time or memory.
    """
    try_tokenizer(content, name, "tokenizers")
    with library_errors(f"{name} is not a tokenizer.json of Hugging Face", "give one that save_pretrained wrote"):
        return tokenizers.Tokenizer.from_str(content.decode("utf-8"))
