"""SQuAD's official rules, on answers one can check by hand; tests/parity has them against the official scripts."""

import pytest

from mjax.tasks.squad_scores import best_threshold, exact, f1, metrics_1, metrics_2, normalize, score


def values(metrics):
    return {metric.name: metric.value for metric in metrics}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("The  Cat's\tPyjamas.", "cats pyjamas"),
        ("a", ""),
        ("An apple a day", "apple day"),
        ("a-la-carte", "alacarte"),
        ("A. the", ""),
        ("theatre an", "theatre"),
        ("“Quoted” – and dashed…", "“quoted” – and dashed…"),  # punctuation beyond ASCII stays
        ("the“end”", "“end”"),
        ("ＴＨＥ İ", "ｔｈｅ i̇"),
        ("$1,000.50", "100050"),
        ("", ""),
    ],
)
def test_answers_are_compared_without_case_punctuation_articles_and_spaces(answer, words):
    assert normalize(answer) == words


@pytest.mark.parametrize(
    ("answer", "truth", "exactly", "share"),
    [
        ("the red house", "Red House!", True, 1),
        ("red house", "red tree", False, 1 / 2),
        ("red red house", "red", False, 2 * (1 / 3) / (1 / 3 + 1)),
        ("red red", "red red red", False, 2 * (2 / 3) / (2 / 3 + 1)),
        ("bird", "tree", False, 0),
        ("", "tree", False, 0),
    ],
)
def test_f1_counts_words_with_their_repetitions(answer, truth, exactly, share):
    assert exact(answer, truth) is exactly
    for empty_agree in (False, True):
        assert f1(answer, truth, empty_agree) == pytest.approx(share)
        assert f1(truth, answer, empty_agree) == pytest.approx(share)


def test_answers_without_words_agree_by_the_rules_of_2_and_not_of_1():
    assert f1("the", "", empty_agree=True) == 1
    assert f1("the", "", empty_agree=False) == 0
    assert [one.f1 for one in score({"q": "a"}, {"q": ["the"]}, "1.1")] == [0]
    assert [one.f1 for one in score({"q": "a"}, {"q": ["the"]}, "2.0")] == [1]


def test_a_true_answer_without_words_does_not_count_beside_others_by_the_rules_of_2():
    for version, right in (("1.1", 1), ("2.0", 0)):
        assert [one.exact for one in score({"q": ""}, {"q": ["the", "red"]}, version)] == [right]


def test_the_true_answer_that_agrees_best_counts_for_each_measure():
    (one,) = score({"q": "big red house"}, {"q": ["house", "the big house", "Big red house of wood"]}, "1.1")
    assert (one.exact, one.f1) == (0, pytest.approx(0.8))  # 2 of 3 words, 2 of 2


def test_figures_of_1_are_percentages_over_all_questions():
    scored = score({"p": "red", "q": "bird tree"}, {"p": ["Red"], "q": ["tree", "stone"]}, "1.1")
    assert values(metrics_1(scored)) == {"exact_match": 50, "f1": pytest.approx(100 * (1 + 2 / 3) / 2), "total": 2}


ANSWERS = {"sure": "red", "wrong": "bird", "none": "tree", "doubt": "house"}
TRUTHS = {"sure": ["red"], "wrong": ["tree stone"], "none": [], "doubt": ["house tree"]}


def metrics(null_odds):
    return values(metrics_2(ANSWERS, null_odds, score(ANSWERS, TRUTHS, "2.0")))


def test_figures_of_2_give_no_answer_above_odds_of_zero():
    found = metrics({"sure": -3, "wrong": -2, "none": 1, "doubt": 2})
    assert (found["exact"], found["f1"], found["total"]) == (50, 50, 4)
    assert (found["HasAns_exact"], found["HasAns_f1"], found["HasAns_total"]) == (100 / 3, 100 / 3, 3)
    assert (found["NoAns_exact"], found["NoAns_f1"], found["NoAns_total"]) == (100, 100, 1)


def test_the_best_threshold_is_found_for_each_measure():
    found = metrics({"sure": -3, "wrong": -2, "none": 2, "doubt": 1})
    assert (found["best_exact"], found["best_exact_thresh"]) == (50, -3)
    # To answer "doubt" too has two thirds of its words right.
    assert (found["best_f1"], found["best_f1_thresh"]) == (pytest.approx(100 * (2 + 2 / 3) / 4), 1)


def test_an_answer_to_a_question_without_one_lowers_what_a_threshold_can_reach():
    found = metrics({"sure": -1, "wrong": -2, "none": -3, "doubt": 1})
    # None answered: 1. All four of them: "none" is lost, then 2/3 of "doubt" and all of "sure" come.
    assert (found["best_exact"], found["best_exact_thresh"]) == (25, 0)
    assert (found["best_f1"], found["best_f1_thresh"]) == (pytest.approx(100 * (1 + 2 / 3) / 4), 1)


def test_a_threshold_of_zero_is_told_where_giving_no_answer_is_best():
    scored = score({"p": "bird"}, {"p": []}, "2.0")
    assert best_threshold({"p": "bird"}, {"p": -4}, scored, [one.f1 for one in scored]) == (1, 0)


def test_a_set_without_questions_of_one_kind_has_no_figures_of_that_kind():
    found = values(metrics_2({"p": "red"}, {"p": -1}, score({"p": "red"}, {"p": ["red"]}, "2.0")))
    assert "HasAns_f1" in found
    assert "NoAns_f1" not in found
