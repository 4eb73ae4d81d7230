"""A model in one file: every command takes a run of it with `--config FILE.py`, and executes nothing else."""

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest

import mjax
from mjax.commands import cli
from mjax.config import load_config
from mjax.config.model import REGISTRY
from mjax.config.model_file import source_file
from mjax.config.run import write_config
from mjax.doctor import RED, MachineInfo
from mjax.doctor.checks import examine
from mjax.errors import UsageError
from mjax.models.build import count_parameters
from mjax.run.metrics import read_metrics
from tests.conftest import ROOT
from tests.test_runs_command import make_run

PALM = re.search(
    r"```python\n(# palm\.py.*?)```", (ROOT / "docs" / "extend" / "add-a-model.md").read_text(), re.DOTALL
)[1]
TRAIN = """train --data.path data/corpus --data.split 80,20,0 --name 'my palm' --mesh.data 1 --train.eval-interval 2
--train.eval-batches 1 --optimizer.warmup-steps 0 --optimizer.decay-steps 4
--log.sample-tokens 4"""
RUN, FILE = "runs/my palm", "my models/palm.py"


@pytest.fixture(autouse=True)
def unregistered():
    yield
    REGISTRY.pop("palm", None)


def test_readme_counts_the_lines_of_the_example():
    lines = sum(bool(line.strip()) for line in PALM.splitlines())
    readme = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text())
    assert f"{lines} lines of code in the example" in readme


def test_latent_attention_of_own_is_short():
    assert len((ROOT / "tests" / "models" / "own_models" / "mla.py").read_text().splitlines()) <= 150


