"""Mistakes with `mjax finetune`: one clear sentence each, before anything is trained."""

import json
import shutil

import pytest

from mjax.commands import cli
from mjax.config import save_config
from tests.finetuning.pretrained import write_run
from tests.small import small_config
from tests.tasks.synthetic import write_task
from tests.test_bad_inputs import fingerprint


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run of a BERT, one of a GPT, and the files of two tasks, which nothing below may change."""
    folder = tmp_path_factory.mktemp("place")
    write_run(folder / "bert")
    (folder / "gpt").mkdir()
    save_config(small_config(), folder / "gpt" / "config.json")
    for name in ("mnli", "race"):
        write_task(folder / name, name, train=24, validation=8)
    unlabelled = "index\tsentence1\tsentence2\n0\tthe bird\tthe tree\n"
    (folder / "mnli" / "test_matched.tsv").write_text(unlabelled)
    (folder / "old").mkdir()
    (folder / "old" / "request.json").write_text("{")
    return folder


def finetune(*flags, run="bert", task="mnli", train="mnli/train.tsv", validation="mnli/dev_matched.tsv"):
    def argv(place):
        given = {"--run": place / run, "--task": task, "--train": place / train, "--output": place / "out"}
        given["--validation"] = place / validation
        words = [str(word) for pair in given.items() for word in pair]
        return ["finetune", *words, "--batch", "8", *(str(flag).replace("PLACE", str(place)) for flag in flags)]

    return argv


WRONG = {
    "a GPT": (finetune(run="gpt"), "holds a GPT, and labelled tasks need a BERT"),
    "rows beyond the positions": (finetune("--sequence", 49), "--sequence 49 is longer than the 48 positions"),
    "a batch that does not divide": (finetune("--batch", 9, "--mesh.data", 2), "use a multiple of 2"),
    "a micro-batch that does not divide": (finetune("--train.micro-batch", 3), "--train.micro-batch 3 does not divide"),
    "a batch above the examples": (finetune("--batch", 25), "--batch 25 is more than the 24 examples of --train"),
    "an infinite rate": (finetune("--learning-rate", "inf"), "--learning-rate inf is not a number"),
    "nothing but warm-up": (finetune("--warmup", 1), "--warmup is 1.0"),
    "training without labels": (finetune(train="mnli/test_matched.tsv"), "test_matched.tsv"),
    "validation without labels": (
        finetune(validation="mnli/test_matched.tsv"), "--validation has no labels to choose the best epoch by",
    ),
    "a damaged request": (finetune("--output", "PLACE/old"), "request.json is not JSON"),
    "a head in pre-training": (
        lambda p: ["train", "--config", "bert_336m", "--data.mock", "--model.head", "span"],
        "--model.head is an option of bert_task models; remove it",
    ),
    "a head in pre-training by its kind": (
        lambda p: ["train", "--config", "bert_336m", "--data.mock", "--model.kind", "bert_task"],
        "--model.kind bert_task is not for pre-training; remove it",
    ),
    "evaluating what was not fine-tuned": (
        lambda p: ["evaluate", "--run", f"{p}/bert", "--task", "mnli", "--data", f"{p}/mnli/dev_matched.tsv"],
        "was not fine-tuned for mnli; give the folder best of mjax finetune --task mnli",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_flag_or_file_changes_nothing(what, place, capsys):
    argv, words = WRONG[what]
    before = {name: fingerprint(place / name) for name in ("bert", "mnli", "race", "old")}
    assert cli.main(argv(place)) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("mjax: error: ")
    assert words in message
    assert {name: fingerprint(place / name) for name in before} == before
    assert not list((place / "out").glob("seed-*/*"))


@pytest.mark.parametrize(
    ("head", "num_labels", "task"),
    [("classification", 2, "mnli"), ("classification", 3, "race"), ("multiple_choice", 4, "mnli"), ("span", 2, "mnli")],
)
def test_run_of_another_task_is_rejected(place, tmp_path, capsys, head, num_labels, task):
    run = shutil.copytree(place / "bert", tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["model"] |= {"kind": "bert_task", "head": head, "num_labels": num_labels}
    del config["model"]["mlm_activation"]
    (run / "config.json").write_text(json.dumps(config))
    data = place / ("race/dev" if task == "race" else "mnli/dev_matched.tsv")
    assert cli.main(["evaluate", "--run", str(run), "--task", task, "--data", str(data)]) == 2
    assert f"was not fine-tuned for {task}; give" in capsys.readouterr().err
