"""`mjax sft`, from a run and a file of conversations to answers."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from mjax.commands import cli
from mjax.commands.arguments import PrepareArguments
from mjax.commands.flags import list_flags
from mjax.commands.sft import DEFAULTS, SftArguments, cache_key
from mjax.config import read_config
from mjax.data.tokenizers import stop_token_ids
from mjax.run.metrics import read_metrics
from mjax.utils.stores import Store
from tests.object_store import bucket
from tests.test_chat import CHATML, run  # noqa: F401

FLAGS = ("--train.global-batch", "16", "--train.micro-batch", "1", "--log.sample-tokens", "8")
MESH = ("--mesh.data", "16")


@pytest.fixture
def base(run, tmp_path, monkeypatch):  # noqa: F811
    """A run with a chat template, and sixty conversations in chat.jsonl, in a working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.with_name(f"{tmp_path.name}-caches")))
    lines = []
    for number in range(60):
        question = {"role": "user", "content": f"What is {number}?"}
        lines.append({"messages": [question, {"role": "assistant", "content": "It is a number. " * (number % 4 + 1)}]})
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return shutil.copytree(run, tmp_path / "runs" / "base")


def sft(*flags):
    return cli.main(["sft", "--init", "runs/base", "--data", "chat.jsonl", *FLAGS, *flags])


def test_conversations_become_a_run_that_answers_and_resumes(base, tmp_path, capsys):
    (tmp_path / "questions.txt").write_text("What is 3?\n\nWhat is 5?\n")
    asked = ("--log.sample-prompts", "questions.txt", "--train.eval-interval", "4")
    assert sft("--name", "chat", "--epochs", "2", "--checkpoint.interval", "2", *asked, *MESH) == 0
    said = capsys.readouterr().out
    assert "sft     --train.steps" in said
    assert re.search(r"\d\d sequences with \d+\.\d% padding, 2\.0 epochs", " ".join(said.split()))
    config, folder = read_config(tmp_path / "runs" / "chat" / "config.json"), tmp_path / "runs" / "chat"
    assert (config.data.conversations, config.optimizer.learning_rate) == (True, 2e-5)
    records = read_metrics(folder / "metrics.jsonl")
    assert len(records) == config.train.steps > 2
    assert all(0 < record["labels"] < 16 * 128 for record in records)
    assert (folder / "tokenizer" / "chat_template.jinja").read_text() == CHATML
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [
        (step, f"What is {number}?") for step in (4, 5) for number in (3, 5)
    ]
    capsys.readouterr()
    assert cli.main(["generate", "--run", str(folder), "--chat", "--prompt", "What is 3?", "--tokens", "4"]) == 0

    shutil.rmtree(folder / "checkpoints" / str(config.train.steps))  # as if it had been killed
    assert sft("--name", "chat", "--epochs", "2", "--checkpoint.interval", "2", *MESH) == 0
    assert "prepared before" in capsys.readouterr().out
    again = read_metrics(folder / "metrics.jsonl")
    assert [record["loss"] for record in again] == [record["loss"] for record in records]


def help_of(flag, capsys):
    with pytest.raises(SystemExit):
        cli.main(["sft", flag])
    return capsys.readouterr().out


def test_help_shows_data_first_and_real_defaults(base, monkeypatch, capsys):
    """A run gets the defaults that --help-all shows, with adapters and without."""
    assert re.findall(r"^  (--\S+)", help_of("--help", capsys), re.MULTILINE)[:2] == ["--data", "--init"]
    runs = []
    monkeypatch.setattr("mjax.commands.sft.train", lambda argv, of, _: runs.append(of(None)) or 0)
    assert sft() == sft("--lora.rank", "4") == 0
    shown = list(list_flags(SftArguments, SftArguments(settings=DEFAULTS)))
    for run_of_model in runs:
        real = {flag.name: flag.default for flag in list_flags(SftArguments, run_of_model)}
        wrong = [flag.name for flag in shown if flag.default != real.get(flag.name)]
        derived = set(" ".join(SftArguments.derived.values()).split())
        assert [name for name in wrong if not derived & {name, name.partition(".")[0]}] == ["init"]
    words = " ".join(help_of("--help-all", capsys).split())
    for flag, rate in (("learning-rate", "learning_rate"), ("min-learning-rate", "min_learning_rate")):
        rates = [getattr(each.settings.optimizer, rate) for each in runs]
        assert re.search(rf"--optimizer.{flag} X [^\[]*\[{rates[0]}, of adapters {rates[1]}\]", words)
    assert "gpt_demo" not in words


