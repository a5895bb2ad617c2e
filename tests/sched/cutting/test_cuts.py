"""Cuts: the best of all, within the memory."""

import functools
from collections.abc import Sequence
from itertools import combinations, pairwise

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfeife.data.machine import Machine
from pfeife.sched.cutting import balanced
from pfeife.sched.cutting.cuts import Clusters, borders

LINK = Machine("slow link", 1.0, 1.0, 10**9, link_bandwidth=2.0, link_latency=1.0)
small = st.integers(0, 6)


@st.composite
def clusters(draw: st.DrawFn) -> Clusters:
    """Up to 8 clusters of whole numbers, so that sums are exact in any order."""
    count = draw(st.integers(1, 8))
    column = st.lists(small, min_size=count, max_size=count).map(tuple)
    return Clusters(
        seconds=tuple(map(float, draw(column))),
        parameters=draw(column),
        saved=draw(column),
        crossing=(0, *draw(column)[1:]),
        blocked=frozenset(draw(st.sets(st.integers(1, count)))) - {count},
    )


def every_cut(
    given: Clusters, stages: int, flying: Sequence[int], limit: int, overlap: float
) -> dict[tuple[int, ...], list[float]]:
    """The stages' seconds of every allowed cut."""
    count, found = len(given.seconds), {}
    sent = [1.0 + size / 2.0 for size in given.crossing]
    for cuts in combinations(sorted(set(range(1, count)) - given.blocked), stages - 1):
        ends = list(pairwise((0, *cuts, count)))
        fits = all(
            2 * sum(given.parameters[a:b]) + flying[stage] * sum(given.saved[a:b]) <= limit
            for stage, (a, b) in enumerate(ends)
        )
        if fits:
            found[cuts] = []
            for a, b in ends:
                taken = sum((1 - overlap) * sent[at] for at in (a, b) if 0 < at < count)
                busy = sum(given.seconds[a:b]) + taken
                found[cuts].append(max(busy, sent[a] if a else 0.0))
    return found


@settings(max_examples=300)
@given(clusters(), st.data())
def test_balanced_equals_brute_force(given, data):
    count = len(given.seconds)
    stages = data.draw(st.integers(1, count))
    flying = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    limit = data.draw(st.none() | st.integers(0, 60))
    link = attrs.evolve(LINK, overlap=data.draw(st.sampled_from((0.0, 0.5, 1.0))))
    cut = functools.partial(
        balanced, given, stages, machine=link, in_flight=flying, memory_limit=limit
    )
    found = every_cut(given, stages, flying, LINK.memory if limit is None else limit, link.overlap)
    if not found:
        with pytest.raises(ValueError, match=f"no cut into {stages} stages"):
            cut()
        return
    stage_of = cut()
    assert len(stage_of) == count and list(stage_of) == sorted(stage_of)
    assert sorted(set(stage_of)) == list(range(stages))
    assert borders(stage_of) in found, "this cut is blocked, or does not fit"
    slowest = min(map(max, found.values()))
    assert max(found[borders(stage_of)]) == slowest
    squares = [sum(s * s for s in each) for each in found.values() if max(each) == slowest]
    assert sum(s * s for s in found[borders(stage_of)]) == min(squares)


def test_too_many_stages():
    given = Clusters((1.0,) * 3, (5,) * 3, (1,) * 3, (0,) * 3)
    assert balanced(given, 3, machine=LINK, in_flight=(1, 1, 1)) == (0, 1, 2)
    with pytest.raises(ValueError, match="4 stages, but the program has only 3 clusters"):
        balanced(given, 4, machine=LINK, in_flight=(1,) * 4)
    with pytest.raises(ValueError, match=r"fits 10 bytes a rank \(the largest .* takes 11\)"):
        balanced(given, 3, machine=LINK, in_flight=(1,) * 3, memory_limit=10)
    tiny = attrs.evolve(LINK, memory=10)
    with pytest.raises(ValueError, match="fits 10 bytes"):
        balanced(given, 3, machine=tiny, in_flight=(1,) * 3)
