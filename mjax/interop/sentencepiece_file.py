"""What is in a sentencepiece model: its pieces, and what is done to a text before they are looked for.

The file is a protocol buffer, sentencepiece_model.proto of the sentencepiece library. The reader that the library
brings along asks for the very protobuf it was generated with (7.36.1 in sentencepiece 0.2.3), so it is not used here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

UNIGRAM, BPE = 1, 2  # the algorithms
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of pieces


class Piece(NamedTuple):
    """A token: how it is written, how much it is wanted, and its type."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class PieceModel:
    """A sentencepiece model.

    Attributes:
      pieces: one an id.
      algorithm: UNIGRAM, BPE, or another.
      byte_fallback: whether what no piece spells is spelled in bytes.
      unknown_shown: what the unknown piece is decoded to.
      charsmap: the compiled rules that replace characters; empty for none.
      space_in_front, folds_spaces, marks_spaces: whether a text gets a space in front, loses all but one of several
        spaces, and is searched with "▁" for each space.
    """

    pieces: list[Piece]
    algorithm: int
    byte_fallback: bool
    unknown_shown: str
    charsmap: bytes
    space_in_front: bool
    folds_spaces: bool
    marks_spaces: bool


def parse_pieces(content: bytes) -> PieceModel:
    """The model in `content`, a file that the library has opened: it is not checked again.

    The numbers are those of the fields in sentencepiece_model.proto, and the defaults too.
    """
    pieces, trainer, normalizer = [], {}, {}
    for number, value in _fields(content):
        if number == 1:
            fields = dict(_fields(value))
            score = struct.unpack("<f", fields.get(2, bytes(4)))[0]
            pieces.append(Piece(fields.get(1, b"").decode(), score, fields.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    return PieceModel(
        pieces=pieces,
        algorithm=trainer.get(3, UNIGRAM),
        byte_fallback=bool(trainer.get(35, 0)),
        unknown_shown=trainer.get(44, " ⁇ ".encode()).decode(),
        charsmap=normalizer.get(2, b""),
        space_in_front=bool(normalizer.get(3, 1)),
        folds_spaces=bool(normalizer.get(4, 1)),
        marks_spaces=bool(normalizer.get(5, 1)),
    )


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message: a whole number, or the bytes of anything else."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
            if byte < 128:
                return value

    while place < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}[kind] if kind != 2 else varint()
        yield number, message[place : place + size]
        place += size
