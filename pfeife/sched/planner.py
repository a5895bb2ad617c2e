"""Cuts and schedule decided together: a `Plan`."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from pfeife.data.machine import Machine, Network
from pfeife.data.optimizers import Optimizer
from pfeife.data.plan import Plan
from pfeife.data.progress import Progress
from pfeife.data.schedule import Schedule
from pfeife.data.timeline import MemoryCurve
from pfeife.ir.digest import program_digest
from pfeife.ir.program import Program, Role
from pfeife.lowering.verify import verify_schedule
from pfeife.passes.compose import Passes
from pfeife.sched.by_family import Scheduling, family_of, of_family, saved_is_open
from pfeife.sched.cutting.cuts import marked
from pfeife.sched.cutting.layouts import Constraints
from pfeife.sched.cutting.recompute_policy import RecomputePolicy, with_recompute
from pfeife.sched.cutting.room import curves_of, kept_within
from pfeife.sched.cutting.stages import always_of, counted
from pfeife.sched.cutting.workload import workload_of
from pfeife.sched.families.family import Family
from pfeife.sched.following import follow
from pfeife.sched.joint import SEARCH_SECONDS, search_plan

log = logging.getLogger("pfeife")


def plan(
    program: Program,
    *,
    machine: Machine,
    microbatches: int,
    stages: int | None = None,
    ranks: int | None = None,
    schedule: Scheduling = "1f1b",
    cuts: Sequence[int] | None = None,
    memory_limit: int | None = None,
    network: Network | None = None,
    optimizer: Optimizer | None = None,
    replicas: int = 1,
    search_seconds: float | None = None,
    search_work: int | None = None,
    jobs: int = 1,
    seed: int = 0,
    placement: Sequence[int] | None = None,
    owners: Mapping[str, frozenset[int]] | None = None,
    progress: Progress | None = None,
    recompute: RecomputePolicy | None = None,
    passes: Passes | None = None,
) -> Plan:
    """A plan for a fused and annotated program, split into input- and weight-backwards if the
    schedule shall be; no rank of it needs more than `memory_limit` bytes.

    `schedule` is a family or its name; a `Schedule`, whose stages, ranks and microbatches are then
    those of the plan (with fewer microbatches, the first of its own); a function that makes one of
    a `Problem`, which has the costs, bytes and ranks of the stages; or "search": then cuts,
    placement, stages a rank and schedule are searched together for `search_seconds` (20 unless
    given), or until `search_work` operations were looked at: then the same program and seed have
    the same plan on any machine, where else the plan says if the clock cut it short. `jobs`
    searches run side by side.

    `cuts` has the stage of every cluster (see `split_at` and `follow`). Without it the cuts are the
    `stage_boundary` markers in the model; without those they minimise the seconds of the slowest
    stage. There are as many ranks as stages unless `ranks` says otherwise; more stages than ranks
    are assigned to them in turn. `placement` has the ranks of the stages where they are given. With
    `owners`, the ranks that hold some of the state, stages, cuts and placement are those of
    `follow`, and a family that is not for such a placement gives way to 1F1B, which is for any. A
    measured `network` takes the place of the machine's figures for links. A search calls `progress`
    with how many of its seconds are over.

    `recompute` says what stages recompute (see `with_recompute`): nothing unless given; a search
    decides that itself. `passes` are those that the programs of "stages" and "ranks" will go
    through, so that memory is that of their results.

    The limit is the machine's memory unless given. What a rank needs is what `memory_curves`
    counts: parameters, gradients, the state of `optimizer` (one, its class, the class's name in
    torch.optim, or bytes for each element of a parameter, master weights among them),
    activations and buffers; with `replicas` pipelines, what they reduce. A search whose plan needs
    too much is made again, a quarter as long: most often once (see `kept_within`). Raises
    ValueError if the constraints contradict each other or the program, or no plan was found within
    the limit, with what the worst rank of the best one needs.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    >>> core, clusters = machine("cpu-core"), pfeife.fuse()(flat)
    >>> clusters = pfeife.annotate(estimate(clusters, core))(clusters)
    >>> found = sched.plan(clusters, machine=core, microbatches=4, stages=2)
    >>> found.stage_of_cluster, found.stage_ranks
    ((0, 1), (0, 1))
    """
    machine = network.seen_by(machine) if network else machine
    check_recomputed(schedule, recompute)
    trained = bool(program.ports(Role.TANGENT))
    if owners:
        stages, (cuts, placement) = None, follow(program, owners, ranks)
        schedule = _possible(schedule, placement, microbatches, ranks) if trained else schedule
    if isinstance(schedule, Schedule):
        ranks = ranks or len(schedule.ranks)
        stages = stages or (None if cuts else schedule.stages)
    by_hand = _cuts_by_hand(program, cuts, stages)
    count = by_hand[-1] + 1 if by_hand else stages or 1
    asked = _Asked(
        program,
        Constraints(
            machine,
            microbatches,
            ranks or count,
            machine.memory if memory_limit is None else memory_limit,
            network,
            optimizer,
            stages,
            by_hand,
            tuple(placement[:count]) if placement else None,
        ),
        schedule,
        recompute if trained else None,
        owners or {},
        partial(
            curves_of, program, optimizer=optimizer, replicas=replicas, owners=owners, more=passes
        ),
        partial(search_plan, program, seed=seed, jobs=jobs, owned=owners or (), progress=progress),
        search_seconds,
        search_work,
    )
    limit = asked.constraints.memory_limit
    limited_by = f"memory_limit={limit}"
    if memory_limit is None:
        limited_by = f"the {limit} bytes of machine {machine.name}"
    # Every rank is given the whole batch, whatever the plan.
    batch = sum(port.bytes for port in program.ports(Role.BATCH)) * microbatches * replicas
    known = (batch,) * asked.constraints.ranks
    found = kept_within(limit, limited_by, asked.make, asked.curves, asked.counted, known)
    return attrs.evolve(found, program=program_digest(program))


@attrs.frozen
class _Asked:
    """A plan that is asked for: what stays the same when it is made again with less memory.

    `search` makes one within constraints and a budget.
    """

    program: Program
    constraints: Constraints
    schedule: Scheduling
    recompute: RecomputePolicy | None
    owners: Mapping[str, frozenset[int]]
    curves: Callable[[Plan], tuple[MemoryCurve, ...]]
    search: Callable[..., Plan]
    search_seconds: float | None
    search_work: int | None

    @property
    def searches(self) -> bool:
        """Whether there is something to search."""
        trained = bool(self.program.ports(Role.TANGENT))
        return self.schedule == "search" and trained and self.constraints.ranks > 1

    def make(self, left_out: tuple[int, ...], tries: int) -> Plan:
        """A plan where so many bytes of every rank are in no sum. All tries but the first search a
        quarter as long; the first one of a family keeps to no limit, since it may well fit."""
        less = attrs.evolve(self.constraints, left_out=left_out)
        if not self.searches:
            if not tries and isinstance(self.schedule, str | Family | Schedule):
                less = attrs.evolve(less, memory_limit=math.inf)
            again = self.recomputed
            return of_family(self.program, self.schedule, less, self.owners, self.recompute, again)
        seconds, work = self.search_seconds, self.search_work
        return self.search(
            less,
            search_seconds=seconds and (seconds / 4 if tries else seconds),
            search_work=work and (max(1, work // 4) if tries else work),
        )

    def recomputed(self, plan: Plan, how: RecomputePolicy) -> Plan:
        """The plan with what its stages recompute, by the limit as it was given."""
        limit, machine = self.constraints.memory_limit, self.constraints.machine
        return with_recompute(
            plan, self.program, how, machine=machine, limit=limit, curves=self.curves
        )

    def counted(self, plan: Plan) -> list[int]:
        """Bytes of every rank, as the sums have them by which the plan was made."""
        work = workload_of(self.program, plan.duplicated, self.constraints.optimizer)
        if saved_is_open(self.recompute) and not self.searches:
            return always_of(work, plan)
        return counted(work, plan, self.constraints.machine)


def check_recomputed(schedule: Scheduling, recompute: RecomputePolicy | None) -> None:
    """Raises ValueError where a search and somebody else are to decide what is recomputed."""
    if schedule == "search" and recompute not in (None, "auto"):
        raise ValueError(
            f"schedule='search' and recompute={recompute!r}: the search decides what to recompute; "
            "leave one of them out"
        )


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
    found: dict[int, Plan] = {}
    refused: list[ValueError] = []
    if search_seconds is None and search_work is None:
        search_seconds = SEARCH_SECONDS
    parts = max(1, len(programs))
    share: dict[str, Any] = {
        "search_seconds": search_seconds and search_seconds / parts,
        "search_work": search_work and max(1, search_work // parts),
    }
    for count, program in programs.items():
        try:
            found[count] = plan(program, microbatches=count, **share, **request)
        except ValueError as error:
            refused.append(error)
    if not found:
        raise refused[0] if refused else ValueError("no programs to choose from")
    best = min(found, key=lambda count: found[count].step_seconds or 0.0)
    return best, found[best]


def _cuts_by_hand(
    program: Program, cuts: Sequence[int] | None, stages: int | None
) -> tuple[int, ...] | None:
    found = tuple(cuts) if cuts else marked(program)
    if not cuts and found[-1] == 0:
        return None
    if len(found) != program.units:
        raise ValueError(f"cuts for {len(found)} clusters, the program has {program.units}")
    if stages not in (None, found[-1] + 1):
        raise ValueError(f"stages={stages}, but the cuts by hand make {found[-1] + 1} stages")
    return found


def _possible(
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
