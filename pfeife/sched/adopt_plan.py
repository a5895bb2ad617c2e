"""Plans that were made before, or by hand, for the program at hand."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from pfeife.data.plan import Plan
from pfeife.data.schedule import Do
from pfeife.data.timeline import MemoryCurve
from pfeife.ir.digest import program_digest
from pfeife.ir.messages import holders
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.sched.cutting.memory_limit import no_room


def adopted(
    plan: Plan,
    program: Program,
    *,
    microbatches: int,
    memory_limit: int,
    curves: Callable[[Plan], Iterable[MemoryCurve]],
    ranks: int | None = None,
    owners: Mapping[str, frozenset[int]] | None = None,
    cuts: Sequence[int] | None = None,
) -> Plan:
    """A given plan as that of a program of clusters that trains; for fewer microbatches than its
    own, with the first of its schedule's.

    The batch may have other sizes than when the plan was made, and so may the versions of torch
    and Python be others, as long as the clusters are the same (see `program_digest`; a plan by hand
    need not say for which program it is). Raises ValueError, with both figures, if clusters, ranks
    or microbatches are others; if the plan names values that are not there; if its cuts are not the
    `cuts` by hand, or its ranks not the `owners` of what is trained already; if the loss is outside
    and its backwards do not come last; or if a rank would need more than `memory_limit` bytes, by
    the plan's `curves` (see `curves_of`).
    """
    _check_program(plan, program)
    rank_count, each = len(plan.schedule.ranks), plan.schedule.microbatches
    if ranks not in (None, rank_count):
        raise ValueError(
            f"option plan: it is for {rank_count} ranks a pipeline, and there are {ranks}"
        )
    if microbatches > each:
        raise ValueError(
            f"option plan: it runs {each} microbatches, and this batch is cut into {microbatches}; "
            "drop_last=True in the loader leaves such a batch out"
        )
    if cuts is not None and tuple(cuts) != plan.stage_of_cluster:
        raise ValueError(
            f"option plan: its stages of the clusters are {list(plan.stage_of_cluster)}, and by "
            f"the cuts by hand they are {list(cuts)}; leave one of them out"
        )
    _check_owners(plan, program, owners or {})
    if not program.ports(Role.LOSS) and not _forwards_first(plan):
        raise ValueError(
            "option plan: with the loss outside, gradients arrive when all forwards are done; this "
            "plan's schedule has backwards before them (its family could be 'gpipe')"
        )
    # The account is of the plan as it will run: with fewer microbatches fewer are in flight.
    first = plan if microbatches == each else _of_first(plan, microbatches)
    worst = max(curves(first), key=lambda curve: curve.peak)
    if worst.peak > memory_limit:
        raise no_room(worst, "option plan", memory_limit)
    return first


def _of_first(plan: Plan, microbatches: int) -> Plan:
    """The plan of the first microbatches, of whose seconds nothing was said."""
    order = plan.schedule.first(microbatches)
    return attrs.evolve(plan, schedule=order, step_seconds=None, bound_seconds=None)


def _check_program(plan: Plan, program: Program) -> None:
    clusters = len(plan.stage_of_cluster)
    if clusters != program.units:
        raise ValueError(
            f"option plan: it is for {clusters} clusters, and this program has {program.units}: "
            "plan anew, or give the model and the options (split_at, passes, members, parallel) "
            "that it was made with"
        )
    # Clusters alone may be as many in another model.
    digest = program_digest(program)
    if plan.program not in (None, digest):
        raise ValueError(
            f"option plan: it was made for the program {plan.program}, and this is {digest}: "
            "another model, other passes, or operations of another version of torch; plan anew"
        )


def _check_owners(plan: Plan, program: Program, owners: Mapping[str, frozenset[int]]) -> None:
    """Raises ValueError for state that a stage uses on another rank than an earlier step."""
    ranks = plan.stage_ranks
    for name, calls in holders(program, Role.PARAMETER, Role.BUFFER).items():
        wanted = {ranks[plan.stage_of_cluster[call.unit]] for call in calls}
        if name in owners and not wanted <= owners[name]:
            raise ValueError(
                f"option plan: it has {name} on ranks {sorted(wanted)}, but an earlier step trains "
                f"it on ranks {sorted(owners[name])}; call the planned step first, or make "
                "one plan for each of them"
            )


def _forwards_first(plan: Plan) -> bool:
    """Whether no rank has a backward before a forward."""
    orders = ([action.do == Do.FORWARD for action in rank] for rank in plan.schedule.ranks)
    return all(order == sorted(order, reverse=True) for order in orders)
