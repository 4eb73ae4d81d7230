"""GPT-2's and BERT's published vocabularies as tokenizers of Hugging Face's library.

GPT-2 cuts text into words, each with the space before it, and merges the bytes of a word pair by pair, pairs learned
earlier first (Radford et al. 2019, §2.2). Any text can be encoded and decodes to itself. The files write a byte as a
printable character, the space as "Ġ". `vocab.json` (OpenAI's `encoder.json`) maps tokens to ids, and each line of
`merges.txt` (`vocab.bpe`) is a pair, in the order of learning. A tiktoken file has a line per token: its bytes in
base64 and its rank, which is both its id and its position in the order of learning. The pairs are not in it, but can be
computed: a token was made from the two parts that remain when its bytes are merged by all lower ranks.

BERT's `vocab.txt` has a piece per line, whose number is its id. Text is cleaned of control characters and cut at white
space and around each punctuation mark and Chinese character. A word becomes its longest known beginning, then the
longest known continuation ("##…"), and so on (Devlin et al. 2019, §3). A word that cannot be encoded is [UNK], and so
is one of more than 100 characters: that is Hugging Face's limit, while Megatron's and Google's code has 200. White
space is lost, so decoding does not restore the text. [CLS], [SEP] and [MASK] are added when samples are made; no text
encodes to them, because their brackets are punctuation: `[MASK]` in a text is `[`, `mask`, `]`, as in Megatron.
"""

import base64
import json
import string
from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mjax.data.tokenizers.huggingface import BertTokenizer
from mjax.data.tokenizers.library import EOD_PIECE, SCHEMES, library_errors
from mjax.errors import UsageError


def add_special(library: Tokenizer, *tokens: str) -> Tokenizer:
    """The library's tokenizer, in which these tokens are special."""
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return library


def utf8_lines(content: bytes, name: str) -> list[str]:
    """Lines of a text file that may come from Windows.

    Only a line feed ends a line: to `str.splitlines` U+2028 and U+0085 do too, and vocabularies hold them as tokens.

    Raises:
      UsageError: it is not UTF-8.
    """
    with library_errors(f"{name} is not a text file in UTF-8", "give the right file"):
        lines = content.decode("utf-8").removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines]


# --- BERT -------------------------------------------------------------------------------------------------------------


def bert_library(vocab: bytes, name: str, lowercase: bool) -> Tokenizer:
    """BERT's tokenizer, of words in lower case without accents, or of words as they are.

    Raises:
      UsageError: the file is no vocabulary, or of the other case: half of the words would be [UNK], or half of the
        pieces unused.
    """
    # As in Google's code the line number is the id, and the last of equal pieces counts.
    ids = {piece.rstrip(): number for number, piece in enumerate(utf8_lines(vocab, name))}
    if missing := [piece for piece in BertTokenizer.special if piece not in ids]:
        raise UsageError(f"{name} lacks {', '.join(missing)}; give BERT's vocab.txt, which has one piece a line")
    capitals = [letter in ids for letter in string.ascii_uppercase]
    if lowercase and all(capitals):
        raise UsageError(f"{name} has pieces in capitals; use --tokenizer bert-cased:{name}")
    if not lowercase and not any(capitals):
        raise UsageError(f"{name} has no capital letters; use --tokenizer bert-uncased:{name}")
    library = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    library.normalizer, library.pre_tokenizer = bert_normalizer(lowercase), pre_tokenizers.BertPreTokenizer()
    # Without the clean-up of "it ' s" the text of a beginning is always a beginning of the text.
    library.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    library.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return add_special(library, *BertTokenizer.special)


def bert_normalizer(lowercase: bool) -> normalizers.Normalizer:
    """BERT's cleaning of text, with or without capitals and accents."""
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=lowercase, lowercase=lowercase
    )


# --- GPT-2 ------------------------------------------------------------------------------------------------------------


