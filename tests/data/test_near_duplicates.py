"""Near-duplicates: shingles are the words of a regular expression, MinHash keeps to its S-curve, clusters are exact."""

import json
import re
import sys

import numpy as np
import pytest

from mjax.commands.dedup import DedupArguments, dedup
from mjax.data.corpus import near_duplicates as shingles
from mjax.data.corpus.near_duplicates import (
    NUM_HASHES,
    Buckets,
    Shingles,
    choose_bands,
    find_similar_pairs,
    jaccard,
    make_buckets,
    minhash,
    shingle_hashes,
    word_hashes,
)

# --- Shingles ---------------------------------------------------------------------------------------------------------

TEXTS = [
    *("a b c d e f", "", "one two", "…!", "x" * 70_000, "a b c d e f", " .İΣß漢 \U0001f600\n ab_", "ab\nİ Σß"),
    "Naïve CAFÉ_1 naïve  café_1\n漢字 かな, 한국어 ١٢٣ e\u0301",
]


def literal(text, size, unit):
    """The shingles of a text, spelled out."""
    units = re.findall(r"\w+", text.lower()) if unit == "words" else list(text)
    return [tuple(units[i : i + size]) for i in range(max(len(units) - size + 1, 1))] if units else []


@pytest.mark.parametrize("unit", ["words", "characters"])
@pytest.mark.parametrize("size", [1, 2, 5, 13])
def test_equal_shingles_have_equal_numbers(monkeypatch, size, unit):
    """Different ones have different numbers, and the blocks in which text is hashed do not show."""
    hashes, offsets = shingle_hashes(TEXTS, size, unit)
    expected = [literal(text, size, unit) for text in TEXTS]
    assert np.diff(offsets.astype(int)).tolist() == [len(each) for each in expected]
    pairs = set(zip([run for each in expected for run in each], hashes.tolist(), strict=True))
    assert len(pairs) == len({run for run, _ in pairs}) == len({value for _, value in pairs})
    monkeypatch.setattr(shingles, "BLOCK_CHARACTERS", 3)
    np.testing.assert_array_equal(shingle_hashes(TEXTS[5:], size, unit)[0], hashes[int(offsets[5]) :])


def test_words_are_those_of_the_regular_expression():
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    _, starts, ends = word_hashes(everything)
    assert list(zip(starts, ends, strict=True)) == [match.span() for match in re.finditer(r"\w+", everything)]


# --- MinHash ----------------------------------------------------------------------------------------------------------


def pairs_of_texts(similarity, union, pairs, random):
    """Texts of numbers as words: each pair shares `similarity` of its `union` words."""
    texts, common = [], round(similarity * union)
    half = common + (union - common) // 2
    for _ in range(pairs):
        words = [f"w{number}" for number in random.choice(10**9, union, replace=False)]
        texts += [" ".join(words[:half]), " ".join(words[:common] + words[half:])]
    return texts


@pytest.mark.parametrize(
    ("threshold", "similarity", "union"), [(0.5, 0.5, 100), (0.7, 0.7, 10), (0.7, 0.5, 100), (0.9, 0.9, 1000)]
)
def test_signatures_keep_to_the_s_curve(threshold, similarity, union):
    bands, pairs = choose_bands(threshold), 300 if union < 1000 else 80
    _, keys = minhash(pairs_of_texts(similarity, union, pairs, np.random.default_rng(union)), 1, "words", bands)
    together = (keys[:, 0::2] == keys[:, 1::2]).any(axis=0).mean()
    expected = bands.recall(similarity)
    assert together == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / pairs) + 1 / pairs)


# --- Clusters ---------------------------------------------------------------------------------------------------------


def sets_of(texts):
    hashes, offsets = shingle_hashes(texts, 1, "words")
    return [np.unique(part) for part in np.split(hashes, offsets[1:-1].astype(int))]


