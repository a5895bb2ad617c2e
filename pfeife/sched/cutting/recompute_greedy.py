"""Recomputation, stage by stage, until every rank has room."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import attrs

from pfeife.data.plan import Plan, RecomputeOption
from pfeife.data.schedule import Do, Schedule
from pfeife.data.timeline import MemoryCurve
from pfeife.sched.cutting.recompute_choice import cheapest_first

Options = Sequence[Sequence[RecomputeOption]]


def relieved(
    plan: Plan,
    make_options: Callable[[], Options],
    limit: float | Sequence[float],
    curves: Callable[[Plan], Iterable[MemoryCurve]],
) -> Plan:
    """On each rank over the limit, again and again, the stages with the cheapest bytes go on to
    their next options, until all ranks have room or recompute what they can; a rank without room
    then has the options with which it lacked least.

    A step on drops what all microbatches in flight have saved, at most. So options with which that
    is too little are passed over: to count a plan's bytes takes seconds for a large model.
    """

    def room(rank: int) -> float:
        return limit[rank] if isinstance(limit, Sequence) else limit

    flying = in_flight(plan.schedule)
    stages_of = {
        rank: [stage for stage, where in enumerate(plan.stage_ranks) if where == rank]
        for rank in plan.stage_ranks
    }
    at = dict.fromkeys(range(plan.stages), 0)
    least: dict[int, tuple[float, dict[int, int]]] = {}
    options: Options = ()
    current = plan
    while over := {c.rank: c.peak - room(c.rank) for c in curves(current) if c.peak > room(c.rank)}:
        options = options or make_options()
        moved = False
        for rank, lacking in over.items():
            now = {stage: at[stage] for stage in stages_of[rank]}
            if rank not in least or lacking < least[rank][0]:
                least[rank] = lacking, now
            on = cheapest_first(options, now, lacking, flying)
            moved |= on != now
            at |= on
        if not moved:
            for rank in over:
                at |= least[rank][1]
        chosen = tuple(options[stage][index] for stage, index in at.items())
        current = attrs.evolve(plan, recompute=chosen)
        if not moved:
            break
    return current


def with_blocks(options: Options, blocks: Sequence[RecomputeOption]) -> list[list[RecomputeOption]]:
    """For each stage its options and that of recomputing block by block (if there are `blocks`), in
    the order of what they save.

    Recomputing block by block may be slower than another option that saves as much, and yet need
    less room: nothing of a block is there when the next one is computed again.
    """
    by_stage = []
    for stage, stage_options in enumerate(options):
        by_bytes = {option.saved: option for option in (*stage_options, *blocks[stage : stage + 1])}
        by_stage.append([by_bytes[saved] for saved in sorted(by_bytes, reverse=True)])
    return by_stage


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For every stage the most microbatches that are between forward and last backward."""
    peak = [0] * schedule.stages
    for actions in schedule.ranks:
        flying: Counter[int] = Counter()
        for action in actions:
            if action.do == Do.FORWARD:
                flying[action.stage] += 1
                peak[action.stage] = max(peak[action.stage], flying[action.stage])
            elif action.do in (Do.BACKWARD, Do.WEIGHT_BACKWARD):
                flying[action.stage] -= 1
    return tuple(peak)
