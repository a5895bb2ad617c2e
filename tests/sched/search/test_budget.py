"""Budgets of a search."""

import math

import pytest
from problems import equal

from pfeife.sched.search.search import search_schedule


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"seconds": 0.0}, "seconds=0.0"),
        ({"seconds": math.inf}, "seconds=inf"),
        ({"seconds": math.nan}, "seconds=nan"),
        ({"seconds": "1"}, "seconds='1'"),
        ({"work": 0}, "work=0"),
        ({"work": 1.5}, "work=1.5"),
        ({"work": 9, "jobs": 0}, "jobs=0"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(budget, message):
    with pytest.raises(ValueError, match=message):
        search_schedule(equal(2, 2), **budget)