@pytest.mark.ci
def test_run_stops_as_its_new_template_does(base, tmp_path):
    """The ids that end texts of the base are 256 and 257; conversations of the other template end with 258."""
    (tmp_path / "other.jinja").write_text("{# other #}" + CHATML)
    assert sft("--name", "other", "--chat-template", "other.jinja", "--train.steps", "1", *MESH) == 0
    folder = tmp_path / "runs" / "other"
    assert (folder / "tokenizer" / "chat_template.jinja").read_text() == "{# other #}" + CHATML
    assert stop_token_ids(folder / "tokenizer", 256) == [256, 257, 258]
    for output in ("carried", "written"):
        assert cli.main(["convert", "to-hf", str(folder), output]) == 0
        exported = json.loads((tmp_path / output / "generation_config.json").read_text())
        assert exported["eos_token_id"] == [256, 257, 258]
        (folder / "tokenizer" / "tokenizer_config.json").unlink(missing_ok=True)  # as if from no model folder


def test_mesh_leaves_losses(base, tmp_path):
    records, rates = {}, ("--optimizer.learning-rate", "0.01", "--optimizer.warmup-steps", "0")
    for name, flags in {"one": MESH, "other": ("--mesh.data", "4", "--mesh.model", "4")}.items():
        assert sft("--name", name, "--train.steps", "3", "--precision.compute", "fp32", *rates, *flags) == 0
        records[name] = read_metrics(tmp_path / "runs" / name / "metrics.jsonl")
    for number in ("loss", "grad_norm"):
        one, other = ([record[number] for record in records[name]] for name in ("one", "other"))
        assert other == pytest.approx(one, rel=1e-5)
        assert len({round(x, 1) for x in one}) == 3, "the updates changed nothing"


@pytest.mark.ci
def test_validation_scores_each_conversation_once(base, tmp_path):
    """Thirty, in batches of 4, 16 and 32; the only update changes nothing."""
    held_out = "--data.split", "50,50,0", "--data.no-pack", "--precision.compute", "fp32"
    still, losses = ("--optimizer.learning-rate", "1e-12", "--optimizer.min-learning-rate", "0"), []
    for batch, mesh in ((4, ("--mesh.data", "4", "--mesh.model", "4")), (16, MESH), (32, MESH)):
        flags = "--train.global-batch", str(batch), "--train.steps", "1", "--train.eval-interval", "1"
        assert sft("--name", f"of {batch}", *held_out, *still, *flags, *mesh) == 0
        (record,) = read_metrics(tmp_path / "runs" / f"of {batch}" / "metrics.jsonl")
        losses.append(record["val_loss"])
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


@pytest.mark.ci
def test_conversations_in_a_store_are_prepared_here(base, tmp_path, monkeypatch, capsys):
    pytest.importorskip("s3fs")
    given = []
    monkeypatch.setattr("mjax.commands.sft.train", lambda argv, *_: given.append(argv) or 0)
    with bucket(monkeypatch, tmp_path / "caches"):
        Store("s3").put([(tmp_path / "chat.jsonl", "s3://bucket/chats/chat.jsonl")])
        for _ in range(2):
            assert cli.main(["sft", "--init", "runs/base", "--data", "s3://bucket/chats/chat.jsonl", *FLAGS]) == 0
    assert given[0] == given[1]
    assert given[0][:3] == ["--init", "runs/base", "--data.path"]
    assert f"{given[0][3]}, prepared before" in capsys.readouterr().out


