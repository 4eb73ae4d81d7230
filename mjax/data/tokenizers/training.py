"""Vocabularies that are trained on the user's text: byte pairs that sentencepiece learns, also for BERT.

A sentencepiece model trained here adds no space in front, folds no spaces and normalises nothing, and encodes as UTF-8
bytes what it has no piece for. So `decode(encode(text)) == text`, except "▁" (U+2581), which sentencepiece uses for the
space.

For a BERT, sentencepiece learns byte pairs within the words of the text. It writes the beginning of a word as "▁": its
piece "▁un" becomes "un", and "believ" becomes "##believ".

    [PAD] [UNK] [CLS] [SEP] [MASK] · every letter, and "##" every letter · pieces, in the order of learning

BERT's own vocabulary was chosen by the likelihood of the text rather than by frequency, with code that was never
published; Hugging Face's trainer counts pairs too. It is not used here because it breaks ties by the order of a hash
table: three runs of `trainers.WordPieceTrainer` on the same text gave three different vocabularies.
"""

import io
import re
import string
from collections.abc import Callable, Iterable, Iterator

import sentencepiece
from tokenizers import pre_tokenizers

from mjax.data.tokenizer_trial import remember
from mjax.data.tokenizers.kinds import EOD_PIECE, HuggingFaceTokenizer, SentencePieceTokenizer, utf8
from mjax.data.tokenizers.load import bert_library, bert_normalizer, wrap_library
from mjax.errors import UsageError

CHUNK = 2**14  # characters given to sentencepiece at once in training
TRAINABLE = ("bert-uncased", "bert-cased")
FIRST_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPACE = "▁"  # U+2581, sentencepiece's


def train_sentencepiece(texts: Iterable[str], vocabulary: int) -> SentencePieceTokenizer:
    """Train a byte-pair vocabulary of exactly `vocabulary` pieces; the same texts give the same model.

    Byte pairs and unigram, sentencepiece's two algorithms, give tokens of the same length (3.46 and 3.45 bytes at 4,096
    pieces of Wikipedia), and byte pairs train over ten times faster (0.4 s and 6 s for 5 MB).

    Raises:
      UsageError: there is no text, or it has too few words for the vocabulary or too many characters; says what works.
    """
    model = train_byte_pairs(
        texts,
        vocabulary,
        byte_fallback=True,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,  # indentation in few tokens
        user_defined_symbols=["\n"],  # a line break is always a separate token
        eos_id=1,
        eos_piece=EOD_PIECE,
    )
    remember(model, "sentencepiece")
    return SentencePieceTokenizer(model, "the trained tokenizer")


def train_wordpiece(texts: Iterable[str], vocabulary: int, scheme: str) -> HuggingFaceTokenizer:
    """Train a WordPiece vocabulary of exactly `vocabulary` pieces; the same texts give the same one.

    The rarest letters, together less than a 2,000th of the text, are left out; a word with one of them is [UNK], as in
    every BERT.

    Args:
      scheme: "bert-uncased" or "bert-cased".

    Raises:
      UsageError: there is no text, or it has too few words for the vocabulary or too many letters; says what works.
    """
    lowercase = scheme == "bert-uncased"
    always = set() if lowercase else {*string.ascii_uppercase}  # by which a cased vocabulary is recognised

    def size(letters: int) -> int:
        return len(FIRST_PIECES) + 2 * letters

    model = train_byte_pairs(
        _join_words(texts, lowercase),
        vocabulary,
        size_for=lambda characters: size(characters - 2 + len(always)),  # which has an unknown piece and the space
        character_coverage=0.9995,
        split_by_unicode_script=False,  # a word ends where BERT ends it, and nowhere else
        split_by_number=False,
        eos_id=-1,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    learned_pieces = [pieces.id_to_piece(number) for number in range(1, pieces.vocab_size())]  # 0 is the unknown piece
    letters = sorted({piece for piece in learned_pieces if len(piece) == 1} - {SPACE} | always)
    if size(len(letters)) > vocabulary:
        raise _too_small(vocabulary, size(len(letters)))
    alphabet = [*letters, *(f"##{letter}" for letter in letters)]
    longer = [piece[1:] if piece.startswith(SPACE) else f"##{piece}" for piece in learned_pieces if len(piece) > 1]
    lines = list(dict.fromkeys([*FIRST_PIECES, *alphabet, *longer]))[:vocabulary]
    content, name = ("\n".join(lines) + "\n").encode(), "the vocabulary that was trained"
    return wrap_library(bert_library(content, name, lowercase), scheme, [content], name)


def _join_words(texts: Iterable[str], lowercase: bool) -> Iterator[str]:
    """BERT's words of the texts, a space between two, in chunks that end with a word."""
    normalizer, splitter = bert_normalizer(lowercase), pre_tokenizers.BertPreTokenizer()
    for text in texts:
        utf8(text)
        line, size = [], 0
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)):
            line.append(word)
            size += len(word) + 1
            if size >= CHUNK // 2:
                yield " ".join(line)
                line, size = [], 0
        yield " ".join(line)


def train_byte_pairs(
    texts: Iterable[str], vocabulary: int, size_for: Callable[[int], int] = lambda characters: characters, **settings
) -> bytes:
    """Train a sentencepiece model of exactly `vocabulary` byte-pair pieces on the text as it is.

    Args:
      texts: to train on.
      vocabulary: pieces.
      size_for: size of the user's vocabulary that a model of so many characters makes.
      settings: of sentencepiece's trainer.

    Raises:
      UsageError: there is no text, or this size does not fit it.
    """
    model, interruption = io.BytesIO(), []

    def chunks() -> Iterator[str]:
        # Bounded, because sentencepiece passes over what is longer than max_sentence_length.
        try:
            for text in texts:
                yield from (text[start : start + CHUNK] for start in range(0, len(text), CHUNK))
        except BaseException as error:  # sentencepiece turns whatever its iterator raises into a RuntimeError
            interruption.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chunks(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=4 * CHUNK,  # in bytes
            unk_id=0,
            bos_id=-1,
            pad_id=-1,
            minloglevel=2,
            **settings,
        )
    except RuntimeError as error:
        raise (interruption[0] if interruption else _translate(error, vocabulary, size_for)) from None
    return model.getvalue()


def _translate(error: RuntimeError, vocabulary: int, size_for: Callable[[int], int]) -> Exception:
    """The meaning of a message of sentencepiece."""
    message = str(error)
    if match := re.search(r"too high.*<= (\d+)", message):
        fix = f"use --vocabulary {match[1]} or less, or give more text"
        return UsageError(f"--vocabulary {vocabulary} is too large for this little text; {fix}")
    if match := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return _too_small(vocabulary, size_for(int(match[1])))
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return UsageError("there is no text to train a tokenizer on; give files that hold text")
    return error


def _too_small(vocabulary: int, least: int) -> UsageError:
    fix = f"use --vocabulary {least} or more, or --tokenizer bytes"
    return UsageError(f"--vocabulary {vocabulary} is too small for the characters of this text; {fix}")
