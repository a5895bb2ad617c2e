"""Cuts, placement and schedule together: feasible whenever anything is, and never worse than the
families."""

import itertools

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models import case
from programs import fused

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine
from pfeife.cost.body import Storage
from pfeife.data.tried import Tried
from pfeife.ir.parts import Kind
from pfeife.lowering.problem import Problem, fits, makespan
from pfeife.sched.cutting.account import Account
from pfeife.sched.cutting.constraints import Constraints
from pfeife.sched.cutting.stages import room_for, stage_problem
from pfeife.sched.cutting.workload import Flow, Workload, workload_of
from pfeife.sched.families.orders import folded, looped
from pfeife.sched.families.policies import POLICIES
from pfeife.sched.joint import search_workload
from pfeife.sched.search.budget import Budget
from pfeife.sched.search.seeds import fused as whole

CORE = machine("cpu-core")
SPLIT = (Kind.FORWARD, Kind.INPUT_BACKWARD, Kind.WEIGHT_BACKWARD)


def flow(size: int, unit: int, kind: Kind, *readers: tuple[int, Kind]) -> Flow:
    """A value with a storage of its own."""
    return Flow(size, unit, kind, readers, Storage(f"{kind}{unit}", str(readers), size))


@st.composite
def workloads(draw, largest: int = 6) -> Workload:
    """A chain of clusters that send to their neighbours and to themselves."""
    units = draw(st.integers(2, largest))
    seconds = st.floats(0.5, 2.0)
    per_unit = {
        kind: tuple(draw(seconds) for _ in range(units))
        for kind in (Kind.FORWARD, Kind.INPUT_BACKWARD, Kind.WEIGHT_BACKWARD)
    }
    flows = []
    for unit in range(units):
        size = draw(st.integers(1, 9))
        flows.append(flow(size, unit, Kind.FORWARD, (unit, Kind.WEIGHT_BACKWARD)))
        if unit + 1 < units:
            flows.append(flow(1, unit, Kind.FORWARD, (unit + 1, Kind.FORWARD)))
            flows.append(flow(1, unit + 1, Kind.INPUT_BACKWARD, (unit, Kind.INPUT_BACKWARD)))
    sizes = tuple(draw(st.integers(0, 5)) for _ in range(units))
    parameters = tuple((size, frozenset({unit})) for unit, size in enumerate(sizes))
    temporaries = tuple(draw(st.integers(0, 3)) for _ in range(units))
    nothing = (0,) * units
    needed = dict.fromkeys(per_unit, temporaries)
    made = {**dict.fromkeys(per_unit, nothing), Kind.WEIGHT_BACKWARD: sizes}
    return Workload(per_unit, parameters, sizes, tuple(flows), made, needed)


def limited(work: Workload, cut, placement, microbatches: int, limit: int) -> Problem:
    """The problem of a cut, with what a limit leaves for activations."""
    account = Account(work)
    memory = room_for(limit, account.always(cut, placement, microbatches))
    problem = stage_problem(account, cut, placement, microbatches, machine=CORE)
    return attrs.evolve(problem, memory=memory)


