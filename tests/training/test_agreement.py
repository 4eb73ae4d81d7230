"""What processes compare before the first step, and the sentence for those that differ."""

import shutil
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mjax
from mjax.commands.finetune import FinetuneArguments, _task_facts
from mjax.config import Config
from mjax.data.indexed import IndexedDatasetWriter
from mjax.data.sources import TrainingData
from mjax.errors import UsageError
from mjax.tasks.rows import Examples
from mjax.training import agreement
from mjax.training.agreement import agree, check_shared, config_facts, data_facts, disagreement, software_facts
from tests.small import small_config
from tests.training.watchdogs import Run

pytestmark = pytest.mark.usefixtures("fast_watchdogs")


def given(*values, name="--train.seed"):
    return [
        {"host": f"node{i}", "facts": {} if value is None else {name: (str(value), str(value))}}
        for i, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1, 1, 2, 1), "--train.seed 2 on process 2 on node2, 1 on the others"),
        ((1, 2), "--train.seed 1 on process 0 on node0, 2 on process 1 on node1"),
        ((1, 2, 2, 1), "1 on processes 0 on node0 and 3 on node3, 2 on processes 1 on node1 and 2 on node2"),
        ((1, 2, 3, 3), "1 on process 0 on node0, 2 on process 1 on node1, 3 on the others"),
        ((1, None, 1), "--train.seed absent on process 1 on node1, 1 on the others"),
    ],
)
def test_the_sentence_names_who_differs_in_what(values, words):
    assert words in disagreement(given(*values))


def test_processes_that_agree_get_no_sentence():
    assert disagreement(given(1, 1, 1)) == ""


def test_a_whole_other_installation_makes_a_short_sentence():
    files = {f"mjax/{i}.py": ("a", "a") for i in range(100)}
    others = dict.fromkeys(files, ("b", "b"))
    sentence = disagreement([{"host": "x", "facts": facts} for facts in (files, files, others)])
    assert sentence.count("mjax/") == 6
    assert "and 94 more differences" in sentence


# --- Facts ------------------------------------------------------------------------------------------------------------

CONFIG = small_config()


def compared(facts):
    return {name: value for name, (value, _) in facts.items()}


def changed(value):
    return not value if isinstance(value, bool) else "other" if isinstance(value, str) or value is None else (7,)


def test_every_field_of_the_config_is_compared_but_those_of_a_process_alone():
    before, unseen = config_facts(CONFIG), set()
    for section in fields(Config):
        values = getattr(CONFIG, section.name)
        for knob in fields(values):
            other = replace(values, **{knob.name: changed(getattr(values, knob.name))})
            if config_facts(replace(CONFIG, **{section.name: other})) == before:
                unseen.add(f"{section.name}.{knob.name}")
    paths = {"data.path", "data.train_path", "data.valid_path", "data.test_path"}  # compared by what they hold
    assert unseen == {"data.cache", "log.tensorboard", "log.wandb"} | paths


@pytest.fixture
def dataset(tmp_path):
    def write(name, tokens):
        with IndexedDatasetWriter(tmp_path / name, 60) as writer:
            for _ in range(8):
                writer.add_document(tokens)
        return str(tmp_path / name)

    return write


def facts_about(*path, tokenizer=None):
    config = replace(CONFIG, data=replace(CONFIG.data, mock=False, path=path))
    data = TrainingData(training=None, validation=None, tokenizer=tokenizer, summary="")
    return compared(data_facts(config, data))


def test_data_are_compared_by_their_tokens_wherever_they_lie(dataset):
    here, copy, other = (dataset(*what) for what in (("a", [1, 2, 3]), ("b", [1, 2, 3]), ("c", [1, 2, 4])))
    assert facts_about(here) == facts_about(copy)
    assert facts_about(here) != facts_about(other)
    assert facts_about("0.3", here, "0.7", other) != facts_about("0.7", here, "0.3", other)


