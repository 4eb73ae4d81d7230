"""MNLI, QQP and RACE: rows made of their files, metrics and predictions made of outputs."""

import json

import numpy as np
import pytest

from mjax.errors import RunError
from mjax.tasks.labelled import open_task
from mjax.tasks.rows import Pair, as_rows, clean_text
from tests.tasks.synthetic import MNLI_COLUMNS, VOCABULARY, tokenizer_of


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    # Padding has not the id 0, as it has in the vocabularies of some models.
    pieces = [*VOCABULARY[1:], "[PAD]", "a", "b", "c", "d", "##x"]
    return tokenizer_of(tmp_path_factory.mktemp("vocabulary"), pieces)


def words(tokenizer, row):
    pieces = {number: piece for piece, number in tokenizer.library.get_vocab().items()}
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
        ("red house", "bird tree stone", "[CLS] red house [SEP] bird tree stone [SEP]", "00001111", "11111111"),
        ("red house", "bird tree stone who", "[CLS] red house [SEP] bird tree stone [SEP]", "00001111", "11111111"),
        ("red " * 6, "bird", "[CLS] red red red red red red [SEP]", "00000000", "11111111"),
        ("", "bird", "[CLS] [SEP] bird [SEP] [PAD] [PAD] [PAD] [PAD]", "00110000", "11110000"),
    ],
)
def test_a_row_holds_both_texts_and_is_cut_at_its_end(tokenizer, a, b, row, types, text):
    pair = Pair(tokenizer.encode(a), tokenizer.encode(b))
    examples = as_rows([pair, pair], 2, {"label": [1]}, tokenizer, 8)
    assert examples.tokens.shape == (1, 2, 8)
    assert [array.dtype for array in (examples.tokens, examples.token_types, examples.text)] == [
        np.int32,
        np.int32,
        bool,
    ]
    assert examples.labels["label"].dtype == np.int32
    for choice in range(2):
        assert words(tokenizer, examples.tokens[0, choice]) == row
        assert "".join(map(str, examples.token_types[0, choice])) == types
        assert "".join(str(int(one)) for one in examples.text[0, choice]) == text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("one\ntwo\t three  four", "one two three four"),
        ("The end . Or not .", "The end. Or not ."),
        (". . . . end", ".. .. end"),
        ("so . . . . end", "so. ... end"),
    ],
)
def test_white_space_is_cleaned_as_in_v1(text, clean):
    assert clean_text(text) == clean


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


def test_mnli_reads_sentences_and_labels_by_the_names_of_columns(tokenizer, tmp_path):
    rows = [("a red house", "never", "contradiction"), ("who", "we saw ?", "entailment"), ("tree", "tree", "neutral")]
    # As published: train.tsv has one annotator's label, the dev files five; the original files other columns in front.
    five = [*MNLI_COLUMNS[:-1], "label2", "label3", "label4", "label5", "gold_label"]
    original = ["gold_label", "sentence1_binary_parse", "sentence1", "sentence2", "promptID", "pairID"]
    train = mnli_file(tmp_path / "train.tsv", *rows)
    files = [
        mnli_file(tmp_path / "dev_matched.tsv", *rows, columns=five, end="\r\n"),
        mnli_file(tmp_path / "dev_mismatched.tsv", *rows, columns=original),
    ]
    task = open_task("mnli", [train], files, tokenizer, 10)
    assert (task.head, task.classes, task.choices, task.metric) == ("classification", 3, 1, "accuracy")
    assert list(task.validation) == ["matched", "mismatched"]
    assert task.notes == []
    for examples in (task.train, *task.validation.values()):
        assert examples.labels["label"].tolist() == [0, 1, 2]
        np.testing.assert_array_equal(examples.tokens, task.train.tokens)
    assert words(tokenizer, task.train.tokens[1, 0]) == "[CLS] who [SEP] we saw ? [SEP] [PAD] [PAD] [PAD]"


def test_a_jsonl_file_of_mnli_gives_the_rows_of_the_table(tokenizer, tmp_path):
    table = mnli_file(tmp_path / "dev_matched.tsv", ("red", "never", "contradiction"), ("we", "saw", "neutral"))
    lines = [("red", "never", "contradiction", "7n"), ("we", "saw", "neutral", "8n")]
    keys = ("sentence1", "sentence2", "gold_label", "pairID")
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in lines)
    )
    of_table, of_lines = (
        open_task("mnli", [], [file], tokenizer, 10) for file in (table, str(tmp_path / "lines.jsonl"))
    )
    np.testing.assert_array_equal(of_table.validation["matched"].tokens, of_lines.validation["lines"].tokens)
    assert of_lines.predictions({"lines": outputs_for([2, 0], 3)}) == {
        "lines.tsv": "index\tprediction\n7n\tneutral\n8n\tcontradiction\n"
    }


