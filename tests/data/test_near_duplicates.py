import numpy as np
import pytest

from mjax.data.minhash import choose_bands, sketch
from mjax.data.near_duplicates import ShingleFile, SketchFiles, candidates, find_clusters
from mjax.data.shingles import jaccard, shingle_hashes, shingle_set
from mjax.data.workers import Workers


def sets_of(texts):
    hashes, offsets = shingle_hashes(texts, 1, "words")
    return [shingle_set(part) for part in np.split(hashes, offsets[1:-1].astype(int))]


def clusters_of(texts, threshold, folder, distinct=None, batch=1000):
    """The clusters of `texts` by single words, through the files of a run."""
    bands = choose_bands(threshold)
    files = SketchFiles(folder, bands.count)
    for start in range(0, len(texts), batch):
        files.append(sketch(texts[start : start + batch], 1, "words", bands))
    files.close()
    distinct = np.ones(len(texts), bool) if distinct is None else distinct
    chosen = candidates(files, distinct)
    shingles = ShingleFile(folder / "shingles", chosen)
    sets = sets_of(texts)
    shingles.write([sets[number]] for number in chosen)
    bands_done = []
    with Workers(1) as workers:
        clusters = find_clusters(files, distinct, shingles, threshold, workers, lambda: bands_done.append(1))
    assert len(bands_done) == bands.count
    return clusters


def first_of_components(texts, threshold):
    """The truth, from all pairs."""
    first, sets = list(range(len(texts))), sets_of(texts)
    for one in range(len(texts)):
        for other in range(one):
            if jaccard(sets[one], sets[other]) >= threshold and first[one] != first[other]:
                low, high = sorted((first[one], first[other]))
                first = [low if each == high else each for each in first]
    return first


def variants(random, families, members, words, changed):
    """Texts in families: each member has up to `changed` words of its own."""
    texts = []
    for family in range(families):
        for _ in range(members):
            text = [f"f{family}w{number}" for number in range(words)]
            for place in random.choice(words, random.integers(changed + 1), replace=False):
                text[place] = f"x{random.integers(10**12)}"
            texts.append(" ".join(text))
    return [texts[number] for number in random.permutation(len(texts))]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_clusters_are_the_components_of_all_similar_pairs(tmp_path, threshold, seed):
    texts = variants(np.random.default_rng(seed), 20, 8, 60, round(60 * (1 - threshold)))
    clusters = clusters_of(texts, threshold, tmp_path, batch=37)
    expected = first_of_components(texts, threshold)
    assert len(set(expected)) < len(texts), "there are duplicates"
    assert clusters.first.tolist() == expected


def test_every_removal_has_a_partner_at_or_above_the_threshold(tmp_path):
    texts = variants(np.random.default_rng(7), 20, 8, 60, 18)
    clusters, sets = clusters_of(texts, 0.7, tmp_path), sets_of(texts)
    removed = np.flatnonzero(clusters.first != np.arange(len(texts)))
    assert len(removed) > 40
    for one in removed:
        other = clusters.similar[one]
        assert clusters.similarity[one] == jaccard(sets[one], sets[other]) >= 0.7
        assert clusters.first[one] == clusters.first[other]


def test_a_chain_of_similar_documents_is_one_cluster(tmp_path):
    words = [f"w{number}" for number in range(150)]
    texts = [" ".join(words[10 * i : 10 * i + 100]) for i in range(6)]  # neighbours: 90 of 110; ends: 50 of 150
    clusters = clusters_of([*texts, "something else"], 0.8, tmp_path)
    assert clusters.first.tolist() == [0, 0, 0, 0, 0, 0, 6]
    assert jaccard(*sets_of([texts[0], texts[5]])) < 0.4
    assert clusters.similar[6] == -1


def test_many_copies_of_one_page_are_not_all_compared_with_each_other(tmp_path):
    texts = [f"{' '.join(f'w{word}' for word in range(100))} number{number}" for number in range(300)]
    clusters = clusters_of(texts, 0.7, tmp_path)
    assert (clusters.first == 0).all()
    assert clusters.compared == clusters.confirmed < 2 * 299


def test_what_is_joined_is_not_compared_again_although_others_are_in_the_same_bucket(tmp_path):
    common = [f"w{number}" for number in range(80)]
    families = {"a": 60, "b": 2}  # 80 of 122 words in common: below 0.7, but candidates
    texts = [
        " ".join([*common, *(f"{name}{word}" for word in range(20)), f"{name}-{number}"])
        for name, members in families.items()
        for number in range(members)
    ]
    clusters = clusters_of(texts, 0.7, tmp_path)
    assert clusters.first.tolist() == [0] * 60 + [60] * 2
    assert 60 < clusters.compared < 400, "and not 60 · 59 / 2 more"


def test_a_pair_that_shares_several_bands_is_compared_once(tmp_path):
    common = [f"w{number}" for number in range(66)]
    texts = [" ".join([*common, *(f"{name}{number}" for number in range(17))]) for name in "ab"]
    clusters = clusters_of(texts, 0.7, tmp_path)  # 66 of 100: below, but near
    assert (clusters.compared, clusters.confirmed) == (1, 0)
    keys = sketch(texts, 1, "words", choose_bands(0.7)).keys
    assert (keys[:, 0] == keys[:, 1]).sum() > 1, "the test is about something"


def test_documents_that_are_not_distinct_take_no_part(tmp_path):
    texts = ["one text here", "one text here", "one text here"]
    clusters = clusters_of(texts, 0.7, tmp_path, distinct=np.array([True, False, True]))
    assert clusters.first.tolist() == [0, 1, 0]


@pytest.mark.parametrize("texts", [[], [""], ["one"], ["", "…", "!"]])
def test_where_nothing_can_be_similar_nothing_is(tmp_path, texts):
    if texts:
        assert clusters_of(texts, 0.7, tmp_path).first.tolist() == list(range(len(texts)))
