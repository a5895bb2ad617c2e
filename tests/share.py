"""The gate's share of the tests: every kind of case once. `make test-all` (WHOLE=1) runs them all.

What is left out of the share bears the mark `whole`. Of random cases the share has a quarter
(`random_cases`): of damaged JSON 375 of 1,500, of files 100 of 400, of CSV 150 of 600, of edited
plans 50 of 200; damaged cache entries, which are cheap, are all 300 in both.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

WHOLE = bool(os.environ.get("WHOLE"))


def whole(*values: Any) -> Any:
    """A parameter that is tested in the whole alone."""
    return pytest.param(*values, marks=pytest.mark.whole)


def some(values: Iterable[Any], every: int = 2) -> list:
    """Parameters; the share has the first one and from there on each second, or third, ..."""
    return [whole(one) if at % every else one for at, one in enumerate(values)]


def crossed(first: Sequence[Any], *others: Sequence[Any]) -> list:
    """Parameters for all combinations; the share has all of the `others`, each with one value of
    the first axis, and each of its values once or more."""
    rest = list(product(*others))
    count = max(len(first), len(rest))
    shared = {(first[i % len(first)], *rest[i % len(rest)]) for i in range(count)}
    every = product(first, *others)
    return [pytest.param(*one) if one in shared else whole(*one) for one in every]


def random_cases(count: int, **more: Any) -> settings:
    """Random cases: so many in the whole, a quarter in the share."""
    return settings(max_examples=count if WHOLE else -(-count // 4), deadline=None, **more)
