"""Cuts and schedule decided together: a `Plan`."""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from pfeife.cost.memory import trained_parameters
from pfeife.data.machine import Machine, Network
from pfeife.data.optimizers import Optimizer, optimizer_bytes
from pfeife.data.plan import Plan, RecomputeOption
from pfeife.data.progress import Progress
from pfeife.data.schedule import Do, Schedule
from pfeife.data.timeline import MemoryCurve
from pfeife.ir.digest import program_digest
from pfeife.ir.program import Kind, Program, Role
from pfeife.lowering.lower import insert_actions
from pfeife.lowering.problem import Problem, seconds_of, transfers
from pfeife.lowering.simulate import simulate
from pfeife.lowering.verify import verify_schedule
from pfeife.passes.compose import Passes
from pfeife.sched.cutting.account import counted_by_cuts, counted_by_search
from pfeife.sched.cutting.checkpointing import Recompute, with_recompute
from pfeife.sched.cutting.cuts import (
    Clusters,
    balanced,
    cheap_to_recompute,
    clusters_of,
    marked,
)
from pfeife.sched.cutting.layouts import Constraints
from pfeife.sched.cutting.room import curves_of, kept_within
from pfeife.sched.cutting.workload import Workload, stage_problem, workload_of
from pfeife.sched.families.family import Family, splits_backwards
from pfeife.sched.families.policies import forward_only, policy
from pfeife.sched.following import follow
from pfeife.sched.joint import SEARCH_SECONDS, search_plan
from pfeife.sched.search.bound import lower_bound

log = logging.getLogger("pfeife")

