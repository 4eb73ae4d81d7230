"""A tokenizer of mjax as an equivalent tokenizer.json for `transformers`, with the same ids.

GPT-2's, BERT's and Hugging Face's run on the `tokenizers` library here too. Bytes are byte pairs without merges.
sentencepiece joins the neighbours whose piece has the best score, the library those whose pair was learned first: every
two pieces that make a third are a pair, in the order of the third's score. Spaces become "▁", and one is put in front.

The library has no exact counterpart of everything, so ids and text of the two are compared before a file is written.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Library

from mjax.data.sentencepiece_file import BPE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, parse_pieces
from mjax.data.tokenizers import EOD_PIECE, BertTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from mjax.data.tokenizers.published import add_special, byte_characters, byte_level
from mjax.errors import UsageError

SPACE = "▁"  # U+2581, sentencepiece's

AWKWARD = (
    "The quick brown fox, 3.14 times. Don't!\n\n\tdef f(x):\n        return x  # two  spaces \r\n",
    "  naïve café, e\u0301 s\u0323\u0307 ﬁ\u0301 Ⅷ ① ½ İ ẞ 漢字、한국어 हिन्दी ภาษาไทย مرحبا 👩‍👩‍👧🇫🇷",
    "\u00a0no\u3000break\u200b\u2028\ufeff",
    f"a\x00\x01\x7f {SPACE}Ġ <s>a</s> <unk><0x0A><pad> [CLS] [MASK] [SEP] {EOD_PIECE}one",
    " ",
)
"""Texts on which tokenizers often differ."""


def fast_tokenizer(tokenizer: Tokenizer, pairs: bool = False) -> Library:
    """The same tokenizer in the `tokenizers` library, with the special tokens that `transformers` expects.

    Args:
      tokenizer: any kind.
      pairs: add [CLS] and [SEP] around texts, as for a BERT; else at most the token that begins texts is added.

    Raises:
      UsageError: the library does not give the same ids and text; the message shows where.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        library = _convert_sentencepiece(parse_pieces(tokenizer.contents[0]))
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        values = json.loads(tokenizer.library.to_str())
        if not (pairs and isinstance(tokenizer, BertTokenizer)):
            values["post_processor"] = None  # the model was not trained with what it adds
        library = Library.from_str(json.dumps(values))
    else:
        pieces = {piece: byte for byte, piece in enumerate([*byte_characters(), EOD_PIECE])}
        library = byte_level(pieces, [], words=False)
    _check_same(tokenizer, library)
    if tokenizer.bos is not None:
        piece = library.id_to_token(tokenizer.bos)
        library.post_processor = processors.TemplateProcessing(
            single=[piece, "$A"], special_tokens=[(piece, tokenizer.bos)]
        )
    return library


def _check_same(tokenizer: Tokenizer, library: Library) -> None:
    """Compare the two, with the second used as in `transformers`, on difficult texts and on every piece."""
    library = Library.from_str(library.to_str())  # as read from the file
    library.encode_special_tokens = True
    for text in _texts(tokenizer):
        ids, other = tokenizer.encode(text), library.encode(text, add_special_tokens=False).ids
        if ids != other:
            pairs = enumerate(zip(ids, other, strict=False))
            first = next((i for i, (one, two) in pairs if one != two), min(len(ids), len(other)))
            problem = f"{tokenizer.decode(ids[first : first + 3])!r} has ids {ids[first : first + 3]}"
            problem += f" and there {other[first : first + 3]}"
        elif (shown := tokenizer.decode(ids)) != (there := library.decode(ids, skip_special_tokens=False)):
            problem = f"its ids mean {shown[:40]!r} and there {there[:40]!r}"
        else:
            continue
        raise UsageError(
            f"the tokenizer of kind {tokenizer.scheme} has no equivalent in transformers: {problem}; export the "
            "weights alone with --tokenizer none"
        )


def _texts(tokenizer: Tokenizer) -> list[str]:
    """Difficult texts; all pieces in random order, always the same; and both mixed, with runs of spaces."""
    draw = random.Random(0)
    ids = [number for number in range(tokenizer.vocabulary) if number != tokenizer.eod]
    draw.shuffle(ids)
    pieces = [tokenizer.decode(ids[start : start + 100]) for start in range(0, len(ids), 100)]
    characters = "".join(AWKWARD)
    mixed = []
    for _ in range(200):
        some = [tokenizer.decode([draw.choice(ids)]) for _ in range(20)]
        some += [*draw.choices(characters, k=20), " " * draw.randint(1, 20)]
        draw.shuffle(some)
        mixed.append("".join(some))
    return [*AWKWARD, *pieces, *mixed]


# --- sentencepiece ----------------------------------------------------------------------------------------------------


def _convert_sentencepiece(model: Any) -> Library:
    pieces, trainer, normalizer = model.pieces, model.trainer_spec, model.normalizer_spec
    changes = normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces
    if trainer.model_type != BPE or changes or not normalizer.escape_whitespaces:
        raise UsageError(
            "transformers has an exact equivalent only of sentencepiece models of byte pairs without normalization; "
            "export the weights alone with --tokenizer none"
        )
    unknown = next(piece.piece for piece in pieces if piece.type == UNKNOWN)
    prefix = normalizer.add_dummy_prefix
    library = Library(_byte_pairs(pieces, unknown, trainer.byte_fallback))
    steps = [normalizers.Replace(" ", SPACE), *[normalizers.Prepend(SPACE)] * prefix]
    library.normalizer = normalizers.Sequence(steps)
    steps = [decoders.Replace(unknown, trainer.unk_surface), decoders.Replace(SPACE, " "), decoders.ByteFallback()]
    steps += [decoders.Fuse(), *[decoders.Strip(" ", 1, 0)] * prefix]
    library.decoder = decoders.Sequence(steps)
    add_special(library, *(piece.piece for piece in pieces if piece.type in (CONTROL, UNKNOWN)))
    # Pieces of the user are never split or joined; a single character that is part of no other is never joined anyway.
    inside = {character for piece in pieces if piece.type == NORMAL for character in piece.piece}
    of_user = (piece.piece for piece in pieces if piece.type == USER_DEFINED)
    looked_for = [text for text in of_user if len(text) > 1 or text in inside]
    library.add_tokens([AddedToken(text, special=False, normalized=True) for text in looked_for])
    return library


def _byte_pairs(pieces: Sequence[Any], unknown: str, byte_fallback: bool) -> models.BPE:
    """Every two pieces that make a third are a pair, ordered by the score of the third."""
    ids = {piece.piece: number for number, piece in enumerate(pieces)}
    scores = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
    pairs = [
        (text[:cut], text[cut:])
        for text in sorted(scores, key=lambda text: (-scores[text], ids[text]))
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
