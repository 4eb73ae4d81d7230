"""GPT-2's and BERT's published vocabularies as tokenizers of Hugging Face's library.

GPT-2 cuts text into words, each with the space before it, and merges the bytes of a word pair by pair, pairs learned
earlier first (Radford et al. 2019, §2.2). Any text can be encoded and decodes to itself. The files write a byte as a
printable character, the space as "Ġ". `vocab.json` (OpenAI's `encoder.json`) maps tokens to ids, and each line of
`merges.txt` (`vocab.bpe`) is a pair, in the order of learning.

BERT's `vocab.txt` has a piece per line, whose number is its id. Text is cleaned of control characters and cut at white
space and around each punctuation mark and Chinese character. A word becomes its longest known beginning, then the
longest known continuation ("##…"), and so on (Devlin et al. 2019, §3). A word that cannot be encoded is [UNK], and so
is one of more than 100 characters: that is Hugging Face's limit, while Megatron's and Google's code has 200. White
space is lost, so decoding does not restore the text. [CLS], [SEP] and [MASK] are added when samples are made; no text
encodes to them, because their brackets are punctuation: `[MASK]` in a text is `[`, `mask`, `]`, as in Megatron.
"""

import json
import string
from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mjax.data.tokenizers.huggingface import BertTokenizer
from mjax.data.tokenizers.library import EOD_PIECE, library_errors
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
