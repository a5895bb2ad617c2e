"""A plan with a family's schedule, or a given one, or one that a function makes."""

import inspect
from collections.abc import Callable, Iterator, Sequence

import attrs

from pfeife.data.plan import Plan, RecomputeOption
from pfeife.data.schedule import Do, Schedule
from pfeife.ir.parts import Kind, Role
from pfeife.ir.program import Program
from pfeife.lowering.lower import insert_actions
from pfeife.lowering.problem import Problem, makespan, seconds_of, transfers
from pfeife.lowering.simulate import simulate
from pfeife.lowering.verify import verify_schedule
from pfeife.sched.cutting.account import Account, with_left_out
from pfeife.sched.cutting.balanced import Cutter
from pfeife.sched.cutting.constraints import Constraints
from pfeife.sched.cutting.judged import best_cut, message_seconds
from pfeife.sched.cutting.layouts import even_cuts
from pfeife.sched.cutting.recompute_greedy import in_flight
from pfeife.sched.cutting.recompute_policy import RecomputePolicy
from pfeife.sched.cutting.stages import problem_of, room_for
from pfeife.sched.families.family import Family, splits_backwards
from pfeife.sched.families.policies import forward_only, policy
from pfeife.sched.search.bound import lower_bound

# How to make a schedule: a family or its name, "search", a schedule, or a function of a problem.
Scheduling = str | Family | Schedule | Callable[[Problem], Schedule]


def of_family(
    program: Program,
    account: Account,
    schedule: Scheduling,
    constraints: Constraints,
    recompute: RecomputePolicy | None,
    again: Callable[[Plan, RecomputePolicy], Plan],
) -> Plan:
    """The plan with a family's schedule; its cuts keep to the memory by the program's `account`.
    `again` puts in what is recomputed."""
    trained = bool(program.ports(Role.TANGENT))
    count, m = constraints.count, constraints.microbatches
    # A function of a problem needs cuts before there is a problem: those that suit 1F1B.
    family = family_of(schedule) or policy("1f1b")
    placed = constraints.placement or _placed(family, count, constraints.ranks)
    made = (family if trained else forward_only)(count, m, placed)
    _refuse_other(f"the family {family}", made, placed, m)
    order = _over(made, constraints.ranks)
    _check_split(order, program)
    # What is recomputed is decided after the cuts: until then a microbatch counts as saving
    # nothing.
    flying = (0,) * count if saved_is_open(recompute) else in_flight(order)
    stage_of = constraints.cuts or cut_for(account, constraints, order, flying)
    problem = problem_of(account, constraints, stage_of, placed)
    if trained and callable(schedule) and not isinstance(schedule, Family):
        always = with_left_out(account.always(stage_of, placed, m), constraints.left_out)
        limited = attrs.evolve(problem, memory=room_for(constraints.memory_limit, always))
        order = _over(_made_by(schedule, limited), constraints.ranks)
    _check_split(order, program)
    lowered = insert_actions(verify_schedule(order), transfers(problem))
    plan = Plan(stage_of, order, account.work.duplicated)
    if recompute is not None:
        plan = again(plan, recompute)
        problem = slower(problem, plan.recompute)
    return attrs.evolve(
        plan,
        stage_seconds=tuple(stage.seconds for stage in problem.stages),
        step_seconds=simulate(lowered, seconds_of(problem)).seconds,
        bound_seconds=lower_bound(problem) if trained else None,
    )


def cut_for(
    account: Account, constraints: Constraints, order: Schedule, flying: Sequence[int]
) -> tuple[int, ...]:
    """The cut with which a schedule takes least, or little longer with smaller messages."""
    placed = order.stage_ranks
    trained = any(action.do != Do.FORWARD for actions in order.ranks for action in actions)
    cutter = Cutter(account, constraints, placed, flying)

    def judge(cut: tuple[int, ...]) -> tuple[float, float]:
        problem = problem_of(account, constraints, cut, placed, busy=True)
        if trained:
            return makespan(problem, order), message_seconds(problem)
        lowered = insert_actions(order, transfers(problem))
        return simulate(lowered, seconds_of(problem)).seconds, message_seconds(problem)

    operations = sum(map(len, order.ranks))
    return best_cut(cutter, _others(cutter), judge, constraints.tolerance, operations)


