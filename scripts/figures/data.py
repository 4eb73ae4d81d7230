"""Pictures of docs/guides/prepare-data.md, clean-and-deduplicate.md and docs/reference/data-format.md."""

from __future__ import annotations

import numpy as np

from mjax.data.indexed import HEADER, token_dtype
from mjax.data.samples import build_blend_index, build_sample_index
from scripts.figures.svg import Drawing

DOCUMENTS = ((10, 11, 12, 99), (20, 21, 99), (30, 31, 32, 33, 99))
COLORS = ("blue", "orange", "green")
CELL = 44


def data_pipeline() -> Drawing:
    """Text, clean text, tokens, samples and batches, each with an example and the command that makes it."""
    drawing = Drawing(640, 376, "From text to batches: dedup and clean, prepare, shuffle and cut, train")
    stages = (
        ("text", "grey", ""),
        ("clean text", "grey", "mjax dedup, mjax clean"),
        ("tokens", "blue", "mjax prepare"),
        ("samples", "green", "train.py: shuffle, cut every s tokens"),
        ("batch", "orange", "train.py: B samples per step"),
    )
    for row, (name, color, command) in enumerate(stages):
        top = 8 + row * 78
        drawing.box(8, top, 120, 44, name, color, bold=True)
        if command:
            drawing.arrow((68, top - 34), (68, top - 2))
            drawing.text(84, top - 18, command, size=15, italic=True)
    drawing.text(152, 30, "It doesnâ€™t matter.  /  It doesnâ€™t matter.")
    drawing.text(152, 108, "It doesn't matter.")
    for place, token in enumerate((10, 11, 12, 99, 30, 31, 32, 33, 99)):
        drawing.box(152 + place * 52, 164, 48, 44, str(token), "blue", fill="strong" if token == 99 else "tint")
    for row, tokens in enumerate(((10, 11, 12, 99), (11, 12, 99, 30))):
        left = 152 + row * 240
        for place, token in enumerate(tokens):
            drawing.box(left + place * 40, 242, 38, 44, str(token), "green", fill="strong" if token == 99 else "tint")
        drawing.text(left + 166, 264, ("tokens", "labels")[row], size=15)
    drawing.grid(152, 320, 2, 8, 22, lambda row, column: "orange")
    drawing.text(344, 342, "B sequences × s positions", size=15)
    return drawing


def indexed_dataset() -> Drawing:
    """The two files of a dataset of three documents: tokens in .bin, their lengths and places in .idx."""
    drawing = Drawing(640, 372, "corpus.bin holds the tokens of all documents, corpus.idx where each one begins")
    width = np.dtype(token_dtype(100)).itemsize
    drawing.text(8, 18, "corpus.bin", bold=True)
    drawing.text(8, 40, f"no header, {width} bytes per token", size=15)
    left, begins = 8, []
    for document, color in zip(DOCUMENTS, COLORS, strict=True):
        begins.append(left)
        for token in document:
            drawing.box(left, 58, CELL, 36, str(token), color, fill="strong" if token == 99 else "tint")
            left += CELL
        left += 6
    drawing.text(632, 40, "99 ends a document", size=15, anchor="end")
    lengths = [len(document) for document in DOCUMENTS]
    pointers = np.cumsum([0, *lengths[:-1]]) * width
    for begin, pointer, color in zip(begins, pointers, COLORS, strict=True):
        drawing.line([(begin, 98), (begin, 110)], color, width=2)
        drawing.text(begin + 6, 110, f"byte {pointer}", size=15)
    drawing.text(8, 152, "corpus.idx", bold=True)
    drawing.text(108, 152, "little-endian", size=15)
    rows = (
        ("header", HEADER.size, "MMIDIDX, version, dtype, counts", ()),
        ("lengths", 4 * len(lengths), "tokens in each sequence", lengths),
        ("pointers", 8 * len(lengths), "first byte of each in .bin", pointers),
        ("documents", 8 * (len(lengths) + 1), "first sequence of each", range(len(lengths) + 1)),
    )
    for row, (name, size, about, values) in enumerate(rows):
        top = 172 + row * 48
        drawing.text(8, top + 18, name, size=15, bold=True)
        drawing.text(178, top + 18, f"{size} bytes", size=15, anchor="end")
        for column, value in enumerate(values):
            color = COLORS[column] if column < len(COLORS) else "grey"
            drawing.box(192 + column * 48, top, 44, 36, str(value), color)
        drawing.text(398 if len(values) else 192, top + 18, about, size=15)
    return drawing


