"""Cuts: the best of all, within the memory."""

import functools
from collections.abc import Sequence
from itertools import combinations, pairwise

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import chained

from pfeife.data.link import LinkKind
from pfeife.data.machine import Machine
from pfeife.data.network import Network, Node
from pfeife.ir.parts import Kind
from pfeife.lowering.channel import window
from pfeife.sched.cutting.account import Account
from pfeife.sched.cutting.balanced import balanced
from pfeife.sched.cutting.borders import borders, open_borders, stages_from
from pfeife.sched.cutting.memory_limit import OutOfMemory
from pfeife.sched.cutting.workload import Workload

SLOW = LinkKind("slow", 1.0, 2.0)  # as LINK, which is faster, in whole seconds and bytes
LINK = Machine("slow link", 1.0, 1.0, 10**9, link_bandwidth=2.0, link_latency=1.0)
small = st.integers(0, 6)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Up to 8 clusters of whole numbers, so that sums are exact in any order."""
    count = draw(st.integers(1, 8))
    columns = [draw(st.lists(small, min_size=count, max_size=count)) for _ in range(4)]
    blocked = frozenset(draw(st.sets(st.integers(1, count)))) - {count}
    return chained(list(map(float, columns[0])), *columns[1:], blocked)


def every_cut(
    work: Workload,
    microbatches: int,
    flying: Sequence[int],
    limit: int,
    overlap: float = 0.0,
    left_out: Sequence[int] = (),
    slow: int | None = None,
) -> dict[tuple[int, ...], list[float]]:
    """The stages' seconds of every allowed cut that fits, a stage a rank: parameters, gradients,
    the one that is not yet added up, or the byte that a forward takes; messages that are posted
    ahead; what microbatches in flight save, and what they have sent. The `slow` stage starts at
    another link."""
    found, stages, count = {}, len(flying), work.units
    parameters = [size for size, _ in work.state]
    saved = [flow.bytes for flow in work.flows[:count]]
    crossing = [0, *(flow.bytes for flow in work.flows[count:]), 0]
    less = [*left_out, *[0] * stages]
    for cuts in combinations(sorted(set(range(1, count)) - work.blocked), stages - 1):
        ends, seconds = list(pairwise((0, *cuts, count))), []
        fits = True
        for stage, (a, b) in enumerate(ends):
            state = sum(parameters[a:b])
            ahead = window([crossing[a]], microbatches) if crossing[a] else 0
            kept = flying[stage] * (sum(saved[a:b]) + crossing[b])
            fits &= 2 * state + max(1, state) + ahead + kept + less[stage] <= limit
            links = {a: SLOW if stage == slow else LINK, b: SLOW if stage + 1 == slow else LINK}
            sent = {
                at: link.transfer_seconds(crossing[at])
                for at, link in links.items()
                if 0 < at < count
            }
            busy = sum(work.seconds[Kind.FORWARD][a:b]) + (1 - overlap) * sum(sent.values())
            seconds.append(max(busy, sent.get(a, 0.0)))
        if fits:
            found[cuts] = seconds
    return found


def _two_nodes(ranks: int, slow: int | None, overlap: float) -> Network | None:
    """Nodes joined as LINK says; the second one starts at rank `slow`."""
    if slow is None:
        return None
    inside = LinkKind("inside", LINK.link_bandwidth, LINK.link_latency, overlap)
    nodes = (Node(tuple(range(slow)), inside), Node(tuple(range(slow, ranks)), inside))
    return Network(nodes=nodes, across=attrs.evolve(SLOW, overlap=overlap))


@settings(max_examples=300)
@given(workloads(), st.data())
def test_balanced_equals_brute_force(work, data):
    stages = data.draw(st.integers(1, work.units))
    ranks = range(stages)
    flying = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    left_out = data.draw(st.lists(st.integers(-9, 9), max_size=stages))
    limit, m = data.draw(st.none() | st.integers(0, 80)), data.draw(st.integers(1, 3))
    if data.draw(st.booleans()) and len(edges := open_borders(work.units, work.blocked)) >= stages:
        cut = stages_from(sorted(data.draw(st.permutations(edges))[: stages - 1]), work.units)
        needed, left_out = Account(work).needed(cut, ranks, m, flying), []
        limit = max(needed)  # by the byte
    link = attrs.evolve(LINK, overlap=data.draw(st.sampled_from((0.0, 0.5, 1.0))))
    slow = data.draw(st.none() | st.integers(1, stages - 1)) if stages > 1 else None
    cut = functools.partial(
        balanced,
        Account(work),
        ranks,
        machine=link,
        in_flight=flying,
        microbatches=m,
        memory_limit=limit,
        left_out=left_out,
        network=_two_nodes(stages, slow, link.overlap),
    )

    def within(limit: int) -> dict[tuple[int, ...], list[float]]:
        return every_cut(work, m, flying, limit, link.overlap, left_out, slow)

    found = within(LINK.memory if limit is None else limit)
    if not found:
        with pytest.raises(ValueError, match=f"no cut into {stages} stages") as refused:
            cut()
        if isinstance(refused.value, OutOfMemory):
            assert limit is not None
            more = limit + refused.value.lacks
            assert borders(cut(memory_limit=more)) in within(more)
            assert not within(more - 1)
        return
    stage_of = cut()
    assert len(stage_of) == work.units and list(stage_of) == sorted(stage_of)
    assert sorted(set(stage_of)) == list(range(stages))
    assert borders(stage_of) in found, "this cut is blocked, or does not fit"
    slowest = min(map(max, found.values()))
    assert max(found[borders(stage_of)]) == slowest
    squares = [sum(s * s for s in each) for each in found.values() if max(each) == slowest]
    assert sum(s * s for s in found[borders(stage_of)]) == min(squares)


@settings(max_examples=200)
@given(workloads(), st.data())
def test_several_stages_a_rank_are_refused_only_where_nothing_fits(work, data):
    """One stage of a rank may have more than its share where another has less."""
    stages = data.draw(st.integers(1, work.units))
    ranks = [stage % 2 for stage in range(stages)]
    account, flying = Account(work), [2] * stages
    limit = data.draw(st.integers(0, 120))
    every = [
        stages_from(cuts, work.units)
        for cuts in combinations(open_borders(work.units, work.blocked), stages - 1)
    ]
    worst = {cut: max(account.needed(cut, ranks, 3, flying)) for cut in every}
    try:
        found = balanced(
            account, ranks, machine=LINK, in_flight=flying, microbatches=3, memory_limit=limit
        )
        assert worst[found] <= limit
    except OutOfMemory as error:
        assert min(worst.values()) == limit + error.lacks > limit
    except ValueError as error:
        assert not every, error


def test_the_fastest_cut_may_need_the_limit_to_the_byte():
    work = chained(
        (4.0, 4.0, 5.0, 6.0, 0.0), (1, 3, 1, 2, 0), (1, 0, 4, 0, 0), crossing=(1, 6, 4, 5, 2)
    )
    cut, ranks, flying = (0, 0, 1, 2, 2), (0, 1, 2), (3, 2, 3)
    limit = max(Account(work).needed(cut, ranks, 3, flying))
    asked = functools.partial(
        balanced, Account(work), ranks, machine=LINK, in_flight=flying, microbatches=3
    )
    assert asked(memory_limit=limit) == cut
    with pytest.raises(OutOfMemory, match="lacks 1 B;"):
        asked(memory_limit=limit - 1)


def test_too_many_stages():
    work = chained((1.0,) * 3, (5,) * 3, (1,) * 3, (0,) * 3)
    cut = functools.partial(
        balanced, Account(work), machine=LINK, in_flight=(1,) * 4, microbatches=1
    )
    assert cut((0, 1, 2)) == (0, 1, 2)
    with pytest.raises(ValueError, match="4 stages, but the program has only 3 clusters"):
        cut((0, 1, 2, 3))
    # Parameters, sums of gradients, a gradient that is not yet added up; what is saved.
    with pytest.raises(OutOfMemory, match=r"fits 10 B a rank: .* worst rank lacks 6 B"):
        cut((0, 1, 2), memory_limit=10)
    with pytest.raises(OutOfMemory, match="fits 10 B"):
        cut((0, 1, 2), machine=attrs.evolve(LINK, memory=10))