def _others(cutter: Cutter) -> Iterator[tuple[int, ...]]:
    """Cuts that may be better than the one whose slowest stage is the fastest: as if all links were
    the slowest one, carried one message at a time whatever its direction, or were slower still
    (then messages are small); and, with several stages a rank, those whose ranks are loaded
    evenly."""
    constraints, slow = cutter.constraints, cutter.constraints.machine
    for slower in (1, 2, 8, 32):
        machine = attrs.evolve(slow, link_bandwidth=slow.link_bandwidth / slower)
        alike = attrs.evolve(constraints, machine=machine, of_ranks=(), network=None)
        yield attrs.evolve(cutter, constraints=alike).even()
    if len(cutter.stage_ranks) > len(set(cutter.stage_ranks)):
        yield from even_cuts(cutter)


def _check_split(order: Schedule, program: Program) -> None:
    if splits_backwards(order) and all(c.kind != Kind.INPUT_BACKWARD for c in program.calls):
        raise ValueError(
            "the schedule has backwards in two parts, and those of the program are whole: apply "
            "split_backward() to it first (the backend does so for a Family with splits=True)"
        )


def saved_is_open(recompute: RecomputePolicy | None) -> bool:
    """Whether it is decided after the cuts what is saved, so that they leave it out."""
    return recompute not in (None, "never")


def slower(problem: Problem, recompute: Sequence[RecomputeOption]) -> Problem:
    """The problem with what its stages recompute in the first part of their backwards."""
    pairs = zip(problem.stages, recompute, strict=True) if recompute else ()
    stages = tuple(
        attrs.evolve(stage, input_backward=stage.input_backward + option.extra_seconds)
        for stage, option in pairs
    )
    return attrs.evolve(problem, stages=stages) if stages else problem


def family_of(schedule: Scheduling) -> Family | None:
    """The family of a schedule; None for what a search or a function finds."""
    if isinstance(schedule, str | Family | Schedule) and schedule != "search":
        return policy(schedule)
    return None


def _made_by(make: Callable[[Problem], Schedule], problem: Problem) -> Schedule:
    """What a function makes of a problem. Raises ValueError unless it is a schedule of it."""
    try:
        inspect.signature(make).bind(problem)
    except TypeError as error:
        raise ValueError(
            f"schedule={make!r} is called with a Problem ({error}); wrap what takes (stages, "
            "microbatches, ranks) in a pfeife.Family"
        ) from None
    order = make(problem)
    if not isinstance(order, Schedule):
        raise ValueError(f"schedule={make!r}: it returned {type(order).__name__}, not a Schedule")
    _refuse_other(f"schedule={make!r}", order, problem.stage_ranks, problem.microbatches)
    return order


def _refuse_other(maker: str, made: Schedule, placed: Sequence[int], microbatches: int) -> None:
    stage_ranks = made.stage_ranks
    if stage_ranks != tuple(placed) or made.microbatches != microbatches:
        raise ValueError(
            f"{maker}: it returned {made.microbatches} microbatches of stages on ranks "
            f"{list(stage_ranks)}; asked for are {microbatches} of stages on ranks {list(placed)}"
        )


def _over(order: Schedule, ranks: int) -> Schedule:
    """The schedule with ranks that have nothing to do, if there are more."""
    return Schedule((*order.ranks, *[()] * (ranks - len(order.ranks))))


def splits(schedule: Scheduling) -> bool:
    """Whether the schedules of a family, or those that a search or a function may find, split
    backwards."""
    family = family_of(schedule)
    return family is None or family.splits


def _placed(family: Family, stages: int, ranks: int) -> tuple[int, ...]:
    if stages < ranks:
        raise ValueError(
            f"{stages} stages for {ranks} ranks: every rank needs a stage, or every group of "
            f"members; start fewer processes (torchrun --nproc-per-node {stages}, times members), "
            "or ask for more stages or replicas"
        )
    return family.placement(stages, ranks)
