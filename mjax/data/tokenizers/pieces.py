"""sentencepiece models: a foreign .model file run by sentencepiece's own library.

A model does what it was trained to do: most add a space in front, many fold spaces and normalise to NFKC. One that is
trained here (`training.py`) does neither.
"""

from collections.abc import Sequence

import sentencepiece

from mjax.data.tokenizer_trial import check_expansion, try_tokenizer
from mjax.data.tokenizers.library import EOD_PIECE, Tokenizer, library_errors, utf8
from mjax.errors import UsageError


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model; its end-of-sentence piece, or a control piece `<|endoftext|>`, ends documents."""

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
