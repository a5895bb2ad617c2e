"""Schedules made elsewhere, brought to fit a problem."""

from collections import deque

from pfeife.plan import Action, Do, Schedule
from pfeife.sched.problem import Problem


def fused(problem: Problem, schedule: Schedule) -> Schedule:
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


def capped(problem: Problem, schedule: Schedule) -> Schedule | None:
    """The schedule with forwards put off until there is memory for them; None if it gets stuck.

    All other actions keep their order, and so do the forwards.
    """
    if problem.memory is None:
        return schedule
    ranks = []
    for actions, memory in zip(schedule.ranks, problem.memory, strict=False):
        order = _put_off(problem, actions, memory * (1 + 1e-6))
        if order is None:
            return None
        ranks.append(order)
    return Schedule(tuple(ranks))


def _put_off(
    problem: Problem, actions: tuple[Action, ...], memory: float
) -> tuple[Action, ...] | None:
    held, order = 0.0, []
    waiting: deque[Action] = deque()
    forwards: set[tuple[int, int | None]] = set()
    for action in actions:
        if action.do == Do.FORWARD:
            waiting.append(action)
        else:
            if (action.stage, action.microbatch) not in forwards:
                return None
            order.append(action)
            held -= problem.stages[action.stage].freed(action.do)
        while waiting and held + problem.stages[waiting[0].stage].saved <= memory:
            first = waiting.popleft()
            order.append(first)
            forwards.add((first.stage, first.microbatch))
            held += problem.stages[first.stage].saved
    return None if waiting else tuple(order)