def clusters_of(texts, threshold, folder, **options):
    """Run `mjax dedup` by single words: the first of each cluster, partners of those removed, the report."""
    number = lambda source: int(source.rpartition(":")[2]) - 1  # noqa: E731
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    how = {"inputs": (folder / "in.jsonl",), "output": folder / "out.jsonl", "shingle_size": 1, "threshold": threshold}
    report = dedup(DedupArguments(**{**how, "overwrite": True, **options}))
    first, partners = list(range(len(texts))), {}
    for line in (folder / "out.removed.jsonl").read_text().splitlines():
        story = json.loads(line)
        first[number(story["source"])] = number(story["kept"])
        partners[number(story["source"])] = number(story["similar_to"]), story["jaccard"]
    return first, partners, report["near_duplicates"]


def first_of_components(sets, threshold):
    """The truth, from all pairs."""
    first = list(range(len(sets)))
    for one in range(len(sets)):
        for other in range(one):
            if jaccard(sets[one], sets[other]) >= threshold and first[one] != first[other]:
                low, high = sorted((first[one], first[other]))
                first = [low if each == high else each for each in first]
    return first


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
def test_clusters_are_components_of_similar_pairs(tmp_path, threshold):
    """Each document removed has a partner at or above the threshold."""
    random, texts = np.random.default_rng(0), []
    for family in range(14):
        for _ in range(8):
            text = [f"f{family}w{number}" for number in range(60)]
            for place in random.choice(60, random.integers(round(60 * (1 - threshold)) + 1), replace=False):
                text[place] = f"x{random.integers(10**12)}"
            texts.append(" ".join(text))
    texts = [texts[number] for number in random.permutation(len(texts))]
    first, partners, _ = clusters_of(texts, threshold, tmp_path, tasks=3)
    sets = sets_of(texts)
    assert first == first_of_components(sets, threshold)
    assert len(partners) > 10
    for one, (other, similarity) in partners.items():
        assert similarity == pytest.approx(jaccard(sets[one], sets[other]), abs=1e-4)
        assert jaccard(sets[one], sets[other]) >= threshold
        assert first[one] == first[other]


def test_joined_documents_are_not_compared_again(tmp_path):
    """Comparisons stay linear in the copies of a page, although all of its bands are shared."""
    common = [f"w{number}" for number in range(100)]
    first, _, report = clusters_of([" ".join([*common, f"x{number}"]) for number in range(60)], 0.7, tmp_path)
    assert first == [0] * 60
    assert report["pairs_compared"] < 400, "and not 60 · 59 / 2"


def test_only_distinct_documents_with_words_take_part(tmp_path):
    first, _, report = clusters_of(["one text here", "other words", "one text here"], 0.7, tmp_path)
    assert (first, report["pairs_compared"]) == ([0, 1, 0], 0)
    for texts in ([""], ["one"], ["", "…", "!"], ["two words", "Two others."], []):
        first, _, report = clusters_of(texts, 0.7, tmp_path)
        assert (first, report["pairs_compared"]) == (list(range(len(texts))), 0)


def test_documents_of_one_bucket_are_compared_as_if_alone():
    """The clusters of one bucket do not show in another: buckets are examined by different tasks."""
    random = np.random.default_rng(1)
    ends = np.arange(0, 41 * 20, 20)
    hashes = np.sort(random.integers(0, 30, (40, 60)).astype(np.uint64), axis=1)[:, ::3]
    shingles = Shingles(np.sort(hashes, axis=1).ravel(), ends)
    signatures = np.zeros((40, NUM_HASHES), np.uint8)  # all are promising
    keys = random.integers(1, 5, 80).astype(np.uint64)
    members = make_buckets(keys, np.concatenate((np.arange(40), np.arange(40))))
    clusters = members.documents // 2
    together, compared = find_similar_pairs(members, clusters, signatures, shingles, 0.6)
    alone, count = [], 0
    for bucket in range(members.buckets.max() + 1):
        inside = members.buckets == bucket
        part = Buckets(members.documents[inside], members.buckets[inside])
        edges, pairs = find_similar_pairs(part, clusters[inside], signatures, shingles, 0.6)
        alone, count = [*alone, *edges.tolist()], count + pairs
    assert sorted(together.tolist()) == sorted(alone) != []
    assert compared == count