@given(work=workloads(), limit=st.integers(5, 60), ranks=st.integers(1, 3), count=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_plan_is_found_whenever_there_is_one(work, limit, ranks, count):
    """Every cut into one to three stages a rank on every placement: one microbatch at a time is
    what needs the least memory."""
    units = work.units
    assume(units >= ranks)
    constraints = Constraints(CORE, count, ranks, limit)
    possible = False
    for stages in (v * ranks for v in (1, 2, 3) if v * ranks <= units):
        for starts in itertools.combinations(range(1, units), stages - 1):
            cut = tuple(sum(start <= unit for start in starts) for unit in range(units))
            for stage_ranks in {looped(stages, ranks), folded(stages, ranks)}:
                one = limited(work, cut, stage_ranks, count, limit)
                room = one.memory or ()
                possible |= all(one.smallest_memory(r) <= room[r] for r in range(ranks))
    if not possible:
        with pytest.raises(ValueError, match="for one microbatch on its worst rank"):
            search_workload(Account(work), constraints, Budget.of(None, 200_000))
        return
    plan = search_workload(Account(work), constraints, Budget.of(None, 200_000))
    stage_ranks = plan.stage_ranks
    problem = limited(work, plan.stage_of_cluster, stage_ranks, count, limit)
    assert fits(problem, plan.schedule)
    assert sched.verify_schedule(plan.schedule, problem=problem)
    assert plan.step_seconds == pytest.approx(makespan(problem, plan.schedule))
    assert plan.bound_seconds <= plan.step_seconds * (1 + 1e-9)


@given(work=workloads(8), count=st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_no_family_is_better_on_its_cuts(work, count):
    account = Account(work)
    plan = search_workload(account, Constraints(CORE, count, 2, 10**9), Budget.of(None, 500_000))
    units = work.units
    even = tuple(unit * 2 // units for unit in range(units))
    problem = stage_problem(account, even, (0, 1), count, machine=CORE)
    for name in ("gpipe", "1f1b", "zb-h1"):
        order = POLICIES[name](2, count, (0, 1))
        assert plan.step_seconds <= makespan(problem, order) * 1.0001
        assert plan.step_seconds <= makespan(problem, whole(order)) * 1.0001


@pytest.mark.parametrize("name", ["GPT", "UNet", "BatchNormNet"])
def test_stage_problems_add_up(name):
    """Seconds, parameters and saved bytes of all stages are those of all clusters."""
    program = fused(name)
    program = pfeife.annotate(estimate(program, CORE))(program)
    work = workload_of(program)
    assert not work.splittable
    cut = tuple(unit * 3 // program.units for unit in range(program.units))
    problem = stage_problem(Account(work), cut, (0, 1, 0), 4, machine=CORE)
    total = sum(call.seconds + call.accumulate_seconds for call in program.calls)
    assert sum(stage.seconds for stage in problem.stages) == pytest.approx(total)
    assert {(e.source, e.destination) for e in problem.edges} >= {(0, 1), (1, 2)}
    split = pfeife.split_backward()(program)
    split = pfeife.annotate(estimate(split, CORE))(split)
    parts = stage_problem(Account(workload_of(split)), cut, (0, 1, 0), 4, machine=CORE)
    for one, other in zip(problem.stages, parts.stages, strict=True):
        assert other.splittable and one.forward == pytest.approx(other.forward)
        assert other.backward == pytest.approx(one.backward, rel=0.2)
        assert 0 <= other.kept <= other.saved
    with pytest.raises(ValueError, match="have no costs"):
        workload_of(fused(name))


def test_the_limit_is_what_a_rank_has_for_everything():
    """State, sums of gradients, the largest call and buffers for messages come off first."""
    flows = (
        flow(3, 0, Kind.FORWARD, (1, Kind.FORWARD)),
        flow(5, 0, Kind.FORWARD, (0, Kind.BACKWARD)),
        flow(3, 1, Kind.BACKWARD, (0, Kind.BACKWARD)),
    )
    seconds = {Kind.FORWARD: (1.0, 1.0), Kind.BACKWARD: (2.0, 2.0)}
    state = ((10, frozenset({0})), (20, frozenset({0, 1})))
    made = {Kind.FORWARD: (0, 0), Kind.BACKWARD: (30, 20)}
    temporaries = {Kind.FORWARD: (7, 8), Kind.BACKWARD: (1, 2)}
    work = Workload(seconds, state, (30, 20), flows, made, temporaries)
    problem = limited(work, (0, 1), (0, 1), 4, 1000)
    posted = 3 * 3  # one of the four messages is at hand
    assert problem.memory == (
        1000 - 30 - 30 - (30 + 1) - posted,
        1000 - 20 - 20 - (20 + 2) - posted,
    )
    assert [stage.saved for stage in problem.stages] == [5.0 + 3.0, 0.0], "what is sent is kept"
    together = limited(work, (0, 1), (0, 0), 4, 1000)
    assert together.memory == (1000 - 30 - 50 - (30 + 1),)
    least = Account(work).needed((0, 1), (0, 0), 4, (1, 1))
    assert least == [1000 - together.memory[0] + 5 + 3]


def test_a_storage_is_counted_once():
    """A value that is sent and saved, and a view of it; on each rank that has it."""
    one = Storage("forward", "exp", 8)
    flows = (
        Flow(8, 0, Kind.FORWARD, ((0, Kind.BACKWARD), (1, Kind.FORWARD)), one),
        Flow(4, 0, Kind.FORWARD, ((0, Kind.BACKWARD), (1, Kind.BACKWARD)), one),
        Flow(4, 0, Kind.FORWARD, ((0, Kind.BACKWARD),), None),  # looks at a parameter
    )
    nothing = {Kind.FORWARD: (0, 0), Kind.BACKWARD: (0, 0)}
    work = Workload(nothing, (), (0, 0), flows, nothing, nothing)
    apart = stage_problem(Account(work), (0, 1), (0, 1), 4, machine=CORE)
    assert [stage.saved for stage in apart.stages] == [8.0, 8.0]
    together = stage_problem(Account(work), (0, 0), (0,), 4, machine=CORE)
    assert [stage.saved for stage in together.stages] == [8.0]


def test_what_cannot_be_planned_says_why():
    program = pfeife.annotate(estimate(fused("DropoutNet"), CORE))(fused("DropoutNet"))

    def planned(**options):
        return sched.plan(
            program, machine=CORE, microbatches=4, schedule="search", search_seconds=0.1, **options
        )

    with pytest.raises(ValueError, match=r"50 stages on 50 ranks.* only 4 clusters"):
        planned(ranks=50)
    with pytest.raises(ValueError, match="memory_limit=100: the best plan found needs"):
        planned(ranks=2, memory_limit=100)
    assert planned(ranks=2).stages >= 2
    assert planned(ranks=2, stages=4).stages == 4
    by_hand = planned(ranks=2, cuts=(0, 0, 0, 1))
    assert by_hand.stage_of_cluster == (0, 0, 0, 1)
    tight = attrs.evolve(CORE, memory=10**9)
    assert sched.plan(program, machine=tight, microbatches=4, ranks=2, stages=2).step_seconds


def test_a_budget_of_work_gives_the_same_plan_again():
    program = pfeife.annotate(estimate(fused("DropoutNet"), CORE))(fused("DropoutNet"))
    request = {"machine": CORE, "microbatches": 4, "ranks": 2, "schedule": "search"}
    first, again = (sched.plan(program, **request, search_work=50_000) for _ in range(2))
    assert first == again and not first.interrupted
    assert sched.plan(program, **request, search_seconds=1e-3).interrupted
    for budget in ({"search_seconds": 0.0}, {"search_work": 0.5}):
        with pytest.raises(ValueError, match=r"seconds=0.0|work=0.5"):
            sched.plan(program, **request, **budget)


def test_the_number_of_microbatches_is_chosen():
    """Many fill the pipeline, too many pay for launches; what cannot be planned is left out."""
    one = case("GPT")
    counts = (1, 2, 8)
    fused = {n: pfeife.fuse()(pfeife.capture(one.step, *one.batch(16 // n))) for n in counts}

    def programs(on) -> dict[int, pfeife.Program]:
        return {n: pfeife.annotate(estimate(found, on))(found) for n, found in fused.items()}

    free = {"launch_seconds": 0.0, "link_latency": 0.0}
    quick = attrs.evolve(CORE, **free, link_bandwidth=1e18, memory_bandwidth=1e18)
    best, plan = sched.choose_microbatches(programs(quick), machine=quick, stages=2)
    assert (best, plan.schedule.microbatches) == (8, 8)
    slow = attrs.evolve(CORE, launch_seconds=1.0)
    assert sched.choose_microbatches(programs(slow), machine=slow, stages=2)[0] == 1
    with pytest.raises(ValueError, match="90 stages"):
        sched.choose_microbatches(programs(slow), machine=slow, stages=90)


def chain(seconds: dict[Kind, tuple[float, ...]], saved: tuple[int, ...]) -> Workload:
    """Clusters that save so many bytes and send a byte to the next one."""
    units, nothing = len(saved), (0,) * len(saved)
    flows = [
        flow(size, unit, Kind.FORWARD, (unit, Kind.WEIGHT_BACKWARD))
        for unit, size in enumerate(saved)
    ]
    flows += [flow(1, unit, Kind.FORWARD, (unit + 1, Kind.FORWARD)) for unit in range(units - 1)]
    each = dict.fromkeys(seconds, nothing)
    return Workload(seconds, (), nothing, tuple(flows), each, each)


def test_a_plan_spends_its_budget():
    """A last search of what is left, where the bound is not reached before."""
    work = chain(dict.fromkeys(SPLIT, (1.0, 1.7, 0.6, 1.2, 0.9, 1.4, 0.8)), (4,) * 7)
    budget = Budget.of(None, 300_000)
    plan = search_workload(Account(work), Constraints(CORE, 5, 3, 28), budget)
    assert plan.bound_seconds < plan.step_seconds and budget.left < 30_000


@pytest.mark.parametrize(
    ("seconds", "saved", "limit"),
    [
        (((3.0, 2.0, 1.0), (1.0, 1.0, 3.0), (1.0, 2.0, 1.0)), (4, 1, 3), 10),
        (((3.0, 3.0, 1.0), (2.0, 2.0, 3.0), (1.0, 1.0, 2.0)), (9, 8, 1), 33),
    ],
)
def test_borders_move_only_where_the_schedule_still_fits(seconds, saved, limit):
    """With two clusters on the first rank the step would be shorter, with both microbatches of
    them in flight."""
    work = chain(dict(zip(SPLIT, seconds, strict=True)), saved)
    plan = search_workload(
        Account(work), Constraints(CORE, 2, 2, limit, stages=2), Budget.of(None, 3000)
    )
    problem = limited(work, plan.stage_of_cluster, plan.stage_ranks, 2, limit)
    assert plan.stage_of_cluster == (0, 1, 1) and fits(problem, plan.schedule)


def test_a_search_says_what_it_has_tried():
    """Each schedule is told once, the least so far never grows, and the plan is what it is."""
    program = pfeife.annotate(estimate(fused("GPT"), CORE))(fused("GPT"))
    asked = dict(machine=CORE, microbatches=4, ranks=2, schedule="search", search_work=200_000)
    seen: list[Tried] = []
    plan = sched.plan(program, **asked, watched=seen.append)
    assert plan == sched.plan(program, **asked)
    assert {one.stages for one in seen} == {2, 4, 6}
    best = [one.best for one in seen]
    assert best == list(itertools.accumulate((one.step for one in seen), min))
    assert best[-1] == pytest.approx(plan.step_seconds, rel=0.05)
    assert all(one.after <= other.after for one, other in itertools.pairwise(seen))
