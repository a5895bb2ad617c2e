"""From a captured graph to a step that can run: every phase of it, shown, logged and traced.

    graph ── capture ──> captured ── fuse ──> clusters ── price ──> clusters ── plan ──┐
                         (flat)                           with seconds                 │
    Compiled <── assemble ── schedule of actions <── lower ── program with ranks <─────┘

Each phase is a function of those before; what is built is given on and changed by none.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from pfeife import report
from pfeife.backend.building.artifacts import Artifacts
from pfeife.backend.building.assembling import assemble
from pfeife.backend.building.builder import Builder
from pfeife.backend.building.capturing import capture, check_own_passes
from pfeife.backend.building.compiled import Compiled, worst_at
from pfeife.backend.building.own_passes import guarded
from pfeife.backend.building.planning import Planned, Planning, costs_of, planned, scheduling
from pfeife.backend.building.residence import devices_of
from pfeife.backend.building.task import Task
from pfeife.backend.graphs.step_graph import Graph
from pfeife.backend.settings.declared import declared_sizes, with_marks
from pfeife.backend.settings.option_checks import boundaries, described
from pfeife.backend.settings.options import Options
from pfeife.cost import memory_curves, timing_of
from pfeife.data.garbage import seldom_collected
from pfeife.data.machine import Machine
from pfeife.data.plan import Costs, Plan
from pfeife.data.progress import Shown
from pfeife.data.tried import Tried
from pfeife.frontend.captured import Captured
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.ir.sizes import resized
from pfeife.lowering.buckets import largest_share
from pfeife.lowering.lower import lower
from pfeife.lowering.predict import predict
from pfeife.lowering.verify import verify_schedule
from pfeife.passes import annotate, fuse, place, record, split_backward
from pfeife.passes.apply import passes_of
from pfeife.passes.compose import History, Recorded
from pfeife.passes.overlap import still_bounded, with_overlap
from pfeife.report import Target
from pfeife.runtime.distributed.control.agreement import comparable
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.failure import CollectiveError
from pfeife.sched.by_family import Scheduling, splits
from pfeife.sched.sharing import first_planned, preferred

log = logging.getLogger("pfeife")


def build_step(
    builder: Builder,
    graph: Graph,
    args: Sequence[Any],
    world: World | None,
    device: torch.device,
    show: Shown,
    artifacts: Artifacts,
    earlier: Sequence[Planned] = (),
) -> Compiled:
    """What runs a graph's step on the given shapes, by the plan of an `earlier` build if that is of
    the same program. Raises ValueError on all ranks for what cannot be built."""
    options = builder.options
    if options.runtime is not None and (world or options.devices):
        raise ValueError(
            f"option runtime={described(options.runtime)}: it runs all ranks in one process, "
            "where devices are its own matter; leave it out under torchrun, and devices with it"
        )
    passes = guarded(options.passes)
    return _compiled(Task(builder, graph, args, world, device, show, artifacts, passes, earlier))


def estimated_seconds(
    builder: Builder, graph: Graph, args: Sequence[Any], artifacts: Artifacts
) -> float | None:
    """What a graph that is not cut would take, by estimate; None if it cannot be captured."""
    show = Shown(log, logging.DEBUG)
    task = Task(builder, graph, args, None, torch.device("cpu"), show, artifacts, {})
    try:
        captured, flat = capture(task)[-1]
        machine = task.machine(captured.program)
        priced = _priced(task, _fused(task, flat, split=False), {}, machine)[-1].program
    except ValueError as error:
        log.debug("the time of a graph is not known: %s", error)
        return None
    return sum(call.seconds or 0.0 for call in priced.calls)


def _check_apart(options: Options, program: Program) -> None:
    """Raises CollectiveError if each replica has its own batch, and nobody says what its loss is of
    that of all."""
    losses = program.ports(Role.LOSS)
    if program.ports(Role.TANGENT) and not losses:
        raise CollectiveError(
            "option batch='replica': with the loss outside of the step nobody knows what the "
            "loss of one replica is of that of all; return the loss from the step"
        )
    if options.loss_reduction == "auto" and any(port.reduction == "sum" for port in losses):
        raise CollectiveError(
            "option batch='replica': the loss is a sum over rows, and DDP and FSDP would divide "
            f"the gradients of {options.apart} replicas by {options.apart}. Return a mean, or say "
            "loss_reduction='sum' if the sum over the rows of all replicas is meant, as one device "
            "would compute it (a sum divided by a count of all of them, say)"
        )


@attrs.frozen(eq=False)
class _Decided:
    """A way that a step may go: the programs up to its clusters with their seconds; its plan, the
    programs from there to that of the ranks, and what the planner has tried."""

    captured: Captured
    way: History
    plan: Plan
    history: History
    tried: list[Tried]


@seldom_collected()
def _compiled(task: Task) -> Compiled:
    """All phases, for this process."""
    options, world = task.options, task.world
    has_values = task.has_values  # before ranks come to own what this step trains
    # The only phase that may run the step. All later ones work on programs.
    ways = capture(task)
    captured, _ = ways[-1]
    _warn(task, captured)
    machine, order = task.machine(captured.program), scheduling(options, captured.program)
    # Rank 0 decides: marks on its tensors need not be on those of others.
    hint, most = _declared(task, captured)
    fused = [(each, _fused(task, flat, splits(order))) for each, flat in ways]
    ways = [(each, _priced(task, way, hint, machine)) for each, way in _known(options, fused)]
    programs = [way[-1].program for _, way in ways]
    # Options, operations and costs: where ranks agree on these, they make the same plan of them.
    text = "\n".join([task.builder.asked, *map(str, programs)])
    if world:
        world.check_agreement(text, "the program")
    if options.apart > 1:
        _check_apart(options, captured.program)
    target = task.target(machine)
    microbatches = options.microbatches // options.replicas

    def in_order() -> str:
        return json.dumps(preferred(programs, machine, microbatches, options.plan))

    # Rank 0 decides: seconds that were measured are not the same on all.
    by_one = world.decided_by_rank_zero if world and len(ways) > 1 else lambda decide: decide()
    tries: list[int] = json.loads(by_one(in_order))
    decided = first_planned(
        tries, lambda at: _with_plan(task, *ways[at], order, target, most), CollectiveError
    )
    plan, clusters, program = decided.plan, decided.way[-1].program, decided.history[-1].program
    # Passes of the caller's and plans by hand come out here: what would deadlock is refused before
    # it runs.
    schedule = verify_schedule(lower(plan.schedule, program))
    predicted = functools.partial(
        predict, program, schedule, machine, target.network, target.between
    )
    task.artifacts.history(decided.history)
    task.artifacts.decisions(plan, schedule, predicted)
    way = History((*decided.way, *decided.history[1:]))
    if options.check and has_values:
        check_own_passes(task, decided.captured, way)
    pipeline, borrowed = assemble(task, decided.captured, program, schedule)
    digest = hashlib.sha256(comparable(text).encode()).hexdigest()[:16]
    devices = task.devices(len(plan.schedule.ranks))
    # In one process the state stays one object, and moves to the device of its stage.
    lives = devices_of(program, devices, captured.carried) if devices else {}
    return Compiled(
        *(decided.captured, clusters, plan, program, schedule, pipeline, digest),
        *(borrowed, way, lives, target, decided.tried),
        fitting=[most],
    )


def _known(
    options: Options, ways: Sequence[tuple[Captured, History]]
) -> Sequence[tuple[Captured, History]]:
    """Those ways whose calls have seconds, where the caller has said these; all if none has."""
    if not isinstance(options.costs, Costs):
        return ways
    known = options.costs.seconds.keys()
    return [w for w in ways if known >= {call.node for call in w[1][-1].program.calls}] or ways


def _with_plan(
    task: Task,
    captured: Captured,
    way: History,
    order: Scheduling,
    target: Target,
    most: dict[str, int],
) -> _Decided:
    """A way with its plan, made for the sizes that are declared, or where that does not hold the
    largest ones, for these."""
    options, machine, clusters = task.options, target.machine, way[-1].program
    passes = with_overlap(task.passes, clusters.members, timing_of(machine))
    replicas = options.replicated({})
    planning = Planning(options, clusters, order, machine, passes, replicas, earlier=task.earlier)
    if task.world:
        task.builder.lay_out(task.world, task.args, planning)
    tried: list[Tried] = []
    plan, history = _planned(task, captured, planning, tried)
    if not _fits(plan, history[-1].program, target, most):
        way = _priced(task, History(way[:-1]), most, machine)
        planning = attrs.evolve(planning, clusters=way[-1].program)
        plan, history = _planned(task, captured, planning, tried)
    return _Decided(captured, way, plan, history, tried)


def _warn(task: Task, captured: Captured) -> None:
    """Of what a person should know who cuts this step."""
    warning = captured.warning()
    if not task.graph.said:
        warning = captured.mixing() or warning
    if task.options.microbatches > 1 and warning and not (task.world and task.world.rank):
        task.show.log.warning(warning)


def _declared(task: Task, captured: Captured) -> tuple[dict[str, int], dict[str, int]]:
    """The sizes to plan for, and the largest ones: what is declared of them on rank 0
    (collective)."""
    options = task.options
    if not captured.program.ports(Role.SIZE):
        return {}, {}

    def declared() -> str:
        most = with_marks(options.max_sizes, captured, task.args)
        each = (options.sizes_hint, most)
        return json.dumps([declared_sizes(captured, sizes, options.cut) for sizes in each])

    hint, most = json.loads(task.world.decided_by_rank_zero(declared) if task.world else declared())
    return hint, most


def _fused(task: Task, flat: History, split: bool) -> History:
    """The programs up to the clusters, with their backwards split if they shall be, and what passes
    make of them."""
    options, program = task.options, flat[-1].program
    borders = {
        **(options.split_at or {}),
        **boundaries(options.partition),
        **boundaries(options.cut_at),
    }
    passes = [fuse(boundaries=borders)]  # type: ignore[arg-type]
    # A schedule that delays weight gradients needs them as calls of their own.
    if split and program.ports(Role.TANGENT):
        passes.append(split_backward())
    with task.show.phase("fusing") as phase:
        more = task.passes.get("clusters", ())
        history = record(program, *passes, *more, progress=phase.progress)
        clusters = history[-1].program
        phase.outcome = lambda: f"{clusters.units} clusters"
    task.artifacts.history(history)
    return History((*flat, *history[1:]))


def _priced(task: Task, fused: History, sizes: Mapping[str, int], machine: Machine) -> History:
    """The programs up to the clusters with their seconds, of such sizes."""
    clusters = resized(fused[-1].program, sizes)
    priced = annotate(costs_of(task.options, clusters, machine, task.show))(clusters)
    task.artifacts.program("annotate", priced)
    return History((*fused, Recorded("annotate", priced, fused[-1].program)))


def _planned(
    task: Task, captured: Captured, planning: Planning, tried: list[Tried]
) -> tuple[Plan, History]:
    """The plan, and the programs on the way to that of the ranks on their devices."""
    world, options, builder = task.world, task.options, task.builder
    clusters, replicas = planning.clusters, planning.replicas
    ranks = len(options.devices) if options.devices else None
    owners: dict[str, frozenset[int]] = {}
    if world:
        # What other steps have come to train stays on its ranks: that the planner is told.
        state = captured.program, task.slots(captured), builder.mesh(world)
        world.ownership.adopt(*state, world)
        owners = world.ownership.of(*state)
        replicas = options.replicated(world.ownership.replicas(*state[:2]))
        ranks = ranks or builder.mesh(world).ranks
    if builder.home is not None:
        ports = captured.program.ports(Role.PARAMETER, Role.BUFFER)
        owners = {port.fqn: frozenset({builder.home}) for port in ports} | owners
    planning = attrs.evolve(planning, replicas=replicas, ranks=ranks, owners=owners)
    with task.show.phase("planning") as phase:
        plan = planned(
            planning, world, network=task.network, progress=phase.progress, watched=tried.append
        )
        history = record(clusters, *passes_of(plan, clusters, replicas, owners, planning.passes))
        if clusters.members > 1:
            beside = history[-len(planning.passes["ranks"])]
            assert beside.before is not None
            plan = still_bounded(plan, beside.before, beside.program)
        order = planning.order
        name = order if isinstance(order, str) else described(order)
        phase.outcome = lambda: f"{name}, {_described(task, plan, history[-1].program)}"
    # Passes on these levels run after the clusters were compared, and need not do the same
    # everywhere.
    if world and {"stages", "ranks"} & set(task.passes):
        world.check_agreement(str(history[-1].program), "the program that the passes made")
    devices = task.devices(len(plan.schedule.ranks))
    if devices:
        history = History((*history, *record(history[-1].program, place(devices))[1:]))
    return plan, history


def _described(task: Task, plan: Plan, program: Program) -> str:
    """A plan in a line; all of it in the log of who debugs."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("the plan:\n%s", report.plan_table(plan, program))
    schedule, options = lower(plan.schedule, program), task.options
    apart = options.apart > 1
    curves = memory_curves(program, schedule, optimizer=options.optimizer, apart=apart)
    peak = max(curve.peak for curve in curves)
    words = f"{report.size(peak)} at the peak of the worst rank"
    share = largest_share(program, len(schedule.ranks))
    if share > 1:
        words += f", replicas train at most {share:.2f} times an even share"
    return f"{report.summary(plan, program)}, {words}"


def _fits(plan: Plan, program: Program, target: Target, sizes: Mapping[str, int]) -> bool:
    """Whether a plan keeps to the limit of memory at such sizes, if any are open."""
    if not sizes or target.limit is None:
        return True
    return worst_at(program, lower(plan.schedule, program), target, sizes).peak <= target.limit
