"""The order of examples in training, and what fills up the last batch of an evaluation."""

import numpy as np

from mjax.finetuning.tuning import EpochBatches
from mjax.tasks.labelled_task import Examples, iterate_batches


def examples(count: int) -> Examples:
    """Example i holds the token i alone, and has the label i."""
    tokens = np.zeros((count, 1, 4), np.int32)
    tokens[:, 0, 0] = np.arange(count)
    return Examples(tokens, np.ones_like(tokens), tokens >= tokens[:, :, :1], {"label": np.arange(count)})


def seen(batches: EpochBatches, epoch: int) -> list[int]:
    steps = range(epoch * batches.steps, (epoch + 1) * batches.steps)
    return np.concatenate([batches.batch_at(step)["label"] for step in steps]).tolist()


def test_epoch_shows_each_example_once():
    """But for those that make no whole batch, others in each epoch."""
    batches = EpochBatches(examples(23), 5, seed=3)
    assert batches.steps == 4
    for epoch in range(3):
        assert len(set(seen(batches, epoch))) == len(seen(batches, epoch)) == 20
    assert set(seen(batches, 0)) != set(seen(batches, 1))


def test_order_depends_on_seed_and_epoch_only():
    batches = EpochBatches(examples(20), 5, seed=3)
    assert seen(EpochBatches(examples(20), 5, seed=3), 1) == seen(batches, 1) != seen(batches, 0)
    assert seen(EpochBatches(examples(20), 5, seed=4), 1) != seen(batches, 1)
    assert seen(batches, 0) == [15, 9, 1, 11, 13, 4, 10, 5, 16, 19, 14, 0, 8, 3, 12, 18, 17, 2, 7, 6]


def test_row_has_tokens_and_labels_of_one_example():
    """Also in the rows that a process reads."""
    batches = EpochBatches(examples(20), 5, seed=3)
    batch = batches.batch_at(6)
    assert (batch["tokens"][:, 0, 0] == batch["label"]).all()
    np.testing.assert_array_equal(batch["documents"], batch["tokens"] < batch["tokens"][:, :, :1])
    assert batch["documents"].dtype == np.int32
    for rows in (slice(0, 2), slice(2, 5)):
        for name, whole in batch.items():
            np.testing.assert_array_equal(batches.batch_at(6, rows)[name], whole[rows])


def test_validation_says_how_many_rows_are_real():
    found = list(iterate_batches(examples(11), 4))
    assert [count for count, _ in found] == [4, 4, 3]
    tokens = [batch["tokens"][:, 0, 0].tolist() for _, batch in found]
    assert tokens == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 8]]
    assert "label" not in found[0][1]