def gpt2_library(contents: Sequence[bytes], names: Sequence[str]) -> Tokenizer:
    """GPT-2's tokenizer from its vocab.json and merges.txt; `<|endoftext|>` ends documents.

    Raises:
      UsageError: a file is not what its name says, or the two do not belong together.
    """
    with library_errors(f"{names[0]} is not GPT-2's vocab.json, also called encoder.json", "give the right file"):
        ids = json.loads(contents[0])
        if sorted(ids.values()) != list(range(len(ids))):
            raise ValueError(f"its ids are not 0 to {len(ids) - 1}, each once")
        if missing := {*byte_characters()} - {*ids}:
            raise ValueError(f"it has no token for {len(missing)} of the 256 bytes")
    if EOD_PIECE not in ids:
        raise UsageError(f"{names[0]} has no token {EOD_PIECE} to end documents with; give GPT-2's vocab.json")
    pairs = _parse_merges(contents[1], names[1])
    with library_errors(f"{names[1]} does not belong to {names[0]}", "give a matching pair"):
        library = byte_level(ids, pairs)
    library.post_processor = processors.TemplateProcessing(
        single=f"{EOD_PIECE} $A", special_tokens=[(EOD_PIECE, ids[EOD_PIECE])]
    )
    return library


def byte_level(ids: dict[str, int], pairs: Sequence[tuple[str, str]], words: bool = True) -> Tokenizer:
    """Byte pairs of the library, within GPT-2's `words` or over the whole text."""
    library = Tokenizer(models.BPE(ids, [*pairs]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    library.decoder = decoders.ByteLevel()
    return add_special(library, EOD_PIECE)


def _parse_merges(content: bytes, name: str) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(utf8_lines(content, name), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = tuple(line.split(" "))
        if len(pair) != 2 or not all(pair):
            raise UsageError(f"{name}:{number}: {line[:40]!r} is not a pair such as 'Ġ t'; give GPT-2's merges.txt")
        if "".join(pair) == EOD_PIECE:
            raise UsageError(f"{name}:{number} merges text to {EOD_PIECE}, which ends documents; delete that line")
        pairs.append(pair)
    return pairs


@cache
def byte_characters() -> list[str]:
    """Characters for the 256 bytes in GPT-2's files: itself where it is printable in Latin-1, else from U+0100 on."""
    known = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(character) for character in known if ord(character) < 256}
    others = iter(known[len(printable) :])
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


# --- tiktoken ---------------------------------------------------------------------------------------------------------

MERGING = 2**27
"""Sum of the squares of the lengths of all tokens: half a minute of merging; 131,000 of Mistral's have 2**23."""


def files_of_ranks(content: bytes, name: str) -> tuple[bytes, bytes]:
    """The vocab.json and merges.txt of a tiktoken file; `<|endoftext|>`, which it leaves out, gets the next id.

    Raises:
      UsageError: it is not a tiktoken file, or one whose words are not GPT-2's.
    """
    ranks = _parse_ranks(content, name)
    written = {token: "".join(byte_characters()[byte] for byte in token) for token in ranks}
    merges = ["#version: 0.2"]
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = _merge(token, ranks, below=rank)
            if len(parts) != 2:
                raise UsageError(f"{name}: no two tokens of lower rank make token {rank}; give a file of byte pairs")
            merges.append(f"{written[parts[0]]} {written[parts[1]]}")
    ids = {written[token]: rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])}
    return json.dumps(ids | {EOD_PIECE: len(ids)}).encode(), ("\n".join(merges) + "\n").encode()


def _parse_ranks(content: bytes, name: str) -> dict[bytes, int]:
    with library_errors(
        f"{name} is not a tiktoken file, a token in base64 and its rank a line", f"use {SCHEMES['gpt2'][0]}"
    ):
        lines = [line.split() for line in content.splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise ValueError(f"its ranks are not 0 to {len(ranks) - 1}, each once")
        if any(bytes([byte]) not in ranks for byte in range(256)):
            raise ValueError("it has no token for some of the 256 bytes")
    if sum(len(token) ** 2 for token in ranks) > MERGING:
        raise UsageError(
            f"{name} has tokens of up to {max(map(len, ranks)):,} bytes, which take too long to split into pairs; give "
            "the tiktoken file of a published model, whose tokens have up to 128"
        )
    if any(b"\n" in token and token.decode(errors="ignore").strip() for token in ranks):
        # To GPT-2 a line end is white space, and a word is all white space or has none but a space in front.
        raise UsageError(
            f"{name} is not split into words as GPT-2 does (some token holds a line end and other characters); "
            "use --tokenizer hf:tokenizer.json for this vocabulary"
        )
    return ranks


def _merge(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """Merge the bytes of `token`, lowest rank first, as long as a rank is lower than `below`."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        rank, first = min((ranks.get(parts[i] + parts[i + 1], below), i) for i in range(len(parts) - 1))
        if rank >= below:
            break
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts
