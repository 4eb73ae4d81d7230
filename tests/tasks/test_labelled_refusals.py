"""Errors in a task's files: one sentence that names the file, and the line where there is one."""

import json

import pytest

from mjax.data.tokenizers import ByteTokenizer
from mjax.errors import UsageError
from mjax.tasks.labelled import open_task
from tests.tasks.synthetic import tokenizer_of

MNLI = "index\tsentence1\tsentence2\tgold_label\n"
QQP = "id\tquestion1\tquestion2\tis_duplicate\n"
TEST = "id\tquestion1\tquestion2\n"
PASSAGE = {"id": "a", "article": "red", "questions": ["who ?"], "options": [["a", "b", "c", "d"]], "answers": ["A"]}
ASKED = {"id": "a", "question": "who ?", "answers": [{"text": "red", "answer_start": 0}]}
PAIR = {"sentence1": "a", "sentence2": "b"}


def paragraphs(*found):
    return json.dumps({"data": [{"paragraphs": list(found)}]})


def squad(*asked, context="red tree"):
    return paragraphs({"context": context, "qas": list(asked)})


def race(**changes):
    return json.dumps({key: value for key, value in (PASSAGE | changes).items() if value is not None})


TABLES = [  # task, contents of a file, the sentence; {} is the file
    ("mnli", None, "there is no file {}; give"),
    ("mnli", MNLI + "0\ta\tb\t-\n", "{} has no example; give"),
    ("mnli", MNLI + "0\ta\tb\n", "{}:2 has too few or too many fields, and it is not to be skipped; fix it"),
    (
        "mnli",
        MNLI + "0\ta\tb\tneutral\n1\t \tb\tneutral\n",
        "{}:3 has no sentence1, and it is not to be skipped; fix it",
    ),
    ("mnli", MNLI + "0\ta\tb\tmaybe\n", "{}:2 has 'maybe' for gold_label; it may be contradiction,"),
    ("mnli", MNLI.encode() + b"0\ta\t\xff\tneutral\n", "{}:2 is not UTF-8 (byte 4); give"),
    ("qqp", QQP + "0\ta\tb\tyes\n", "{}:2 has 'yes' for is_duplicate; it may be 0 or 1"),
    (
        "qqp",
        TEST + "0\ta\n",
        "{}:2 has too few or too many fields, and it is not to be skipped; fix it",
    ),
]
LINES = [  # the same, of .jsonl files
    ("mnli", '{"sentence1": "a"\n', "{}:1 is not JSON (Expecting ',' delimiter"),
    ("mnli", json.dumps(PAIR | {"sentence2": "\ud800"}), "{}:1 has an unpaired surrogate"),
    (
        "mnli",
        f"{json.dumps(PAIR)}\n{json.dumps(PAIR | {'gold_label': 'neutral'})}",
        "{} has labels for 1 of its 2 examples; give all, or none",
    ),
]
FOLDERS = [  # the same, of folders of texts
    ("race", None, "there is no folder {}; give one of RACE's"),
    ("race", "text", "{} is a file; give one of RACE's"),
    ("race", [], "the folder {} has no .txt file; give"),
    ("race", [race(questions=["who ?", 5])], "{}/0.txt:1: questions[1] is 5, which is not text;"),
    ("race", [race(options=[["a", "b", "c"]])], "{}/0.txt:1 has a question without four options;"),
    ("race", [race(answers=["E"])], "{}/0.txt:1 has an answer that is not A, B, C or D;"),
    ("race", [race(answers=["A", "B"])], "{}/0.txt:1 has not as many options and answers as questions;"),
    ("race", [race(), race()], "the id a is twice in {}; leave one out"),
]
OBJECTS = [  # the same, of .json files
    ("squad1.1", b"\xff", "{}:1 is not UTF-8 (byte 0); give"),
    ("squad1.1", "\n", "{} is empty;"),
    ("squad1.1", "[" * 100_000, "{} is not JSON ("),
    ("squad1.1", "[1]", "{}: the content is [1], which is not an object;"),
    ("squad1.1", paragraphs({"qas": []}), "{}: there is no data[0].paragraphs[0].context;"),
    ("squad1.1", squad({"id": "a"}), "{}: there is no data[0].paragraphs[0].qas[0].question;"),
    ("squad1.1", squad(ASKED, ASKED | {"answers": [{"text": "red"}]}), "data[0].paragraphs[0].qas[1].answers is "),
    ("squad1.1", squad(ASKED | {"answers": []}), "{}, question a has no answer, which SQuAD 1.1 does not allow;"),
    ("squad2.0", squad(ASKED, ASKED), "the question a is twice in {}; leave one out"),
    ("squad2.0", squad(ASKED, context=" \n"), "{}, question a is about a context without text"),
    ("squad2.0", squad(ASKED | {"question": "who " * 40}), "a row of 32 has no room left for a context; use rows of"),
]
CASES = [
    (f"data{ending}", *case)
    for ending, cases in ((".tsv", TABLES), (".jsonl", LINES), ("", FOLDERS), (".json", OBJECTS))
    for case in cases
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("vocabulary"))


@pytest.mark.parametrize(("file", "name", "contents", "words"), CASES)
def test_malformed_file_gets_one_sentence(tmp_path, tokenizer, file, name, contents, words):
    path = tmp_path / file
    if isinstance(contents, list):
        path.mkdir()
        for number, text in enumerate(contents):
            (path / f"{number}.txt").write_text(text)
    elif contents is not None:
        path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    with pytest.raises(UsageError) as rejected:
        open_task(name, [], [str(path)], tokenizer, 32)
    assert words.format(path) in str(rejected.value)
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize(
    ("name", "train", "validation", "words"),
    [
        ("qqp", TEST + "0\ta\tb\n", [], "has no labels to train on; give the training file"),
        ("mnli", None, [MNLI + "0\ta\tb\tneutral\n"] * 2, "would both be called matched; give one, or rename"),
        ("squad2", None, [], "there is no task squad2; did you mean squad2.0"),
    ],
)
def test_wrong_combination_gets_one_sentence(tmp_path, tokenizer, name, train, validation, words):
    (tmp_path / "train.tsv").write_text(train or "")
    for text in validation:
        (tmp_path / "dev_matched.tsv").write_text(text)
    given = [str(tmp_path / "train.tsv")] if train else []
    with pytest.raises(UsageError, match=words):
        open_task(name, given, [str(tmp_path / "dev_matched.tsv") for _ in validation], tokenizer, 32)


def test_tokenizer_without_cls_is_rejected():
    with pytest.raises(UsageError, match="the tokenizer is of kind bytes, and this task needs a BERT's"):
        open_task("mnli", [], [], ByteTokenizer(), 32)
