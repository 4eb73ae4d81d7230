"""The parts of products that tests run leave out no two options that can meet."""

from itertools import combinations, product

from tests.products import covering, diagonal, one_in, seldom

CHOICES = (("gpipe", "1f1b", "zb-h1"), (1, 2), ({"zero": 1}, {}), ("none", "selective", "full"))


def pairs(cases):
    return {repr(pair) for case in cases for pair in combinations(enumerate(case), 2)}


def named(parameters, mark):
    return [each.values for each in parameters if {found.name for found in each.marks} == ({mark} if mark else set())]


def test_in_a_covering_every_two_options_meet_that_can():
    possible = [case for case in product(*CHOICES) if case[0] != "gpipe" or case[1] == 1]
    found = covering(possible)
    assert pairs(found) == pairs(possible)
    assert 9 <= len(found) < len(possible) / 2  # three times three of the first and the last


def test_what_runs_often_is_not_covered_again():
    often = [("gpipe", 1, {}, "none"), ("1f1b", 2, {}, "full")]
    found = seldom(product(*CHOICES), often)
    assert named(found, None) == often
    assert pairs(named(found, "ci") + often) == pairs(product(*CHOICES))
    assert len(named(found, "all")) == 36 - len(often) - len(named(found, "ci")) > 20


def test_every_option_is_on_a_diagonal():
    found = diagonal(3, "abcd", range(3))
    assert found == [("a", 0), ("b", 2), ("c", 1), ("d", 0)]
    assert named(seldom(product("abcd", range(3)), some=found), "ci") == found


def test_one_in_three_runs_often():
    found = one_in(3, [1, (2,), 3, 4])
    assert named(found, None) == [(1,), (4,)]
    assert named(found, "ci") == [(2,), (3,)]
