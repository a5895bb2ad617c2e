"""A run of a schedule in simulated time, for whoever brings one."""

import warnings

from pfeife.data.schedule import Do, Schedule
from pfeife.data.timeline import Timeline
from pfeife.lowering.simulate import Seconds, nothing
from pfeife.lowering.simulate import simulate as run


def simulate(
    schedule: Schedule, seconds: Seconds, overhead: float = 0.0, occupied: Seconds = nothing
) -> Timeline:
    """The timeline of a lowered schedule whose every action takes `seconds(action)`.

    A rank does one thing at a time. A send's seconds are those of the transfer, and a channel
    (pair of ranks, one direction) carries one transfer at a time; a receive waits for the
    arrival. Of their ranks' time they take what `occupied` says, a receive only where the rank
    has not waited as long anyway. A reduction starts on all ranks that have it together.
    `overhead` seconds of the rank come to every action. Raises ValueError if the schedule
    deadlocks. A schedule that is not lowered has no sends and receives: its ranks would not wait
    for one another, which a warning says (also of one whose ranks have nothing to tell one
    another); `insert_actions` puts in those of a `chain` of stages.

    >>> order = sched.families.one_f_one_b(2, 4)
    >>> full = insert_actions(order, chain(order))  # both of pfeife.lowering.lower
    >>> timeline = sched.simulate(full, lambda action: 1.0 if action.do.kind else 0.0)
    >>> timeline.seconds, round(timeline.bubble, 3)  # (p - 1) / (m + p - 1) is idle
    (10.0, 0.2)
    """
    if _apart(schedule):
        warnings.warn(
            "the schedule has no sends and receives, so that no rank waits for another: lower it "
            "first, with sched.lower(schedule, program)",
            stacklevel=2,
        )
    return run(schedule, seconds, overhead, occupied)


def _apart(schedule: Schedule) -> bool:
    """Whether several ranks train, and nothing is between them."""
    every = {action.do for actions in schedule.ranks for action in actions}
    backwards = every & {Do.BACKWARD, Do.INPUT_BACKWARD}
    return sum(map(bool, schedule.ranks)) > 1 and bool(backwards) and all(do.kind for do in every)
