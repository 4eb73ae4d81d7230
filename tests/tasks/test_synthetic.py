"""The synthetic sets are what the published files are: every task opens them, and knows every word of theirs."""

import numpy as np
import pytest

from mjax.tasks.labelled import DEFAULTS, TASKS, open_task
from tests.tasks.synthetic import write_task


def test_every_task_has_a_recipe_and_every_recipe_a_task():
    assert list(TASKS) == list(DEFAULTS)


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_synthetic_set_is_read_whole_and_its_labels_told_by_single_words(name, tmp_path):
    files = write_task(tmp_path, name, train=40, validation=16)
    task = open_task(name, files.train, files.validation, files.tokenizer, 48)
    assert task.notes == []
    assert task.train.tokens.shape == (40, task.choices, 48)
    assert sum(len(examples.tokens) for examples in task.validation.values()) == 16
    assert files.tokenizer.unk not in task.train.tokens
    outputs = {key: perfect(task, examples) for key, examples in task.validation.items()}
    values = {metric.name: metric.value for metric in task.metrics(outputs)}
    assert values[task.metric] == (100 if task.head == "span" else 1)


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_synthetic_set_is_the_same_each_time_and_another_with_another_seed(name, tmp_path):
    contents = [
        {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder, seed in ((tmp_path / "a", 1), (tmp_path / "b", 1), (tmp_path / "c", 2))
        if write_task(folder, name, 8, 8, seed)
    ]
    assert contents[0] == contents[1] != contents[2]


def perfect(task, examples):
    """Outputs of a model that knows the labels."""
    rows, shape = np.arange(len(examples.tokens)), (len(examples.tokens), task.classes)
    if task.head == "span":
        outputs = np.zeros((*shape, examples.tokens.shape[-1]), np.float32)
        for number, key in enumerate(("start", "end")):
            outputs[rows, number, examples.labels[key]] = 9
        return outputs
    outputs = np.zeros((shape[0], max(task.classes, task.choices)), np.float32)
    outputs[rows, examples.labels["label"]] = 9
    return outputs
