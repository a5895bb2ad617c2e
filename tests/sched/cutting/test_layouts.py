"""Cuts and placements that a search starts from, where memory is short."""

import attrs
import pytest

from pfeife.cost import machine
from pfeife.cost.body import Storage
from pfeife.data.plan import RecomputeOption
from pfeife.ir.parts import Kind
from pfeife.sched.cutting.account import Account
from pfeife.sched.cutting.constraints import Constraints
from pfeife.sched.cutting.layouts import layouts_for, lighter, short_of_memory
from pfeife.sched.cutting.memory_limit import OutOfMemory
from pfeife.sched.cutting.workload import Flow, Workload
from pfeife.sched.joint import search_workload
from pfeife.sched.search.budget import Budget

CORE = machine("cpu-core")
NEVER, ALWAYS = RecomputeOption(10), RecomputeOption(0, 1.0, ("tanh",))


def chain(state: list[int], saved: int = 0) -> Workload:
    """Clusters that take as long as one another, each with so many bytes of state, and a value
    that its backward reads."""
    units, nothing = len(state), (0,) * len(state)
    values = [Storage(f"value {unit}", "", saved) for unit in range(units if saved else 0)]
    flows = tuple(
        Flow(saved, unit, Kind.FORWARD, ((unit, Kind.BACKWARD),), value)
        for unit, value in enumerate(values)
    )
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return Workload(
        {kind: (1.0,) * units for kind in kinds},
        tuple((size, frozenset({unit})) for unit, size in enumerate(state)),
        nothing,
        flows,
        dict.fromkeys(kinds, nothing),
        dict.fromkeys(kinds, nothing),
    )


def test_room_is_found_where_there_are_too_many_cuts_to_try_them_all():
    """The first quarter of the clusters has all the state, which must go to two ranks."""
    work = chain([10] * 10 + [0] * 30)
    constraints = Constraints(CORE, 4, 4, 70)
    plan = search_workload(Account(work), constraints, Budget.of(None, 500_000))
    first = plan.stage_ranks[plan.stage_of_cluster[0]]
    held = [plan.stage_ranks[stage] for stage in plan.stage_of_cluster[:10]]
    assert 3 <= held.count(first) <= 7


def test_borders_that_are_closed_leave_no_room():
    """One border is open, so that other numbers of stages a rank have no cuts at all."""
    work = attrs.evolve(chain([10] * 4), blocked=frozenset({2, 3}))
    with pytest.raises(OutOfMemory, match="the best lacks 10 B"):
        search_workload(Account(work), Constraints(CORE, 2, 2, 20), Budget.of(None, 1000))


def test_no_more_is_recomputed_than_makes_room():
    """Each rank has four clusters that save 10 bytes of each of two microbatches, and room for
    70: one of them recomputes."""
    work = chain([0] * 8, saved=10)
    constraints = Constraints(CORE, 2, 2, 70)
    account = Account(work)
    (layout,) = [one for one in layouts_for(account, constraints) if max(one.stage_of) == 1]
    assert short_of_memory(layout, constraints)
    most, *_ = lighter(account, [layout], constraints, [(NEVER, ALWAYS)] * 8)
    assert sorted(most.relief.options) == [0, 4]


def test_memory_is_not_short_where_a_microbatch_for_every_rank_fits():
    """Two microbatches of the four clusters' 10 bytes, on each of two ranks."""
    account = Account(chain([0] * 8, saved=10))
    for limit, short in ((79, True), (90, False)):
        constraints = Constraints(CORE, 2, 2, limit)
        found = [one for one in layouts_for(account, constraints) if max(one.stage_of) == 1]
        assert [short_of_memory(one, constraints) for one in found] == [short]
