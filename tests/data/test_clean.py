import json
import sys
from pathlib import Path

import pytest

from mjax import cli
from mjax.commands.clean import CleanArguments, clean
from mjax.errors import RunError, UsageError

QUESTION = "which of these fifteen words in a row belongs to no language that anybody living speaks"
SENTENCE = "Rain fell on the roofs and nobody in the long street came to a window. "
LONG = SENTENCE * 12


def lines(file, texts, key="text"):
    file.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)))
    return file


def read(file):
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def run(tmp_path, texts, **options):
    """Clean `texts`: what stays and the report."""
    file = lines(tmp_path / "in.jsonl", texts)
    options = {"workers": 1, "minimum_tokens": 0, "overwrite": True, **options}
    report = clean(CleanArguments(inputs=(file,), output=tmp_path / "out.jsonl", **options))
    return read(tmp_path / "out.jsonl"), report


def outputs(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.startswith("out")}


def step(report, name):
    (found,) = [each for each in report["changed"] + report["removed"] if each["name"] == name]
    return found


@pytest.fixture
def questions(tmp_path):
    return (lines(tmp_path / "questions.jsonl", [QUESTION], key="question"),)


@pytest.fixture
def hooks(tmp_path):
    file = tmp_path / "hooks.py"
    file.write_text(
        "def no_rain(text):\n    return 'rain' not in text\n"
        "def short(text):\n    return len(text) < 20\n"
        "def forgetful(text):\n    len(text)\n"
        "def fails(text):\n    return text[99]\n"
        "number = 3\n"
    )
    return file


# --- The steps --------------------------------------------------------------------------------------------------------


def test_broken_unicode_is_repaired_and_whole_text_is_not_touched(tmp_path):
    kept, report = run(tmp_path, ["It donâ€™t work, cafÃ©", "naïve 漢字 don't", "&lt;b&gt; &amp; ﬁne"])
    assert [one["text"] for one in kept] == ["It don't work, café", "naïve 漢字 don't", "<b> & fine"]
    repaired = step(report, "repaired")
    assert repaired["documents"] == 2
    assert repaired["examples"][0]["before"] == "It donâ€™t work, cafÃ©"
    assert repaired["examples"][0]["after"] == "It don't work, café"
    assert run(tmp_path, ["donâ€™t"], repair=False)[0] == [{"id": 0, "text": "donâ€™t"}]


def test_documents_of_fewer_than_128_words_are_removed_and_of_128_stay(tmp_path):
    kept, report = run(tmp_path, ["w " * 127, "w " * 128, ""], minimum_tokens=128)
    assert [one["id"] for one in kept] == [1]
    assert step(report, "fewer than 128 words")["documents"] == 2
    assert read(tmp_path / "out.removed.jsonl")[0] == {
        "source": f"{tmp_path / 'in.jsonl'}:1",
        "reason": "fewer than 128 words",
    }


@pytest.mark.parametrize("length", [9, 10, 11, 159, 160, 161, 1000])
def test_tokens_are_those_of_the_tokenizer(tmp_path, length):
    kept, report = run(tmp_path, ["é" * length], minimum_tokens=20, tokenizer="bytes")
    assert len(kept) == (2 * length >= 20)
    assert step(report, "fewer than 20 tokens")["documents"] == (2 * length < 20)


def test_a_text_whose_beginning_is_of_few_tokens_is_counted_to_its_end(tmp_path):
    for words, stays in ((127, 0), (128, 1)):
        assert len(run(tmp_path, [" " * 5000 + "w " * words], minimum_tokens=128)[0]) == stays


def test_functions_of_the_user_say_what_stays(tmp_path, hooks):
    keep = (f"{hooks}:short", f"{hooks}:no_rain")
    kept, report = run(tmp_path, ["some rain", "some sun", "a text that is too long"], keep=keep)
    assert [one["text"] for one in kept] == ["some sun"]
    assert [step(report, f"--keep {spec}")["documents"] for spec in keep] == [1, 1]
    assert [one["reason"] for one in read(tmp_path / "out.removed.jsonl")] == [f"--keep {keep[1]}", f"--keep {keep[0]}"]


