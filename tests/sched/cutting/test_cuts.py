"""Cuts: the best of all, within the memory."""

import functools
from collections.abc import Sequence
from itertools import combinations, pairwise

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfeife.cost.body import Storage
from pfeife.data.machine import Machine
from pfeife.ir.program import Kind
from pfeife.sched.cutting import balanced, clusters_of, stage_problem
from pfeife.sched.cutting.cuts import borders
from pfeife.sched.cutting.room import NoRoom
from pfeife.sched.cutting.stages import least_of
from pfeife.sched.cutting.workload import Flow, Workload

LINK = Machine("slow link", 1.0, 1.0, 10**9, link_bandwidth=2.0, link_latency=1.0)
small = st.integers(0, 6)


def chained(
    seconds: Sequence[float],
    parameters: Sequence[int],
    saved: Sequence[int],
    crossing: Sequence[int],
    blocked: frozenset[int] = frozenset(),
) -> Workload:
    """Clusters that save for their own backward and send to the next one."""
    count = len(seconds)
    flows = [(saved[c], c, (c, Kind.BACKWARD)) for c in range(count)]
    flows += [(crossing[c], c - 1, (c, Kind.FORWARD)) for c in range(1, count)]
    return Workload(
        {Kind.FORWARD: tuple(seconds), Kind.BACKWARD: (0.0,) * count},
        tuple((size, frozenset({c})) for c, size in enumerate(parameters)),
        tuple(parameters),
        tuple(
            Flow(size, unit, Kind.FORWARD, (reader,), Storage(f"F{unit}", str(reader), size))
            for size, unit, reader in flows
        ),
        {Kind.FORWARD: (0,) * count, Kind.BACKWARD: tuple(parameters)},
        {Kind.FORWARD: (1,) * count, Kind.BACKWARD: (0,) * count},
        blocked,
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Up to 8 clusters of whole numbers, so that sums are exact in any order."""
    count = draw(st.integers(1, 8))
    columns = [draw(st.lists(small, min_size=count, max_size=count)) for _ in range(4)]
    blocked = frozenset(draw(st.sets(st.integers(1, count)))) - {count}
    return chained(list(map(float, columns[0])), *columns[1:], blocked)


def every_cut(
    work: Workload, microbatches: int, flying: Sequence[int], limit: int, overlap: float
) -> dict[tuple[int, ...], list[float]]:
    """The stages' seconds of every allowed cut, with the memory that a search counts."""
    given, found, stages = clusters_of(work), {}, len(flying)
    count, ranks = len(given.seconds), range(len(flying))
    sent = [1.0 + size / 2.0 for size in given.crossing]
    for cuts in combinations(sorted(set(range(1, count)) - given.blocked), stages - 1):
        ends = list(pairwise((0, *cuts, count)))
        stage_of = [sum(cut <= unit for cut in cuts) for unit in range(count)]
        costs = stage_problem(work, stage_of, ranks, microbatches, machine=LINK).stages
        one = least_of(work, stage_of, ranks, microbatches)
        needed = [size + (flying[s] - 1) * costs[s].saved for s, size in enumerate(one)]
        if max(needed) <= limit:
            found[cuts] = []
            for a, b in ends:
                taken = sum((1 - overlap) * sent[at] for at in (a, b) if 0 < at < count)
                busy = sum(given.seconds[a:b]) + taken
                found[cuts].append(max(busy, sent[a] if a else 0.0))
    return found


@settings(max_examples=300)
@given(workloads(), st.data())
def test_balanced_equals_brute_force(work, data):
    stages = data.draw(st.integers(1, work.units))
    ranks = range(stages)
    flying = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    left_out = data.draw(st.lists(st.integers(-9, 9), max_size=stages))
    work = attrs.evolve(work, left_out=tuple(left_out))
    limit, m = data.draw(st.none() | st.integers(0, 80)), data.draw(st.integers(1, 3))
    link = attrs.evolve(LINK, overlap=data.draw(st.sampled_from((0.0, 0.5, 1.0))))
    cut = functools.partial(
        balanced, work, ranks, machine=link, in_flight=flying, microbatches=m, memory_limit=limit
    )
    found = every_cut(work, m, flying, LINK.memory if limit is None else limit, link.overlap)
    if not found:
        with pytest.raises(ValueError, match=f"no cut into {stages} stages") as refused:
            cut()
        if isinstance(refused.value, NoRoom):
            assert limit is not None
            more = cut(memory_limit=limit + refused.value.lacks)
            assert borders(more) in every_cut(
                work, m, flying, limit + refused.value.lacks, link.overlap
            )
            assert not every_cut(work, m, flying, limit + refused.value.lacks - 1, link.overlap)
        return
    stage_of = cut()
    assert len(stage_of) == work.units and list(stage_of) == sorted(stage_of)
    assert sorted(set(stage_of)) == list(range(stages))
    assert borders(stage_of) in found, "this cut is blocked, or does not fit"
    slowest = min(map(max, found.values()))
    assert max(found[borders(stage_of)]) == slowest
    squares = [sum(s * s for s in each) for each in found.values() if max(each) == slowest]
    assert sum(s * s for s in found[borders(stage_of)]) == min(squares)


def test_too_many_stages():
    work = chained((1.0,) * 3, (5,) * 3, (1,) * 3, (0,) * 3)
    cut = functools.partial(balanced, work, machine=LINK, in_flight=(1,) * 4, microbatches=1)
    assert cut((0, 1, 2)) == (0, 1, 2)
    with pytest.raises(ValueError, match="4 stages, but the program has only 3 clusters"):
        cut((0, 1, 2, 3))
    # Parameters, sums of gradients, a gradient that is not yet added up; what is saved.
    with pytest.raises(NoRoom, match=r"fits 10 bytes a rank: .* worst rank lacks 6"):
        cut((0, 1, 2), memory_limit=10)
    with pytest.raises(NoRoom, match="fits 10 bytes"):
        cut((0, 1, 2), machine=attrs.evolve(LINK, memory=10))
