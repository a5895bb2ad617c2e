"""From what was asked for to a plan: costs, cuts, and what the planner is told."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from pfeife.backend.settings.options import Options
from pfeife.compilers import BodyCompiler, compiler_name
from pfeife.cost import estimate, measure
from pfeife.data import plain
from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.data.plan import Costs, Plan
from pfeife.data.progress import Progress, Shown
from pfeife.data.replicas import Replicas
from pfeife.data.schedule import Schedule
from pfeife.data.tried import Watched
from pfeife.ir.digest import program_digest
from pfeife.ir.messages import holders
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.passes.compose import Passes
from pfeife.runtime.distributed.world import World
from pfeife.sched import plan as make_plan
from pfeife.sched.adopt_plan import adopted
from pfeife.sched.by_family import Scheduling
from pfeife.sched.cutting import cheap_to_recompute, partitioned, split_at
from pfeife.sched.cutting.memory_limit import curves_of
from pfeife.sched.cutting.unevenness import unevenness
from pfeife.sched.families import gpipe


def scheduling(options: Options, program: Program) -> Scheduling:
    """How a program is scheduled. A given plan is for programs that train; others run where it has
    the stages. With the loss outside the gradients arrive when all forwards are done: GPipe, on
    the ranks of a given schedule."""
    if isinstance(options.plan, Plan):
        return options.plan.schedule
    given = options.schedule
    if program.ports(Role.LOSS):
        return given
    if isinstance(given, Schedule):
        return gpipe(given.stages, given.microbatches, given.stage_ranks)
    return "gpipe"


def costs_of(options: Options, clusters: Program, target: Machine, show: Shown) -> Costs:
    """The seconds of a program of clusters. Raises ValueError for a function without `Costs`."""
    given = options.costs
    if isinstance(given, Costs):
        return given
    if given == "estimate":
        return estimate(clusters, target)
    with show.phase("measuring") as phase:
        if callable(given):
            found = given(clusters)
            if not isinstance(found, Costs):
                name = compiler_name(given)
                raise ValueError(f"option costs={name}: it returned {found!r}, not Costs")
            return found
        cache = Path(options.cache) if options.cache else None
        compiler = None if options.compiler == "aot_eager" else BodyCompiler(options.compiler)
        return measure(clusters, compiler=compiler, cache=cache, progress=phase.progress)


UNEVEN = 1.1  # times as uneven stages as those of the sizes that a plan was made for: plan anew
Planned = tuple[Program, Plan]  # of clusters, and what was decided for it


@attrs.frozen
class Place:
    """Where a program is to run: the machine, the ranks that own state, what becomes of replicas,
    the passes that its programs go through, and `earlier` programs and their plans."""

    machine: Machine
    owners: Mapping[str, frozenset[int]]
    replicas: Replicas
    passes: Passes
    earlier: Sequence[Planned] = ()


def planned(
    options: Options,
    clusters: Program,
    order: Scheduling,
    world: World | None,
    place: Place,
    *,
    network: Network | None,
    progress: Progress | None,
    watched: Watched | None = None,
) -> Plan:
    """The plan of a program of clusters with costs, that of rank 0 on every rank: that of an
    earlier program, if that is the same one of other sizes and there is room. Raises ValueError
    as `sched.plan` does, or for a given plan as `sched.adopt_plan.adopted` does."""
    ranks = world.size // options.replicas if world else None
    ranks = len(options.devices) if options.devices else ranks

    def make() -> Plan:
        again = _planned_before(options, clusters, ranks, place)
        if again is not None:
            return again
        return planner_of(options, clusters, order, ranks, place)(network, progress, watched)

    return _decided(make, world) if world else make()


def _planned_before(
    options: Options, clusters: Program, ranks: int | None, place: Place
) -> Plan | None:
    """The plan of the last one of earlier programs that train with as many clusters, each of the
    same parameters, and the loss at the same place, if any is and its stages are about as even
    here: without seconds, which were those of other sizes. Where a plan names what is recomputed,
    all operations must be the same."""
    if not clusters.ports(Role.TANGENT) or isinstance(options.plan, Plan):
        return None
    digest, microbatches = program_digest(clusters), options.microbatches // options.replicas
    for before, plan in reversed(place.earlier):
        same = _units_of(before) == _units_of(clusters)
        same &= len(before.ports(Role.LOSS)) == len(clusters.ports(Role.LOSS))
        same &= plan.schedule.microbatches == microbatches
        recomputed = any(option.names for option in plan.recompute)
        if not same or (recomputed and plan.program != digest):
            continue
        then, now = (unevenness(one, plan.stage_of_cluster) for one in (before, clusters))
        if now <= UNEVEN * then:
            cut = attrs.evolve(
                plan,
                duplicated=cheap_to_recompute(clusters, place.machine, place.owners),
                stage_seconds=None,
                step_seconds=None,
                bound_seconds=None,
                program=digest,
            )
            with contextlib.suppress(ValueError):
                return _adopted(cut, options, clusters, ranks, place)
    return None


def _units_of(clusters: Program) -> tuple[int, dict[str, set[int]]]:
    """How many clusters there are, and which of them read each parameter."""
    held = holders(clusters, Role.PARAMETER)
    return clusters.units, {name: {call.unit for call in calls} for name, calls in held.items()}


def _adopted(
    plan: Plan,
    options: Options,
    clusters: Program,
    ranks: int | None,
    place: Place,
    cuts: tuple[int, ...] | None = None,
) -> Plan:
    """A plan that was made before, as `sched.adopt_plan.adopted` takes it."""
    optimizer, limit = options.optimizer, options.memory_limit
    machine, owners, replicas, passes = place.machine, place.owners, place.replicas, place.passes
    return adopted(
        plan,
        clusters,
        microbatches=options.microbatches // options.replicas,
        memory_limit=machine.memory if limit is None else limit,
        curves=lambda plan: curves_of(clusters, plan, optimizer, replicas, owners, passes),
        ranks=ranks,
        owners=owners,
        cuts=cuts,
    )


def planner_of(
    options: Options,
    clusters: Program,
    order: Scheduling,
    ranks: int | None,
    place: Place,
) -> Callable[[Network | None, Progress | None, Watched | None], Plan]:
    """What makes a plan for a network, as `planned` does."""
    microbatches = options.microbatches // options.replicas
    cuts = _cuts(options, clusters, order, ranks)
    optimizer, limit = options.optimizer, options.memory_limit
    machine, owners, replicas, passes = place.machine, place.owners, place.replicas, place.passes
    if isinstance(options.plan, Plan) and clusters.ports(Role.TANGENT):
        given = options.plan
        return lambda network, progress, watched: _adopted(
            given, options, clusters, ranks, place, cuts
        )
    return lambda network, progress, watched: make_plan(
        clusters,
        machine=machine,
        microbatches=microbatches,
        stages=options.stages,
        ranks=ranks,
        schedule=order,
        cuts=cuts,
        memory_limit=limit,
        network=network,
        optimizer=optimizer,
        replicas=replicas,
        search_seconds=None if options.search_work else options.search_seconds,
        search_work=options.search_work,
        jobs=options.jobs,
        owners=owners,
        progress=progress,
        watched=watched,
        recompute=options.recompute,
        passes=passes,
        message_tolerance=options.message_tolerance,
        cut_at=options.cut_at,
    )


def _cuts(
    options: Options, clusters: Program, order: Scheduling, ranks: int | None
) -> tuple[int, ...] | None:
    """The stage of every cluster, if it was said where to cut."""
    if options.split_at:
        return split_at(clusters, options.split_at)
    if options.partition is None:
        return None
    count = order.stages if isinstance(order, Schedule) else options.stages or ranks or 1
    return partitioned(clusters, options.partition, count)


def _decided(make: Callable[[], Plan], world: World) -> Plan:
    """Rank 0's plan, or its reason that there is none, on every rank."""
    return plain.from_json(Plan, world.decided_by_rank_zero(lambda: plain.to_json(make())))