def test_files_of_two_parts_are_prepared(base, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr("mjax.commands.sft.train", lambda argv, of, _: runs.append((argv, of(None).settings)) or 0)
    lines = (tmp_path / "chat.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "held_out.jsonl").write_text("".join(lines[:20]))
    parts = ["--data.train-path", "chat.jsonl", "--data.valid-path=held_out.jsonl", "--data.no-pack"]
    assert cli.main(["sft", "--init", "runs/base", *parts, *FLAGS]) == 0
    [(argv, settings)] = runs
    assert not [word for word in argv if word.endswith(".jsonl")]
    assert (settings.data.train_samples, settings.train.steps, settings.train.eval_batches) == (180, 12, 2)


def test_one_conversation_and_one_step_are_enough(base, tmp_path):
    """Another file of that name, although it is older, is prepared separately; nothing is left in the folder."""
    before, prefixes = set(tmp_path.iterdir()), []
    for name, answer in (("one", "b"), ("two", "c")):
        (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "a", "completion": answer}) + "\n")
        os.utime(tmp_path / "chat.jsonl", (0, 0))
        assert sft("--name", name, "--train.steps", "1", *MESH) == 0
        prefixes += read_config(tmp_path / "runs" / name / "config.json").data.path
    assert len(set(prefixes)) == 2
    assert set(tmp_path.iterdir()) <= before | {tmp_path / "chat.jsonl", tmp_path / "runs"}


def test_prepared_data_depend_on_every_input(base, tmp_path):
    """Contents of file, template and tokenizer, flags, and the length of the model."""
    (tmp_path / "other.jinja").write_text("{{ messages }}")

    def key(**changes):
        return cache_key(PrepareArguments(inputs=(Path("chat.jsonl"),), output="", **changes), Path("runs/base"))

    keys = [
        key(),
        key(train_on="last"),
        key(chat_template="plain"),
        key(chat_template="other.jinja"),
        key(max_length=9),
    ]
    (tmp_path / "other.jinja").write_text("{{ messages[0] }}")
    keys.append(key(chat_template="other.jinja"))
    about = (tmp_path / "chat.jsonl").stat()
    (tmp_path / "chat.jsonl").write_text((tmp_path / "chat.jsonl").read_text().replace("a", "b"))
    os.utime(tmp_path / "chat.jsonl", ns=(about.st_atime_ns, about.st_mtime_ns))
    keys.append(key())
    config = tmp_path / "runs" / "base" / "config.json"
    config.write_text(config.read_text().replace('"sequence": ', '"sequence": 1'))
    keys.append(key())
    (tmp_path / "runs" / "base" / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    keys.append(key())
    assert len(set(keys)) == len(keys)


BASE = "--init runs/base --data chat.jsonl"
WRONG = {
    "--data chat.jsonl": "mjax sft needs --init RUN; type mjax sft --init runs/q",
    "--init runs/base": "there are no conversations; add --data FILE.jsonl",
    "--init runs/none --data chat.jsonl": "runs/none does not exist",
    "--init runs/base --data missing.jsonl": "there is no file missing.jsonl",
    f"{BASE} --epochs 0": "--epochs is 0",
    f"{BASE} --data=a.jsonl": "--data.path is given twice",
    f"{BASE} --log.sample-prompts no": "no cannot be read",
    f"{BASE} --train.step 3": "--train.step",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_start_is_one_sentence(line, base, capsys):
    assert cli.main(["sft", *line.split()]) == 2
    said = capsys.readouterr().err.splitlines()[-1]  # a slow machine prints progress before
    assert said.startswith("mjax: error: ")
    assert WRONG[line] in said


def test_text_is_not_conversations(base, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("Some text. " * 200)
    assert cli.main(["prepare", "a.txt", "--tokenizer", "run:runs/base", "--output", "text"]) == 0
    assert cli.main(["sft", "--init", "runs/base", "--data", "text"]) == 2
    assert "text.mask, the loss mask of conversations, does not exist" in capsys.readouterr().err
