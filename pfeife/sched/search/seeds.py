"""Schedules made elsewhere, brought to fit a problem, and the patterns that families repeat."""

from collections import deque
from collections.abc import Iterator

import attrs

from pfeife.data.schedule import Action, Do, Schedule
from pfeife.lowering.problem import Problem, StageCosts, chain_edges, fits
from pfeife.sched.families.family import Family
from pfeife.sched.families.policies import POLICIES
from pfeife.sched.search.job_shop import compile_problem, orders_of, starts_of
from pfeife.sched.search.pattern import Pattern, pattern_of

STRIDE = 6  # times as many microbatches as ranks bring a family into its stride
SEEDING = tuple(family for family in POLICIES.values() if family.seeds)  # the best first
_REPEATING = ("v-min", "v-half", "zb-v", "dualpipe-v", "zb-h1", "interleaved")


def made(family: Family, problem: Problem) -> Schedule | None:
    """A family's schedule, with whole backwards where some cannot be split; None if it is not for
    the placement."""
    try:
        schedule = family(len(problem.stages), problem.microbatches, problem.stage_ranks)
    except ValueError:
        return None
    return schedule if all(stage.splittable for stage in problem.stages) else fused(schedule)


def patterns(problem: Problem) -> Iterator[Pattern]:
    """The patterns that families repeat at unit times, once each."""
    count = len(problem.stages)
    unit = attrs.evolve(
        problem,
        stages=(StageCosts(1.0, 1.0, 1.0),) * count,
        microbatches=STRIDE * problem.ranks,
        edges=chain_edges(count),
        memory=None,
    )
    shop, seen = compile_problem(unit), set()
    for name in _REPEATING:
        schedule = made(POLICIES[name], unit)
        starts = None if schedule is None else starts_of(shop, orders_of(shop, schedule))
        pattern = None if starts is None else pattern_of(shop, starts)
        if pattern is not None and pattern not in seen:
            seen.add(pattern)
            yield pattern


def fused(schedule: Schedule) -> Schedule:
    """The schedule with every I as a B at its place, and no W."""
    ranks = []
    for actions in schedule.ranks:
        whole = []
        for action in actions:
            if action.do == Do.INPUT_BACKWARD:
                whole.append(Action(action.stage, Do.BACKWARD, action.microbatch))
            elif action.do != Do.WEIGHT_BACKWARD:
                whole.append(action)
        ranks.append(tuple(whole))
    return Schedule(tuple(ranks))


def fitting(problem: Problem, schedule: Schedule) -> Iterator[Schedule]:
    """The schedule if it keeps to the memory, else what it becomes when forwards wait for it.

    Three kinds: no more than a number of microbatches in flight on any rank, as many as the bytes
    of each rank allow, and forwards alone put off while there are no bytes for them. Some of these
    may deadlock.
    """
    if fits(problem, schedule):
        yield schedule
        return
    # The most that fit: fewer in flight only wait more.
    for in_flight in range(min(schedule.microbatches, 2 * len(schedule.ranks)), 0, -1):
        waiting = capped(problem, schedule, in_flight)
        if waiting is not None and fits(problem, waiting):
            yield waiting
            break
    for waiting in (capped(problem, schedule, None), put_off_forwards(problem, schedule)):
        if waiting is not None:
            yield waiting


def capped(problem: Problem, schedule: Schedule, in_flight: int | None) -> Schedule | None:
    """The schedule with microbatches put off until there is room for them; None if that gets stuck.

    A rank has room as long as fewer than `in_flight` microbatches are between their first F and
    their last W; without a number, as long as all their forwards fit into its memory. All that is
    not put off keeps its order.
    """
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        room = float(in_flight or 0)
        size = 1.0
        if in_flight is None:
            assert problem.memory is not None
            room, size = problem.memory[rank] * (1 + 1e-6), problem.smallest_memory(rank)
        order = _put_off(actions, room, size)
        if order is None:
            return None
        ranks.append(order)
    return Schedule(tuple(ranks))


def _put_off(actions: tuple[Action, ...], room: float, size: float) -> tuple[Action, ...] | None:
    """Actions with those of microbatches that have no room behind what makes room."""
    left: dict[int | None, int] = {}
    for action in actions:
        left[action.microbatch] = left.get(action.microbatch, 0) + 1
    order: list[Action] = []
    waiting = list(actions)
    inside: set[int | None] = set()
    # Pass after pass over what is left: when a microbatch is through, those that were put off come
    # before all that has not been looked at yet.
    while waiting:
        put_off: list[Action] = []
        freed = False
        for action in waiting:
            k = action.microbatch
            if freed or (k not in inside and (len(inside) + 1) * size > room):
                put_off.append(action)
                continue
            inside.add(k)
            order.append(action)
            left[k] -= 1
            if not left[k]:
                inside.remove(k)
                freed = bool(put_off)
        if len(put_off) == len(waiting):
            return None
        waiting = put_off
    return tuple(order)


def put_off_forwards(problem: Problem, schedule: Schedule) -> Schedule | None:
    """The schedule with forwards put off while there is no memory for them; None if that gets
    stuck. Forwards keep their order, and so do all others."""
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        assert problem.memory is not None
        memory, held = problem.memory[rank] * (1 + 1e-6), 0.0
        order: list[Action] = []
        waiting: deque[Action] = deque()
        for action in actions:
            if action.do == Do.FORWARD:
                waiting.append(action)
            # A backward whose forward is put off: what makes room comes behind it, so neither ever
            # starts.
            elif any(
                o.stage == action.stage and o.microbatch == action.microbatch for o in waiting
            ):
                return None
            else:
                order.append(action)
                held -= problem.stages[action.stage].freed(action.do)
            while waiting and held + problem.stages[waiting[0].stage].saved <= memory:
                order.append(waiting.popleft())
                held += problem.stages[order[-1].stage].saved
        ranks.append((*order, *waiting))
    return Schedule(tuple(ranks))
