"""From a captured graph to a step that can run: every phase of it, shown, logged and traced."""

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from pfeife import report
from pfeife.backend.artifacts import Artifacts
from pfeife.backend.call import Compiled
from pfeife.backend.decide import costs_of, planned, scheduling
from pfeife.backend.given import boundaries, guarded, told
from pfeife.backend.graphs import Graph
from pfeife.backend.options import Options
from pfeife.compilers import compile_bodies
from pfeife.cost import default_machine, memory_curves
from pfeife.data.machine import Machine, Mesh, Network
from pfeife.data.plan import Plan
from pfeife.data.progress import Shown
from pfeife.frontend.capture import Captured
from pfeife.frontend.first_call import check_first_call
from pfeife.ir.program import Program, Role
from pfeife.lowering.lower import lower
from pfeife.lowering.predict import predict
from pfeife.lowering.verify import verify_schedule
from pfeife.passes import annotate, fuse, place, record, split_backward
from pfeife.passes.compose import Pass, Recorded
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.world import World
from pfeife.runtime.failure import Refusal
from pfeife.runtime.local.pipeline import LocalPipeline
from pfeife.runtime.protocols import Pipeline
from pfeife.sched import splits
from pfeife.sched.cutting.room import rank_passes

log = logging.getLogger("pfeife")


