"""Any fast tokenizer of Hugging Face, from its tokenizer.json.

The file says how text is split and merged, and that is followed to the letter. What would change a corpus behind its
owner's back is switched off: truncation and padding (some files cut at 128 tokens), tokens added around the text,
random merges (BPE dropout), and special tokens recognised inside the text, one of which ends documents.
"""

import re
from typing import Self

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from mjax.data.tokenizers.interface import read_given
from mjax.data.tokenizers.library import LibraryTokenizer
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
    """A tokenizer.json; one of the usual special tokens ends documents, or the one that is named."""

    kind = "hf"
    form = "hf:tokenizer.json or hf:tokenizer.json,eod=TOKEN"
    stored = ("tokenizer.json",)

    def __init__(self, content: bytes, name: str, eod: str | int | None = None):
        try:
            self.library = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises nothing more special
            raise UsageError(
                f"{name} is not a tokenizer.json of Hugging Face ({error}); give one that save_pretrained wrote"
            ) from None
        self.library.no_truncation()
        self.library.no_padding()
        if hasattr(self.library.model, "dropout"):
            self.library.model.dropout = None
        self.library.encode_special_tokens = True  # as ordinary text
        self.contents = (content,)
        vocabulary = self.library.get_vocab(with_added_tokens=True)
        self.vocabulary = max(vocabulary.values(), default=-1) + 1
        token = self._find_eod(name, eod)
        self.eod = self.library.token_to_id(token)
        self._keep_out_of_text(token, name)

    @classmethod
    def from_files(cls, files: str) -> Self:
        """From what follows the kind on the command line: a tokenizer.json, and perhaps `,eod=TOKEN`."""
        file, _, eod = files.partition(",eod=")
        return cls(read_given(cls, files, file), file, eod or None)

    @classmethod
    def from_contents(cls, contents, names, eod: int) -> Self:
        """From the files of a folder that `save` wrote; the id says which token was chosen."""
        return cls(*contents, *names, eod)

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
        """See to it that the written form of `token`, an added one, does not encode to it."""
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
