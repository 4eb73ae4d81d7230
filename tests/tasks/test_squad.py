"""SQuAD: windows and spans of its files, and answers made of logits; its metrics are in test_squad_scores.py."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mjax.data.tokenizers import load_tokenizer
from mjax.tasks.labelled import open_task
from mjax.tasks.squad import (
    Context,
    DocSpan,
    Squad,
    TokenSpan,
    best_answer,
    max_context_windows,
    split_context,
)
from tests.data.vocabularies import NASTY, TEXTS, bert_file
from tests.tasks.synthetic import VOCABULARY, tokenizer_of

CONTEXT = "we saw anna king over the old red house near the small river"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    pieces = [*VOCABULARY, "the", "##s", "##n", "un", "##der", ",", "1882"]
    return tokenizer_of(tmp_path_factory.mktemp("vocabulary"), pieces)


@pytest.fixture(scope="module", params=["uncased", "cased"])
def real_tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return load_tokenizer(f"bert-{request.param}:{bert_file(folder, lowercase=request.param == 'uncased')}")


def squad_file(path, context, *questions):
    """A file of one paragraph; a question is (id, text, [(answer, start), …] or None)."""
    asked = [
        {"id": name, "question": text}
        | ({} if answers is None else {"answers": [{"text": a, "answer_start": start} for a, start in answers]})
        for name, text, answers in questions
    ]
    data = [{"title": "T", "paragraphs": [{"context": context, "qas": asked}]}]
    path.write_text(json.dumps({"version": "v2.0", "data": data}, ensure_ascii=False), encoding="utf-8")
    return str(path)


def words(tokenizer, row):
    pieces = {number: piece for piece, number in tokenizer.backend.get_vocab().items()}
    return " ".join(pieces[int(token)] for token in row)


def context_of(tokenizer, text):
    return Context(text, *tokenizer.encode_with_offsets([text])[0])


# --- Spans and characters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "cut"),
    [
        ("We saw Anna King, the old bird.", "Anna King", "Anna King"),
        ("the tree's house", "tree", "tree"),
        ("a  red\n house", "red\n house", "red\n house"),
        ("an unknownword here", "known", "unknownword"),  # what is one token cannot be parted
        ("cafe\u0301 red", "cafe\u0301", "cafe\u0301"),
        ("tree\u200b red", "tree", "tree"),
        (" red ", " red ", "red"),
        ("İstanbul red", "İstanbul", "İstanbul"),
        ("red  \u200b tree", "  ", None),  # characters without a token
    ],
)
def test_answer_is_cut_out_of_original_text(tokenizer, text, answer, cut):
    context = context_of(tokenizer, text)
    span = context.locate(text.index(answer), len(answer))
    assert (None if span is None else context.extract_text(span)) == cut


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_span_of_text_is_found_again(real_tokenizer, data):
    plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    parts = st.sampled_from([*NASTY.values(), *" ".join(TEXTS).split(" "), " ", "\n", "'s", "-", "é", "e\u0301"])
    text = "".join(data.draw(st.lists(parts | plain, min_size=1, max_size=6)))
    context = context_of(real_tokenizer, text)
    assert context.ids == real_tokenizer.encode(text)
    if not context.ids:
        return
    first = data.draw(st.integers(0, len(context.ids) - 1))
    last = data.draw(st.integers(first, len(context.ids) - 1))
    begin, cut = int(context.begin[first]), context.extract_text(TokenSpan(first, last))
    again = context.locate(begin, len(cut))
    # Pieces of one character, such as those of "½", cannot be distinguished by characters; then the text is the same.
    if (context.begin[1:] >= context.end[:-1]).all() and begin + len(cut) == context.end[last]:
        assert again == (first, last)
    assert context.extract_text(again) == cut
    assert text[begin:].startswith(cut)


# --- Windows ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 80), st.integers(1, 20), st.integers(1, 25))
@example(370, 369, 128)  # a short last window loses to one that shows a token less
@settings(max_examples=30)
def test_window_with_most_context_decides(tokens, room, stride):
    """The rule is the one of Google's run_squad.py."""
    windows = split_context(tokens, room, stride)
    deciding = max_context_windows(windows, tokens)

    def shown(number, token):
        window = windows[number]
        return min(token - window.start, window.stop - 1 - token) + 0.01 * len(window), -number

    for token in range(tokens):
        inside = [number for number, window in enumerate(windows) if token in window]
        assert deciding[token] == max(inside, key=lambda number: shown(number, token))


def test_long_context_is_read_in_windows(tokenizer, tmp_path):
    """An answer is marked where it is whole, and a question truncated after 64 tokens."""
    answers = [[("old red", CONTEXT.index("old"))], [("the old", CONTEXT.index("the old"))], []]
    questions = [(f"q{number}", "who came ?", of_one) for number, of_one in enumerate(answers)]
    file = squad_file(tmp_path / "train.json", CONTEXT, *questions)
    task = Squad("2.0", [file], [], tokenizer, 12, stride=3)  # room for 12 - 3 - 3 tokens
    rows = [words(tokenizer, row) for row in task.train.tokens[:, 0]]
    assert rows[4:8] == rows[8:] == rows[:4]
    assert rows[:4] == [
        "[CLS] who came ? [SEP] we saw anna king over the [SEP]",
        "[CLS] who came ? [SEP] king over the old red house [SEP]",
        "[CLS] who came ? [SEP] old red house near the small [SEP]",
        "[CLS] who came ? [SEP] near the small river [SEP] [PAD] [PAD]",
    ]
    assert task.train.token_types[3, 0].tolist() == [0] * 5 + [1] * 5 + [0] * 2
    assert task.train.labels["start"].tolist() == [0, 8, 5, 0, *[0, 7, 0, 0], *[0] * 4]
    assert task.train.labels["end"].tolist() == [0, 9, 6, 0, *[0, 8, 0, 0], *[0] * 4]

    file = squad_file(tmp_path / "long.json", "red tree", ("q", "who " * 80, [("tree", 4)]), ("r", "who", [("red", 0)]))
    task = open_task("squad1.1", [file], [], tokenizer, 80)
    assert task.train.labels["start"].tolist() == [67, 3]
    assert task.notes == [f"{file}: 1 of 2 questions (50.0%) have more than 64 tokens and are truncated at the end"]