def samples_across_documents() -> Drawing:
    """Two samples of five tokens, cut out of three shuffled documents."""
    drawing = Drawing(640, 290, "Documents are shuffled and joined, then cut every five tokens")
    order, sequence = (0, 2, 1), 5
    lengths = np.array([len(document) for document in DOCUMENTS])
    stream = [(token, COLORS[number]) for number in order for token in DOCUMENTS[number]]
    index = build_sample_index(lengths, np.array(order), sequence, 2)
    ends = np.cumsum(lengths[list(order)])
    begins = [int(ends[position] - lengths[order[position]] + offset) for position, offset in index]
    drawing.text(8, 18, "documents in shuffled order: 0, 2, 1", size=15, bold=True)
    for place, (token, color) in enumerate(stream):
        drawing.box(
            8 + place * 52, 36, 48, 36, str(token), color, fill="strong" if token == DOCUMENTS[0][-1] else "tint"
        )
    for number, begin in enumerate(begins[:2]):
        left, right = 8 + begin * 52, 8 + (begin + sequence) * 52 + 48
        top = 90 + 16 * number
        drawing.line([(left + 4, top - 8), (left + 4, top), (right - 4, top), (right - 4, top - 8)], width=2)
        drawing.text(
            right + 6 if number == 0 else left - 8,
            top + (2 if number else -2),
            f"sample {number}",
            size=14,
            anchor="start" if number == 0 else "end",
        )
        row = 128 + 84 * number
        drawing.text(8, row + 18, f"sample {number}", bold=True)
        for shift, name in enumerate(("tokens", "labels")):
            drawing.text(232, row + 18 + 38 * shift, name, size=15, anchor="end")
            for place in range(sequence):
                token, color = stream[begin + shift + place]
                drawing.box(
                    244 + place * 52,
                    row + 38 * shift,
                    48,
                    34,
                    str(token),
                    color,
                    fill="strong" if token == DOCUMENTS[0][-1] else "tint",
                )
    drawing.text(516, 146, "31 is the last", size=15)
    drawing.text(516, 166, "label here and", size=15)
    drawing.text(516, 230, "the first token", size=15)
    drawing.text(516, 250, "there", size=15)
    return drawing


def blending() -> Drawing:
    """Two datasets, blended 0.3 to 0.7: shares of the run, passes over each dataset, and the first ten samples."""
    weights, sizes, samples = (0.3, 0.7), (600, 200), 1000
    names, colors = ("wiki", "books"), ("orange", "blue")
    drawing = Drawing(
        640, 290, "A blend of 0.3 wiki and 0.7 books draws 30% of the samples from wiki, however large it is"
    )
    for top, title, values in ((8, "on disk", sizes), (86, "in the run", [weight * samples for weight in weights])):
        drawing.text(8, top + 20, title, bold=True)
        left = 108
        for name, color, value in zip(names, colors, values, strict=True):
            wide = value / 2
            drawing.box(left, top, wide, 40, f"{name} {value:.0f}", color, size=15)
            left += wide + 2
    drawing.text(108, 64, "samples of one epoch", size=14)
    passes = [weight * samples / size for weight, size in zip(weights, sizes, strict=True)]
    drawing.text(108, 142, f"1,000 samples: half of wiki ({passes[0]:g} epochs), books {passes[1]:g} times", size=14)
    drawing.text(8, 182, "The first ten samples", bold=True)
    order = build_blend_index(weights, 10)
    counts = np.zeros(2, int)
    for place, dataset in enumerate(order.tolist()):
        counts[dataset] += 1
        drawing.box(8 + place * 62, 200, 58, 40, names[dataset], colors[dataset], size=15)
    drawing.text(
        8, 264, f"{counts[0]} from wiki and {counts[1]} from books; the next ten have the same shares", size=15
    )
    return drawing


def near_duplicates() -> Drawing:
    """Shingles of two sentences that differ in one word, and their Jaccard similarity."""
    texts = ("the loss is the same on every mesh today", "the loss is the same on every mesh again")
    shingles = [[" ".join(text.split()[i : i + 5]) for i in range(len(text.split()) - 4)] for text in texts]
    common = set(shingles[0]) & set(shingles[1])
    union = set(shingles[0]) | set(shingles[1])
    drawing = Drawing(640, 346, "Two texts that differ in one word share four of six shingles: a similarity of 0.67")
    for side, (text, words, color) in enumerate(zip("AB", shingles, ("blue", "orange"), strict=True)):
        left = 8 + side * 318
        last = texts[side].split()[-1]
        drawing.text(left, 18, f"text {text} ends in “{last}”", bold=True)
        for row, shingle in enumerate(words):
            shared = shingle in common
            drawing.box(left, 36 + row * 42, 306, 36, shingle, "green" if shared else color, size=15)
    similarity = len(common) / len(union)
    drawing.text(8, 266, "five words in a row are a shingle; green: in both texts", size=15, italic=True)
    drawing.text(8, 298, f"similarity = shared / all different = {len(common)} / {len(union)} = {similarity:.2f}")
    drawing.text(8, 326, "below the threshold of 0.7: both texts stay", size=15)
    return drawing
