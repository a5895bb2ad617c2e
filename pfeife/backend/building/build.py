"""From a captured graph to a step that can run: every phase of it, shown, logged and traced."""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from pfeife import report
from pfeife.backend.building.artifacts import Artifacts
from pfeife.backend.building.builder import Builder
from pfeife.backend.building.compiled import Compiled, worst_at
from pfeife.backend.building.own_passes import check_unchanged, guarded
from pfeife.backend.building.planning import Place, Planned, costs_of, planned, scheduling
from pfeife.backend.building.residence import devices_of
from pfeife.backend.building.sync_batch_norm import check_synced
from pfeife.backend.graphs import Graph
from pfeife.backend.settings.declared import declared_sizes, with_marks
from pfeife.backend.settings.option_checks import boundaries, described
from pfeife.backend.settings.options import Options
from pfeife.compilers import compile_bodies
from pfeife.cost import default_machine, memory_curves
from pfeife.data.machine import Machine, Mesh
from pfeife.data.network import Network
from pfeife.data.plan import Plan
from pfeife.data.progress import Shown
from pfeife.data.schedule import Schedule
from pfeife.data.tried import Tried
from pfeife.frontend.captured import Captured
from pfeife.frontend.checks.check_capture import check_first_call
from pfeife.frontend.checks.check_trace import check_traced
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.ir.sizes import resized
from pfeife.lowering.buckets import largest_share
from pfeife.lowering.lower import lower
from pfeife.lowering.predict import predict
from pfeife.lowering.verify import verify_schedule
from pfeife.passes import (
    accumulate_in,
    annotate,
    defer_batch_norm,
    fuse,
    master_weights,
    place,
    record,
    split_backward,
)
from pfeife.passes.apply import passes_of
from pfeife.passes.compose import History, Pass, Passes, Recorded
from pfeife.report import Target
from pfeife.runtime.distributed.agreement import comparable
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.state.remote_parameters import UntrainedState
from pfeife.runtime.distributed.world import World
from pfeife.runtime.failure import CollectiveError
from pfeife.runtime.local.pipeline import LocalPipeline
from pfeife.runtime.protocols import Pipeline
from pfeife.sched.by_family import Scheduling, splits

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
    return Build(builder, graph, args, world, device, show, artifacts, passes, earlier).compiled()


def estimated_seconds(
    builder: Builder, graph: Graph, args: Sequence[Any], artifacts: Artifacts
) -> float | None:
    """What a graph that is not cut would take, by estimate; None if it cannot be captured."""
    show = Shown(log, logging.DEBUG)
    build = Build(builder, graph, args, None, torch.device("cpu"), show, artifacts, {})
    try:
        return build.seconds()
    except ValueError as error:
        log.debug("the time of a graph is not known: %s", error)
        return None


