"""BERT's WordPiece, from the vocab.txt that comes with every published BERT.

Text is cleaned of control characters and cut at white space and around each punctuation mark and Chinese character. A
word becomes its longest known beginning, then the longest known continuation ("##…"), and so on (Devlin et al. 2019,
§3). A word that cannot be encoded is [UNK], and so is one of more than 100 characters: that is Hugging Face's limit,
while Megatron's and Google's code has 200. White space is not kept, so decoding does not restore the text.

Special tokens, [CLS] and [SEP] around sentences and [MASK], are added when samples are made; no text encodes to them,
because their brackets are punctuation: `[MASK]` in a text is `[`, `mask`, `]`, as in Megatron.
"""

import string
from typing import ClassVar

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from mjax.data.tokenizers.library import LibraryTokenizer, utf8, utf8_lines
from mjax.errors import UsageError

LONGEST_WORD = 100  # characters
SPECIAL = ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]")


class BertTokenizer(LibraryTokenizer):
    """WordPiece; [SEP] ends documents.

    Attributes:
      lowercase: whether capitals become small letters and accents are dropped.
      cls, sep, mask, pad, unk: ids of [CLS], [SEP], [MASK], [PAD] and [UNK].
    """

    stored = ("vocab.txt",)
    lowercase: ClassVar[bool]

    def __init__(self, vocab: bytes, name: str):
        # As in Google's code the line number is the id, and the last of equal pieces counts.
        pieces = [line.rstrip() for line in utf8_lines(vocab, name)]
        ids = {piece: number for number, piece in enumerate(pieces)}
        if missing := [piece for piece in SPECIAL if piece not in ids]:
            raise UsageError(f"{name} lacks {', '.join(missing)}; give BERT's vocab.txt, which has one piece a line")
        self._check_case(ids, name)
        self.library = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD))
        self.library.normalizer = _normalizer(self.lowercase)
        self.library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        # Without the clean-up of "it ' s" the text of a beginning is always a beginning of the text.
        self.library.decoder = decoders.WordPiece(prefix="##", cleanup=False)
        self.contents = (vocab,)
        self.vocabulary = len(pieces)
        self.cls, self.sep, self.mask, self.pad, self.unk = (ids[piece] for piece in SPECIAL)
        self.eod = self.sep

    def _check_case(self, ids: dict[str, int], name: str) -> None:
        """Refuse a vocabulary of the other case: half of the words would be [UNK], or half of the pieces unused."""
        capitals = [letter in ids for letter in string.ascii_uppercase]
        if self.lowercase and all(capitals):
            raise UsageError(f"{name} has pieces in capitals; use --tokenizer {CasedBertTokenizer.scheme}:{name}")
        if not self.lowercase and not any(capitals):
            raise UsageError(f"{name} has no capital letters; use --tokenizer {UncasedBertTokenizer.scheme}:{name}")


def words_of(text: str, lowercase: bool) -> list[str]:
    """The words of `text`, cleaned and cut at white space and around punctuation; pieces are parts of them."""
    utf8(text)
    cut = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(_normalizer(lowercase).normalize_str(text))
    return [word for word, _ in cut]


def _normalizer(lowercase: bool) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=lowercase, lowercase=lowercase
    )


class UncasedBertTokenizer(BertTokenizer):
    """WordPiece of lower-case text without accents, Megatron's BertWordPieceLowerCase."""

    scheme = "bert-uncased"
    form = "bert-uncased:vocab.txt"
    lowercase = True


class CasedBertTokenizer(BertTokenizer):
    """WordPiece of text as it is, Megatron's BertWordPieceCase."""

    scheme = "bert-cased"
    form = "bert-cased:vocab.txt"
    lowercase = False