def test_pairs_of_mnli_without_a_gold_label_are_left_out_and_counted(tokenizer, tmp_path):
    file = mnli_file(tmp_path / "train.tsv", ("red", "never", "-"), ("we", "saw", "neutral"), ("we", "is", "-"))
    task = open_task("mnli", [file], [file], tokenizer, 10)
    assert task.train.labels["label"].tolist() == [2]
    note = f"{file}: 2 of 3 pairs were skipped, such as that of {file}:2, which has the gold label -"
    assert task.notes == [note, note]
    assert values(task, {"train": outputs_for([2], 3)})["accuracy"] == 1


def test_the_accuracy_of_mnli_is_over_all_sets_and_of_each(tokenizer, tmp_path):
    rows = [("red", "never", "contradiction"), ("we", "saw", "neutral"), ("we", "is", "neutral")]
    files = [mnli_file(tmp_path / f"dev_{kind}.tsv", *rows[:n]) for kind, n in (("matched", 3), ("mismatched", 2))]
    task = open_task("mnli", [], files, tokenizer, 10)
    assert len(task.train.tokens) == 0
    assert values(task, {"matched": outputs_for([0, 2, 1], 3), "mismatched": outputs_for([1, 1], 3)}) == {
        "accuracy": 2 / 5,
        "matched_accuracy": 2 / 3,
        "mismatched_accuracy": 0,
        "correct": 2,
    }


def test_predictions_of_mnlis_test_files_are_glues_submissions(tokenizer, tmp_path):
    columns = MNLI_COLUMNS[:-2]
    files = [
        mnli_file(tmp_path / f"test_{kind}.tsv", ("red", "-"), columns=columns) for kind in ("matched", "mismatched")
    ]
    task = open_task("mnli", [], files, tokenizer, 10)
    assert task.validation["test_matched"].labels == {}
    outputs = {name: outputs_for([1], 3) for name in task.validation}
    assert task.metrics(outputs) == []
    submission = "index\tprediction\n7\tentailment\n"
    assert task.predictions(outputs) == {"MNLI-m.tsv": submission, "MNLI-mm.tsv": submission}


def test_rows_that_are_cut_are_counted(tokenizer, tmp_path):
    file = mnli_file(tmp_path / "train.tsv", ("red " * 7, "never", "neutral"), ("red " * 6, "saw", "neutral"))
    assert open_task("mnli", [file], [], tokenizer, 10).notes == [
        f"{file}: 1 of 2 rows (50.0%) have more than 10 tokens and are truncated at the end"
    ]


# --- QQP --------------------------------------------------------------------------------------------------------------

QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"


def test_broken_lines_of_qqp_are_left_out_and_counted(tokenizer, tmp_path):
    good = '4\t1\t2\twhat is "red" ?\twho came ?\t1\n9\t1\t2\twho\twhat\t0\n'
    broken = "5\t1\t2\twhat is\nred ?\twho came ?\t1\n6\t1\t2\t\twho\t0\n\n7\t1\t2\twhat\twho\t\n"
    (tmp_path / "train.tsv").write_text(QQP + good + broken)
    task = open_task("qqp", [str(tmp_path / "train.tsv")], [], tokenizer, 16)
    assert task.train.labels["label"].tolist() == [1, 0]
    assert words(tokenizer, task.train.tokens[0, 0, :11]) == "[CLS] what is [UNK] red [UNK] ? [SEP] who came ?"
    (note,) = task.notes
    assert note == (
        f"{tmp_path}/train.tsv: 4 of 6 pairs were skipped, such as that of {tmp_path}/train.tsv:4, "
        "which has 4 fields, not 6"
    )


def test_qqp_has_accuracy_and_the_f1_of_duplicates(tokenizer, tmp_path):
    (tmp_path / "dev.tsv").write_text(QQP + "".join(f"{n}\t1\t2\twho\twhat\t{int(n < 3)}\n" for n in range(8)))
    task = open_task("qqp", [], [str(tmp_path / "dev.tsv")], tokenizer, 16)
    outputs = {"validation": outputs_for([1, 1, 0, 1, 0, 0, 0, 0], 2)}
    assert values(task, outputs) == {"accuracy": 6 / 8, "correct": 6, "f1": 2 * 2 / (2 * 2 + 1 + 1)}
    assert values(task, {"validation": outputs_for([0] * 8, 2)})["f1"] == 0
    assert task.predictions(outputs)["validation.tsv"].startswith("index\tprediction\n0\t1\n1\t1\n2\t0\n")