@attrs.frozen(eq=False)
class Build:
    """One step on its way:

    captured -> fused -> priced -> planned -> assembled
    (flat)      (clusters)         (stages, ranks)
    """

    builder: Builder
    graph: Graph
    args: Sequence[Any]
    world: World | None
    device: torch.device
    show: Shown
    artifacts: Artifacts
    passes: Passes
    earlier: Sequence[Planned] = ()  # what was built before

    @property
    def options(self) -> Options:
        return self.builder.options

    @property
    def network(self) -> Network | None:
        """What was measured, by the ranks of a pipeline."""
        found, mesh = self.builder.network, self.mesh
        return found.within(mesh) if found and mesh else found

    @property
    def mesh(self) -> Mesh | None:
        return self.builder.mesh(self.world) if self.world else self.options.mesh

    def compiled(self) -> Compiled:
        """All of it, for this process."""
        values = self.world is None or not self.world.ownership.owns_any(self.args)
        captured, flat = self._capture()
        program = captured.program
        warning = captured.warning()
        if not self.graph.said:
            warning = captured.mixing() or warning
        if self.options.microbatches > 1 and warning and not (self.world and self.world.rank):
            self.show.log.warning(warning)
        machine = self.builder.machine or default_machine(_device_of(program, self.device))
        order = scheduling(self.options, program)
        fused = self._fused(program, splits(order))
        hint, most = self._declared(captured)
        clusters = self._priced(resized(fused[-1].program, hint), machine)
        text = f"{self.builder.asked}\n{clusters}"
        if self.world:
            self.world.check_agreement(text, "the program")
        if self.options.apart > 1 and program.ports(Role.TANGENT) and not program.ports(Role.LOSS):
            raise CollectiveError(
                "option batch='replica': with the loss outside of the step nobody knows what the "
                "loss of one replica is of that of all; return the loss from the step"
            )
        if self.world:
            self.builder.lay_out(self.world, self.args, clusters, order, machine, self.passes)
        tried: list[Tried] = []
        target = self._target(machine)
        plan, history = self._planned(captured, clusters, order, machine, tried)
        if not _fits(plan, history[-1].program, target, most):
            clusters = self._priced(resized(fused[-1].program, most), machine)
            plan, history = self._planned(captured, clusters, order, machine, tried)
        program = history[-1].program
        schedule = verify_schedule(lower(plan.schedule, program))
        network, between = self.network, target.between
        predicted = functools.partial(predict, program, schedule, machine, network, between)
        self.artifacts.history(history)
        self.artifacts.decisions(plan, schedule, predicted)
        priced = Recorded("annotate", clusters, fused[-1].program)
        way = History((*flat, *fused[1:], priced, *history[1:]))
        if self.options.check and values:
            self._check_passes(captured, way)
        pipeline, borrowed = self._assembled(captured, program, schedule)
        digest = hashlib.sha256(comparable(text).encode()).hexdigest()[:16]
        devices = self._devices(len(plan.schedule.ranks))
        lives = devices_of(program, devices, captured.carried) if devices else {}
        return Compiled(
            *(captured, clusters, plan, program, schedule, pipeline, digest, borrowed, way, lives),
            target,
            tried,
            fitting=[most],
        )

    def _target(self, machine: Machine) -> Target:
        """What the step is planned for."""
        options, links = self.options, self.builder.network
        between = links.between(self.mesh) if links and self.mesh else None
        limit = machine.memory if options.memory_limit is None else options.memory_limit
        return Target(machine, self.network, between, options.optimizer, limit, options.apart > 1)

    def _declared(self, captured: Captured) -> tuple[dict[str, int], dict[str, int]]:
        """The sizes to plan for, and the largest ones: what is declared of them on rank 0."""
        if not captured.program.ports(Role.SIZE):
            return {}, {}

        def declared() -> str:
            most = with_marks(self.options.max_sizes, captured, self.args)
            each = (self.options.sizes_hint, most)
            return json.dumps([declared_sizes(captured, one, self.options.cut) for one in each])

        text = self.world.decided_by_rank_zero(declared) if self.world else declared()
        hint, most = json.loads(text)
        return hint, most

    def _capture(self) -> tuple[Captured, History]:
        """The program of a microbatch, and what the passes made of it; if a rank refuses the step,
        all do."""
        world, options = self.world, self.options
        with self.show.phase("capturing") as phase:
            found, refused = None, None
            try:
                count = world.size if world else options.replicas
                check_synced(self.graph.inputs.modules, count)
                captured = self.graph.capture(self.args, options)
                # Where state has owners, a rank has no values of what others train.
                known = world is not None and world.ownership.owns_any(self.args)
                if options.microbatches > 1 and not (
                    options.check
                    and options.cut > 1
                    and not known
                    and check_first_call(
                        self.graph.step,
                        captured,
                        self.args,
                        self.graph.sure,
                        self.graph.doubled,
                        decided=options.loss_reduction != "auto",
                        counting=self.graph.counting,
                    )
                ):
                    self.graph.check_unseen(captured)
                if options.check and not known and captured.door == "trace":
                    check_traced(self.graph.step, captured, self.args)
                self.artifacts.program("capture", captured.program)
                self.artifacts.premises(captured.program.premises)
                passes = *self._asked(captured), *self.passes.get("flat", ())
                found = captured, record(captured.program, *passes, start="capture")
            except ValueError as error:
                refused = error
            if world:
                world.agreed("", "the captured program", refused=refused)
            if refused or found is None:
                raise refused or AssertionError
            captured, history = found
            phase.outcome = lambda: _counted(history[-1].program)
        self.artifacts.history(history)
        return attrs.evolve(captured, program=history[-1].program), history

    def _check_passes(self, captured: Captured, way: History) -> None:
        """Raises ValueError if one of the caller's own passes has changed what is computed; if a
        rank finds that, all do."""
        own = {id(one) for passes in self.passes.values() for one in passes}
        passed = [step for step in way if id(step.made_by) in own]
        if not passed:
            return
        refused, within = None, self.options.check
        try:
            share = None if isinstance(within, bool) else within
            check_unchanged(passed, captured, self.args, share)
        except ValueError as error:
            refused = error
        if self.world:
            self.world.agreed("", "what the passes compute", refused=refused)
        if refused:
            raise refused

    def _asked(self, captured: Captured) -> list[Pass]:
        """What makes sums of gradients, and the caller's own parameters, as wide as was asked for,
        and has batch norms track the whole batch."""
        wide, narrow = self.options.accumulate, self.options.param_dtype
        passes = [] if wide is None else [accumulate_in(wide)]
        if self.options.deferred_batch_norm:
            passes.append(defer_batch_norm())
        if narrow is not None:
            slots = self._slots(captured)
            ports = captured.program.ports(Role.PARAMETER)
            for dtype in sorted({slots[port.name].dtype for port in ports} - {narrow}, key=str):
                theirs = {port.name for port in ports if slots[port.name].dtype == dtype}
                passes.append(master_weights(dtype, theirs))
        return passes

    def _fused(self, program: Program, split: bool) -> History:
        """The clusters, with their backwards split if they shall be, and what passes make of
        them."""
        asked = self.options
        borders = {
            **(asked.split_at or {}),
            **boundaries(asked.partition),
            **boundaries(asked.cut_at),
        }
        passes = [fuse(boundaries=borders)]  # type: ignore[arg-type]
        if split and program.ports(Role.TANGENT):
            passes.append(split_backward())
        with self.show.phase("fusing") as phase:
            more = self.passes.get("clusters", ())
            history = record(program, *passes, *more, progress=phase.progress)
            clusters = history[-1].program
            phase.outcome = lambda: f"{clusters.units} clusters"
        self.artifacts.history(history)
        return history

    def seconds(self) -> float:
        """What a microbatch takes if nothing is cut, by its costs."""
        captured, _ = self._capture()
        clusters = self._fused(captured.program, split=False)[-1].program
        machine = self.builder.machine or default_machine(_device_of(clusters, self.device))
        return sum(call.seconds or 0.0 for call in self._priced(clusters, machine).calls)

    def _priced(self, clusters: Program, machine: Machine) -> Program:
        """The clusters with their seconds."""
        priced = annotate(costs_of(self.options, clusters, machine, self.show))(clusters)
        self.artifacts.program("annotate", priced)
        return priced

    def _planned(
        self,
        captured: Captured,
        clusters: Program,
        order: Scheduling,
        machine: Machine,
        tried: list[Tried],
    ) -> tuple[Plan, History]:
        """The plan, and the programs on the way to that of the ranks on their devices."""
        world, slots = self.world, self._slots(captured)
        owners: dict[str, frozenset[int]] = {}
        replicas = self.options.replicated({})
        if world:
            given = captured.program, slots, self.builder.mesh(world)
            world.ownership.adopt(*given, world)
            owners = world.ownership.of(*given)
            known = world.ownership.replicas(captured.program, slots)
            replicas = self.options.replicated(known)
        if self.builder.home is not None:
            state = captured.program.ports(Role.PARAMETER, Role.BUFFER)
            owners = {port.fqn: frozenset({self.builder.home}) for port in state} | owners
        with self.show.phase("planning") as phase:
            plan = planned(
                self.options,
                clusters,
                order,
                world,
                Place(machine, owners, replicas, self.passes, self.earlier),
                network=self.network,
                progress=phase.progress,
                watched=tried.append,
            )
            history = record(clusters, *passes_of(plan, clusters, replicas, owners, self.passes))
            asked = order if isinstance(order, str) else described(order)
            phase.outcome = lambda: f"{asked}, {self._described(plan, history[-1].program)}"
        if world and {"stages", "ranks"} & set(self.passes):
            world.check_agreement(str(history[-1].program), "the program that the passes made")
        devices = self._devices(len(plan.schedule.ranks))
        if devices:
            history = History((*history, *record(history[-1].program, place(devices))[1:]))
        return plan, history

    def _assembled(
        self, captured: Captured, program: Program, schedule: Schedule
    ) -> tuple[Pipeline, UntrainedState | None]:
        """What runs the program's ranks in this process, and the state that it borrows from
        others."""
        world, options = self.world, self.options
        mesh = Mesh(len(schedule.ranks), options.replicas)
        if world:
            mesh = attrs.evolve(mesh, order=self.builder.mesh(world).order)
        mine = [mesh.place(world.rank)[1]] if world else range(mesh.ranks)
        self.artifacts.ranks(program, mine)
        bodies = self._bodies(program)
        with self.show.phase("building") as phase:
            actions = mesh.replicas * sum(map(len, schedule.ranks))
            phase.outcome = lambda: f"{actions} actions on {mesh.size} ranks"
            if options.runtime is not None:
                pipeline = options.runtime(program, schedule, bodies)
                lacks = {p.fqn for p in program.ports(Role.GRADIENT)} - pipeline.gradients
                if lacks:
                    raise ValueError(
                        f"option runtime={described(options.runtime)}: its pipeline says that it "
                        f"has no gradients of {sorted(lacks)}, which the program has"
                    )
                return pipeline, None
            if world is None:
                return LocalPipeline(program, schedule, self._devices(mesh.ranks), bodies), None
            device = _device_of(program, self.device)
            pipeline = DistributedPipeline(
                program,
                schedule,
                device,
                bodies,
                timeout=options.timeout,
                mesh=mesh,
                apart=options.apart > 1,
            )
            carried, modules = captured.carried, self.graph.inputs.modules
            slots, apart = self._slots(captured), options.apart > 1
            world.ownership.settle(program, slots, mesh, modules, world, carried, apart)
            names = [None if name in carried else name for name in captured.arguments]
            return pipeline, UntrainedState.of(
                program, names, self.args, mine[0], world.ownership.known
            )

    def _slots(self, captured: Captured) -> dict[str | None, Any]:
        """The call's arguments by the names of their ports, None for those that have none."""
        return dict(zip(captured.arguments, self.args, strict=True))

    def _bodies(self, program: Program) -> dict[str, Callable]:
        """The compiled bodies of a rank, or of all in this process. If one of several processes
        cannot compile its own, all refuse."""
        world = self.world
        if self.options.compiler == "aot_eager" and not self.options.cuda_graphs:
            return {}
        given = set(map(_with_index, map(torch.device, self.options.devices or ())))
        if given - {_device_of(program, self.device)}:
            raise ValueError(
                f"option devices={self.options.devices}: bodies are compiled and captured as CUDA "
                "graphs for the device of the step's capture, not for others; on several devices "
                "take compiler='aot_eager' without cuda_graphs, or a process a GPU (torchrun)"
            )
        bodies, refusal = {}, ""
        try:
            with self.show.phase("compiling") as phase:
                bodies = compile_bodies(
                    program,
                    self.options.compiler,
                    rank=self.builder.mesh(world).place(world.rank)[1] if world else None,
                    cuda_graphs=self.options.cuda_graphs,
                    progress=phase.progress,
                )
        except ValueError as error:
            if world is None:
                raise
            refusal = str(error)
        for other, text in enumerate(world.from_all_ranks(refusal) if world else ()):
            if text:
                raise CollectiveError(f"rank {other}: {text}")
        return bodies

    def _described(self, plan: Plan, program: Program) -> str:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("the plan:\n%s", report.plan_table(plan, program))
        schedule, options = lower(plan.schedule, program), self.options
        apart = options.apart > 1
        curves = memory_curves(program, schedule, optimizer=options.optimizer, apart=apart)
        peak = max(curve.peak for curve in curves)
        said = f"{report.size(peak)} at the peak of the worst rank"
        share = largest_share(program, len(schedule.ranks))
        if share > 1:
            said += f", replicas train at most {share:.2f} times an even share"
        return f"{report.summary(plan, program)}, {said}"

    def _devices(self, ranks: int) -> list[torch.device] | None:
        """The device of every rank in this process, None to leave all where it is."""
        given = self.options.devices
        if given is None:
            return None
        if self.world or len(given) != ranks:
            raise ValueError(
                f"devices={given}: this is for one process that runs all ranks of a pipeline, "
                f"one device a rank; there are {ranks} ranks"
                + (", a process each" if self.world else "")
            )
        return [_with_index(torch.device(name)) for name in given]


def _fits(plan: Plan, program: Program, target: Target, sizes: Mapping[str, int]) -> bool:
    """Whether a plan keeps to the limit of memory at such sizes, if any are open."""
    if not sizes or target.limit is None:
        return True
    return worst_at(program, lower(plan.schedule, program), target, sizes).peak <= target.limit


def _device_of(program: Program, otherwise: torch.device) -> torch.device:
    """The device of the parameters; a batch may still come from another one."""
    return next((port.device for port in program.ports(Role.PARAMETER)), otherwise)


def _with_index(device: torch.device) -> torch.device:
    """The device as its tensors have it: "cuda" is one of several."""
    meant = device.type != "cpu" and device.index is None
    return torch.empty(0, device=device).device if meant else device


def _counted(program: Program) -> str:
    nodes = len(program.module.graph.nodes)
    return f"{len(program.inputs)} inputs, {len(program.outputs)} outputs, {nodes} nodes"
