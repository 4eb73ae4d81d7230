"""What is wrong with a task's files is said in one sentence that names the file, and the line where there is one."""

import json

import pytest

from mjax.data.tokenizers import ByteTokenizer
from mjax.errors import UsageError
from mjax.tasks.labelled import open_task
from tests.tasks.synthetic import tokenizer_of

MNLI = "index\tsentence1\tsentence2\tgold_label\n"
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
PASSAGE = {"id": "a", "article": "red", "questions": ["who ?"], "options": [["a", "b", "c", "d"]], "answers": ["A"]}
ASKED = {"id": "a", "question": "who ?", "answers": [{"text": "red", "answer_start": 0}]}


def squad(*asked, context="red tree"):
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": list(asked)}]}]})


def race(**changes):
    return json.dumps({key: value for key, value in (PASSAGE | changes).items() if value is not None})


TABLE = [
    # task, name of the file, its contents, role, the sentence; {} is the file
    ("mnli", "none.tsv", None, "train", "there is no file {}; give the task's files as published"),
    ("mnli", "a.tsv", "", "train", "{}:1 names no column sentence1 and no sentence2; give the published file"),
    ("mnli", "a.tsv", "index\tsentence1\n", "train", "{}:1 names no column sentence2; give"),
    ("mnli", "a.tsv", MNLI, "train", "{} has no example; give"),
    ("mnli", "a.tsv", MNLI + "0\ta\tb\t-\n", "train", "{} has no example; give"),
    ("mnli", "a.tsv", MNLI + "0\ta\tb\n", "train", "{}:2 has 3 fields, not 4; fix it"),
    ("mnli", "a.tsv", MNLI + "0\ta\tb\tneutral\n1\t \tb\tneutral\n", "train", "{}:3 lacks a sentence; fix it"),
    ("mnli", "a.tsv", MNLI + "0\ta\tb\tmaybe\n", "train", "{}:2 has the gold label 'maybe'; it may be contradiction,"),
    ("mnli", "a.tsv", MNLI.encode() + b"0\ta\t\xff\tneutral\n", "train", "{}:2 is not UTF-8 (byte 4); give"),
    ("mnli", "a.tsv", "index\tsentence1\tsentence2\n0\ta\tb\n", "train", "{} has no labels to train on; give"),
    ("mnli", "a.jsonl", '{"sentence1": "a"\n', "train", "{}:1 is not JSON (Expecting ',' delimiter"),
    ("mnli", "a.jsonl", '["a"]\n', "train", "{}:1 is '[\"a\"]', not a JSON object"),
    ("mnli", "a.jsonl", '{"sentence1": "a", "sentence2": 5}\n', "train", "{}:1 lacks a sentence; fix it"),
    ("mnli", "a.jsonl", '{"sentence1": "a", "sentence2": "\\ud800"}', "train", "{}:1 has half of a surrogate pair"),
    (
        "mnli",
        "a.jsonl",
        '{"sentence1": "a", "sentence2": "b"}\n{"sentence1": "a", "sentence2": "b", "gold_label": "neutral"}\n',
        "validation",
        "{} has labels for 1 of its 2 examples; give a file that has all",
    ),
    ("qqp", "a.tsv", "id\tquestion1\n", "train", "{}:1 names no column question2; give"),
    ("qqp", "a.tsv", QQP + "0\t1\t2\ta\tb\tyes\n", "train", "{}:2 has 'yes' for is_duplicate; it may be 0 or 1"),
    ("qqp", "a.tsv", QQP + "0\t1\t2\ta\n", "train", "{} has no example; give"),
    (
        "qqp",
        "a.tsv",
        "id\tquestion1\tquestion2\n0\ta\n",
        "validation",
        "{}:2 has 2 fields, not 3, and each pair needs a prediction; fix it",
    ),
    ("qqp", "a.tsv", "id\tquestion1\tquestion2\n0\ta\t \n", "validation", "{}:2 has an empty question2, and each"),
    ("race", "none", None, "train", "there is no folder {}; give one of RACE's"),
    ("race", "dev", [], "train", "the folder {} has no .txt file; give one of RACE's"),
    ("race", "dev", [""], "train", "{} has no example; give"),
    ("race", "dev", [race(id=None)], "train", "{}/0.txt:1 lacks an id, an article or questions;"),
    ("race", "dev", [race(questions=["who ?", 5])], "train", "{}/0.txt:1 lacks an id, an article or questions;"),
    ("race", "dev", [race(options=[["a", "b", "c"]])], "train", "{}/0.txt:1 has a question without four options;"),
    ("race", "dev", [race(answers=["E"])], "train", "{}/0.txt:1 has an answer that is not A, B, C or D;"),
    ("race", "dev", [race(answers=["A", "B"])], "train", "{}/0.txt:1 has 1 questions, options for 1 and 2 answers;"),
    ("race", "dev", [race(options=[])], "train", "{}/0.txt:1 has 1 questions, options for 0 and 1 answers;"),
    ("race", "dev", [race(answers=None)], "train", "{} has no labels to train on; give"),
    ("race", "dev", [race(), race(id="b", answers=None)], "validation", "{} has labels for 1 of its 2 examples"),
    ("race", "dev", [race(), race()], "validation", "the id a is twice in {}; leave one out"),
    ("squad1.1", "none.json", None, "train", "there is no file {}; give"),
    ("squad1.1", "a.json", b"\xff", "train", "{} is not UTF-8 (byte 0); give"),
    ("squad1.1", "a.json", "[" * 100_000, "train", "{} is not JSON ("),
    ("squad1.1", "a.json", '{"data": []', "train", "{} is not JSON (Expecting ',' delimiter"),
    ("squad1.1", "a.json", "[1]", "train", "{} is '[1]', not a JSON object"),
    ("squad1.1", "a.json", '{"version": "1.1"}', "train", "{} has no list 'data'"),
    ("squad1.1", "a.json", '{"data": [{"title": "a"}]}', "train", "{}, data[0] has no list 'paragraphs'"),
    ("squad1.1", "a.json", '{"data": [{"paragraphs": [7]}]}', "train", "{}, data[0].paragraphs[0] is not an object"),
    (
        "squad1.1",
        "a.json",
        '{"data": [{"paragraphs": [{"qas": []}]}]}',
        "train",
        "{}, data[0].paragraphs[0] lacks 'context' or 'qas'",
    ),
    ("squad1.1", "a.json", '{"data": []}', "train", "{} has no example; give"),
    ("squad1.1", "a.json", squad({"id": "a"}), "train", "{}, data[0].paragraphs[0].qas[0] lacks 'id' or 'question'"),
    (
        "squad1.1",
        "a.json",
        squad(ASKED, ASKED | {"answers": [{"text": "red", "answer_start": "0"}]}),
        "train",
        "{}, data[0].paragraphs[0].qas[1] has an answer without 'text' or 'answer_start'",
    ),
    ("squad1.1", "a.json", squad(ASKED | {"answers": "red"}), "train", "has an answer without 'text'"),
    ("squad1.1", "a.json", squad(ASKED | {"answers": []}), "train", "has no answer, which SQuAD 1.1 does not allow;"),
    ("squad1.1", "a.json", squad({"id": "a", "question": "who"}), "train", "{} has no labels to train on"),
    ("squad2.0", "a.json", squad(ASKED, {"id": "b", "question": "who"}), "validation", "{} has labels for 1 of its 2"),
    ("squad2.0", "a.json", squad(ASKED, ASKED), "validation", "the question a is twice in {}; leave one out"),
    ("squad2.0", "a.json", squad(ASKED, context=" \n"), "train", "{}, question a is about a context without text"),
    (
        "squad2.0",
        "a.json",
        squad(ASKED | {"question": "who " * 40}),
        "train",
        "{}, question a has 40 tokens, and a row of 32 has no room left for a context; use rows of 192 tokens",
    ),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("vocabulary"))


