"""MNLI, QQP and RACE: rows made of their files, metrics and predictions made of outputs."""

import json

import numpy as np
import pytest

from mjax.errors import RunError
from mjax.tasks.labelled import RECIPES, TASKS, open_task
from mjax.tasks.labelled_task import TokenPair, build_examples, clean_text
from tests.tasks.synthetic import MNLI_COLUMNS, VOCABULARY, tokenizer_of, write_task


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    # Padding has not the id 0, as in the vocabularies of some models.
    return tokenizer_of(tmp_path_factory.mktemp("vocabulary"), [*VOCABULARY[1:], "[PAD]"])


def words(tokenizer, row):
    pieces = {number: piece for piece, number in tokenizer.backend.get_vocab().items()}
    return " ".join(pieces[int(token)] for token in row)


def values(task, outputs):
    return {metric.name: metric.value for metric in task.metrics(outputs)}


def outputs_for(labels, classes):
    return np.eye(classes, dtype=np.float32)[labels]


# --- Rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "row", "types", "text"),
    [
        ("red house", "bird", "[CLS] red house [SEP] bird [SEP] [PAD] [PAD]", "00001100", "11111100"),
        ("red house", "bird tree stone who", "[CLS] red house [SEP] bird tree stone [SEP]", "00001111", "11111111"),
        ("red " * 6, "bird", "[CLS] red red red red red red [SEP]", "00000000", "11111111"),
        ("", "bird", "[CLS] [SEP] bird [SEP] [PAD] [PAD] [PAD] [PAD]", "00110000", "11110000"),
    ],
)
def test_row_holds_both_texts_up_to_its_end(tokenizer, a, b, row, types, text):
    pair = TokenPair(tokenizer.encode(a), tokenizer.encode(b))
    examples = build_examples([pair, pair], 2, {"label": [1]}, tokenizer, 8)
    assert examples.tokens.shape == (1, 2, 8)
    assert examples.tokens.dtype == examples.token_types.dtype == examples.labels["label"].dtype == np.int32
    for choice in range(2):
        assert words(tokenizer, examples.tokens[0, choice]) == row
        assert "".join(map(str, examples.token_types[0, choice])) == types
        assert "".join(str(int(one)) for one in examples.text[0, choice]) == text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("one\ntwo\t three  four", "one two three four"),
        ("The end . Or not .", "The end. Or not ."),
        ("so . . . . end", "so. ... end"),
    ],
)
def test_white_space_is_cleaned_as_in_megatron(text, clean):
    assert clean_text(text) == clean


@pytest.mark.parametrize("name", RECIPES)
def test_published_format_is_read_whole(name, tmp_path):
    """The right outputs have the highest metric."""
    assert list(TASKS) == list(RECIPES)
    files = write_task(tmp_path, name, train=40, validation=16)
    task = open_task(name, files.train, files.validation, files.tokenizer, 48)
    assert task.notes == []
    assert task.train.tokens.shape == (40, task.choices, 48)
    assert sum(len(examples.tokens) for examples in task.validation.values()) == 16
    assert files.tokenizer.unk not in task.train.tokens
    found = values(task, {key: right_outputs(task, examples) for key, examples in task.validation.items()})
    assert found[task.metric] == (100 if task.head == "span" else 1)


def right_outputs(task, examples):
    """Outputs that are highest at the labels."""
    width = {"classification": task.classes, "multiple_choice": task.choices, "span": 48}[task.head]
    found = np.stack([outputs_for(label, width) for label in examples.labels.values()], axis=1)
    return found if task.head == "span" else found[:, 0]


# --- MNLI -------------------------------------------------------------------------------------------------------------


def mnli_file(path, *rows, columns=MNLI_COLUMNS, end="\n"):
    """A table whose rows are (first, second, label) or (first, second)."""
    lines = ["\t".join(columns)]
    for number, row in enumerate(rows, start=7):
        fields = dict.fromkeys(columns, "-") | {"index": str(number), "pairID": f"{number}n"}
        fields |= dict(zip(("sentence1", "sentence2", "gold_label"), row, strict=False))
        lines.append("\t".join(fields[column] for column in columns))
    path.write_bytes("".join(line + end for line in lines).encode("utf-8-sig"))  # Windows puts a mark in front
    return str(path)


