"""Cuts and schedule decided together: a `Plan`."""

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import attrs

from pfeife.cost.precision import assumed_rates
from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.data.optimizers import Optimizer
from pfeife.data.plan import Plan
from pfeife.data.progress import Progress
from pfeife.data.replicas import Replicas, replicas_of
from pfeife.data.schedule import Schedule
from pfeife.data.tried import Watched
from pfeife.data.units import size
from pfeife.ir.digest import program_digest
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.passes.compose import Passes
from pfeife.sched.by_family import Scheduling
from pfeife.sched.cutting.account import Account
from pfeife.sched.cutting.blocks import CutAt, check_cut_at, closed_borders
from pfeife.sched.cutting.clusters import clusters_of
from pfeife.sched.cutting.constraints import Constraints
from pfeife.sched.cutting.duplicated import cheap_to_recompute
from pfeife.sched.cutting.heterogeneous import limits_of, machines_of, on_machines
from pfeife.sched.cutting.judged import MESSAGE_TOLERANCE, checked_tolerance
from pfeife.sched.cutting.memory_limit import counted_once, curves_of
from pfeife.sched.cutting.recompute_policy import RecomputePolicy
from pfeife.sched.cutting.workload import workload_of
from pfeife.sched.fixed_placement import follow
from pfeife.sched.joint import Effort, search_plan
from pfeife.sched.manual_cuts import (
    check_order,
    check_placement,
    check_recomputed,
    cuts_by_hand,
    possible,
)
from pfeife.sched.replicated import reductions_of, with_reductions
from pfeife.sched.request import PlanRequest

log = logging.getLogger("pfeife")


