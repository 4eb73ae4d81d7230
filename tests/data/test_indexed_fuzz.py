"""Ten thousand damaged .idx and .bin files: each is refused in one sentence, or gives exactly what it says."""

import resource
import struct
from itertools import chain

import numpy as np
import pytest

from mjax.data.indexed import HEADER, IndexedDataset, IndexedDatasetWriter, index_file, token_file
from mjax.data.samples import GPTDataset
from mjax.errors import UsageError

CASES = 10_000
HUGE = (2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
SHAPES = [[[3], [1], [2]], [[0], [4], [0]], [[2, 3], [1, 0, 6], [5]], [[1]], [[7] * 9] * 4]


def originals(folder):
    """(.idx, .bin) of small sound datasets, tokens of two and of four bytes."""
    found = []
    for number, shape in enumerate(SHAPES):
        for vocabulary in (100, 70_000):
            prefix, random = folder / f"{number}-{vocabulary}", np.random.RandomState(number)
            with IndexedDatasetWriter(prefix, vocabulary) as writer:
                for document in shape:
                    writer.add_document(*(random.randint(0, vocabulary, length) for length in document))
            found.append((index_file(prefix).read_bytes(), token_file(prefix).read_bytes()))
    return found


def fields(index):
    """Byte and format of every number in an index."""
    _, _, _, sequences, boundaries = HEADER.unpack_from(index)
    places = {"version": [(9, "<Q")], "type": [(17, "<B")], "sequences": [(18, "<Q")], "boundaries": [(26, "<Q")]}
    places["length"] = [(34 + 4 * i, "<i") for i in range(sequences)]
    places["pointer"] = [(34 + 4 * sequences + 8 * i, "<q") for i in range(sequences)]
    places["document"] = [(34 + 12 * sequences + 8 * i, "<q") for i in range(boundaries)]
    return places


def damaged(index, tokens, random):
    """One of many kinds of damage, sometimes two."""
    index, tokens = bytearray(index), bytearray(tokens)
    places = fields(index)
    for _ in range(random.choice([1, 1, 2])):
        kind = random.choice(["cut", "grow", "bits", "number", "swap", "tokens", "bytes"])
        if kind == "cut":
            del index[random.randint(len(index)) :]
        elif kind == "grow":
            index += bytes(random.randint(1, 20))
        elif kind == "bits":
            for place in random.randint(0, 8 * max(len(index), 1), random.randint(1, 4)):
                if place // 8 < len(index):
                    index[place // 8] ^= 1 << (place % 8)
        elif kind == "bytes":
            index = bytearray(random.bytes(random.randint(0, 200)) if random.rand() < 0.5 else index[:9] + bytes(80))
        elif kind == "tokens":
            change = random.randint(-9, 10)
            tokens = tokens[:change] if change < 0 else tokens + bytes(change)
        else:
            name = random.choice(sorted(places))
            place, form = places[name][random.randint(len(places[name]))]
            other, other_form = places[name][random.randint(len(places[name]))]
            if max(place, other) + struct.calcsize(form) > len(index):
                continue
            if kind == "swap":  # unordered pointers, documents and lengths
                (a,), (b,) = struct.unpack_from(form, index, place), struct.unpack_from(other_form, index, other)
                struct.pack_into(form, index, place, b)
                struct.pack_into(form, index, other, a)
            else:
                bits = 8 * struct.calcsize(form)
                value = int(random.choice([0, 1, 2, 5, -1, -3, 255, *HUGE]))
                value = value if random.rand() < 0.5 else struct.unpack_from(form, index, place)[0] + value
                value %= 2**bits
                index[place : place + bits // 8] = value.to_bytes(bits // 8, "little")
    return bytes(index), bytes(tokens)


def described(index, tokens):
    """The sequences that an index says there are, read number by number."""
    _, _, code, sequences, _ = HEADER.unpack_from(index)
    form, size = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[code], {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}[code]
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    assert all(begin >= 0 and begin + n * size <= len(tokens) for begin, n in zip(pointers, lengths, strict=True))
    return [list(struct.unpack_from(f"<{n}{form}", tokens, begin)) for begin, n in zip(pointers, lengths, strict=True)]


def read_all(prefix):
    data = IndexedDataset(prefix)
    assert np.diff(data.document_indices).min(initial=0) >= 0
    assert data.document_indices[-1] == len(data)
    sequences = [data.get(i).tolist() for i in range(len(data))]
    assert data.join(np.arange(len(data)), 0, int(data.lengths[-1])).tolist() == list(chain(*sequences))
    if data.tokens > 3 and all(token >= 0 for token in chain(*sequences)):
        samples = GPTDataset(data, range(len(data)), 5, 3, 0)
        assert {samples[i].shape for i in range(5)} == {(4,)}
    return sequences


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_refused_in_one_sentence_or_read_as_they_say(tmp_path, seed):
    random, sound = np.random.RandomState(seed), originals(tmp_path)
    refused = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(CASES // 4):
        index, tokens = damaged(*sound[case % len(sound)], random)
        prefix = (
            tmp_path / f"case{case}"
        )  # a name of its own: file systems write a file that is replaced to disk at once
        index_file(prefix).write_bytes(index)
        token_file(prefix).write_bytes(tokens)
        try:
            sequences = read_all(prefix)
        except UsageError as error:
            refused.append(str(error))
        else:
            assert sequences == described(index, tokens)
        index_file(prefix).unlink()
        token_file(prefix).unlink()
    assert CASES // 8 < len(refused) < CASES // 4  # both happen
    assert all("/case" in sentence and "\n" not in sentence for sentence in refused)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


DAMAGE = {
    "negative length": ("length", 1, -2, "sequence 1 has -2 tokens"),
    "length of another sequence": ("length", 0, 2, "sequence 1 begins at byte 6 of the tokens, which is not where the"),
    "pointer beyond the file": ("pointer", 2, 2**40, "sequence 2 begins at byte 1,099,511,627,776 of"),
    "negative pointer": ("pointer", 0, -6, "sequence 0 begins at byte -6 of"),
    "overlapping pointers": ("pointer", 1, 4, "sequence 1 begins at byte 4 of"),
    "documents out of order": ("document", 1, 3, "document 1 ends before it begins"),
    "document beyond the sequences": ("document", 2, 77, "document 2 ends before it begins"),
    "huge number of sequences": ("sequences", 0, 2**63, "cut short"),
    "huge number of documents": ("boundaries", 0, 2**64 - 1, "cut short"),
    "last length too long": ("length", 2, 2**31 - 1, "describes 4,294,967,302"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(tmp_path, damage):
    name, which, value, words = damage
    index, tokens = originals(tmp_path)[0]
    place, form = fields(index)[name][which]
    changed = bytearray(index)
    struct.pack_into(form, changed, place, value)
    index_file(tmp_path / "d").write_bytes(changed)
    token_file(tmp_path / "d").write_bytes(tokens)
    with pytest.raises(UsageError, match=words):
        IndexedDataset(tmp_path / "d")


def test_damage_beyond_the_first_piece_of_the_index_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("mjax.data.indexed.PIECE", 4)
    lengths = list(range(1, 14))
    with IndexedDatasetWriter(tmp_path / "d", 100) as writer:
        for length in lengths:
            writer.add_document([length] * length)
    index = index_file(tmp_path / "d").read_bytes()
    assert IndexedDataset(tmp_path / "d").tokens == sum(lengths)
    damage = [("length", 3, 100), ("length", 4, 100), ("pointer", 4, 100), ("pointer", 12, 100)]
    for name, which, value in [*damage, ("document", 4, 0), ("document", 9, 100)]:
        place, form = fields(index)[name][which]
        changed = bytearray(index)
        struct.pack_into(form, changed, place, value)
        index_file(tmp_path / "d").write_bytes(changed)
        with pytest.raises(UsageError, match=r"d\.idx is damaged: (sequence|document) \d+ (begins|ends)"):
            IndexedDataset(tmp_path / "d")
