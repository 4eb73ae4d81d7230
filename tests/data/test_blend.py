"""Blends: the walk in lanes is the walk one by one, and what a blend gives out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.data import blend
from mjax.data.blend import BlendedDataset, build_blend_index, normalize, number_within, parse_blend, samples_of_parts
from mjax.data.samples import MockDataset
from mjax.errors import UsageError


def walked(shares, samples, sizes=None):
    """Megatron's loops (helpers.cpp), one sample after the other."""
    counts, index = [0] * len(shares), []
    for i in range(samples):
        behind = [
            -np.inf if sizes is not None and count >= size else share * max(float(i), 1.0) - float(count)
            for share, count, size in zip(shares, counts, sizes or [0] * len(shares), strict=True)
        ]
        chosen = behind.index(max(behind))
        index.append(chosen)
        counts[chosen] += 1
    return index


WEIGHTS = st.one_of(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12),
    st.lists(st.integers(1, 4), min_size=1, max_size=30),  # many equals
    st.lists(st.sampled_from([1e-4, 0.01, 1.0]), min_size=2, max_size=10),  # rare ones
)


@settings(deadline=None, max_examples=60)
@given(weights=WEIGHTS, samples=st.integers(0, 2500), lane=st.integers(1, 600))
def test_lanes_join_to_the_walk_one_by_one(weights, samples, lane):
    shares = normalize(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "LANE", lane)
        found = build_blend_index(shares, samples)
    assert found.dtype == np.int16
    assert found.tolist() == walked(shares, samples)


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12), lane=st.integers(1, 400))
def test_without_weights_lanes_join_to_the_walk_and_every_sample_comes_once(sizes, lane):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "LANE", lane)
        data = BlendedDataset([range(size) for size in sizes], None, None)
    assert data.dataset_index.tolist() == walked(normalize(sizes), sum(sizes), sizes)
    drawn = set(zip(data.dataset_index.tolist(), data.dataset_sample_index.tolist(), strict=True))
    assert drawn == {(part, i) for part, size in enumerate(sizes) for i in range(size)}
    assert len(data) == sum(sizes)


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(1, 200), min_size=2, max_size=8), data=st.data())
def test_a_dataset_that_is_used_up_is_passed_over_whatever_its_share(sizes, data):
    shares = normalize(data.draw(st.lists(st.floats(0.01, 1), min_size=len(sizes), max_size=len(sizes))))
    found = build_blend_index(shares, sum(sizes), sizes)
    assert np.bincount(found).tolist() == sizes
    assert found.tolist() == walked(shares, sum(sizes), sizes)


@given(index=st.lists(st.integers(0, 5), max_size=60))
def test_samples_are_numbered_within_their_dataset(index):
    assert number_within(np.array(index, np.int16)).tolist() == [index[:i].count(d) for i, d in enumerate(index)]


@settings(deadline=None)
@given(weights=WEIGHTS, samples=st.integers(1, 2000))
def test_what_the_parts_are_asked_for_is_enough_for_the_blend(weights, samples):
    shares = normalize(weights)
    used = np.bincount(build_blend_index(shares, samples), minlength=len(shares))
    assert (used <= samples_of_parts(samples, shares)).all()


def test_a_blend_keeps_its_proportions_from_the_first_sample_on():
    index = build_blend_index([0.5, 0.3, 0.2], 10_000)
    for samples in (10, 100, 1000, 10_000):
        assert np.abs(np.bincount(index[:samples]) - samples * np.array([0.5, 0.3, 0.2])).max() <= 1


def test_a_longer_blend_begins_like_a_shorter_one():
    shares = normalize([3, 1, 5])
    assert (build_blend_index(shares, 5000)[:1234] == build_blend_index(shares, 1234)).all()


def test_a_blend_gives_the_samples_of_its_parts_in_their_order():
    data = BlendedDataset([[10, 11, 12, 13], ["a", "b", "c"]], [0.5, 0.5], 6)
    assert [data[i] for i in range(6)] == [10, "a", 11, "b", 12, "c"]
    for index in (-1, 6):
        with pytest.raises(IndexError):
            data[index]
    text = BlendedDataset([MockDataset(50, 8, seed) for seed in (1, 2)], [0.5, 0.5], 6)
    assert all((text.part(i, slice(3, 7)) == text[i][3:7]).all() for i in range(6))


def test_a_blend_without_weights_that_is_too_small_says_how_to_repeat_it():
    with pytest.raises(
        UsageError, match=r"40 in all, and 41 are needed; .* give weights .* such as 0\.25 PREFIX 0\.75"
    ):
        BlendedDataset([range(10), range(30)], None, 41)


# --- As it is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "prefixes", "weights"),
    [
        (["a"], ("a",), None),
        (["0.5"], ("0.5",), None),
        (["a", "b", "c"], ("a", "b", "c"), None),
        (["0.3", "a", "0.7", " b "], ("a", "b"), (0.3, 0.7)),
        (["1e2", "a"], ("a",), (100.0,)),
        (["1", "2"], ("2",), (1.0,)),
    ],
)
def test_a_blend_is_prefixes_or_weights_and_prefixes_in_turn(values, prefixes, weights):
    blend = parse_blend(values)
    assert (blend.prefixes, blend.weights) == (prefixes, weights)


@pytest.mark.parametrize("values", [["0.3", "a", "b"], ["a", "0.3"], ["0.3", "a", "b", "0.7"], ["1", "a", "2"]])
def test_weights_for_some_only_are_refused(values):
    with pytest.raises(UsageError, match=r"--data\.train-path .* write a weight before every prefix"):
        parse_blend(values, "--data.train-path")


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(UsageError, match="not above 0"):
        parse_blend(["1", "a", weight, "b"])


@pytest.mark.parametrize("values", [["1", ""], ["x"] * 32767])
def test_no_name_and_too_many_are_refused(values):
    with pytest.raises(UsageError, match="an empty prefix, or 32,767"):
        parse_blend(values)