def plan(
    program: Program,
    *,
    machine: Machine | Sequence[Machine],
    microbatches: int,
    stages: int | None = None,
    ranks: int | None = None,
    schedule: Scheduling = "1f1b",
    cuts: Sequence[int] | None = None,
    memory_limit: int | None = None,
    network: Network | None = None,
    optimizer: Optimizer | None = None,
    replicas: int | Replicas = 1,
    search_seconds: float | None = None,
    search_work: int | None = None,
    jobs: int = 1,
    seed: int = 0,
    placement: Sequence[int] | None = None,
    owners: Mapping[str, frozenset[int]] | None = None,
    progress: Progress | None = None,
    watched: Watched | None = None,
    recompute: RecomputePolicy | None = None,
    passes: Passes | None = None,
    message_tolerance: float = MESSAGE_TOLERANCE,
    cut_at: CutAt = "anywhere",
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
    `stage_boundary` markers in the model; without those they minimise the seconds of the step, in
    which each message goes over the link of its two ranks. Where its messages take less, a step
    may take up to `message_tolerance` (a fraction) longer, by as much of that as they take less
    (see `Score`). `cut_at` says where they may be: "anywhere" between clusters, at the borders of
    the model's repeated "blocks" (see `blocks_of`), or of modules by their paths; cuts that are
    given, and those of `owners`, are taken as they are. There are as many ranks as stages, and
    stages as ranks, where one of them is not given; more stages than ranks are assigned to them in
    turn. `placement` has the ranks of the stages where they are given. With `owners`, the ranks
    that hold some of the state, stages, cuts and placement are those of `follow`, and a family that
    is not for such a placement gives way to 1F1B, which is for any. A `network`, measured or
    `Network.of`, takes the place of the machine's figures for links.
    A search calls `progress` with how many of its seconds are over and `watched` with every
    schedule that this process has timed (`Tried`), and ranks what it has found with the reductions
    of replicas.

    `recompute` says what stages recompute (see `with_recompute`): nothing unless given; a search
    decides that itself. `passes` are those that the programs of "stages" and "ranks" will go
    through, so that memory is that of their results.

    `machine` may be a sequence, one for each rank of a pipeline: then the program's costs are those
    of the first one, a cluster takes on another machine as much longer as by estimate, each rank
    keeps to its machine's memory, and without a `network` the slower machine's link joins two.

    The limit is the machine's memory unless given. What a rank needs is what `memory_curves`
    counts: parameters, gradients, the state of `optimizer` (one, its class, the class's name in
    torch.optim, or bytes for each element of a parameter, master weights among them),
    activations and buffers; with `replicas` pipelines (or `Replicas`, which say what becomes of
    their gradients, and what each is given of the batch), what they reduce and what the worst of
    them keeps. A search whose plan needs too much is made again, a quarter as long: most often once
    (see `kept_within`). Raises ValueError if the constraints contradict each other or the program,
    or no plan was found within the limit, with what the worst rank of the best one needs.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    >>> core, clusters = machine("cpu-core"), pfeife.fuse()(flat)
    >>> clusters = pfeife.annotate(estimate(clusters, core))(clusters)
    >>> plan = sched.plan(clusters, machine=core, microbatches=4, stages=2)
    >>> plan.stage_of_cluster, plan.stage_ranks
    ((0, 1), (0, 1))
    """
    check_recomputed(schedule, recompute)
    trained = bool(program.ports(Role.TANGENT))
    if owners:
        stages, (cuts, placement) = None, follow(program, owners, ranks)
        schedule = possible(schedule, placement, microbatches, ranks) if trained else schedule
    by_hand, stages, ranks = _shape(program, schedule, cuts, placement, stages, ranks)
    machines = machines_of(machine, ranks)
    limits = limits_of(machines, memory_limit)
    constraints = Constraints(
        machine=_seen(machines, network),
        microbatches=microbatches,
        ranks=ranks,
        memory_limit=max(limits),
        network=network,
        optimizer=optimizer,
        stages=stages,
        cuts=by_hand,
        placement=tuple(placement) if placement else None,
        tolerance=checked_tolerance(message_tolerance),
        of_ranks=() if all(rank_machine == machines[0] for rank_machine in machines) else machines,
    )
    check_placement(constraints, schedule)
    if schedule == "search" and constraints.ranks == 1:  # nothing to search but what to recompute
        schedule, recompute = "1f1b", "auto"
    replication = replicas_of(replicas)
    check_cut_at(cut_at)
    account = _account(program, constraints, machines, owners or (), replication.shards, cut_at)
    # Machines of one name are alike: each kind warns once.
    for rank_machine in {rank_machine.name: rank_machine for rank_machine in machines}.values():
        for assumed in assumed_rates(program, rank_machine):
            log.warning("%s", assumed)
    check_order(account, by_hand)
    reductions = reductions_of(account, constraints, replication)
    request = PlanRequest(
        program=program,
        account=account,
        constraints=constraints,
        schedule=schedule,
        recompute=recompute if trained else None,
        curves=counted_once(
            partial(
                curves_of,
                program,
                optimizer=optimizer,
                replicas=replication,
                owners=owners,
                more=passes,
            )
        ),
        search=partial(search_plan, program, progress=progress, watched=watched, after=reductions),
        effort=Effort(search_seconds, search_work, seed, jobs),
        limits=limits,
    )
    limited_by = _memory_words(machines) if memory_limit is None else f"memory_limit={max(limits)}"
    planned = request.planned(limited_by, _batch_bytes(program, microbatches, replication))
    planned = with_reductions(planned, account, constraints, reductions)
    return attrs.evolve(planned, program=program_digest(program))


def _shape(
    program: Program,
    schedule: Scheduling,
    cuts: Sequence[int] | None,
    placement: Sequence[int] | None,
    stages: int | None,
    ranks: int | None,
) -> tuple[tuple[int, ...] | None, int | None, int]:
    """The cuts by hand, if there are any, and how many stages, if that is said, and ranks there
    are."""
    # Stages and ranks are those of the first that says them: the arguments, a schedule that is
    # given, cuts by hand, a placement; else there is one stage a rank.
    if isinstance(schedule, Schedule):
        ranks = ranks or len(schedule.ranks)
        stages = stages or (None if cuts else schedule.stages)
    by_hand = cuts_by_hand(program, cuts, stages)
    if placement:
        ranks = ranks or 1 + max(placement)
        stages = stages or (None if by_hand else len(placement))
    return by_hand, stages, ranks or (1 + max(by_hand) if by_hand else stages or 1)


def _seen(machines: Sequence[Machine], network: Network | None) -> Machine:
    """The first rank's machine with the slowest link of all, for decisions before ranks are
    known."""
    if network:
        return network.seen_by(machines[0])
    slowest = min(machines, key=lambda machine: machine.link_bandwidth)
    return attrs.evolve(
        machines[0],
        link_bandwidth=slowest.link_bandwidth,
        link_latency=slowest.link_latency,
        overlap=slowest.overlap,
    )


def _memory_words(machines: Sequence[Machine]) -> str:
    memories = dict.fromkeys((machine.memory, machine.name) for machine in machines)
    return " and ".join(f"the {size(memory)} of machine {name}" for memory, name in memories)


def _batch_bytes(program: Program, microbatches: int, replicas: Replicas) -> int:
    """What every rank is given of a batch, whatever the plan."""
    pipelines = 1 if replicas.apart else replicas.count
    return sum(port.bytes for port in program.ports(Role.BATCH)) * microbatches * pipelines


def _account(
    program: Program,
    constraints: Constraints,
    machines: Sequence[Machine],
    owned: Collection[str],
    shards: int,
    cut_at: CutAt,
) -> Account:
    """The sums of a program on machines, whose cuts are where it was said; what is `owned` on some
    ranks is read there alone."""
    duplicated = cheap_to_recompute(program, constraints.machine, owned)
    work = workload_of(program, duplicated, constraints.optimizer, shards)
    if constraints.cuts is None:
        closed = closed_borders(program, clusters_of(work), cut_at, constraints.count)
        work = attrs.evolve(work, blocked=work.blocked | closed)
    return Account(on_machines(work, program, machines))
