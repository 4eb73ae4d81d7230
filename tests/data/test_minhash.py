import numpy as np
import pytest

from mjax.data.minhash import HASHES, Bands, choose_bands, estimate, sketch, worth_comparing
from mjax.errors import UsageError

SIMILARITIES = [(0.5, 0.5), (0.7, 0.7), (0.7, 0.5), (0.9, 0.9), (0.9, 0.7)]


def pairs_of_texts(similarity, union, pairs, random):
    """Texts of single letters as words: each pair shares `similarity` of its `union` words."""
    texts = []
    for _ in range(pairs):
        words = [f"w{number}" for number in random.choice(10**9, union, replace=False)]
        common = round(similarity * union)
        half = common + (union - common) // 2
        texts += [" ".join(words[:half]), " ".join(words[:common] + words[half:])]
    return texts


@pytest.mark.parametrize("threshold", np.linspace(0.3, 1, 15).round(2))
def test_bands_find_99_percent_at_the_threshold_and_no_more_selective_ones_do(threshold):
    bands = choose_bands(threshold)
    assert bands.rows * bands.count <= HASHES
    assert bands.recall(threshold) >= 0.99
    more_selective = Bands(bands.rows + 1, HASHES // (bands.rows + 1))
    assert more_selective.recall(threshold) < 0.99 or bands.rows == HASHES


@pytest.mark.parametrize("threshold", [0.0, 0.29, 1.01, -1, float("nan")])
def test_a_threshold_that_is_no_similarity_is_refused(threshold):
    with pytest.raises(UsageError, match=r"--threshold .*use 0\.3 to 1, such as 0\.7, or --exact"):
        choose_bands(threshold)


@pytest.mark.parametrize("union", [10, 100, 1000])
@pytest.mark.parametrize(("threshold", "similarity"), SIMILARITIES)
def test_signatures_keep_to_the_s_curve(threshold, similarity, union):
    bands, pairs = choose_bands(threshold), 400 if union < 1000 else 100
    texts = pairs_of_texts(similarity, union, pairs, np.random.default_rng(union))
    sketches = sketch(texts, 1, "words", bands)
    together = (sketches.keys[:, 0::2] == sketches.keys[:, 1::2]).any(axis=0).mean()
    expected = bands.recall(similarity)
    assert together == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / pairs) + 1 / pairs)


def test_estimates_are_unbiased_and_as_close_as_they_claim():
    texts = pairs_of_texts(0.7, 200, 300, np.random.default_rng(0))
    signatures = sketch(texts, 1, "words", choose_bands(0.7)).signatures
    estimates = estimate(signatures[0::2], signatures[1::2])
    assert estimates.mean() == pytest.approx(0.7, abs=0.006)
    assert estimates.std() < 0.031
    assert estimates.min() > worth_comparing(0.7)


def test_unrelated_texts_share_nothing():
    texts = pairs_of_texts(0, 200, 200, np.random.default_rng(1))
    sketches = sketch(texts, 1, "words", choose_bands(0.7))
    assert all(len(np.unique(keys)) == len(texts) for keys in sketches.keys)
    assert estimate(sketches.signatures[0::2], sketches.signatures[1::2]).max() < 0.05


def test_texts_without_words_are_in_no_band_and_texts_of_few_words_are():
    keys = sketch(["", "…", "two words", "Two words.", "other words"], 5, "words", choose_bands(0.7)).keys
    assert (keys[:, :2] == 0).all()
    assert (keys[:, 2] == keys[:, 3]).all()
    assert (keys[:, 2] != keys[:, 4]).all()
