"""What is given by hand: cuts, placements and recomputation that go together, or a refusal."""

import logging
from collections.abc import Sequence

from pfeife.ir.parts import Kind
from pfeife.ir.program import Program
from pfeife.lowering.verify import verify_schedule
from pfeife.sched.by_family import Scheduling, family_of
from pfeife.sched.cutting.account import Account
from pfeife.sched.cutting.constraints import Constraints
from pfeife.sched.cutting.cuts import marked
from pfeife.sched.cutting.recompute_policy import RecomputePolicy

log = logging.getLogger("pfeife")


def cuts_by_hand(
    program: Program, cuts: Sequence[int] | None, stages: int | None
) -> tuple[int, ...] | None:
    """The stage of every cluster by the given cuts, else by the markers in the model; None where
    there are neither."""
    stage_of = tuple(cuts) if cuts else marked(program)
    if not cuts and stage_of[-1] == 0:
        return None
    if len(stage_of) != program.units:
        raise ValueError(f"cuts for {len(stage_of)} clusters, the program has {program.units}")
    count = 1 + max(stage_of)
    if set(stage_of) != set(range(count)):
        # `count` is one more than the greatest: where no stage is missing, some are below 0.
        missing = sorted(set(range(count)) - set(stage_of)) or sorted(
            set(stage_of) - set(range(count))
        )
        raise ValueError(
            f"cuts {list(stage_of)}: stages are 0 to the last one, and each has a cluster; look at "
            f"{missing}"
        )
    if stages not in (None, count):
        raise ValueError(f"stages={stages}, but the cuts by hand make {count} stages")
    return stage_of


def possible(
    schedule: Scheduling, placement: Sequence[int], microbatches: int, ranks: int | None
) -> Scheduling:
    """The family if it can run stages that are placed so, else one that always can."""
    family, why = family_of(schedule), ""
    try:
        if family is not None:
            verify_schedule(family(len(placement), microbatches, placement))
    except ValueError as error:
        why = str(error)
    idle = set(range(ranks or 0)) - set(placement)
    if schedule == "search" and idle:
        why = f"ranks {sorted(idle)} have nothing to do"
    if not why:
        return schedule
    log.info(
        "schedule=%s is not for the stages of this step, which follow the trained state on ranks "
        "%s (%s): it runs with 1f1b",
        repr(schedule) if isinstance(schedule, str) else family,
        list(placement),
        why,
    )
    return "1f1b"


def check_order(account: Account, stage_of: Sequence[int] | None) -> None:
    """Raises ValueError for cuts by hand by which a stage reads of a later one."""
    if stage_of is None:
        return
    for flow in account.work.flows:
        for unit, kind in flow.readers:
            if flow.kind == kind == Kind.FORWARD and stage_of[unit] < stage_of[flow.unit]:
                raise ValueError(
                    f"cuts {list(stage_of)}: cluster {unit} in stage {stage_of[unit]} reads what "
                    f"cluster {flow.unit} in stage {stage_of[flow.unit]} makes, which is a later "
                    "stage"
                )


def check_placement(constraints: Constraints, schedule: Scheduling) -> None:
    """Raises ValueError for ranks of stages that are not those that there are."""
    placement, ranks = constraints.placement, constraints.ranks
    if placement is None:
        return
    if len(placement) != constraints.count:
        raise ValueError(
            f"placement={list(placement)} has the ranks of {len(placement)} stages, and there are "
            f"{constraints.count}"
        )
    if any(rank not in range(ranks) for rank in placement):
        raise ValueError(f"placement={list(placement)}: the ranks are 0 to {ranks - 1}")
    idle = sorted(set(range(ranks)) - set(placement))
    if schedule == "search" and idle:
        raise ValueError(
            f"placement={list(placement)}: ranks {idle} have no stage, and a search gives every "
            "rank something to do; start fewer processes, or name a family"
        )


def check_recomputed(schedule: Scheduling, recompute: RecomputePolicy | None) -> None:
    """Raises ValueError where a search and somebody else are to decide what is recomputed."""
    if schedule == "search" and recompute not in (None, "auto"):
        raise ValueError(
            f"schedule='search' and recompute={recompute!r}: the search decides what to recompute; "
            "leave one of them out"
        )
