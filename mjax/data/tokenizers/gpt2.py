"""GPT-2's byte-level byte-pair encoding, from OpenAI's two files or from tiktoken's one.

Text is cut into words, each with the space before it, and the bytes of a word are merged pair by pair, pairs learned
earlier first (Radford et al. 2019, §2.2). Any text can be encoded and decodes to itself.

The files write a byte as a printable character, the space as "Ġ". `vocab.json` (OpenAI's `encoder.json`) maps tokens to
ids, and each line of `merges.txt` (`vocab.bpe`) is a pair, in the order of learning. A tiktoken file has a line per
token: its bytes in base64 and its rank, which is both its id and its position in the order of learning. The pairs are
not in it, but can be computed: a token was made from the two parts that remain when its bytes are merged by all lower
ranks.
"""

import base64
import binascii
import json
from functools import cache
from typing import Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mjax.data.tokenizers.library import EOD_PIECE, LibraryTokenizer, library_errors, read_given, utf8_lines
from mjax.errors import UsageError
from mjax.utils.files import parse_json


class GPT2Tokenizer(LibraryTokenizer):
    """GPT-2's byte-pair encoding; `<|endoftext|>`, which no merge leads to, ends documents."""

    scheme = "gpt2"
    form = "gpt2:vocab.json,merges.txt or gpt2:FILE.tiktoken"
    stored = ("vocab.json", "merges.txt")

    def __init__(self, vocab: bytes, merges: bytes, vocab_name: str, merges_name: str):
        ids = _parse_vocab(vocab, vocab_name)
        pairs = _parse_merges(merges, merges_name)
        with library_errors(f"{merges_name} does not belong to {vocab_name}", "give a matching pair"):
            model = models.BPE(ids, pairs)
        self.library = Tokenizer(model)
        self.library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.library.decoder = decoders.ByteLevel()
        self.contents = (vocab, merges)
        self.vocabulary, self.eod = len(ids), ids[EOD_PIECE]

    def bos_of_files(self) -> int | None:
        """GPT-2's one special token begins texts too, if the model's files ask for it."""
        return self.eod

    @classmethod
    def from_files(cls, files: str) -> Self:
        """Make it from the files that follow the kind on the command line: vocab.json,merges.txt or a tiktoken file."""
        names = files.split(",")
        if len(names) > 2:
            raise UsageError(f"--tokenizer gpt2:{files} names {len(names)} files; use --tokenizer {cls.form}")
        contents = [read_given(cls, files, name) for name in names]
        if len(names) == 1:
            if _is_json(contents[0]):
                raise UsageError(
                    f"{files} is JSON, not a tiktoken file; use --tokenizer gpt2:{files},merges.txt if it is GPT-2's "
                    f"vocabulary, or hf:{files} if it is a tokenizer.json"
                )
            return cls(*_from_ranks(_parse_ranks(contents[0], files), files), files, files)
        if _is_json(contents[1]) and not _is_json(contents[0]):
            raise UsageError(f"the files are swapped; use --tokenizer gpt2:{names[1]},{names[0]}")
        return cls(*contents, *names)


# --- Files ------------------------------------------------------------------------------------------------------------


def _is_json(content: bytes) -> bool:
    return content.lstrip()[:1] == b"{"  # no line of merges or ranks begins a file with it


def _parse_vocab(content: bytes, name: str) -> dict[str, int]:
    expected = 'a JSON object such as {"!": 0, "\\"": 1, …} is expected: GPT-2\'s vocab.json, also called encoder.json'
    ids = parse_json(content, name, expected)
    if not isinstance(ids, dict) or not all(type(number) is int for number in ids.values()):
        raise UsageError(f"{name} is not a vocabulary; {expected}")
    if sorted(ids.values()) != list(range(len(ids))):
        raise UsageError(f"the ids in {name} are not 0 to {len(ids) - 1}, each once; {expected}")
    if missing := [character for character in byte_characters() if character not in ids]:
        raise UsageError(f"{name} has no token for {len(missing)} of the 256 bytes; {expected}")
    if EOD_PIECE not in ids:
        raise UsageError(f"{name} has no token {EOD_PIECE} to end documents with; {expected}")
    return ids


def _parse_merges(content: bytes, name: str) -> list[tuple[str, str]]:
    lines = utf8_lines(content, name)
    start = 1 if lines and lines[0].startswith("#version") else 0
    pairs = []
    for number, line in enumerate(lines[start:], start + 1):
        pair = tuple(line.split(" "))
        if line and (len(pair) != 2 or not all(pair)):
            expected = "GPT-2's merges.txt is expected, also called vocab.bpe"
            raise UsageError(f"{name}:{number}: {line[:40]!r} is not a pair such as 'Ġ t'; {expected}")
        if "".join(pair) == EOD_PIECE:
            raise UsageError(f"{name}:{number} merges text to {EOD_PIECE}, which ends documents; delete that line")
        if line:
            pairs.append(pair)
    return pairs


# --- tiktoken ---------------------------------------------------------------------------------------------------------

MERGING = 2**27
"""Sum of the squares of the lengths of all tokens: half a minute of merging; 131,000 of Mistral's have 2**23."""


def _parse_ranks(content: bytes, name: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UsageError(
                f"{name}:{number}: {line[:40].decode(errors='replace')!r} is not a token in base64 and its rank, as "
                f"in a tiktoken file; use --tokenizer {GPT2Tokenizer.form}"
            ) from None
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise UsageError(f"the ranks in {name} are not 0 to {len(ranks) - 1}, each once; give a complete tiktoken file")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise UsageError(f"{name} has no token for some of the 256 bytes; give a complete tiktoken file")
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


def _from_ranks(ranks: dict[bytes, int], name: str) -> tuple[bytes, bytes]:
    """The vocab.json and merges.txt of a tiktoken file; `<|endoftext|>`, which it leaves out, gets the next id."""
    characters = byte_characters()

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    ids, merges = {}, ["#version: 0.2"]
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        ids[written(token)] = rank
        if len(token) > 1:
            parts = _merge(token, ranks, below=rank)
            if len(parts) != 2:
                raise UsageError(f"{name}: no two tokens of lower rank make token {rank}; give a file of byte pairs")
            merges.append(" ".join(map(written, parts)))
    ids[EOD_PIECE] = len(ids)
    return json.dumps(ids).encode(), ("\n".join(merges) + "\n").encode()


def _merge(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """Merge the bytes of `token`, lowest rank first, as long as a rank is lower than `below`."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        rank, first = min((ranks.get(parts[i] + parts[i + 1], below), i) for i in range(len(parts) - 1))
        if rank >= below:
            break
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts


@cache
def byte_characters() -> list[str]:
    """Characters for the 256 bytes in GPT-2's files: itself where it is printable in Latin-1, else from U+0100 on."""
    known = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(character) for character in known if ord(character) < 256}
    others = iter(known[len(printable) :])
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]