# How to make a schedule: a family or its name, "search", a schedule, or a function of a problem.
Scheduling = str | Family | Schedule | Callable[[Problem], Schedule]


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
    recompute: Recompute | None = None,
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
    """
    machine = network.seen_by(machine) if network else machine
    trained = bool(program.ports(Role.TANGENT))
    if owners:
        stages, (cuts, placement) = None, follow(program, owners, ranks)
        schedule = _possible(schedule, placement, microbatches, ranks) if trained else schedule
    if isinstance(schedule, Schedule):
        ranks = ranks or len(schedule.ranks)
        stages = stages or (None if cuts else schedule.stages)
    by_hand = _cuts_by_hand(program, cuts, stages)
    count = by_hand[-1] + 1 if by_hand else stages or 1
    constraints = Constraints(
        machine,
        microbatches,
        ranks or count,
        machine.memory if memory_limit is None else memory_limit,
        network,
        state_factor(program, optimizer),
        stages,
        by_hand,
        tuple(placement[:count]) if placement else None,
    )
    # Every rank is given the whole batch, whatever the plan.
    batch = sum(port.bytes for port in program.ports(Role.BATCH)) * microbatches * replicas
    search = schedule == "search" and trained and constraints.ranks > 1
    if search and recompute not in (None, "auto"):
        raise ValueError(
            f"recompute={recompute!r} and schedule='search': the search decides what to recompute; "
            "leave one of them out"
        )

    def curves(plan: Plan) -> tuple[MemoryCurve, ...]:
        return curves_of(program, plan, optimizer, replicas, owners, passes)

    def again(plan: Plan, how: Recompute) -> Plan:
        limit = constraints.memory_limit
        return with_recompute(plan, program, how, machine=machine, limit=limit, curves=curves)

    def make(room: int, tries: int) -> Plan:
        less = attrs.evolve(constraints, memory_limit=max(room - batch, 0))
        if not search:
            how = recompute if trained else None
            return _of_family(program, schedule, less, owners or (), how, again)
        return search_plan(
            program,
            less,
            search_seconds=search_seconds and (search_seconds / 4 if tries else search_seconds),
            search_work=search_work and (max(1, search_work // 4) if tries else search_work),
            seed=seed,
            jobs=jobs,
            owned=owners or (),
            progress=progress,
        )

    def counted(plan: Plan) -> tuple[int, ...]:
        work, factor = workload_of(program, plan.duplicated), constraints.state_factor
        if search:
            sums = counted_by_search(work, plan, machine, factor)
        else:
            clusters = _to_cut(work, recompute)
            sums = counted_by_cuts(clusters, plan, in_flight(plan.schedule), factor)
        return tuple(batch + size for size in sums)

    of_machine = f"the {constraints.memory_limit} bytes of machine {machine.name}"
    found = kept_within(
        constraints.memory_limit,
        of_machine if memory_limit is None else f"memory_limit={memory_limit}",
        make,
        curves,
        counted,
    )
    return attrs.evolve(found, program=program_digest(program))


def _of_family(
    program: Program,
    schedule: Scheduling,
    constraints: Constraints,
    owned: Collection[str],
    recompute: Recompute | None,
    again: Callable[[Plan, Recompute], Plan],
) -> Plan:
    """The plan with a family's schedule; its cuts keep to the memory by rough figures. `again` puts
    in what is recomputed."""
    trained = bool(program.ports(Role.TANGENT))
    count = constraints.cuts[-1] + 1 if constraints.cuts else constraints.stages or 1
    family = _family(schedule) or policy("1f1b")  # a function of a problem needs cuts before
    placed = constraints.placement or _placed(family, count, constraints.ranks)
    made = (family if trained else forward_only)(count, constraints.microbatches, placed)
    order = _over(made, constraints.ranks)
    duplicated = cheap_to_recompute(program, constraints.machine, owned)
    work = workload_of(program, duplicated)
    stage_of = constraints.cuts or balanced(
        _to_cut(work, recompute),
        count,
        machine=constraints.machine,
        in_flight=in_flight(order),
        memory_limit=constraints.memory_limit // max(Counter(placed).values()),
        state_factor=constraints.state_factor,
    )
    pose = functools.partial(
        stage_problem,
        work,
        stage_of,
        placed,
        constraints.microbatches,
        machine=constraints.machine,
        network=constraints.network,
    )
    problem = pose()
    if trained and callable(schedule) and not isinstance(schedule, Family):
        whole = pose(memory_limit=constraints.memory_limit, state_factor=constraints.state_factor)
        order = _over(_asked(schedule, whole), constraints.ranks)
    if splits_backwards(order) and all(c.kind != Kind.INPUT_BACKWARD for c in program.calls):
        raise ValueError(
            "the schedule has backwards in two parts, and those of the program are whole: apply "
            "split_backward() to it first (the backend does so for a Family with splits=True)"
        )
    lowered = insert_actions(verify_schedule(order), transfers(problem))
    plan = Plan(stage_of, order, duplicated)
    if recompute is not None:
        plan = again(plan, recompute)
        problem = _slower(problem, plan.recompute)
    return attrs.evolve(
        plan,
        stage_seconds=tuple(stage.seconds for stage in problem.stages),
        step_seconds=simulate(lowered, seconds_of(problem)).seconds,
        bound_seconds=lower_bound(problem) if trained else None,
    )


def _to_cut(work: Workload, recompute: Recompute | None) -> Clusters:
    """The clusters as they are cut; what is saved is up to those who recompute."""
    clusters = clusters_of(work)
    if recompute in (None, "never"):
        return clusters
    return attrs.evolve(clusters, saved=(0,) * len(clusters.saved))


def _slower(problem: Problem, recompute: Sequence[RecomputeOption]) -> Problem:
    """The problem with what its stages recompute in the first part of their backwards."""
    pairs = zip(problem.stages, recompute, strict=True) if recompute else ()
    stages = tuple(
        attrs.evolve(stage, input_backward=stage.input_backward + option.extra_seconds)
        for stage, option in pairs
    )
    return attrs.evolve(problem, stages=stages) if stages else problem


def _family(schedule: Scheduling) -> Family | None:
    """The family of a schedule; None for what a search or a function finds."""
    if isinstance(schedule, str | Family | Schedule) and schedule != "search":
        return policy(schedule)
    return None


def _asked(make: Callable[[Problem], Schedule], problem: Problem) -> Schedule:
    """What a function makes of a problem. Raises ValueError unless it is a schedule of it."""
    order = make(problem)
    if not isinstance(order, Schedule):
        raise ValueError(f"schedule={make!r}: it returned {type(order).__name__}, not a Schedule")
    found, wanted = order.stage_ranks, problem.stage_ranks
    if found != wanted or order.microbatches != problem.microbatches:
        raise ValueError(
            f"schedule={make!r}: it returned {order.microbatches} microbatches of stages on ranks "
            f"{list(found)}; the problem has {problem.microbatches} of stages on {list(wanted)}"
        )
    return order


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
    count = max(1, len(programs))
    share: dict[str, Any] = {
        "search_seconds": search_seconds and search_seconds / count,
        "search_work": search_work and max(1, search_work // count),
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
    family, why = _family(schedule), ""
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


def _over(order: Schedule, ranks: int) -> Schedule:
    """The schedule with ranks that have nothing to do, if there are more."""
    return Schedule((*order.ranks, *[()] * (ranks - len(order.ranks))))


def state_factor(program: Program, optimizer: Optimizer | None) -> float:
    """Bytes of optimizer state for each byte of a program's parameters."""
    ports = program.ports(Role.PARAMETER)
    if optimizer is None or not ports:
        return 0.0
    state, trained = optimizer_bytes(optimizer), trained_parameters(program)
    kept = sum(state(port.shape, port.dtype) for port in ports if port.fqn in trained)
    return kept / sum(port.bytes for port in ports)


def splits(schedule: Scheduling) -> bool:
    """Whether the schedules of a family, or those that a search or a function may find, split
    backwards."""
    family = _family(schedule)
    return family is None or family.splits


def _placed(family: Family, stages: int, ranks: int) -> tuple[int, ...]:
    if stages < ranks:
        raise ValueError(
            f"{stages} stages for {ranks} ranks: every rank needs a stage; start fewer processes "
            f"(torchrun --nproc-per-node {stages}), or ask for more stages or replicas"
        )
    return family.placement(stages, ranks)


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
