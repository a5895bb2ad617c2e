"""From a captured graph to a step that can run: every phase of it, shown, logged and traced."""

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from pfeife import report
from pfeife.backend.artifacts import Artifacts
from pfeife.backend.call import Compiled
from pfeife.backend.graphs import Graph
from pfeife.backend.options import Options
from pfeife.compilers import BodyCompiler, compile_bodies
from pfeife.cost import default_machine, estimate, measure, memory_curves
from pfeife.data import plain
from pfeife.data.machine import Machine, Mesh, Network
from pfeife.data.plan import Costs, Plan
from pfeife.data.progress import Progress, Shown
from pfeife.frontend.captured import Captured
from pfeife.frontend.first_call import check_first_call
from pfeife.ir.program import Program, Role
from pfeife.lowering.lower import lower
from pfeife.lowering.predict import predict
from pfeife.lowering.verify import verify_schedule
from pfeife.passes import annotate, fuse, place, record, split_backward
from pfeife.passes.compose import Recorded
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.world import World
from pfeife.runtime.failure import Refusal
from pfeife.runtime.local.pipeline import LocalPipeline
from pfeife.sched import plan as make_plan
from pfeife.sched import split_at, splits
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
        captured = self._captured(graph, args, world, show)
        program = captured.program
        if captured.warning() and not (world and world.rank):
            log.warning(captured.warning())
        artifacts.program("capture", program)
        device = _home(program, device)
        target = self.machine or default_machine(device)
        # With the loss outside the gradients arrive when all forwards are done.
        order = options.schedule if program.ports(Role.LOSS) else "gpipe"
        clusters = self._fused(program, splits(order), show, artifacts)
        clusters = annotate(self._costs(clusters, target, show))(clusters)
        artifacts.program("annotate", clusters)
        text = f"{options}\n{clusters}"
        if world:
            world.check_agreement(text, "the program")
        slots = dict(zip(captured.arguments, args, strict=True))
        homes = world.homes.of(program, slots, self._mesh(world)) if world else {}
        by_hand = split_at(clusters, options.split_at) if options.split_at else None
        wishes = {"machine": target, "schedule": order, "cuts": by_hand, "homes": homes}
        with show.phase("planning") as phase:
            plan, history = self._planned(clusters, wishes, world, phase.progress)
            phase.outcome = lambda: f"{order}, {self._described(plan, history[-1].program)}"
        mesh = Mesh(len(plan.schedule.ranks), options.replicas)
        devices = self._devices(mesh, world is not None)
        if devices:
            history = (*history, *record(history[-1].program, place(devices))[1:])
        program = history[-1].program
        schedule = verify_schedule(lower(plan.schedule, program))
        predicted = functools.partial(predict, program, schedule, target, self.network)
        artifacts.history(history)
        artifacts.decisions(plan, schedule, predicted)
        mine = [world.rank % mesh.ranks] if world else range(mesh.ranks)
        artifacts.ranks(program, mine)
        bodies = self._bodies(program, world, show)
        pipeline: DistributedPipeline | LocalPipeline
        borrowed = None
        with show.phase("building") as phase:
            if world:
                limit = options.timeout
                pipeline = DistributedPipeline(program, schedule, device, bodies, timeout=limit)
                carried = captured.carried
                world.homes.settle(program, slots, mesh, graph.inputs.modules, world, carried)
                names = [None if name in carried else name for name in captured.arguments]
                borrowed = world.homes.borrowed(program, names, args, mine[0])
            else:
                pipeline = LocalPipeline(program, schedule, devices, bodies)
            actions = mesh.replicas * sum(map(len, schedule.ranks))
            phase.outcome = lambda: f"{actions} actions on {mesh.size} ranks"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return Compiled(captured, clusters, plan, program, schedule, pipeline, digest, borrowed)

    def _mesh(self, world: World) -> Mesh:
        replicas = self.options.replicas
        return Mesh(max(1, world.size // replicas), replicas)

    def outdated(self, compiled: Compiled, args: Sequence[Any], world: World) -> bool:
        """Whether a step must be built anew, since another one has been the first to train state
        that it reads, elsewhere."""
        slots = dict(zip(compiled.captured.arguments, args, strict=True))
        return world.homes.outdated(compiled.program, slots, self._mesh(world))

    def _captured(
        self, graph: Graph, args: Sequence[Any], world: World | None, show: Shown
    ) -> Captured:
        """The program of a microbatch; if a rank refuses the step, all do."""
        with show.phase("capturing") as phase:
            captured, refused = None, None
            try:
                captured = graph.captured(args, self.options)
                # Where state has a home, a rank has no values of what others train.
                known = world is not None and world.homes.among(args)
                if self.options.check and self.options.microbatches > 1 and not known:
                    check_first_call(graph.module, captured, args, graph.sure)
            except ValueError as error:
                refused = error
            if world:
                world.agreed("", "the captured program", refused=refused)
            if refused or captured is None:
                raise refused or AssertionError
            phase.outcome = lambda: _counted(captured.program)
        return captured

    def _fused(self, program: Program, split: bool, show: Shown, artifacts: Artifacts) -> Program:
        """The clusters, with their backwards split if they shall be."""
        passes = [fuse(boundaries=self.options.split_at)]  # type: ignore[arg-type]
        if split and program.ports(Role.TANGENT):
            passes.append(split_backward())
        with show.phase("fusing") as phase:
            history = record(program, *passes)
            clusters = history[-1].program
            phase.outcome = lambda: f"{clusters.units} clusters"
        artifacts.history(history)
        return clusters

    def _planned(
        self,
        clusters: Program,
        wishes: Mapping[str, Any],
        world: World | None,
        progress: Progress | None,
    ) -> tuple[Plan, tuple[Recorded, ...]]:
        """The plan of the `clusters` with costs, and the programs on the way to that of the ranks;
        `wishes` are those for the planner that are not options."""
        options = self.options
        ranks = world.size // options.replicas if world else None
        ranks = len(options.devices) if options.devices else ranks
        by_rank = not options.split_at and wishes["schedule"] != "search"
        make = functools.partial(
            make_plan,
            clusters,
            **wishes,
            microbatches=options.microbatches // options.replicas,
            stages=options.stages or (ranks if by_rank else None),
            ranks=ranks,
            replicas=options.replicas,
            memory_limit=options.memory_limit,
            optimizer=options.optimizer,
            network=self.network,
            search_seconds=None if options.search_work else options.search_seconds,
            search_work=options.search_work,
            progress=progress,
        )
        plan = self._decided(make, world) if world else make()
        passes = rank_passes(clusters, plan, options.replicas, wishes["homes"])
        return plan, record(clusters, *passes)

    @staticmethod
    def _decided(make: Callable[[], Plan], world: World) -> Plan:
        """Rank 0's plan, or its reason that there is none, on every rank."""
        return plain.from_json(Plan, world.decided_by_rank_zero(lambda: plain.to_json(make())))

    def _costs(self, clusters: Program, target: Machine, show: Shown) -> Costs:
        if self.options.costs == "estimate":
            return estimate(clusters, target)
        cache = Path(self.options.cache) if self.options.cache else None
        given = self.options.compiler
        compiler = None if given == "aot_eager" else BodyCompiler(given)
        with show.phase("measuring") as phase:
            return measure(clusters, compiler=compiler, cache=cache, progress=phase.progress)

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