@attrs.frozen(eq=False)
class Builder:
    """Builds steps with some options."""

    options: Options
    machine: Machine | None
    network: Network | None

    def build(
        self,
        graph: Graph,
        args: Sequence[Any],
        world: World | None,
        device: torch.device,
        show: Shown,
        artifacts: Artifacts,
    ) -> Compiled:
        options = self.options
        if options.runtime is not None and (world or options.devices):
            raise ValueError(
                f"option runtime={told(options.runtime)}: it runs all ranks in one process, where "
                "devices are its own matter; leave it out under torchrun, and devices with it"
            )
        passes = guarded(options.passes)
        captured, flat = self._captured(graph, args, world, passes.get("flat", ()), show, artifacts)
        program = captured.program
        if captured.warning() and not (world and world.rank):
            log.warning(captured.warning())
        device = _home(program, device)
        target = self.machine or default_machine(device)
        order = scheduling(options, program)
        fused = self._fused(program, splits(order), passes.get("clusters", ()), show, artifacts)
        clusters = annotate(costs_of(options, fused[-1].program, target, show))(fused[-1].program)
        artifacts.program("annotate", clusters)
        text = f"{options}\n{clusters}"
        if world:
            world.check_agreement(text, "the program")
        slots = dict(zip(captured.arguments, args, strict=True))
        homes = world.homes.of(program, slots, self._mesh(world)) if world else {}
        network = self.network
        with show.phase("planning") as phase:
            tell = phase.progress
            plan = planned(options, clusters, order, target, network, passes, homes, world, tell)
            levels = rank_passes(clusters, plan, options.replicas, homes, passes)
            history = record(clusters, *levels)
            asked = order if isinstance(order, str) else told(order)
            phase.outcome = lambda: f"{asked}, {self._described(plan, history[-1].program)}"
        if world and {"stages", "ranks"} & set(passes):
            world.check_agreement(str(history[-1].program), "the program that the passes have made")
        mesh = Mesh(len(plan.schedule.ranks), options.replicas)
        devices = self._devices(mesh, world is not None)
        if devices:
            history = (*history, *record(history[-1].program, place(devices))[1:])
        program = history[-1].program
        schedule = verify_schedule(lower(plan.schedule, program))
        predicted = functools.partial(predict, program, schedule, target, network)
        artifacts.history(history)
        artifacts.decisions(plan, schedule, predicted)
        mine = [world.rank % mesh.ranks] if world else range(mesh.ranks)
        artifacts.ranks(program, mine)
        bodies = self._bodies(program, world, show)
        pipeline: Pipeline
        borrowed = None
        with show.phase("building") as phase:
            if world:
                limit = options.timeout
                pipeline = DistributedPipeline(program, schedule, device, bodies, timeout=limit)
                carried = captured.carried
                world.homes.settle(program, slots, mesh, graph.inputs.modules, world, carried)
                names = [None if name in carried else name for name in captured.arguments]
                borrowed = world.homes.borrowed(program, names, args, mine[0])
            elif options.runtime is not None:
                pipeline = options.runtime(program, schedule, bodies)
            else:
                pipeline = LocalPipeline(program, schedule, devices, bodies)
            actions = mesh.replicas * sum(map(len, schedule.ranks))
            phase.outcome = lambda: f"{actions} actions on {mesh.size} ranks"
        return Compiled(
            captured,
            clusters,
            plan,
            program,
            schedule,
            pipeline,
            hashlib.sha256(text.encode()).hexdigest()[:16],
            borrowed,
            (*flat, *fused[1:], Recorded("annotate", clusters), *history[1:]),
        )

    def _mesh(self, world: World) -> Mesh:
        replicas = self.options.replicas
        return Mesh(max(1, world.size // replicas), replicas)

    def outdated(self, compiled: Compiled, args: Sequence[Any], world: World) -> bool:
        """Whether a step must be built anew, since another one has been the first to train state
        that it reads, elsewhere."""
        slots = dict(zip(compiled.captured.arguments, args, strict=True))
        return world.homes.outdated(compiled.program, slots, self._mesh(world))

    def _captured(
        self,
        graph: Graph,
        args: Sequence[Any],
        world: World | None,
        passes: Sequence[Pass],
        show: Shown,
        artifacts: Artifacts,
    ) -> tuple[Captured, tuple[Recorded, ...]]:
        """The program of a microbatch, and what the passes made of it; if a rank refuses the step,
        all do."""
        with show.phase("capturing") as phase:
            found, refused = None, None
            try:
                captured = graph.captured(args, self.options)
                # Where state has a home, a rank has no values of what others train.
                known = world is not None and world.homes.among(args)
                if self.options.check and self.options.microbatches > 1 and not known:
                    check_first_call(graph.module, captured, args, graph.sure)
                artifacts.program("capture", captured.program)
                found = captured, record(captured.program, *passes, start="capture")
            except ValueError as error:
                refused = error
            if world:
                world.agreed("", "the captured program", refused=refused)
            if refused or found is None:
                raise refused or AssertionError
            captured, history = found
            phase.outcome = lambda: _counted(history[-1].program)
        artifacts.history(history)
        return attrs.evolve(captured, program=history[-1].program), history

    def _fused(
        self,
        program: Program,
        split: bool,
        more: Sequence[Pass],
        show: Shown,
        artifacts: Artifacts,
    ) -> tuple[Recorded, ...]:
        """The clusters, with their backwards split if they shall be, and what `more` passes make of
        them."""
        borders = {**(self.options.split_at or {}), **boundaries(self.options.partition)}
        passes = [fuse(boundaries=borders)]  # type: ignore[arg-type]
        if split and program.ports(Role.TANGENT):
            passes.append(split_backward())
        with show.phase("fusing") as phase:
            history = record(program, *passes, *more)
            clusters = history[-1].program
            phase.outcome = lambda: f"{clusters.units} clusters"
        artifacts.history(history)
        return history

    def _bodies(self, program: Program, world: World | None, show: Shown) -> dict[str, Callable]:
        """The compiled bodies of a rank, or of all in this process. If one of several processes
        cannot compile its own, all refuse."""
        if self.options.compiler == "aot_eager" and not self.options.cuda_graphs:
            return {}
        bodies, refusal = {}, ""
        try:
            with show.phase("compiling") as phase:
                bodies = compile_bodies(
                    program,
                    self.options.compiler,
                    rank=world.rank % (world.size // program.replicas) if world else None,
                    cuda_graphs=self.options.cuda_graphs,
                    progress=phase.progress,
                )
        except ValueError as error:
            if world is None:
                raise
            refusal = str(error)
        for other, text in enumerate(world.from_all_ranks(refusal) if world else ()):
            if text:
                raise Refusal(f"rank {other}: {text}")
        return bodies

    def _described(self, plan: Plan, program: Program) -> str:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("the plan:\n%s", report.plan_table(plan, program))
        schedule, kept = lower(plan.schedule, program), self.options.optimizer
        peak = max(curve.peak for curve in memory_curves(program, schedule, optimizer=kept))
        said = report.size(peak)
        return f"{report.summary(plan, program)}, {said} at the peak of the worst rank"

    def _devices(self, mesh: Mesh, many: bool) -> list[torch.device] | None:
        """The device of every rank in this process, None to leave all where it is."""
        given = self.options.devices
        if given is None:
            return None
        if many or len(given) != mesh.ranks:
            raise ValueError(
                f"devices={given}: this is for one process that runs all ranks of a pipeline, "
                f"one device a rank; there are {mesh.ranks} ranks"
                + (", a process each" if many else "")
            )
        return [torch.device(name) for name in given]


def _home(program: Program, otherwise: torch.device) -> torch.device:
    """The device of the parameters; a batch may still come from another one."""
    return next((port.device for port in program.ports(Role.PARAMETER)), otherwise)


def _counted(program: Program) -> str:
    nodes = len(program.module.graph.nodes)
    return f"{len(program.inputs)} inputs, {len(program.outputs)} outputs, {nodes} nodes"