def test_tokenizers_are_compared_by_their_files(dataset, tmp_path):
    data, folder = dataset("a", [1, 2, 3]), tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "vocabulary").write_text("a b c")
    before = facts_about(data, tokenizer=folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert facts_about(data, tokenizer=tmp_path / "copy") == before
    (folder / "vocabulary").write_text("a c b")
    assert facts_about(data, tokenizer=folder) != before


def test_an_edited_file_of_mjax_another_version_and_another_setting_are_seen(monkeypatch, tmp_path):
    before = compared(software_facts())
    assert {"jax", "numpy", "Python", "XLA_FLAGS", "jax_enable_x64", "mjax/training/loop.py"} <= before.keys()
    monkeypatch.setattr(agreement, "installed", lambda: {"jax": "0.0.1", "unrelated": "1"})
    assert compared(software_facts())["jax"] == "0.0.1"
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/of/process/7 --xla_x=1")
    assert compared(software_facts())["XLA_FLAGS"] == "--xla_x=1"
    shutil.copytree(Path(mjax.__file__).parent, tmp_path / "mjax", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(mjax, "__file__", str(tmp_path / "mjax" / "__init__.py"))
    same = compared(software_facts())
    with (tmp_path / "mjax" / "models" / "gpt.py").open("a") as file:
        file.write("# edited\n")
    found = compared(software_facts())
    assert {name for name in found if found[name] != same[name]} == {"mjax/models/gpt.py"}


def test_all_processes_end_with_the_same_sentence():
    faster = replace(CONFIG, optimizer=replace(CONFIG.optimizer, learning_rate=1e-4))
    with Run() as run:
        answers = run.ask(lambda one, index: agree(one, config_facts(faster if index == 2 else CONFIG)))
        assert run.ask(lambda one, index: agree(one, config_facts(CONFIG))) == [None] * 3
    assert {type(answer) for answer in answers} == {UsageError}
    assert len(set(map(str, answers))) == 1
    assert "do not agree: --optimizer.learning-rate 0.0001 on process 2 on " in str(answers[0])
    assert ", 0.01 on the others; start all with the same" in str(answers[0])


# --- The run folder ---------------------------------------------------------------------------------------------------


def test_a_shared_run_folder_is_found_and_nothing_is_left_in_it(tmp_path):
    with Run() as run:
        assert run.ask(lambda one, index: check_shared(one, tmp_path / "runs" / "new")) == [None] * 3
    assert list((tmp_path / "runs" / "new").iterdir()) == []


def test_a_folder_that_a_process_does_not_share_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "PATIENCE", 0.1)
    (tmp_path / "b").mkdir()
    with Run() as run:
        answers = run.ask(lambda one, index: check_shared(one, tmp_path / ("b" if index == 1 else "a")))
    assert len(set(map(str, answers))) == 1
    assert f"has its run folder at {tmp_path / 'a'}, and process 1 on" in str(answers[0])
    assert f"cannot see it at {tmp_path / 'b'}; use --runs with a folder on a file system" in str(answers[0])
    assert list((tmp_path / "a").iterdir()) == list((tmp_path / "b").iterdir()) == []


def test_processes_that_see_different_checkpoints_do_not_begin(tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    (tmp_path / "checkpoints" / "40" / "manifest.json").write_text("{}")
    own = agreement.newest_checkpoint
    stale = iter(["20", *[own(tmp_path)] * 2])
    monkeypatch.setattr(agreement, "newest_checkpoint", lambda folder: next(stale))
    with Run() as run:
        answers = run.ask(lambda one, index: check_shared(one, tmp_path))
    assert len(set(map(str, answers))) == 1
    assert "the newest checkpoint is 20 on process" in str(answers[0])
    assert f", {own(tmp_path)} on the others" in str(answers[0])


def test_finetuning_compares_its_examples_and_where_it_starts_from(tmp_path):
    rows = np.zeros((2, 1, 4), np.int32)
    examples = Examples(rows, rows, rows > 0, {"label": np.array([0, 1])})
    swapped = replace(examples, labels={"label": np.array([1, 0])})

    def facts(train, **flags):
        arguments = FinetuneArguments(tmp_path, "mnli", (), (), **flags)
        return _task_facts(arguments, SimpleNamespace(train=train, validation={"matched": examples}))

    assert facts(examples) == facts(examples)
    assert facts(examples) != facts(swapped)
    assert facts(examples)["--seed"] != facts(examples, seed=2)["--seed"]
    before = facts(examples)
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    (tmp_path / "checkpoints" / "7" / "manifest.json").write_text("{}")
    assert facts(examples) != before
