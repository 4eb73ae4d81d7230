"""Comparison of processes before the first step, and the sentence for differences."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mjax
from mjax.commands.finetune import FinetuneArguments, _task_facts
from mjax.data.indexed import IndexedDatasetWriter
from mjax.data.sources import TrainingData
from mjax.errors import UsageError
from mjax.run import agreement
from mjax.run.agreement import (
    check_agreement,
    check_shared,
    config_facts,
    data_facts,
    describe_differences,
    software_facts,
)
from mjax.tasks.labelled_task import Examples
from tests.small import small_config
from tests.training.watchdogs import Run

pytestmark = pytest.mark.usefixtures("fast_watchdogs")

CONFIG = small_config()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1, 1, 2, 1), "--train.seed 2 on process 2 on node2, 1 on the others"),
        ((1, 2, 2, 1), "1 on processes 0 on node0 and 3 on node3, 2 on processes 1 on node1 and 2 on node2"),
        ((1, 2, 3, 3), "1 on process 0 on node0, 2 on process 1 on node1, 3 on the others"),
        ((1, None, 1), "--train.seed absent on process 1 on node1, 1 on the others"),
        ((1, 1, 1), ""),
    ],
)
def test_disagreement_names_who_differs_in_what(values, words):
    facts = [{} if value is None else {"--train.seed": (str(value), str(value))} for value in values]
    sentence = describe_differences([{"host": f"node{i}", "facts": each} for i, each in enumerate(facts)])
    assert words in sentence if words else sentence == ""


# --- Facts ------------------------------------------------------------------------------------------------------------


def compared(facts):
    return {name: value for name, (value, _) in facts.items()}


def changed(value):
    return not value if isinstance(value, bool) else "other" if isinstance(value, str) or value is None else (7,)


def test_config_facts_have_every_shared_field():
    unseen = set()
    for section, values in vars(CONFIG).items():
        for knob, value in vars(values).items():
            other = replace(CONFIG, **{section: replace(values, **{knob: changed(value)})})
            if config_facts(other) == config_facts(CONFIG):
                unseen.add(f"{section}.{knob}")
    assert unseen == {
        "data.cache", "log.scaling", "log.tensorboard", "log.trackio", "log.wandb",
        "data.path", "data.train_path", "data.valid_path",  # compared by what they hold
    }  # fmt: skip


def test_data_facts_are_digests_of_the_contents(tmp_path):
    def dataset(name, tokens):
        with IndexedDatasetWriter(tmp_path / name, 60) as writer:
            writer.add_document(tokens)
        return str(tmp_path / name)

    def facts(*path, tokenizer=None):
        config = replace(CONFIG, data=replace(CONFIG.data, mock=False, path=path))
        return compared(data_facts(config, TrainingData(None, None, tokenizer, "")))

    here, copy, other = (dataset(*what) for what in (("a", [1, 2, 3]), ("b", [1, 2, 3]), ("c", [1, 2, 4])))
    assert facts(here) == facts(copy)
    assert facts(here) != facts(other)
    assert facts("0.3", here, "0.7", other) != facts("0.7", here, "0.3", other)
    found = []
    for folder, text in (("one", "a b c"), ("same", "a b c"), ("other", "a c b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "vocabulary").write_text(text)
        found.append(facts(here, tokenizer=tmp_path / folder))
    assert found[0] == found[1] != found[2]


def test_software_facts_show_edits_versions_and_settings(monkeypatch, tmp_path):
    before = compared(software_facts())
    assert {"jax", "numpy", "Python", "XLA_FLAGS", "jax_enable_x64", "mjax/run/loop.py"} <= before.keys()
    monkeypatch.setattr(agreement, "list_versions", lambda: {"jax": "0.0.1", "unrelated": "1"})
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/of/process/7 --xla_x=1")
    same = compared(software_facts())
    assert (same["jax"], same["XLA_FLAGS"]) == ("0.0.1", "--xla_x=1")
    shutil.copytree(Path(mjax.__file__).parent, tmp_path / "mjax", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(mjax, "__file__", str(tmp_path / "mjax" / "__init__.py"))
    with (tmp_path / "mjax" / "models" / "gpt" / "model.py").open("a") as file:
        file.write("# edited\n")
    found = compared(software_facts())
    assert {name for name in found if found[name] != same[name]} == {"mjax/models/gpt/model.py"}


def test_finetuning_facts_have_examples_and_origin(tmp_path):
    rows = np.zeros((2, 1, 4), np.int32)
    examples = Examples(rows, rows, rows > 0, {"label": np.array([0, 1])})
    swapped = replace(examples, labels={"label": np.array([1, 0])})

    def facts(train, **flags):
        arguments = FinetuneArguments(tmp_path, "mnli", (), (), **flags)
        return _task_facts(arguments, SimpleNamespace(train=train, validation={"matched": examples}))

    before = facts(examples)
    assert facts(examples) == before != facts(swapped)
    assert before["--seed"] != facts(examples, seed=2)["--seed"]
    add_checkpoint(tmp_path)
    assert facts(examples) != before


# --- Processes --------------------------------------------------------------------------------------------------------


def add_checkpoint(folder):
    (folder / "checkpoints" / "40").mkdir(parents=True)
    (folder / "checkpoints" / "40" / "manifest.json").write_text("{}")


def refusal(run, question):
    """The sentence that every process ends with."""
    answers = run.ask(question)
    assert {type(answer) for answer in answers} == {UsageError}
    [sentence] = set(map(str, answers))
    return sentence


def test_all_processes_end_with_same_sentence():
    faster = replace(CONFIG, optimizer=replace(CONFIG.optimizer, learning_rate=1e-4))
    with Run() as run:
        sentence = refusal(run, lambda one, index: check_agreement(one, config_facts(faster if index == 2 else CONFIG)))
        assert run.ask(lambda one, index: check_agreement(one, config_facts(CONFIG))) == [None] * 3
    assert "do not agree: --optimizer.learning-rate 0.0001 on process 2 on " in sentence


def test_run_folder_must_be_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "VISIBILITY_TIMEOUT", 0.1)
    (tmp_path / "b").mkdir()
    with Run() as run:
        assert run.ask(lambda one, index: check_shared(one, tmp_path / "runs" / "new")) == [None] * 3
        sentence = refusal(run, lambda one, index: check_shared(one, tmp_path / ("b" if index == 1 else "a")))
    assert f"cannot see it at {tmp_path / 'b'}; use --runs with a folder on a file system" in sentence
    assert [list((tmp_path / folder).iterdir()) for folder in ("runs/new", "a", "b")] == [[], [], []]


def test_processes_must_see_same_checkpoints(tmp_path, monkeypatch):
    add_checkpoint(tmp_path)
    stale = iter(["20", "40", "40"])
    monkeypatch.setattr(agreement, "checkpoint_label", lambda folder: next(stale))
    with Run() as run:
        sentence = refusal(run, lambda one, index: check_shared(one, tmp_path))
    assert re.search("the newest checkpoint is 20 on process .*, 40 on the others", sentence)
