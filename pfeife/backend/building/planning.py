"""From what was asked for to a plan: costs, cuts, and what the planner is told."""

import contextlib
from collections.abc import Mapping, Sequence
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
from pfeife.runtime.distributed.world.world import World
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
    if options.plan is not None:
        return options.plan.schedule
    order = options.schedule
    # With the loss inside, the schedule decides when backwards run.
    if program.ports(Role.LOSS):
        return order
    if isinstance(order, Schedule):
        return gpipe(order.stages, order.microbatches, order.stage_ranks)
    return "gpipe"


def costs_of(options: Options, clusters: Program, target: Machine, show: Shown) -> Costs:
    """The seconds of a program of clusters. Raises ValueError for a function without `Costs`."""
    source = options.costs
    if isinstance(source, Costs):
        return source
    if source == "estimate":
        return estimate(clusters, target)
    with show.phase("measuring") as phase:
        if callable(source):
            costs = source(clusters)
            if not isinstance(costs, Costs):
                name = compiler_name(source)
                raise ValueError(f"option costs={name}: it returned {costs!r}, not Costs")
            return costs
        cache = Path(options.cache) if options.cache else None
        compiler = None if options.compiler == "aot_eager" else BodyCompiler(options.compiler)
        return measure(
            clusters, compiler=compiler, cache=cache, progress=phase.progress, machine=target
        )


UNEVEN = 1.1  # times as uneven stages as those of the sizes that a plan was made for: plan anew
Planned = tuple[Program, Plan]  # of clusters, and what was decided for it


@attrs.frozen(eq=False)
class Planning:
    """A program of clusters with costs, and what its plan depends on: the options and how it is
    scheduled, the machine, the passes that its programs go through, what becomes of replicas, the
    ranks of a pipeline (None: as many as there are stages), those that own state, and `earlier`
    programs with their plans."""

    options: Options
    clusters: Program
    order: Scheduling
    machine: Machine
    passes: Passes
    replicas: Replicas
    ranks: int | None = None
    owners: Mapping[str, frozenset[int]] = attrs.field(factory=dict)
    earlier: Sequence[Planned] = ()

    @property
    def microbatches(self) -> int:
        """Those of a replica."""
        return self.options.microbatches // self.options.replicas

    def plan(
        self, network: Network | None, progress: Progress | None, watched: Watched | None
    ) -> Plan:
        """A new plan, or the given one if it fits, or as an earlier program has taken it. Raises
        ValueError as `sched.plan` and `sched.adopt_plan.adopted` do."""
        options, cuts = self.options, self._cuts()
        if options.plan is not None and self.clusters.ports(Role.TANGENT):
            try:
                return self._adopted(options.plan, cuts)
            except ValueError:
                if earlier := self.earlier_plan():
                    return earlier
                raise
        return make_plan(
            self.clusters,
            machine=self.machine,
            microbatches=self.microbatches,
            stages=options.stages,
            ranks=self.ranks,
            schedule=self.order,
            cuts=cuts,
            memory_limit=options.memory_limit,
            network=network,
            optimizer=options.optimizer,
            replicas=self.replicas,
            search_seconds=None if options.search_work else options.search_seconds,
            search_work=options.search_work,
            jobs=options.jobs,
            owners=self.owners,
            progress=progress,
            watched=watched,
            recompute=options.recompute,
            passes=self.passes,
            message_tolerance=options.message_tolerance,
            cut_at=options.cut_at,
        )

    def earlier_plan(self) -> Plan | None:
        """The plan of the last one of earlier programs that train with as many clusters, each of
        the same parameters, and the loss at the same place, if any is and its stages are about as
        even here: without seconds, which were those of other sizes. Where a plan names what is
        recomputed, all operations must be the same."""
        clusters, given = self.clusters, self.options.plan is not None
        if not clusters.ports(Role.TANGENT):
            return None
        digest = program_digest(clusters)
        for before, plan in reversed(self.earlier):
            # Costs differ with the sizes, so that only what is cut has to be the same.
            same = _units_of(before) == _units_of(clusters)
            same &= len(before.ports(Role.LOSS)) == len(clusters.ports(Role.LOSS))
            each = plan.schedule.microbatches
            same &= each == self.microbatches or (given and each > self.microbatches)
            recomputed = any(option.names for option in plan.recompute)
            if not same or (recomputed and plan.program != digest):
                continue
            then, now = (unevenness(each, plan.stage_of_cluster) for each in (before, clusters))
            if now <= UNEVEN * then:
                cut = attrs.evolve(
                    plan,
                    # Sizes decide what is cheaper to compute twice than to send.
                    duplicated=cheap_to_recompute(clusters, self.machine, self.owners),
                    stage_seconds=None,
                    step_seconds=None,
                    bound_seconds=None,
                    program=digest,
                )
                # It may not fit into memory at these sizes: then a new plan does, or says why not.
                with contextlib.suppress(ValueError):
                    return self._adopted(cut)
        return None

    def _adopted(self, plan: Plan, cuts: tuple[int, ...] | None = None) -> Plan:
        """A plan that was made before, as `sched.adopt_plan.adopted` takes it."""
        optimizer, limit = self.options.optimizer, self.options.memory_limit
        owners, replicas, passes = self.owners, self.replicas, self.passes
        return adopted(
            plan,
            self.clusters,
            microbatches=self.microbatches,
            memory_limit=self.machine.memory if limit is None else limit,
            curves=lambda plan: curves_of(self.clusters, plan, optimizer, replicas, owners, passes),
            ranks=self.ranks,
            owners=owners,
            cuts=cuts,
        )

    def _cuts(self) -> tuple[int, ...] | None:
        """The stage of every cluster, if it was said where to cut."""
        options, order = self.options, self.order
        if options.split_at:
            return split_at(self.clusters, options.split_at)
        if options.partition is None:
            return None
        count = order.stages if isinstance(order, Schedule) else options.stages or self.ranks or 1
        return partitioned(self.clusters, options.partition, count)


def planned(
    planning: Planning,
    world: World | None,
    *,
    network: Network | None,
    progress: Progress | None,
    watched: Watched | None = None,
) -> Plan:
    """The plan of a program of clusters, that of rank 0 on every rank (collective): that of an
    earlier program, if that is the same one of other sizes and there is room. Raises ValueError
    as `Planning.plan` does."""

    def make() -> Plan:
        earlier = planning.earlier_plan() if planning.options.plan is None else None
        return planning.plan(network, progress, watched) if earlier is None else earlier

    if world is None:
        return make()
    return plain.from_json(Plan, world.decided_by_rank_zero(lambda: plain.to_json(make())))


def _units_of(clusters: Program) -> tuple[int, dict[str, set[int]]]:
    """How many clusters there are, and which of them read each parameter."""
    held = holders(clusters, Role.PARAMETER)
    return clusters.units, {name: {call.unit for call in calls} for name, calls in held.items()}