def test_training_skips_and_counts_misplaced_answers(tokenizer, tmp_path):
    questions = [("a", "who ?", [("red", 0)]), ("b", "who ?", [("red", 1)]), ("c", "who ?", [("tree", -4)])]
    file = squad_file(tmp_path / "train.json", "red tree", *questions)
    task = open_task("squad1.1", [file], [file], tokenizer, 80)
    assert len(task.train.tokens) == 1
    skipped = "2 of 3 questions were skipped: the context does not contain their answer at its answer_start"
    assert task.notes == [f"{file}: {skipped}"]
    assert len(task.validation["validation"].tokens) == 3  # no model is measured by less


# --- Answers ----------------------------------------------------------------------------------------------------------


def logits_of(rows, starts=(), ends=(), positions=12):
    """[rows, 2, s] of zeros, but for {(row, position): logit}."""
    logits = np.zeros((rows, 2, positions), np.float32)
    for number, given_logits in enumerate((starts, ends)):
        for (row, position), value in dict(given_logits).items():
            logits[row, number, position] = value
    return logits


def test_answer_is_allowed_span_of_highest_sum(tokenizer):
    context, window = context_of(tokenizer, CONTEXT), DocSpan(offset=5, first=0, is_max_context=np.ones(13, bool))

    def answer(starts, ends):
        starts, ends = ({(0, place): value for place, value in each.items()} for each in (starts, ends))
        return best_answer(context, [window], logits_of(1, starts, ends, positions=20), max_tokens=3).text

    assert answer({7: 3}, {8: 2}) == "anna king"
    assert answer({1: 9, 7: 3}, {2: 9, 8: 2}) == "anna king"  # in the question
    assert answer({18: 9, 7: 3}, {19: 9, 8: 2}) == "anna king"  # in the padding
    assert answer({7: 3, 9: 4}, {8: 2, 6: 3}) == "anna king"  # ends before it begins
    assert answer({7: 3}, {10: 3, 9: 2}) == "anna king over"  # longer than three
    assert answer({}, {17: 5}) in ("river", "small river", "the small river")


def test_lowest_window_scores_no_answer(tokenizer):
    context, ones = context_of(tokenizer, CONTEXT), np.ones(1, bool)
    windows = [DocSpan(offset=5, first=first, is_max_context=ones) for first in range(3)]
    logits = logits_of(3, {(0, 0): 4, (1, 0): -1, (2, 0): 3}, {(0, 0): 4, (1, 0): 2, (2, 0): -1})
    assert best_answer(context, windows, logits).null_odds == 1


def test_answer_is_given_unless_none_is_likelier(tokenizer, tmp_path):
    questions = [("yes", "who ?", [("tree", 4)]), ("no", "who ?", []), ("equal", "who ?", [("red", 0)])]
    task = Squad("2.0", [], [squad_file(tmp_path / "dev.json", "red tree", *questions)], tokenizer, 12)
    both = {(0, 5): 3, (0, 0): 2, (1, 5): 2, (1, 0): 3, (2, 4): 1, (2, 0): 1}
    outputs = {"validation": logits_of(3, both, both)}
    files = {name: json.loads(text) for name, text in task.predictions(outputs).items()}
    assert files["predictions.json"] == {"yes": "tree", "no": "", "equal": "red"}
    assert files["null_odds.json"] == {"yes": -2, "no": 2, "equal": 0}
    assert files["best_answers.json"] == {"yes": "tree", "no": "tree", "equal": "red"}
    values = {metric.name: metric.value for metric in task.metrics(outputs)}
    assert (values["exact"], values["best_f1"], values["best_f1_thresh"]) == (100, 100, 0)
    assert (values["HasAns_total"], values["NoAns_total"], values["NoAns_f1"]) == (2, 1, 100)


def test_file_without_answers_gives_predictions_only(tokenizer, tmp_path):
    dev = squad_file(tmp_path / "dev.json", "red tree", ("a", "who ?", [("tree", 4)]))
    test = squad_file(tmp_path / "test.json", "red tree", ("b", "who ?", None))
    task = open_task("squad1.1", [], [dev, test], tokenizer, 12)
    assert task.validation["test"].labels == {}
    outputs = dict.fromkeys(("dev", "test"), logits_of(1, {(0, 5): 3}, {(0, 5): 3}))
    values = {metric.name: metric.value for metric in task.metrics(outputs)}
    assert values == {"exact_match": 100, "f1": 100, "total": 1}
    files = task.predictions(outputs)
    assert set(files) == {f"{name}_predictions.json" for name in outputs}
    assert json.loads(files["test_predictions.json"]) == {"b": "tree"}
