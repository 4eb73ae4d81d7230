"""Parts of products of options, and marks for parts of a list of cases."""

from itertools import product

import pytest


def diagonal(n, *choices) -> list[tuple]:
    """One in `n` of a product, those whose places add up to a multiple of `n`: every value is in some."""
    numbered = product(*map(enumerate, choices))
    return [tuple(value for _, value in each) for each in numbered if sum(place for place, _ in each) % n == 0]


def one_in(n, cases, often=(), others=pytest.mark.ci) -> list:
    """`cases` as parameters. Each `n`-th has the mark `often`, by default none, and the others `others`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=others if i % n else often)
        for i, case in enumerate(cases)
    ]
