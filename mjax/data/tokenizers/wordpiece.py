"""Train a WordPiece vocabulary, BERT's vocab.txt, on the user's text.

Text is cleaned and cut into words as `bert.py` cuts it, and sentencepiece learns byte pairs within the words. It writes
the beginning of a word as "▁": its piece "▁un" becomes "un", and "believ" becomes "##believ".

    [PAD] [UNK] [CLS] [SEP] [MASK] · every letter, and "##" every letter · pieces, in the order of learning

BERT's own vocabulary was chosen by the likelihood of the text rather than by frequency, with code that was never
published; Hugging Face's trainer counts pairs too. It is not used here because it breaks ties by the order of a hash
table: three runs of `trainers.WordPieceTrainer` on the same text gave three different vocabularies.
"""

import string
from collections.abc import Iterable, Iterator

import sentencepiece

from mjax.data.tokenizers.bert import BertTokenizer, CasedBertTokenizer, UncasedBertTokenizer, words_of
from mjax.data.tokenizers.pieces import CHUNK, WrongSize, learned
from mjax.errors import UsageError

TRAINABLE = {tokenizer.scheme: tokenizer for tokenizer in (UncasedBertTokenizer, CasedBertTokenizer)}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
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
    found = [pieces.id_to_piece(number) for number in range(1, pieces.vocab_size())]  # 0 is the unknown piece
    letters = sorted({piece for piece in found if len(piece) == 1} - {SPACE} | set(always))
    if _size(len(letters)) > vocabulary:
        raise too_small(len(letters))
    alphabet = [*letters, *(f"##{letter}" for letter in letters)]
    longer = [piece[1:] if piece.startswith(SPACE) else f"##{piece}" for piece in found if len(piece) > 1]
    lines = list(dict.fromkeys([*SPECIAL, *alphabet, *longer]))[:vocabulary]
    return tokenizer(("\n".join(lines) + "\n").encode(), "the vocabulary that was trained")


def _size(letters: int) -> int:
    """Size of a vocabulary that has pieces for this many letters and no longer ones."""
    return len(SPECIAL) + 2 * letters


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