def command(*argv):
    """The exit code of a command in a process that knows the models of mjax only."""
    REGISTRY.pop("palm", None)
    return cli.main([word for part in argv for word in shlex.split(part)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory, quick_runs):
    """A folder with data, the file, and a run of two steps."""
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("mjax.run.loop.check_devices", lambda *_: None)
        (folder / "text.txt").write_text("the city of the sea and the sea of the city\n" * 200)
        assert (
            cli.main(shlex.split("prepare text.txt --tokenizer bytes --output data/corpus --split-documents 20")) == 0
        )
        (folder / "my models").mkdir()
        (folder / FILE).write_text(PALM)
        assert command(TRAIN, "--train.steps 2", "--config 'my models/palm.py'") == 0
    return folder


@pytest.fixture
def place(trained, tmp_path, monkeypatch):
    """A copy of the folder, so that no test sees another's changes; the file's path is still the first one."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mjax.run.loop.check_devices", lambda *_: None)
    return tmp_path


def test_run_of_own_model_resumes_bit_for_bit(place, capsys):
    assert command(TRAIN, "--train.steps 4 --name whole --config 'my models/palm.py'") == 0
    whole = [record["loss"] for record in read_metrics(place / "runs" / "whole" / "metrics.jsonl")]
    again = shutil.copytree(place / RUN, place / "runs" / "again")
    assert command(TRAIN, "--train.steps 4 --config 'my models/palm.py'") == 0  # the same command
    assert command("train --run runs/again --config 'my models/palm.py' --train.steps 4") == 0
    for folder in (place / RUN, again):
        assert [record["loss"] for record in read_metrics(folder / "metrics.jsonl")] == whole
    assert json.loads((again / "model.json").read_text())["file"] == str(place / FILE)


def test_last_line_of_run_works_as_printed(place, capsys):
    assert command(TRAIN, "--train.steps 4 --config 'my models/palm.py'") == 0
    *_, line = capsys.readouterr().out.splitlines()
    words = shlex.split(line.partition("mjax ")[2])
    assert words[:3] == ["generate", "--run", RUN]
    REGISTRY.pop("palm")
    assert cli.main([*words[:-1], "the city", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("the city")


def test_commands_use_run_with_config_from_anywhere(place, capsys, monkeypatch):
    monkeypatch.chdir(place / "runs")
    config = "--config '../my models/palm.py'"
    assert command("generate --run 'my palm' --prompt a --tokens 2 --json", config) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 2
    assert command("evaluate --run 'my palm' --task perplexity --data ../text.txt --json", config) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(5.5, abs=0.3)
    assert command("plan --run 'my palm' --json", config) == 0
    assert json.loads(capsys.readouterr().out)["run"]["parameters"] == 115_136


NEED_IT = [
    "generate --run 'runs/my palm' --prompt a",
    "evaluate --run 'runs/my palm' --task perplexity --data text.txt",
    "train --run 'runs/my palm'",
    "train --config 'runs/my palm/config.json' --name new",
    "plan --run 'runs/my palm'",
    "convert to-hf 'runs/my palm' out",
]


@pytest.mark.parametrize("line", NEED_IT)
def test_command_without_config_says_what_to_type(line, place, trained, capsys):
    (trained / FILE).write_text(f"raise SystemExit(9)\n{PALM}")  # nothing may execute it
    try:
        assert command(line) == 2
    finally:
        (trained / FILE).write_text(PALM)
    error = capsys.readouterr().err
    assert f"contains 'palm', a custom model defined in {trained / FILE};" in error
    assert f"type --config '{trained / FILE}', or in Python call mjax.load_config(" in error


def test_settings_and_curves_need_no_class(place, capsys, monkeypatch):
    make_run(place / "runs" / "gpt")
    assert command("runs --json") == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (rows["my palm"]["model"], rows["my palm"]["parameters"]) == ("palm 2 × 64", 115_136)
    assert command("runs compare 'my palm' gpt --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"]["my palm"]["parameters"] == 115_136
    assert found["settings"]["model.positions"] == {"my palm": None, "gpt": "learned"}
    (place / RUN / "model.json").unlink()  # of a run of an older version
    assert command("runs --json") == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (rows["my palm"]["state"], rows["my palm"]["parameters"]) == ("done", None)


def test_export_of_own_model_is_one_sentence(place, capsys):
    assert command("convert to-hf 'runs/my palm' out --config 'my models/palm.py'") == 2
    sentence = "has no names for a GPT with parallel layers; state `families` in its config, or use `mjax.open_run(RUN)"
    assert sentence in capsys.readouterr().err
    assert not (place / "out").exists()


@pytest.mark.ci
def test_own_model_with_names_opens_in_transformers(place):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    file, ids = ROOT / "tests" / "models" / "own_models" / "mla.py", list(b"the city of the sea")
    assert command(f"train --config '{file}' --data.path data/corpus --name latent --train.steps 2") == 0
    assert command(f"convert to-hf runs/latent out --config '{file}'") == 0
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained("out")(torch.tensor([ids])).logits[0]
    (logits,) = mjax.logits("runs/latent", [ids], compute="fp32")
    np.testing.assert_allclose(logits, expected, atol=1e-6)


EDITS = {
    "note": (lambda text: f"{text}\n# edited", 0, "note: {run} was trained with the model of {before}, which differs"),
    "error": (lambda text: f"{text}\nx = nowhere", 2, "raises NameError: name 'nowhere' is not defined; fix the file"),
    "syntax": (lambda text: f"{text}\ndef f(:", 2, "raises SyntaxError: invalid syntax"),
    "shape": (lambda text: text.replace("width = 4 *", "width = 2 *"), 2, "of shape (2, 256, 64), this config needs"),
    "another": (lambda text: text.replace('"palm"', '"balm"'), 2, "registers no 'palm', the model of {run}; it was"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_file_is_told(edit, place, trained, capsys):
    change, code, words = EDITS[edit]
    (place / FILE).write_text(change(PALM))
    assert command("generate --run 'runs/my palm' --prompt a --tokens 1 --config 'my models/palm.py'") == code
    assert words.format(run=RUN, before=trained / FILE) in capsys.readouterr().err
    REGISTRY.pop("balm", None)


def test_field_the_class_lacks_is_refused(place, capsys):
    file = place / RUN / "config.json"
    file.write_text(file.read_text().replace('"kind": "palm"', '"kind": "palm", "gate": true'))
    assert command("generate --run 'runs/my palm' --prompt a --config 'my models/palm.py'") == 2
    assert f"unknown field model.gate; PalmConfig is defined in {place / FILE}" in capsys.readouterr().err
    file.write_text(file.read_text().replace('"gate"', '"a b"'))
    assert command("runs --json") == 0
    assert "cannot be read: runs/my palm/config.json" in capsys.readouterr().out


def test_moved_file_is_asked_for(place, trained, capsys):
    record = place / RUN / "model.json"
    record.write_text(record.read_text().replace(str(trained), "/elsewhere"))
    assert command("generate --run 'runs/my palm' --prompt a") == 2
    assert "/my models/palm.py, which no longer exists;" in (error := capsys.readouterr().err)
    assert "type --config FILE.py" in error
    assert command("generate --run 'runs/my palm' --prompt a --tokens 1 --config 'my models/palm.py'") == 0
    assert "note" not in capsys.readouterr().err  # the content is the same


@pytest.mark.ci
def test_continuing_with_edited_file_notes_it_once(place, capsys):
    (place / FILE).write_text(f"{PALM}\n# edited")
    again = "train --run 'runs/my palm' --config 'my models/palm.py' --train.steps"
    assert command(again, "3") == 0
    assert "note: runs/my palm was trained with the model of" in capsys.readouterr().out
    assert command(again, "4") == 0
    assert "note: runs/my palm was" not in capsys.readouterr().out


def test_config_of_run_of_mjax_is_refused(place, capsys):
    make_run(place / "runs" / "gpt")
    assert command("generate --run runs/gpt --prompt a --config 'my models/palm.py'") == 2
    assert "has no effect on runs/gpt, which has a GPT; remove it" in capsys.readouterr().err


def test_python_uses_class_that_is_loaded(place, trained, capsys):
    with pytest.raises(UsageError, match=r"in Python call mjax\.load_config\("):
        mjax.open_run(RUN)
    first = mjax.load_config(str(trained / FILE))
    assert mjax.open_run(RUN).step == 2
    assert "note" not in capsys.readouterr().out
    assert mjax.generate(RUN, ids=[[1, 2]], tokens=1)
    assert mjax.hidden_states(RUN, [[1, 2]])[0].shape == (3, 2, 64)
    assert mjax.log_probs(RUN, [[1, 2]])[0].shape == (1,)
    with pytest.raises(UsageError, match=r"needs layers of the class Block .* PalmLayer of a GPT with parallel layers"):
        mjax.attention_weights(RUN, [[1, 2]])
    (place / FILE).write_text(PALM.replace("width = 4 *", "width = 2 *"))  # the same names in another folder
    second = mjax.load_config(FILE)
    assert [source_file(type(config.model)) for config in (first, second)] == [str(trained / FILE), str(place / FILE)]
    sizes = [count_parameters(config.model) for config in (first, second)]
    assert sizes[0] - sizes[1] == 2 * 2 * 2 * 64 * 64
    with pytest.raises(UsageError, match="this config needs"):
        mjax.open_run(RUN)
    assert f"which differs from the model of {place / FILE}" in capsys.readouterr().out


def test_written_config_imports_own_class(place, monkeypatch):
    config = load_config(FILE)
    write_config(replace(config, train=replace(config.train, steps=7)), place / "found.py", "Found.")
    REGISTRY.pop("palm")
    for name in [name for name in sys.modules if name.startswith("mjax_config_")]:
        monkeypatch.delitem(sys.modules, name)
    assert load_config("found.py").train.steps == 7


@pytest.mark.ci
def test_doctor_knows_own_model_in_its_child(place):
    facts = MachineInfo(name=FILE, environment=os.environ | {"PYTHONPATH": str(ROOT)})
    (found, *_) = examine(facts, lambda name: None, ("storage",))
    assert found.status != RED, found.found