def test_predictions_of_qqps_test_file_are_glues_submission(tokenizer, tmp_path):
    (tmp_path / "test.tsv").write_text("id\tquestion1\tquestion2\n0\twho\twhat\n1\twho\twho\n")
    task = open_task("qqp", [], [str(tmp_path / "test.tsv")], tokenizer, 16)
    outputs = {"validation": outputs_for([0, 1], 2)}
    assert task.metrics(outputs) == []
    assert task.predictions(outputs) == {"QQP.tsv": "index\tprediction\n0\t0\n1\t1\n"}


def test_outputs_that_are_not_finite_are_no_predictions(tokenizer, tmp_path):
    (tmp_path / "dev.tsv").write_text(QQP + "0\t1\t2\twho\twhat\t1\n")
    task = open_task("qqp", [], [str(tmp_path / "dev.tsv")], tokenizer, 16)
    for made in (task.metrics, task.predictions):
        with pytest.raises(RunError, match="the model's outputs for validation are not finite"):
            made({"validation": np.array([[np.nan, 1]], np.float32)})


# --- RACE -------------------------------------------------------------------------------------------------------------


def race_file(folder, name, questions, answers="A", article="We saw a tree .\n The bird sleeps .", **changes):
    folder.mkdir(parents=True, exist_ok=True)
    options = [["red", "old", "small house", "gold"]] * len(questions)
    passage = {"id": name, "article": article, "questions": questions, "options": options, "answers": list(answers)}
    (folder / name).write_text(json.dumps(passage | changes))


def test_each_option_of_race_is_a_row_of_question_and_option_then_the_article(tokenizer, tmp_path):
    race_file(tmp_path / "RACE/train/high", "high1.txt", ["what is _ ?", "who came ?"], "DB")
    task = open_task("race", [str(tmp_path / "RACE/train")], [], tokenizer, 20)
    assert (task.head, task.classes, task.choices, task.metric) == ("multiple_choice", 1, 4, "accuracy")
    assert task.train.tokens.shape == (2, 4, 20)
    assert task.train.labels["label"].tolist() == [3, 1]
    article = "we saw a tree . the bird sleeps . [SEP]"
    assert words(tokenizer, task.train.tokens[0, 2]) == f"[CLS] what is small house ? [SEP] {article} [PAD] [PAD] [PAD]"
    assert words(tokenizer, task.train.tokens[1, 1]) == f"[CLS] who came ? old [SEP] {article}" + " [PAD]" * 4


def test_every_blank_of_a_question_is_filled_and_a_long_one_leaves_room_for_the_article(tokenizer, tmp_path):
    race_file(tmp_path / "dev/middle", "middle1.txt", ["_ or _", "red " * 200], "AA")
    task = open_task("race", [], [str(tmp_path / "dev")], tokenizer, 140)
    rows = task.validation["middle"].tokens[:, 0]
    assert words(tokenizer, rows[0]).startswith("[CLS] red [UNK] red [SEP] we")
    assert words(tokenizer, rows[1]) == "[CLS]" + " red" * 128 + " [SEP] we saw a tree . the bird sleeps . [SEP]"


def test_race_is_measured_and_predicted_by_levels(tokenizer, tmp_path):
    race_file(tmp_path / "dev/middle", "middle2.txt", ["who ?"], "C")
    race_file(tmp_path / "dev/middle", "middle1.txt", ["who ?", "what ?"], "AB")
    race_file(tmp_path / "dev/high", "high9.txt", ["who ?"], "D")
    task = open_task("race", [], [str(tmp_path / "dev")], tokenizer, 32)
    outputs = {"middle": outputs_for([0, 2, 2], 4), "high": outputs_for([1], 4)}
    assert values(task, outputs) == {
        "accuracy": 2 / 4,
        "middle_accuracy": 2 / 3,
        "high_accuracy": 0,
        "correct": 2,
    }
    files = task.predictions(outputs)
    assert list(files) == ["predictions.json"]
    assert json.loads(files["predictions.json"]) == {
        "middle1.txt": ["A", "C"],
        "middle2.txt": ["C"],
        "high9.txt": ["B"],
    }


def test_a_level_of_race_may_be_given_alone_and_its_answers_may_be_missing(tokenizer, tmp_path):
    race_file(tmp_path / "test/high", "high9.txt", ["who ?"], "D")
    folder = tmp_path / "test/high"
    (folder / "high9.txt").write_text((folder / "high9.txt").read_text().replace('"answers"', '"unknown"'))
    task = open_task("race", [], [f"{folder}/"], tokenizer, 32)
    outputs = {"high": outputs_for([1], 4)}
    assert task.metrics(outputs) == []
    assert json.loads(task.predictions(outputs)["predictions.json"]) == {"high9.txt": ["B"]}
