"""Blends: the walk in lanes is Megatron's walk one by one, and each dataset has what is asked of it."""

import numpy as np
import pytest

from mjax.config.datasets import normalize
from mjax.data import samples as blend
from mjax.data.samples import BlendedDataset, build_blend_index, count_samples_per_dataset


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


RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "two": [0.3, 0.7],
    "many equals": [1, 1, 2] * 10,
    "rare": [1e-4, 1.0, 0.01, 1.0],
    "far apart": (10 ** RANDOM.uniform(-6, 6, 12)).tolist(),
    "one": [3.0],
}


@pytest.mark.parametrize("lane", [1, 7, 600])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_lanes_join_to_megatrons_walk(monkeypatch, weights, lane):
    monkeypatch.setattr(blend, "LANE_SAMPLES", lane)
    shares, samples = normalize(weights), 1500 if lane > 1 else 60
    found = build_blend_index(shares, samples)
    assert found.dtype == np.int16
    assert found.tolist() == walked(shares, samples)
    for length in range(1, samples, 37):
        used = np.bincount(found[:length], minlength=len(shares))
        assert (used <= count_samples_per_dataset(length, shares)).all()


def test_parts_hold_half_a_percent_more():
    """Megatron's epochs, and so its order, depend on it."""
    assert count_samples_per_dataset(1001, [0.3, 0.7]) == [303, 705]  # of 300.3 and 700.7, rounded up twice


@pytest.mark.parametrize("sizes", [[5], [1, 1, 1], [3, 400], [70, 1, 200, 33], RANDOM.integers(1, 200, 8).tolist()])
@pytest.mark.parametrize("lane", [7, 600])
def test_exhausted_datasets_are_skipped(monkeypatch, sizes, lane):
    """Without weights each sample comes once; with others than the sizes' shares too, in another order."""
    monkeypatch.setattr(blend, "LANE_SAMPLES", lane)
    data = BlendedDataset([range(size) for size in sizes], None, None)
    assert data.dataset_index.tolist() == walked(normalize(sizes), sum(sizes), sizes)
    drawn = list(zip(data.dataset_index.tolist(), data.dataset_sample_index.tolist(), strict=True))
    assert sorted(drawn) == [(part, i) for part, size in enumerate(sizes) for i in range(size)]
    shares = normalize(sizes[::-1])
    assert build_blend_index(shares, sum(sizes), sizes).tolist() == walked(shares, sum(sizes), sizes)


def test_blend_gives_samples_of_parts_in_order():
    data = BlendedDataset([[10, 11, 12, 13], ["a", "b", "c"]], [0.5, 0.5], 6)
    assert [data[i] for i in range(6)] == [10, "a", 11, "b", 12, "c"]
    for index in (-1, 6):
        with pytest.raises(IndexError):
            data[index]
