"""Evaluation text is cut out of training text as by Megatron's filter_ngrams.py, whose rule stands here once more."""

import re

import numpy as np
import pytest

from mjax.commands.clean import cut, evaluation_grams

QUESTION = "which of these fifteen words in a row belongs to no language that anybody living speaks"
SENTENCE = "Rain fell on the roofs and nobody in the long street came to a window. "  # 71 characters


def original_words(text):
    found = list(re.finditer(r"\w+", text.lower()))
    return [match.group() for match in found], [match.start() for match in found]


def original_grams(texts):
    grams = set()
    for text in texts:
        words, _ = original_words(text)
        if 8 <= len(words) < 13:
            grams.add(" ".join(words))
        grams |= {" ".join(words[i : i + 13]) for i in range(len(words) - 12)}
    return grams


def original_split(text, start, run):
    first = second = ""
    place = start - 200
    while place > 0 and text[place] not in ".!?":
        place -= 1
    if place > 0:
        first = text[: place + 1]
    place = start + len(run) + 200
    while place < len(text) and text[place] not in ".!?":
        place += 1
    if place + 1 < len(text):
        second = text[place + 1 :]
    return first, second


def original_first_match(words, grams):
    lengths = sorted({len(gram.split()) for gram in grams})
    for i in range(len(words) - 12):
        for length in (13, *lengths):
            if " ".join(words[i : i + length]) in grams:
                return i, " ".join(words[i : i + length])
    if len(words) > 13:
        last = len(words) - 13
        for length in lengths:
            if length != 13:
                for i in range(13 - length + 1):
                    if " ".join(words[last + i : last + i + length]) in grams:
                        return last + i, " ".join(words[last + i : last + i + length])
    return None


def original_cut(text, grams):
    waiting, free = [text], []
    while waiting:
        text = waiting.pop(0)
        words, places = original_words(text)
        match = original_first_match(words, grams)
        if match is None:
            free.append(text)
            continue
        first, second = original_split(text, places[match[0]], match[1])
        if len(first) > 200:
            free.append(first)
        if len(second) > 200:
            waiting.append(second)
    return free


@pytest.mark.parametrize("seed", range(30))
def test_pieces_are_those_of_the_original(seed):
    random = np.random.default_rng(seed)
    words = [f"w{number}" for number in range(50)]
    evaluation = [" ".join(random.choice(words, random.integers(5, 25))) for _ in range(12)]
    parts = []
    for _ in range(random.integers(1, 40)):
        if random.random() < 0.2:
            text = evaluation[random.integers(len(evaluation))]
            separator = random.choice([" ", ", ", "\n", " - - "])
            parts.append(text.upper() if random.random() < 0.5 else text.replace(" ", separator))
        else:
            parts.append(random.choice([" ", ". "]).join(random.choice(words, random.integers(1, 60))))
        parts.append(random.choice([". ", " ", "? ", "!", "\n\n", ".\n"]))
    text = "".join(parts)
    assert cut(text, evaluation_grams(evaluation))[0] == original_cut(text, original_grams(evaluation))


def test_pieces_of_200_characters_go_too():
    grams = evaluation_grams([QUESTION])
    exactly = "x" * 199 + "."
    for before, stays in ((exactly, False), ("x" + exactly, True)):
        text = before + "z" * 200 + " " + QUESTION + "y" * 210 + "." + "w" * 150
        assert cut(text, grams)[0] == ([before] if stays else [])


def test_longer_lower_case_does_not_shift_a_cut():
    text = "İ" * 300 + ". " + SENTENCE * 10 + QUESTION + ". " + SENTENCE * 10
    plain, grams = "I" * 300 + text[300:], evaluation_grams([QUESTION])
    assert [len(piece) for piece in cut(text, grams)[0]] == [len(piece) for piece in cut(plain, grams)[0]]