def test_mnli_reads_every_published_table(tokenizer, tmp_path):
    """Columns are found by name; .jsonl is read too."""
    rows = [("a red house", "never", "contradiction"), ("who", "we saw ?", "entailment"), ("tree", "tree", "neutral")]
    # train.tsv has one annotator's label, the dev files five; the original files other columns in front.
    five = [*MNLI_COLUMNS[:-1], "label2", "label3", "label4", "label5", "gold_label"]
    original = ["gold_label", "sentence1_binary_parse", "sentence1", "sentence2", "promptID", "pairID"]
    train = mnli_file(tmp_path / "train.tsv", *rows)
    keys = ("sentence1", "sentence2", "gold_label", "pairID")
    lines = [dict(zip(keys, (*row, f"{number}n"), strict=True)) for number, row in enumerate(rows)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [
        mnli_file(tmp_path / "dev_matched.tsv", *rows, columns=five, end="\r\n"),
        mnli_file(tmp_path / "dev_mismatched.tsv", *rows, columns=original),
        str(tmp_path / "lines.jsonl"),
    ]
    task = open_task("mnli", [train], files, tokenizer, 10)
    assert (task.head, task.classes, task.choices, task.metric) == ("classification", 3, 1, "accuracy")
    assert list(task.validation) == ["matched", "mismatched", "lines"]
    assert task.notes == []
    for examples in (task.train, *task.validation.values()):
        assert examples.labels["label"].tolist() == [0, 1, 2]
        np.testing.assert_array_equal(examples.tokens, task.train.tokens)
    assert words(tokenizer, task.train.tokens[1, 0]) == "[CLS] who [SEP] we saw ? [SEP] [PAD] [PAD] [PAD]"
    predicted = task.predictions({"lines": outputs_for([2, 0, 1], 3)})["lines.tsv"]
    assert predicted == "index\tprediction\n0n\tneutral\n1n\tcontradiction\n2n\tentailment\n"


def test_mnli_skips_and_counts_pairs_without_label(tokenizer, tmp_path):
    """Rows that are truncated are counted too."""
    rows = ("red " * 8, "never", "-"), ("red " * 7, "saw", "neutral"), ("red " * 6, "is", "neutral"), ("we", "is", "-")
    file = mnli_file(tmp_path / "train.tsv", *rows)
    task = open_task("mnli", [file], [file], tokenizer, 10)
    assert task.train.labels["label"].tolist() == [2, 2]
    assert task.notes[:2] == [
        f"{file}: 2 of 4 pairs were skipped, such as that of {file}:2, which has the label -",
        f"{file}: 1 of 2 rows (50.0%) have more than 10 tokens and are truncated at the end",
    ]
    assert values(task, {"train": outputs_for([2, 2], 3)})["accuracy"] == 1


# --- QQP --------------------------------------------------------------------------------------------------------------

QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"


def test_qqp_skips_and_counts_broken_lines(tokenizer, tmp_path):
    good = '4\t1\t2\twhat is "red" ?\twho came ?\t1\n9\t1\t2\twho\twhat\t0\n'
    broken = "5\t1\t2\twhat is\nred ?\twho came ?\t1\n6\t1\t2\t\twho\t0\n\n7\t1\t2\twhat\twho\t\n"
    file = tmp_path / "train.tsv"
    file.write_text(QQP + good + broken)
    task = open_task("qqp", [str(file)], [], tokenizer, 16)
    assert task.train.labels["label"].tolist() == [1, 0]
    assert words(tokenizer, task.train.tokens[0, 0, :11]) == "[CLS] what is [UNK] red [UNK] ? [SEP] who came ?"
    assert task.notes == [
        f"{file}: 4 of 6 pairs were skipped, such as that of {file}:4, which has too few or too many fields"
    ]


def test_qqp_has_accuracy_and_f1_of_duplicates(tokenizer, tmp_path):
    (tmp_path / "dev.tsv").write_text(QQP + "".join(f"{n}\t1\t2\twho\twhat\t{int(n < 3)}\n" for n in range(8)))
    task = open_task("qqp", [], [str(tmp_path / "dev.tsv")], tokenizer, 16)
    outputs = {"validation": outputs_for([1, 1, 0, 1, 0, 0, 0, 0], 2)}
    assert values(task, outputs) == {"accuracy": 6 / 8, "correct": 6, "f1": 2 * 2 / (2 * 2 + 1 + 1)}
    assert values(task, {"validation": outputs_for([0] * 8, 2)})["f1"] == 0
    assert task.predictions(outputs)["validation.tsv"].startswith("index\tprediction\n0\t1\n1\t1\n2\t0\n")
    for made in (task.metrics, task.predictions):
        with pytest.raises(RunError, match="the model's outputs for validation are not finite"):
            made({"validation": np.full((8, 2), np.nan, np.float32)})


# --- RACE -------------------------------------------------------------------------------------------------------------


def race_file(folder, name, questions, answers="A", article="We saw a tree .\n The bird sleeps ."):
    folder.mkdir(parents=True, exist_ok=True)
    options = [["red", "old", "small house", "gold"]] * len(questions)
    passage = {"id": name, "article": article, "questions": questions, "options": options}
    (folder / name).write_text(json.dumps(passage | ({"answers": list(answers)} if answers else {})))


def test_race_rows_are_option_then_article(tokenizer, tmp_path):
    race_file(tmp_path / "RACE/train/high", "high1.txt", ["what is _ ?", "who came ?"], "DB")
    task = open_task("race", [str(tmp_path / "RACE/train")], [], tokenizer, 20)
    assert (task.head, task.classes, task.choices, task.metric) == ("multiple_choice", 1, 4, "accuracy")
    assert task.train.tokens.shape == (2, 4, 20)
    assert task.train.labels["label"].tolist() == [3, 1]
    article = "we saw a tree . the bird sleeps . [SEP]"
    assert words(tokenizer, task.train.tokens[0, 2]) == f"[CLS] what is small house ? [SEP] {article} [PAD] [PAD] [PAD]"
    assert words(tokenizer, task.train.tokens[1, 1]) == f"[CLS] who came ? old [SEP] {article}" + " [PAD]" * 4


def test_race_truncates_questions(tokenizer, tmp_path):
    race_file(tmp_path / "dev/middle", "middle1.txt", ["red " * 200], "A")
    task = open_task("race", [], [str(tmp_path / "dev")], tokenizer, 140)
    (row,) = task.validation["middle"].tokens[:, 0]
    assert words(tokenizer, row) == "[CLS]" + " red" * 128 + " [SEP] we saw a tree . the bird sleeps . [SEP]"


def test_race_is_measured_and_predicted_by_levels(tokenizer, tmp_path):
    race_file(tmp_path / "dev/middle", "middle2.txt", ["who ?"], "C")
    race_file(tmp_path / "dev/middle", "middle1.txt", ["who ?", "what ?"], "AB")
    race_file(tmp_path / "dev/high", "high9.txt", ["who ?"], "D")
    task = open_task("race", [], [str(tmp_path / "dev")], tokenizer, 32)
    outputs = {"middle": outputs_for([0, 2, 2], 4), "high": outputs_for([1], 4)}
    found = {"accuracy": 2 / 4, "middle_accuracy": 2 / 3, "high_accuracy": 0, "correct": 2}
    assert values(task, outputs) == found
    files = task.predictions(outputs)
    answers = {"middle1.txt": ["A", "C"], "middle2.txt": ["C"], "high9.txt": ["B"]}
    assert {name: json.loads(text) for name, text in files.items()} == {"predictions.json": answers}


# --- Without labels ---------------------------------------------------------------------------------------------------


PAIRS = "index\tsentence1\tsentence2\n7\tred\t-\n"
ENTAILED = "index\tprediction\n7\tentailment"


@pytest.mark.parametrize(
    ("name", "files", "predictions"),
    [
        (
            "mnli",
            {"test_matched.tsv": PAIRS, "test_mismatched.tsv": PAIRS},
            {"MNLI-m.tsv": ENTAILED, "MNLI-mm.tsv": ENTAILED},
        ),
        ("qqp", {"test.tsv": "id\tquestion1\tquestion2\n0\twho\twhat\n"}, {"QQP.tsv": "index\tprediction\n0\t1"}),
        ("race", {"high": None}, {"predictions.json": json.dumps({"high9.txt": ["B"]}, indent=2)}),
    ],
)
def test_test_files_give_submissions(tokenizer, tmp_path, name, files, predictions):
    for file, text in files.items():
        if text is None:
            race_file(tmp_path / file, "high9.txt", ["who ?"], None)
        else:
            (tmp_path / file).write_text(text)
    task = open_task(name, [], [str(tmp_path / file) for file in files], tokenizer, 32)
    outputs = {key: outputs_for([1], task.classes * task.choices) for key in task.validation}
    assert task.metrics(outputs) == []
    assert {file: text.strip() for file, text in task.predictions(outputs).items()} == predictions
