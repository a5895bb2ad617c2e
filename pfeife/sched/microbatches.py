"""How many microbatches: a plan for each number, of which the shortest step is taken."""

import math
from collections.abc import Mapping
from typing import Any

from pfeife.data.plan import Plan
from pfeife.ir.program import Program
from pfeife.sched.joint import SEARCH_SECONDS, Effort
from pfeife.sched.planner import plan


def choose_microbatches(
    programs: Mapping[int, Program],
    *,
    search_seconds: float | None = None,
    search_work: int | None = None,
    **request: Any,
) -> tuple[int, Plan]:
    """The number of microbatches with the shortest step, and its plan.

    `programs` has the same step, fused and annotated, captured with a microbatch of as many rows
    as that number leaves of the batch; the other arguments are those of `plan`, and the budget of
    a search is shared. Raises ValueError if none of them can be planned, for the first one's
    reason.
    """
    plans: dict[int, Plan] = {}
    refused: list[ValueError] = []
    if search_seconds is None and search_work is None:
        search_seconds = SEARCH_SECONDS
    # Without programs there is nothing to share; that is refused below.
    effort = Effort(search_seconds, search_work).shared(max(1, len(programs)))
    share: dict[str, Any] = {"search_seconds": effort.seconds, "search_work": effort.work}
    for count, program in programs.items():
        try:
            plans[count] = plan(program, microbatches=count, **share, **request)
        except ValueError as error:
            refused.append(error)
    if not plans:
        raise refused[0] if refused else ValueError("no programs to choose from")

    def seconds(count: int) -> float:
        step_seconds = plans[count].step_seconds
        return math.inf if step_seconds is None else step_seconds

    best = min(plans, key=seconds)
    return best, plans[best]
