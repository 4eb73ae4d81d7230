"""SQuAD's official rules, on answers one can check by hand; tests/parity has them against the official scripts."""

import pytest

from mjax.tasks.squad import best_threshold, metrics_v1, metrics_v2, score_answers


def values(metrics):
    return {metric.name: metric.value for metric in metrics}


@pytest.mark.parametrize(
    ("answer", "truths", "version", "exactly", "share"),
    [
        ("The  Cat's\tPyjamas.", ["cats pyjamas"], "1.1", 1, 1),
        ("a-la-carte theatre an", ["alacarte theatre"], "1.1", 1, 1),
        ("“Quoted” – and dashed…", ["“quoted” – and dashed…!"], "1.1", 1, 1),  # punctuation beyond ASCII stays
        ("the“end”", ["“end”"], "1.1", 1, 1),
        ("ＴＨＥ İ", ["ｔｈｅ i̇"], "1.1", 1, 1),
        ("$1,000.50", ["100050"], "1.1", 1, 1),
        ("red house", ["red tree"], "1.1", 0, 1 / 2),
        ("red red", ["red red red"], "2.0", 0, 2 * (2 / 3) / (2 / 3 + 1)),
        ("red red red", ["red red"], "1.1", 0, 2 * (2 / 3) / (2 / 3 + 1)),
        ("bird", ["tree"], "2.0", 0, 0),
        ("a", ["the"], "1.1", 1, 0),
        ("a", ["the"], "2.0", 1, 1),
        ("", ["the", "red"], "1.1", 1, 0),
        ("", ["the", "red"], "2.0", 0, 0),  # a true answer without words does not count next to others
        ("big red house", ["house", "the big house", "Big red house of wood"], "1.1", 0, 0.8),  # 2 of 3 words, 2 of 2
    ],
)
def test_best_true_answer_counts(answer, truths, version, exactly, share):
    (one,) = score_answers({"q": answer}, {"q": truths}, version)
    assert (one.exact, one.f1) == (exactly, pytest.approx(share))


def test_metrics_of_version_1_are_percentages():
    scored = score_answers({"p": "red", "q": "bird tree"}, {"p": ["Red"], "q": ["tree", "stone"]}, "1.1")
    assert values(metrics_v1(scored)) == {"exact_match": 50, "f1": pytest.approx(100 * (1 + 2 / 3) / 2), "total": 2}


ANSWERS = {"sure": "red", "wrong": "bird", "none": "tree", "doubt": "house"}
TRUTHS = {"sure": ["red"], "wrong": ["tree stone"], "none": [], "doubt": ["house tree"]}


def metrics(*null_odds, answers=ANSWERS):
    odds = dict(zip(answers, null_odds, strict=True))
    return values(metrics_v2(answers, odds, score_answers(answers, TRUTHS, "2.0")))


def test_version_2_gives_no_answer_above_zero():
    found = metrics(-3, -2, 1, 2)
    assert (found["exact"], found["f1"], found["total"]) == (50, 50, 4)
    assert (found["HasAns_exact"], found["HasAns_f1"], found["HasAns_total"]) == (100 / 3, 100 / 3, 3)
    assert (found["NoAns_exact"], found["NoAns_f1"], found["NoAns_total"]) == (100, 100, 1)
    only = values(metrics_v2({"p": "red"}, {"p": -1}, score_answers({"p": "red"}, {"p": ["red"]}, "2.0")))
    assert "HasAns_f1" in only
    assert "NoAns_f1" not in only


def test_best_threshold_is_found_for_each_measure():
    found = metrics(-3, -2, 2, 1)
    assert (found["best_exact"], found["best_exact_thresh"]) == (50, -3)
    # To answer "doubt" too has two thirds of its words right.
    assert (found["best_f1"], found["best_f1_thresh"]) == (pytest.approx(100 * (2 + 2 / 3) / 4), 1)
    # None answered: 1. All of them: "none" is lost, then all of "sure" and 2/3 of "doubt" come.
    found = metrics(-1, -2, -3, 1)
    assert (found["best_exact"], found["best_exact_thresh"]) == (25, 0)
    assert (found["best_f1"], found["best_f1_thresh"]) == (pytest.approx(100 * (1 + 2 / 3) / 4), 1)
    # Nothing is lost where the best answer to a question without one is empty.
    found = metrics(-1, -2, -3, 1, answers=ANSWERS | {"none": ""})
    assert found["best_exact"] == 50
    scored = score_answers({"p": "bird"}, {"p": []}, "2.0")
    assert best_threshold({"p": "bird"}, {"p": -4}, scored, [one.f1 for one in scored]) == (1, 0)