def test_a_function_can_come_from_a_module(tmp_path, hooks, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    hooks.rename(tmp_path / "my_hooks.py")
    assert len(run(tmp_path, ["some rain", "sun"], keep=("my_hooks:no_rain",))[0]) == 1


def test_evaluation_text_is_cut_out_and_the_pieces_say_where_they_are_from(tmp_path, questions):
    text = f"{LONG}{QUESTION}. {LONG}"
    kept, report = run(tmp_path, [LONG, text], decontaminate=questions, decontaminate_key="question")
    source = f"{tmp_path / 'in.jsonl'}:2"
    assert kept == [
        {"id": 0, "text": LONG},
        {"id": 1, "text": (SENTENCE * 9)[:-1], "split_id": f"{source}-0000"},
        {"id": 1, "text": " " + SENTENCE * 9, "split_id": f"{source}-0001"},
    ]
    cut = step(report, "cut at evaluation text")
    assert (cut["documents"], cut["examples"][0]["pieces"]) == (1, 2)
    assert cut["examples"][0]["evaluation_text"] == " ".join(QUESTION.split()[:13])
    assert report["decontaminate"]["runs"] == 4
    assert report["decontaminate"]["runs_met"] == 4


def test_pieces_have_to_be_long_enough_and_wanted_as_well(tmp_path, questions, hooks):
    text = f"{LONG}{QUESTION}. {SENTENCE * 7} sun"
    options = {"decontaminate": questions, "decontaminate_key": "question", "minimum_tokens": 100}
    kept, _ = run(tmp_path, [text], **options)
    assert [one["split_id"][-4:] for one in kept] == ["0000"]
    (removed,) = read(tmp_path / "out.removed.jsonl")
    assert removed["split_id"].endswith(":1-0001")
    assert removed["reason"] == "fewer than 100 words"


def test_what_is_nothing_but_evaluation_text_or_falls_into_more_than_ten_pieces_goes(tmp_path, questions):
    eleven, twelve = (f"{SENTENCE * 7}{QUESTION}. " * 5 + LONG, f"{SENTENCE * 10}{QUESTION}. " * 10 + LONG)
    texts = [QUESTION, f"{LONG}{QUESTION}. " * 9 + LONG, f"{LONG}{QUESTION}. " * 10 + LONG, eleven, twelve]
    kept, report = run(tmp_path, texts, decontaminate=questions, decontaminate_key="question", common=1000)
    assert [one["id"] for one in kept if one["id"] == 1] == [1] * 10
    assert step(report, "nothing left beside evaluation text")["documents"] == 1
    assert step(report, "cut into more than 10 pieces")["documents"] == 2
    assert {one["id"] for one in kept} == {1, 3}


def test_runs_that_the_input_holds_ten_times_are_not_cut_out(tmp_path, questions):
    text = f"{LONG}{QUESTION}. {LONG}"
    options = {"decontaminate": questions, "decontaminate_key": "question"}
    assert len(run(tmp_path, [text] * 9, **options)[0]) == 18
    kept, report = run(tmp_path, [text] * 10, **options)
    assert report["decontaminate"]["common_runs"] == 4
    assert [one["text"] for one in kept] == [text] * 10


# --- The report -------------------------------------------------------------------------------------------------------


def everything(tmp_path, questions, hooks, **options):
    texts = ["donâ€™t", QUESTION, f"{LONG}{QUESTION}. {LONG}", LONG + "rain", LONG, f"{LONG}{QUESTION}. " * 10 + LONG]
    keep = (f"{hooks}:no_rain",)
    options = {"minimum_tokens": 50, "decontaminate_key": "question", "common": 99, **options}
    return run(tmp_path, texts * 20, keep=keep, decontaminate=questions, **{**options, "common": 10**6})


def test_the_report_adds_up(tmp_path, questions, hooks, capsys):
    kept, report = everything(tmp_path, questions, hooks)
    assert report == json.loads((tmp_path / "out.report.json").read_text())
    removed = sum(each["documents"] for each in report["removed"])
    assert removed == len(read(tmp_path / "out.removed.jsonl"))
    pieces = step(report, "more pieces by that")["documents"]
    assert report["read"]["documents"] + pieces - removed == report["kept"]["documents"] == len(kept)
    assert all(each["documents"] == 20 for each in report["changed"] + report["removed"])
    assert report["kept"]["bytes"] == sum(len(one["text"].encode()) for one in kept)
    assert max(len(each["examples"]) for each in report["removed"]) == 10
    shown = capsys.readouterr().out
    for what in ("120 documents", "− fewer than 50 words", "of 4 runs of words", "words between white space", "16.7%"):
        assert what in shown


def test_json_prints_the_report_and_nothing_else(tmp_path, capsys):
    run(tmp_path, [LONG], json=True)
    assert capsys.readouterr().out == (tmp_path / "out.report.json").read_text()


def test_the_result_does_not_depend_on_workers_or_blocks(tmp_path, questions, hooks, monkeypatch):
    everything(tmp_path, questions, hooks)
    alone = outputs(tmp_path)
    monkeypatch.setattr("mjax.data.blocks.SIZE", 1000)
    everything(tmp_path, questions, hooks, workers=2)
    assert outputs(tmp_path) == alone
    assert len(alone) == 3


def test_the_command_line_runs_it(tmp_path, questions, capsys):
    file = lines(tmp_path / "in.jsonl", [LONG])
    command = ["clean", str(file), "--output", str(tmp_path / "out.jsonl"), "--minimum-tokens", "10", "--no-repair"]
    command += ["--decontaminate", str(questions[0]), "--decontaminate-key", "question", "--tokenizer", "bytes"]
    assert cli.main(command) == 0
    assert "− fewer than 10 tokens" in capsys.readouterr().out


# --- What is refused --------------------------------------------------------------------------------------------------


def test_a_function_that_fails_or_forgets_to_answer_is_named_with_the_document(tmp_path, hooks):
    for name, message in (
        ("fails", "failed on .*:1: IndexError"),
        ("forgetful", "returned None for .*:1; .* True or False"),
    ):
        with pytest.raises(RunError, match=message):
            run(tmp_path, ["a text"], keep=(f"{hooks}:{name}",))
    assert outputs(tmp_path) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ()}, "no input; give .txt, .jsonl or .parquet files"),
        ({"minimum_tokens": -1}, "--minimum-tokens is -1"),
        ({"common": 0}, "--common is 0"),
        ({"tokenizer": "gpt5"}, "--tokenizer gpt5 is not a known kind"),
        ({"decontaminate": (Path("none.txt"),)}, "there is no file none.txt"),
        ({"decontaminate": (Path("in.jsonl"),)}, "--decontaminate in.jsonl has no text of 8 words or more"),
        ({"keep": ("hooks.py",)}, "--keep hooks.py names no function; use FILE.py:FUNCTION or MODULE:FUNCTION"),
        ({"keep": ("hooks.py:nothing",)}, "hooks.py has no function 'nothing'; it has .*no_rain, short"),
        ({"keep": ("hooks.py:number",)}, "has no function 'number'"),
        ({"keep": ("none.py:f",)}, "none.py cannot be loaded: FileNotFoundError"),
        ({"keep": ("no_such_module:f",)}, "no_such_module cannot be loaded: ModuleNotFoundError"),
        ({"output": Path("in.jsonl"), "overwrite": True}, "would overwrite the input in.jsonl"),
        ({"output": Path("out")}, r"--output out is not a \.jsonl file; give one such as out\.jsonl"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(tmp_path, monkeypatch, hooks, options, message):
    monkeypatch.chdir(tmp_path)
    lines(Path("in.jsonl"), ["a"])
    with pytest.raises(UsageError, match=message):
        clean(CleanArguments(**{"inputs": (Path("in.jsonl"),), "output": Path("out.jsonl"), **options}))
    assert sorted(file.name for file in tmp_path.iterdir() if file.name != "__pycache__") == ["hooks.py", "in.jsonl"]


def test_a_malformed_line_stops_the_run_or_is_skipped_and_counted(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\noops\n')
    arguments = {"inputs": (tmp_path / "in.jsonl",), "output": tmp_path / "out.jsonl", "minimum_tokens": 0}
    with pytest.raises(UsageError, match=r"in\.jsonl:2: .*--malformed skip"):
        clean(CleanArguments(**arguments))
    assert outputs(tmp_path) == {}
    assert clean(CleanArguments(**arguments, malformed="skip"))["malformed"]["documents"] == 1
