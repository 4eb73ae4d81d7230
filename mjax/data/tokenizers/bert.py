"""BERT's WordPiece, from the vocab.txt that comes with every published BERT.

Text is cleaned of control characters and cut at white space and around each punctuation mark and Chinese character. A
word becomes its longest known beginning, then the longest known continuation ("##…"), and so on (Devlin et al. 2019,
§3). A word that cannot be encoded is [UNK], and so is one of more than 100 characters: that is Hugging Face's limit,
while Megatron's and Google's code has 200. White space is lost, so decoding does not restore the text.

Special tokens, [CLS] and [SEP] around sentences and [MASK], are added when samples are made; no text encodes to them,
because their brackets are punctuation: `[MASK]` in a text is `[`, `mask`, `]`, as in Megatron.

To train a vocabulary, sentencepiece learns byte pairs within the words of the user's text. It writes
the beginning of a word as "▁": its piece "▁un" becomes "un", and "believ" becomes "##believ".

    [PAD] [UNK] [CLS] [SEP] [MASK] · every letter, and "##" every letter · pieces, in the order of learning

BERT's own vocabulary was chosen by the likelihood of the text rather than by frequency, with code that was never
published; Hugging Face's trainer counts pairs too. It is not used here because it breaks ties by the order of a hash
table: three runs of `trainers.WordPieceTrainer` on the same text gave three different vocabularies.
"""

import string
from collections.abc import Iterable, Iterator
from typing import ClassVar

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from mjax.data.tokenizers.library import LibraryTokenizer, utf8, utf8_lines
from mjax.data.tokenizers.pieces import CHUNK, WrongSize, learned
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
        """Reject a vocabulary of the other case: half of the words would be [UNK], or half of the pieces unused."""
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


# --- Training ---------------------------------------------------------------------------------------------------------

TRAINABLE = {tokenizer.scheme: tokenizer for tokenizer in (UncasedBertTokenizer, CasedBertTokenizer)}
FIRST_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPACE = "▁"  # U+2581, sentencepiece's


def train_wordpiece(texts: Iterable[str], vocabulary: int, scheme: str) -> BertTokenizer:
    """Train a WordPiece vocabulary of exactly `vocabulary` pieces; the same texts give the same one.

    The rarest letters, together less than a 2,000th of the text, are left out; a word with one of them is [UNK], as in
    every BERT.

    Args:
      scheme: "bert-uncased" or "bert-cased".

    Raises:
      UsageError: there is no text, or it has too few words for the vocabulary or too many letters; says what works.
    """
    tokenizer = TRAINABLE[scheme]
    # A cased vocabulary is recognised by its capitals.
    always = [] if tokenizer.lowercase else list(string.ascii_uppercase)

    met: set[str] = set()

    def too_small(letters: int) -> UsageError:
        return UsageError(
            f"--vocabulary {vocabulary} is too small: the letters of this text alone are {_size(letters)} pieces; "
            f"use --vocabulary {_size(letters)} or more"
        )

    try:
        model = learned(
            _spaced(texts, tokenizer.lowercase, met),
            vocabulary,
            character_coverage=0.9995,
            split_by_unicode_script=False,  # a word ends where BERT ends it, and nowhere else
            split_by_number=False,
            eos_id=-1,
        )
    except WrongSize as error:
        if error.least is not None:
            raise too_small(error.least - 2 + len(always)) from None  # but for the unknown piece and the space
        if error.most < (least := _size(len(met.union(always)))):
            raise UsageError(
                f"there is too little text to train a vocabulary: its words yield {error.most} pieces, its letters "
                f"alone {least}; give more text, or a vocabulary with --tokenizer {scheme}:vocab.txt"
            ) from None
        raise UsageError(
            f"--vocabulary {vocabulary} is too large for this little text, which yields {error.most} pieces; "
            f"use --vocabulary {error.most} or less, or give more text"
        ) from None
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    learned_pieces = [pieces.id_to_piece(number) for number in range(1, pieces.vocab_size())]  # 0 is the unknown piece
    letters = sorted({piece for piece in learned_pieces if len(piece) == 1} - {SPACE} | set(always))
    if _size(len(letters)) > vocabulary:
        raise too_small(len(letters))
    alphabet = [*letters, *(f"##{letter}" for letter in letters)]
    longer = [piece[1:] if piece.startswith(SPACE) else f"##{piece}" for piece in learned_pieces if len(piece) > 1]
    lines = list(dict.fromkeys([*FIRST_PIECES, *alphabet, *longer]))[:vocabulary]
    return tokenizer(("\n".join(lines) + "\n").encode(), "the vocabulary that was trained")


def _size(letters: int) -> int:
    """Size of a vocabulary that has pieces for this many letters and no longer ones."""
    return len(FIRST_PIECES) + 2 * letters


def _spaced(texts: Iterable[str], lowercase: bool, met: set[str]) -> Iterator[str]:
    """The words of the texts with a space between two, in chunks that end with a word; their letters go to `met`."""
    for text in texts:
        line, size = [], 0
        for word in words_of(text, lowercase):
            line.append(word)
            met.update(word)
            size += len(word) + 1
            if size >= CHUNK // 2:
                yield " ".join(line)
                line, size = [], 0
        yield " ".join(line)
