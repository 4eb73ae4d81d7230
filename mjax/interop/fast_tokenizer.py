"""A tokenizer of mjax as an equivalent tokenizer.json for `transformers`, with the same ids.

GPT-2's, BERT's and Hugging Face's run on the `tokenizers` library here too. Bytes are byte pairs without merges. A
sentencepiece model becomes byte pairs or a unigram model of the library:

    byte pairs   sentencepiece joins the neighbours whose piece has the best score, the library those whose pair was
                 learned first: every two pieces that make a third are a pair, in the order of the third's score
    unigram      the same search over the same scores
    text         charsmap, runs of spaces, "▁" for a space and at the beginning: the library's normalizers

The library has no exact counterpart of everything (a charsmap is applied character by character within a grapheme, such
as "ṩ" in three code points), so ids and text of the two are compared before a file is written.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from mjax.data.sentencepiece_file import BPE, CONTROL, NORMAL, UNIGRAM, UNKNOWN, USER_DEFINED, parse_pieces
from mjax.data.tokenizers import (
    EOD_PIECE,
    BertTokenizer,
    ByteTokenizer,
    GPT2Tokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from mjax.data.tokenizers.bert import SPECIAL
from mjax.data.tokenizers.gpt2 import byte_characters
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
      pairs: add [CLS] and [SEP] around texts, as for a BERT; else nothing is added.

    Raises:
      UsageError: the library does not give the same ids and text; the message shows where.
    """
    library = _built(tokenizer, pairs)
    _check_same(tokenizer, library)
    if tokenizer.bos is not None:
        piece = library.id_to_token(tokenizer.bos)
        library.post_processor = processors.TemplateProcessing(
            single=[piece, "$A"], special_tokens=[(piece, tokenizer.bos)]
        )
    return library


def _built(tokenizer: Tokenizer, pairs: bool) -> Library:
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _of_sentencepiece(tokenizer)
    if isinstance(tokenizer, ByteTokenizer):
        library = Library(models.BPE({piece: byte for byte, piece in enumerate([*byte_characters(), EOD_PIECE])}, []))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        return _with_special(library, EOD_PIECE)
    library = Library.from_str(tokenizer.library.to_str())
    if isinstance(tokenizer, HuggingFaceTokenizer):
        values = json.loads(library.to_str())
        values["post_processor"] = None  # the model was not trained with what it adds
        return Library.from_str(json.dumps(values))
    if isinstance(tokenizer, GPT2Tokenizer):
        return _with_special(library, EOD_PIECE)
    assert isinstance(tokenizer, BertTokenizer)
    if pairs:
        library.post_processor = processors.BertProcessing(("[SEP]", tokenizer.sep), ("[CLS]", tokenizer.cls))
    return _with_special(library, *SPECIAL)


def _check_same(tokenizer: Tokenizer, library: Library) -> None:
    """Compare the two, with the second used as in `transformers`, on difficult texts and on every piece."""
    library = Library.from_str(library.to_str())  # as read from the file
    library.encode_special_tokens = True
    for text in _texts(tokenizer):
        ours, theirs = tokenizer.encode(text), library.encode(text, add_special_tokens=False).ids
        shown, there = tokenizer.decode(ours), library.decode(ours, skip_special_tokens=False)
        if (ours, shown) == (theirs, there):
            continue
        difference = f"its own ids back as {shown[:40]!r} and as {there[:40]!r} there"
        if ours != theirs:
            first = next((i for i, two in enumerate(zip(ours, theirs, strict=False)) if two[0] != two[1]), 0)
            part = slice(max(0, first - 2), first + 3)
            difference = f"{tokenizer.decode(ours[part])!r} as ids {ours[part]} and as {theirs[part]} there"
        raise UsageError(
            f"the tokenizer of kind {tokenizer.scheme} has no equivalent in transformers: it reads {difference}; "
            "export the weights alone with --tokenizer none"
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


def _with_special(library: Library, *tokens: str) -> Library:
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return library


# --- sentencepiece ----------------------------------------------------------------------------------------------------


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> Library:
    model = parse_pieces(tokenizer.contents[0])
    pieces, trainer, normalizer = model.pieces, model.trainer_spec, model.normalizer_spec
    unknown = next(number for number, piece in enumerate(pieces) if piece.type == UNKNOWN)
    if trainer.model_type == BPE:
        library = Library(_byte_pairs(pieces, pieces[unknown].piece, trainer.byte_fallback))
    elif trainer.model_type == UNIGRAM:
        library = Library(models.Unigram(_scores(pieces), unknown, trainer.byte_fallback))
    else:
        raise UsageError(
            "transformers supports sentencepiece models of byte pairs and unigrams, and the run's is neither; "
            "export the weights alone with --tokenizer none"
        )

    steps = [normalizers.Precompiled(charsmap)] if (charsmap := normalizer.precompiled_charsmap) else []
    if normalizer.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if normalizer.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    if normalizer.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    library.normalizer = normalizers.Sequence(steps)
    shown = decoders.Replace(pieces[unknown].piece, trainer.unk_surface)
    steps = [shown, decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", 1, 0))
    library.decoder = decoders.Sequence(steps)
    _with_special(library, *(piece.piece for piece in pieces if piece.type in (CONTROL, UNKNOWN)))
    if trainer.model_type == BPE:
        library.add_tokens([AddedToken(text, special=False, normalized=True) for text in _looked_for(pieces)])
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


def _looked_for(pieces: Sequence[Any]) -> list[str]:
    """User-defined pieces, which are never split or joined.

    A single character that is part of no other piece is never joined anyway.
    """
    inside = {character for piece in pieces if piece.type == NORMAL for character in piece.piece}
    return [
        piece.piece
        for piece in pieces
        if piece.type == USER_DEFINED and (len(piece.piece) > 1 or piece.piece in inside)
    ]


def _scores(pieces: Sequence[Any]) -> list[tuple[str, float]]:
    """For a unigram model: user-defined pieces have sentencepiece's own bonus, and pieces that occur in no text a lower
    score."""
    normal = [piece.score for piece in pieces if piece.type == NORMAL]

    def score(piece: Any) -> float:
        if piece.type == USER_DEFINED:
            return len(piece.piece.encode()) * max(normal) - 0.1
        return piece.score if piece.type == NORMAL else min(normal) - 1000

    return [(piece.piece, score(piece)) for piece in pieces]
