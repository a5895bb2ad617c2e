"""Placements of stages: the best is found, the nearer ones have more time."""

import attrs
import pytest
from problems import WORK, equal, on_a_v

from pfeife.lowering.problem import fits
from pfeife.sched.search.bound import lower_bound
from pfeife.sched.search.budget import Budget
from pfeife.sched.search.placements import _shares
from pfeife.sched.search.pool import Candidate, Origin
from pfeife.sched.search.run import Search
from pfeife.sched.search.search import search_placements


def test_placements_have_more_time_the_nearer_they_are():
    searches = [Search(equal(4, 8), Budget.of(None, WORK), 0) for _ in range(4)]
    for search, seconds in zip(searches, (100.0, 102.0, 130.0, 101.0), strict=True):
        search.pool.keep(Candidate(seconds, [], Origin.RULE))
    searches[3].bound = 100.0  # cannot become better than the best
    parts = {searches.index(search): part for search, part in _shares(searches)}
    assert parts == {0: pytest.approx(3 / 4), 1: pytest.approx(1 / 4)}


def test_the_best_placement_is_found_and_the_bound_is_of_all():
    near, far = on_a_v(4, 8, 4.0), attrs.evolve(on_a_v(4, 8, 4.0), microbatches=24)
    first, again = (search_placements([far, near], work=4 * WORK) for _ in range(2))
    assert first == again and first[0] == 1 and not first[1].interrupted
    assert first[1].bound == lower_bound(near)


def test_a_placement_in_which_nothing_fits_is_left_out():
    small, large = (equal(2, 2, memory=bytes_) for bytes_ in (0.5, 2.0))
    at, found = search_placements([small, large], work=WORK)
    assert at == 1 and fits(large, found.schedule)
    with pytest.raises(ValueError, match="one microbatch alone does not fit: rank 0 needs 1 B"):
        search_placements([small, small], work=WORK)


def test_placements_that_are_none_are_refused():
    with pytest.raises(ValueError, match="no placement"):
        search_placements([], work=WORK)
    with pytest.raises(ValueError, match="2 lists for 1 problems"):
        search_placements([equal(2, 2)], work=WORK, seeds=[[], []])
