"""SQuAD: windows and spans of its files, and answers made of logits; its metrics are in test_squad_scores.py."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mjax.tasks.labelled import open_task
from mjax.tasks.squad import Squad
from mjax.tasks.squad_answers import BEST, Answer, Answers, best_answers, no_answer
from mjax.tasks.squad_windows import Context, Span, Window, cut_into_windows, deciding_windows
from tests.data.vocabularies import NASTY, TEXTS, bert_file
from tests.tasks.synthetic import VOCABULARY, tokenizer_of


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    pieces = [*VOCABULARY, "the", "##s", "##n", "un", "##der", ",", "1882"]
    return tokenizer_of(tmp_path_factory.mktemp("vocabulary"), pieces)


@pytest.fixture(scope="module", params=["uncased", "cased"])
def real_tokenizer(request, tmp_path_factory):
    from mjax.data.tokenizers import load_tokenizer

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
    pieces = {number: piece for piece, number in tokenizer.library.get_vocab().items()}
    return " ".join(pieces[int(token)] for token in row)


def context_of(tokenizer, text):
    return Context(text, *tokenizer.encode_with_characters([text])[0])


# --- Spans and characters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "cut"),
    [
        ("We saw Anna King, the old bird.", "Anna King", "Anna King"),
        ("We saw Anna King, the old bird.", "Anna King,", "Anna King,"),
        ("in 1882 (or 1883)", "1882", "1882"),
        ("the tree's house", "tree", "tree"),
        ("so UNDER", "UNDER", "UNDER"),
        ("over-under", "under", "under"),
        ("a  red\n house", "red\n house", "red\n house"),
        ("an unknownword here", "known", "unknownword"),  # what is one token cannot be parted
        ("cafe\u0301 red", "cafe\u0301", "cafe\u0301"),
        ("tree\u200b red", "tree", "tree"),
        (" red ", " red ", "red"),
        ("漢字かな", "字", "字"),
        ("İstanbul red", "İstanbul", "İstanbul"),
    ],
)
def test_an_answer_is_found_by_its_characters_and_cut_out_of_the_original_text(tokenizer, text, answer, cut):
    context = context_of(tokenizer, text)
    assert context.cut(context.locate(text.index(answer), len(answer))) == cut


def test_characters_without_a_token_are_no_span(tokenizer):
    context = context_of(tokenizer, "red  \u200b tree")
    assert context.locate(4, 2) is None
    assert context.locate(0, 0) is None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_text_of_a_span_is_found_as_that_span_again(real_tokenizer, data):
    parts = st.sampled_from([*NASTY.values(), *" ".join(TEXTS).split(" "), " ", "\n", "'s", "-", "é", "e\u0301"])
    text = "".join(data.draw(st.lists(parts | st.text(max_size=4).filter(_whole), min_size=1, max_size=8)))
    context = context_of(real_tokenizer, text)
    assert context.ids == real_tokenizer.encode(text)
    if not context.ids:
        return
    first = data.draw(st.integers(0, len(context.ids) - 1))
    last = data.draw(st.integers(first, len(context.ids) - 1))
    begin, cut = int(context.begin[first]), context.cut(Span(first, last))
    again = context.locate(begin, len(cut))
    # Pieces of one character, such as those of "½", cannot be told apart by characters; then the text is the same.
    if (context.begin[1:] >= context.end[:-1]).all() and begin + len(cut) == context.end[last]:
        assert again == (first, last)
    assert context.cut(again) == cut
    assert text[begin:].startswith(cut)


def _whole(text):
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


# --- Windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "room", "stride", "windows"),
    [
        (5, 8, 3, [(0, 5)]),
        (8, 8, 3, [(0, 8)]),
        (9, 8, 3, [(0, 8), (3, 9)]),
        (15, 8, 3, [(0, 8), (3, 11), (6, 14), (9, 15)]),
        (15, 4, 9, [(0, 4), (4, 8), (8, 12), (12, 15)]),  # no token is passed over
    ],
)
def test_windows_move_on_by_the_stride_until_the_end(tokens, room, stride, windows):
    assert [(window.start, window.stop) for window in cut_into_windows(tokens, room, stride)] == windows


@given(st.integers(1, 80), st.integers(1, 20), st.integers(1, 25))
@example(370, 369, 128)  # a short last window loses to one that shows a token less
def test_a_token_is_decided_by_the_window_that_shows_most_around_it(tokens, room, stride):
    windows = cut_into_windows(tokens, room, stride)
    deciding = deciding_windows(windows, tokens)
    for token in range(tokens):  # the definition of Google's run_squad.py
        best = max(
            (number for number, window in enumerate(windows) if token in window),
            key=lambda n: (
                min(token - windows[n].start, windows[n].stop - 1 - token) + 0.01 * len(windows[n]),
                -n,
            ),
        )
        assert deciding[token] == best


def test_a_long_context_is_read_in_windows_and_its_answer_marked_where_it_is_whole(tokenizer, tmp_path):
    context = "we saw anna king over the old red house near the small river"
    answers = [[("old red", context.index("old"))], [("the old", context.index("the old"))], []]
    questions = [(f"q{number}", "who came ?", of_one) for number, of_one in enumerate(answers)]
    file = squad_file(tmp_path / "train.json", context, *questions)
    task = Squad("2.0", [file], [], tokenizer, positions=12, stride=3)  # room for 12 − 3 − 3 tokens
    rows = [words(tokenizer, row) for row in task.train.tokens[:, 0]]
    assert rows[4:8] == rows[8:] == rows[:4]
    assert rows[:4] == [
        "[CLS] who came ? [SEP] we saw anna king over the [SEP]",
        "[CLS] who came ? [SEP] king over the old red house [SEP]",
        "[CLS] who came ? [SEP] old red house near the small [SEP]",
        "[CLS] who came ? [SEP] near the small river [SEP] [PAD] [PAD]",
    ]
    assert task.train.token_types[0, 0].tolist() == [0] * 5 + [1] * 7
    assert task.train.token_types[3, 0].tolist() == [0] * 5 + [1] * 5 + [0] * 2
    assert task.train.labels["start"].tolist() == [0, 8, 5, 0, *[0, 7, 0, 0], *[0] * 4]
    assert task.train.labels["end"].tolist() == [0, 9, 6, 0, *[0, 8, 0, 0], *[0] * 4]


def test_a_question_is_cut_at_64_tokens(tokenizer, tmp_path):
    file = squad_file(tmp_path / "train.json", "red tree", ("q", "who " * 80, [("tree", 4)]))
    task = open_task("squad1.1", [file], [], tokenizer, 80)
    assert words(tokenizer, task.train.tokens[0, 0]) == "[CLS]" + " who" * 64 + " [SEP] red tree [SEP]" + " [PAD]" * 11
    assert task.train.labels["start"].tolist() == [67]


def test_training_leaves_out_and_counts_answers_that_are_not_where_the_file_says(tokenizer, tmp_path):
    questions = [("a", "who ?", [("red", 0)]), ("b", "who ?", [("red", 1)]), ("c", "who ?", [("tree", -4)])]
    file = squad_file(tmp_path / "train.json", "red tree", *questions)
    task = open_task("squad1.1", [file], [file], tokenizer, 80)
    assert len(task.train.tokens) == 1
    assert task.notes == [
        f"{file}: 2 of 3 questions were skipped: the context does not contain their answer at its answer_start"
    ]
    assert len(task.validation["validation"].tokens) == 3  # nobody is measured by less


# --- Answers ----------------------------------------------------------------------------------------------------------


def logits_of(rows, starts=(), ends=(), positions=12):
    """[rows, 2, s] of zeros, but for {(row, position): logit}."""
    logits = np.zeros((rows, 2, positions), np.float32)
    for number, given_logits in enumerate((starts, ends)):
        for (row, position), value in dict(given_logits).items():
            logits[row, number, position] = value
    return logits


def test_the_answer_is_the_span_of_the_highest_sum_among_those_allowed(tokenizer):
    context = context_of(tokenizer, "we saw anna king over the old red house near the small river")
    window = Window(offset=5, first=0, deciding=np.ones(13, bool))
    answer = lambda **logits: best_answers(context, [window], logits_of(1, **logits, positions=20), longest=3)[0].text  # noqa: E731
    assert answer(starts={(0, 7): 3}, ends={(0, 8): 2}) == "anna king"
    assert answer(starts={(0, 1): 9, (0, 7): 3}, ends={(0, 2): 9, (0, 8): 2}) == "anna king"  # in the question
    assert answer(starts={(0, 18): 9, (0, 7): 3}, ends={(0, 19): 9, (0, 8): 2}) == "anna king"  # in the padding
    assert answer(starts={(0, 7): 3, (0, 9): 4}, ends={(0, 8): 2, (0, 6): 3}) == "anna king"  # ends before it begins
    assert answer(starts={(0, 7): 3}, ends={(0, 10): 3, (0, 9): 2}) == "anna king over"  # longer than three
    assert answer(ends={(0, 17): 5}) in ("river", "small river", "the small river")


def test_a_token_in_two_windows_begins_an_answer_in_one_of_them(tokenizer, tmp_path):
    context = "we saw anna king over the old red house near the small river"
    file = squad_file(tmp_path / "dev.json", context, ("q", "who came ?", [("old", context.index("old"))]))
    task = Squad("1.1", [], [file], tokenizer, positions=12, stride=3)
    # "old" is the fourth token of the second window and the first of the third: the second shows more around it.
    of_third = logits_of(4, {(2, 5): 9, (1, 8): 2}, {(2, 5): 9, (1, 8): 2})
    assert json.loads(task.predictions({"validation": of_third})["predictions.json"]) == {"q": "old"}
    listed = json.loads(task.predictions({"validation": of_third})["nbest_predictions.json"])["q"]
    assert (listed[0]["start_logit"], listed[0]["end_logit"]) == (2, 2)


def test_a_question_has_the_logits_of_its_own_windows(tokenizer, tmp_path):
    context = "we saw anna king over the old red house near the small river"
    file = squad_file(tmp_path / "dev.json", context, *((name, "who came ?", [("we", 0)]) for name in "abc"))
    task = Squad("1.1", [], [file], tokenizer, positions=12, stride=3)
    outputs = {"validation": logits_of(12, {(0, 5): 9, (5, 7): 9, (11, 8): 9}, {(0, 5): 9, (5, 7): 9, (11, 8): 9})}
    assert json.loads(task.predictions(outputs)["predictions.json"]) == {"a": "we", "b": "the", "c": "river"}


def test_the_n_best_have_different_texts_and_their_probabilities_sum_to_one(tokenizer, tmp_path):
    file = squad_file(tmp_path / "dev.json", "red red red tree", ("q", "who ?", [("tree", 12)]))
    task = open_task("squad1.1", [], [file], tokenizer, 12)
    listed = json.loads(
        task.predictions({"validation": logits_of(1, {(0, 4): 1}, {(0, 4): 1, (0, 6): -1})})["nbest_predictions.json"]
    )["q"]
    texts = [answer["text"] for answer in listed]
    assert texts[0] == "red"
    assert len(texts) == len(set(texts)) == 7  # of ten spans
    assert sum(answer["probability"] for answer in listed) == pytest.approx(1)
    scores = [answer["start_logit"] + answer["end_logit"] for answer in listed]
    assert scores == sorted(scores, reverse=True)
    assert listed[0]["probability"] == pytest.approx(np.exp(2) / np.exp(scores).sum())


def test_twenty_answers_are_kept_however_long_the_context(tokenizer):
    context = context_of(tokenizer, " ".join(VOCABULARY[5:]))
    window = Window(2, 0, np.ones(len(context.ids), bool))
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(1, 2, len(context.ids) + 4)).astype(np.float32)
    found = best_answers(context, [window], logits)
    every = sorted(
        (
            float(logits[0, 0, first + 2]) + float(logits[0, 1, last + 2])
            for first in range(len(context.ids))
            for last in range(first, min(first + 30, len(context.ids)))
        ),
        reverse=True,
    )
    assert [answer.score for answer in found] == pytest.approx(every[:20])


@pytest.mark.parametrize(("score", "place"), [(9.0, 0), (-2.5, 3), (-99.0, 20)])
def test_that_there_is_no_answer_is_always_listed(score, place):
    best = [Answer(f"text {number}", -float(number), 0.0) for number in range(BEST)]
    listed = Answers(best, Answer("", score, 0.0)).listed()
    assert [answer["text"] for answer in listed].index("") == place
    assert len(listed) == max(BEST, place + 1)


def test_that_there_is_no_answer_is_told_by_the_window_that_believes_in_it_least():
    none = no_answer(logits_of(3, {(0, 0): 4, (1, 0): -1, (2, 0): 3}, {(0, 0): 4, (1, 0): 2, (2, 0): -1}))
    assert (none.text, none.start, none.end) == ("", -1, 2)


def test_an_answer_is_given_unless_there_being_none_is_more_likely(tokenizer, tmp_path):
    questions = [("yes", "who ?", [("tree", 4)]), ("no", "who ?", []), ("equal", "who ?", [("red", 0)])]
    file = squad_file(tmp_path / "dev.json", "red tree", *questions)
    task = open_task("squad2.0", [], [file], tokenizer, 12)
    outputs = {
        "validation": logits_of(
            3,
            {(0, 5): 3, (0, 0): 2, (1, 5): 2, (1, 0): 3, (2, 4): 1, (2, 0): 1},
            {(0, 5): 3, (0, 0): 2, (1, 5): 2, (1, 0): 3, (2, 4): 1, (2, 0): 1},
        )
    }
    files = {name: json.loads(contents) for name, contents in task.predictions(outputs).items()}
    assert files["predictions.json"] == {"yes": "tree", "no": "", "equal": "red"}
    assert files["null_odds.json"] == {"yes": -2, "no": 2, "equal": 0}
    assert files["best_answers.json"] == {"yes": "tree", "no": "tree", "equal": "red"}
    assert [answer["text"] for answer in files["nbest_predictions.json"]["no"][:2]] == ["", "tree"]
    values = {metric.name: metric.value for metric in task.metrics(outputs)}
    assert (values["exact"], values["best_f1"], values["best_f1_thresh"]) == (100, 100, 0)
    assert (values["HasAns_total"], values["NoAns_total"], values["NoAns_f1"]) == (2, 1, 100)


def test_a_file_without_answers_gives_predictions_beside_one_that_is_measured(tokenizer, tmp_path):
    dev = squad_file(tmp_path / "dev.json", "red tree", ("a", "who ?", [("tree", 4)]))
    test = squad_file(tmp_path / "test.json", "red tree", ("b", "who ?", None))
    task = open_task("squad1.1", [], [dev, test], tokenizer, 12)
    assert task.validation["test"].labels == {}
    logits = logits_of(1, {(0, 5): 3}, {(0, 5): 3})
    outputs = {"dev": logits, "test": logits}
    assert {metric.name: metric.value for metric in task.metrics(outputs)} == {
        "exact_match": 100,
        "f1": 100,
        "total": 1,
    }
    files = task.predictions(outputs)
    assert set(files) == {f"{name}_{kind}predictions.json" for name in outputs for kind in ("", "nbest_")}
    assert json.loads(files["test_predictions.json"]) == {"b": "tree"}


def test_a_question_that_is_cut_is_counted_and_said(tokenizer, tmp_path):
    context = "we saw anna king over the old red house near the small river"
    questions = [("short", "who came ?", []), ("long", "who " * 100, [])]
    file = squad_file(tmp_path / "dev.json", context, *questions)
    task = Squad("2.0", [], [file], tokenizer, positions=96)
    assert any("1 of 2 questions have more than 64 tokens and are truncated" in note for note in task.notes)
