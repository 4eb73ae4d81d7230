"""Parts of products of options: what runs often, what runs before a change lands, and what `make test-all` adds."""

from itertools import combinations, product

import pytest


def _pairs(case) -> set:
    return set(combinations(enumerate(map(repr, case)), 2))


def covering(cases, often=()) -> list:
    """Those of `cases`, fewer than all, in which every two values meet that meet in `cases` and not in `often`."""
    found, pairs = [], {repr(case): _pairs(case) for case in cases}
    left = set().union(*pairs.values()).difference(*map(_pairs, often))
    while left:
        found.append(max(cases, key=lambda case: len(pairs[repr(case)] & left)))
        left -= pairs[repr(found[-1])]
    return found


def diagonal(n, *choices) -> list[tuple]:
    """One in `n` of a product, those whose places add up to a multiple of `n`: every value is in some."""
    numbered = product(*map(enumerate, choices))
    return [tuple(value for _, value in each) for each in numbered if sum(place for place, _ in each) % n == 0]


def seldom(cases, often=(), some=None) -> list:
    """`cases` as parameters of a test. They are left to the tier `all`, but for those `often`, which have none, and
    `some`, which run in `ci`: by default as many as it takes for every two values to meet.
    """
    cases = list(cases)
    some = covering(cases, often) if some is None else some
    marks = {repr(case): pytest.mark.ci for case in some} | {repr(case): () for case in often}
    return [pytest.param(*case, marks=marks.get(repr(case), pytest.mark.all)) for case in cases]


def one_in(n, cases, often=(), others=pytest.mark.ci) -> list:
    """`cases` as parameters, of which each `n`-th has the mark `often`, by default none, and the others `others`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=others if i % n else often)
        for i, case in enumerate(cases)
    ]
