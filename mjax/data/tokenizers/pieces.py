"""sentencepiece: a foreign .model file, or a model trained on the user's text.

A model trained here adds no space in front, folds no spaces and normalises nothing, and encodes as UTF-8 bytes what it
has no piece for. So `decode(encode(text)) == text`, except "▁" (U+2581), which sentencepiece uses for the space.
A foreign model does what it was trained to do: most add a space in front, many fold spaces and normalise to NFKC.
"""

import io
import re
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece

from mjax.data.tokenizer_trial import check_expansion, remember, try_tokenizer
from mjax.data.tokenizers.library import EOD_PIECE, Tokenizer, utf8
from mjax.errors import UsageError

CHUNK = 2**14  # characters given to sentencepiece at once in training


class WrongSize(Exception):
    """A vocabulary size that does not fit a text: it yields `most` pieces, or needs `least` for its letters."""

    def __init__(self, most: int | None = None, least: int | None = None):
        super().__init__(most, least)
        self.most, self.least = most, least


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model; its end-of-sentence piece, or a control piece `<|endoftext|>`, ends documents."""

    scheme = encoder = "sentencepiece"
    form = "sentencepiece:FILE.model"
    stored = ("tokenizer.model",)

    def __init__(self, model: bytes, source: str):
        try_tokenizer(model, source, "sentencepiece")
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
            for number in range(self._processor.vocab_size()):
                self._processor.id_to_piece(number)  # a piece that is not UTF-8 fails here, not in the middle of a text
        except (RuntimeError, UnicodeDecodeError):
            raise UsageError(f"{source} is not a sentencepiece model; give the .model file of one") from None
        self.contents = (model,)
        self.vocabulary = self._processor.vocab_size()
        self.eod = self._processor.eos_id()
        if self.eod < 0:
            self.eod = self._processor.piece_to_id(EOD_PIECE)
            if self._processor.id_to_piece(self.eod) != EOD_PIECE:  # unknown pieces get the id of <unk>
                raise UsageError(
                    f"{source} has neither an end-of-sentence piece nor a piece {EOD_PIECE} to end documents with; "
                    "use a model that has one, or leave --tokenizer out to train one"
                )
        if not self._processor.is_control(self.eod):  # text encodes to any other piece
            raise UsageError(
                f"{source} ends documents with {self._processor.id_to_piece(self.eod)}, which is not a control piece, "
                "so text can hold it; use a model trained with it among --control_symbols"
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


# --- Training ---------------------------------------------------------------------------------------------------------


def train_sentencepiece(texts: Iterable[str], vocabulary: int) -> SentencePieceTokenizer:
    """Train a byte-pair vocabulary of exactly `vocabulary` pieces; the same texts give the same model.

    Byte pairs and unigram, sentencepiece's two algorithms, give tokens of the same length (3.46 and 3.45 bytes at 4,096
    pieces of Wikipedia), and byte pairs train over ten times faster (0.4 s and 6 s for 5 MB).

    Raises:
      UsageError: there is no text, or it has too few words for the vocabulary or too many characters; says what works.
    """
    try:
        model = learned(
            texts,
            vocabulary,
            byte_fallback=True,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,  # indentation in few tokens
            user_defined_symbols=["\n"],  # a line break is always a separate token
            eos_id=1,
            eos_piece=EOD_PIECE,
        )
    except WrongSize as error:
        if error.most is not None:
            raise UsageError(
                f"--vocabulary {vocabulary} is too large for this little text, which yields {error.most} pieces; "
                f"use --vocabulary {error.most} or less, give more text, or use --tokenizer bytes"
            ) from None
        raise UsageError(
            f"--vocabulary {vocabulary} is too small: bytes and characters of this text alone are {error.least} "
            f"pieces; use --vocabulary {error.least} or more, or --tokenizer bytes"
        ) from None
    remember(model, "sentencepiece")
    return SentencePieceTokenizer(model, "the trained tokenizer")


def learned(texts: Iterable[str], vocabulary: int, **settings) -> bytes:
    """Train a sentencepiece model of exactly `vocabulary` byte-pair pieces on the text as it is.

    Args:
      settings: of sentencepiece's trainer.

    Raises:
      UsageError: there is no text.
      WrongSize: this size and this text do not fit.
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
        raise (interruption[0] if interruption else _explained(error)) from None
    return model.getvalue()


def _explained(error: RuntimeError) -> Exception:
    """Translate sentencepiece's message."""
    message = str(error)
    if match := re.search(r"too high.*<= (\d+)", message):
        return WrongSize(most=int(match[1]))
    if match := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return WrongSize(least=int(match[1]))
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return UsageError("there is no text to train a tokenizer on; give files that hold text")
    return error