@pytest.mark.parametrize(("name", "file", "contents", "role", "sentence"), TABLE)
def test_a_malformed_file_is_answered_with_one_sentence(tmp_path, tokenizer, name, file, contents, role, sentence):
    path = tmp_path / file
    if isinstance(contents, list):
        path.mkdir()
        for number, text in enumerate(contents):
            (path / f"{number}.txt").write_text(text)
    elif contents is not None:
        path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    files = {"train": [], "validation": []} | {role: [str(path)]}
    with pytest.raises(UsageError) as refused:
        open_task(name, **files, tokenizer=tokenizer, positions=32)
    assert sentence.format(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_validation_files_of_one_name_are_refused(tmp_path, tokenizer):
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "dev_matched.tsv").write_text(MNLI + "0\ta\tb\tneutral\n")
        files.append(str(tmp_path / folder / "dev_matched.tsv"))
    with pytest.raises(UsageError, match="would both be called matched; give one, or rename the other"):
        open_task("mnli", [], files, tokenizer, 32)


def test_an_unknown_task_is_answered_with_the_known_ones(tokenizer):
    with pytest.raises(
        UsageError, match=r"there is no task 'squad2', did you mean 'squad2.0'\?; use mnli, qqp, race, "
    ):
        open_task("squad2", [], [], tokenizer, 32)


def test_a_tokenizer_without_cls_and_sep_is_refused():
    with pytest.raises(UsageError, match="the model's tokenizer is of kind bytes, and rows of this task need a BERT's"):
        open_task("mnli", [], [], ByteTokenizer(), 32)
