"""torch.compile's entry: from Dynamo's graph to a pipelined step that autograd can use."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from pfeife import _torch, plain, report
from pfeife.artifacts import Artifacts
from pfeife.call import Compiled, run_step
from pfeife.capture import Captured
from pfeife.compilers import BodyCompiler, compile_bodies
from pfeife.cost import default_machine, estimate, machine, measure, memory_curves
from pfeife.microbatch import BatchedGraph
from pfeife.options import Options, options_from, versions
from pfeife.passes import (
    annotate,
    dp_wrap,
    fuse,
    insert_send_recv,
    partition,
    place,
    record,
    split_backward,
)
from pfeife.passes.compose import Recorded
from pfeife.plan import Costs, Machine, Mesh, Network, Plan
from pfeife.program import Kind, Port, Program, Role, holders
from pfeife.progress import Progress, Shown, shown
from pfeife.runtime.distributed import DistributedPipeline
from pfeife.runtime.failure import Refusal
from pfeife.runtime.local import LocalPipeline
from pfeife.runtime.world import World, join_world
from pfeife.sched import follow, lower, policy, predict, split_at, splits, verify_schedule
from pfeife.sched import plan as make_plan

log = logging.getLogger("pfeife")
_CPU = torch.device("cpu")


class Backend:
    """A compile backend with its options bound.

    `compiled` lists what it has built so far, `homes` the stages that hold each parameter and
    updated buffer: with a rank a process, later graphs of the same model (without gradients,
    say) keep to them.
    """

    def __init__(self, options: Options):
        self.options = options
        self.alike = [*versions(), str(options)]  # on every rank
        self.compiled: list[Compiled] = []
        self.homes = WeakIdKeyDictionary()  # (stage, rank)s by parameter or buffer
        self.placed: tuple[int, ...] | None = None  # the ranks of the stages that they are about
        if options.schedule != "search":
            policy(options.schedule)
        given = options.machine
        self._machine = given if isinstance(given, Machine | None) else machine(given)
        links = options.network
        self._network = links if isinstance(links, Network | None) else _measured(links)

    def __call__(self, module: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Callable:
        """Called by Dynamo with a graph; the program is built at the first call of the result,
        for each shape that it is called with."""
        graph = BatchedGraph(module, examples)
        artifacts = Artifacts(_torch.compilation())
        known: dict[tuple, Compiled] = {}

        def run(*args: Any) -> list[torch.Tensor]:
            key = graph.key(args)
            device = next((a.device for a in args if isinstance(a, torch.Tensor)), _CPU)
            world = join_world(device, self.options.timeout)
            if world:
                with world.building("the arguments of a step"):
                    world.check_agreement(self._called_with(args), "the arguments of this call")
            if key in known:
                return run_step(known[key], self.options, args)
            rank = world.rank if world else 0
            show = shown(log, progress=self.options.progress, rank=rank)
            with world.building("a step") if world else contextlib.nullcontext():
                known[key] = self._build(graph, args, world, device, show, artifacts)
            self.compiled.append(known[key])
            return run_step(known[key], self.options, args, show)

        return run

    def _called_with(self, args: Sequence[Any]) -> str:
        """All that a call's program and its messages depend on, a line each."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        shapes = [f"a tensor of {a.dtype} {list(a.shape)} on {a.device.type}" for a in tensors]
        trains = f"gradients {'on' if torch.is_grad_enabled() else 'off'}"
        return "\n".join([*self.alike, trains, *shapes])

    def _build(
        self,
        graph: BatchedGraph,
        args: Sequence[Any],
        world: World | None,
        device: torch.device,
        show: Shown,
        artifacts: Artifacts,
    ) -> Compiled:
        options = self.options
        with show.phase("capturing") as phase:
            captured = graph.captured(args, options)
            phase.outcome = lambda: _counted(captured.program)
        program = captured.program
        artifacts.program("capture", program)
        target = self._machine or default_machine(device)
        # With the loss outside the gradients arrive when all forwards are done.
        order = options.schedule if program.ports(Role.LOSS) else "gpipe"
        whole, clusters = self._fused(program, splits(order), show, artifacts)
        clusters = annotate(self._costs(clusters, target, show))(clusters)
        artifacts.program("annotate", clusters)
        if world:
            world.check_agreement(f"{options}\n{clusters}", "the captured program")
        slots = dict(zip(captured.arguments, args, strict=True))
        homes = self._known_homes(program, slots) if world else {}
        wishes = {
            "machine": target,
            "schedule": order,
            "cuts": self._cuts(clusters, homes),
            "placement": self.placed if homes else None,
        }
        with show.phase("planning") as phase:
            plan, history = self._planned(whole, clusters, wishes, world, phase.progress)
            phase.outcome = lambda: f"{order}, {_described(plan, history[-1].program)}"
        mesh = Mesh(len(plan.schedule.ranks), options.replicas)
        devices = self._devices(mesh, world is not None)
        if devices:
            history = (*history, *record(history[-1].program, place(devices))[1:])
        program = history[-1].program
        schedule = verify_schedule(lower(plan.schedule, program))
        predicted = functools.partial(predict, program, schedule, target, self._network)
        artifacts.history(history)
        artifacts.decisions(plan, schedule, predicted)
        mine = [world.rank % mesh.ranks] if world else range(mesh.ranks)
        artifacts.ranks(program, mine)
        bodies = self._bodies(program, world, show)
        pipeline: DistributedPipeline | LocalPipeline
        with show.phase("building") as phase:
            if world:
                limit = options.timeout
                pipeline = DistributedPipeline(program, schedule, device, bodies, timeout=limit)
                self._settle(captured, program, plan.stage_ranks, args, world)
            else:
                pipeline = LocalPipeline(program, schedule, devices, bodies)
            actions = mesh.replicas * sum(map(len, schedule.ranks))
            phase.outcome = lambda: f"{actions} actions on {mesh.size} ranks"
        return Compiled(captured, clusters, plan, program, schedule, pipeline)

    def _fused(
        self, program: Program, split: bool, show: Shown, artifacts: Artifacts
    ) -> tuple[Program, Program]:
        """The clusters, and the same with their backwards split if they shall be."""
        passes = [fuse(boundaries=self.options.split_at)]  # type: ignore[arg-type]
        if split and program.ports(Role.TANGENT):
            passes.append(split_backward())
        with show.phase("fusing") as phase:
            history = record(program, *passes)
            whole, clusters = history[1].program, history[-1].program
            phase.outcome = lambda: f"{whole.units} clusters"
        artifacts.history(history)
        return whole, clusters

    def _planned(
        self,
        whole: Program,
        clusters: Program,
        wishes: Mapping[str, Any],
        world: World | None,
        progress: Progress | None,
    ) -> tuple[Plan, tuple[Recorded, ...]]:
        """The plan of the `clusters` with costs, and the programs on the way to that of the ranks;
        planned again with less memory as long as the account of every byte says that a rank would
        need more than its limit. `whole` are the clusters before their backwards were split,
        `wishes` those for the planner that are not options."""
        options = self.options
        split = any(call.kind == Kind.INPUT_BACKWARD for call in clusters.calls)
        ranks = world.size // options.replicas if world else None
        ranks = len(options.devices) if options.devices else ranks
        by_rank = not options.split_at and wishes["schedule"] != "search"
        limit, worst = options.memory_limit, 0
        refused: ValueError | None = None
        for _ in range(6):
            make = functools.partial(
                make_plan,
                clusters,
                **wishes,
                microbatches=options.microbatches // options.replicas,
                stages=options.stages or (ranks if by_rank else None),
                ranks=ranks,
                memory_limit=limit,
                network=self._network,
                search_seconds=options.search_seconds,
                progress=progress,
            )
            try:
                plan = self._decided(make, world) if world else make()
            except ValueError as error:
                if not worst:
                    raise
                refused = error
                break
            mesh = Mesh(len(plan.schedule.ranks), options.replicas)
            passes = [insert_send_recv(), dp_wrap(mesh)]
            if split and plan.recompute:  # which part repeats what is known of whole backwards
                history = record(whole, partition(plan), split_backward(), *passes)
            else:
                history = record(clusters, partition(plan), *passes)
            if limit is None or options.memory_limit is None:
                return plan, history
            worst = _peak(plan, history[-1].program)
            if worst <= options.memory_limit:
                return plan, history
            log.debug("a plan for %d bytes a rank would need %d", limit, worst)
            limit = int(limit * min(0.97, options.memory_limit / worst))
        raise ValueError(
            f"memory_limit={options.memory_limit}: the best plan found needs {worst} bytes on its "
            "worst rank; use more stages, smaller microbatches or a larger limit"
        ) from refused

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

    def _cuts(
        self, clusters: Program, homes: Mapping[str, frozenset[tuple[int, int]]]
    ) -> tuple[int, ...] | None:
        """Cuts that are given: by where the state is at home already, or by the options."""
        if homes:
            return follow(
                clusters, {name: frozenset(s for s, _ in at) for name, at in homes.items()}
            )
        return split_at(clusters, self.options.split_at) if self.options.split_at else None

    def _settle(
        self,
        captured: Captured,
        program: Program,
        placed: tuple[int, ...],
        args: Sequence[Any],
        world: World,
    ) -> None:
        """Notes which stages hold which state. What is new here must have the same values on
        every rank: else one of them holds stale ones, or was given another batch."""
        slots = dict(zip(captured.arguments, args, strict=True))
        found = holders(program, Role.PARAMETER, Role.BUFFER)
        homes = {
            port.fqn: frozenset((call.unit, call.rank) for call in found.get(port.fqn, ()))
            for port in self._trained(program)
        }
        known = self._known_homes(program, slots)
        fresh = {
            port.fqn: slots[port.name]
            for port in program.inputs
            if port.name in slots
            and (port.fqn not in known or known[port.fqn] != homes.get(port.fqn))
        }
        wrong = world.differing(fresh)
        if wrong:
            raise Refusal(
                f"{wrong[:3]} ({len(wrong)} in all) are not the same on all ranks. Every rank is "
                "given the whole batch, and seeded alike before the model is made; a model that "
                "another compiled step has trained in parts runs with that step's pfeife.compile "
                "or pfeife.backend object"
            )
        for port in self._trained(program):
            self.homes[slots[port.name]] = homes[port.fqn]
        self.placed = self.placed or placed

    @staticmethod
    def _trained(program: Program) -> list[Port]:
        """State that training changes: parameters, and buffers that are updated."""
        updated = {port.fqn for port in program.ports(Role.BUFFER_UPDATE)}
        ports = program.ports(Role.PARAMETER, Role.BUFFER)
        return [p for p in ports if p.role == Role.PARAMETER or p.fqn in updated]

    def _known_homes(
        self, program: Program, slots: Mapping[str | None, Any]
    ) -> dict[str, frozenset[tuple[int, int]]]:
        """Where earlier programs have put this program's state, by canonical names."""
        ports = program.ports(Role.PARAMETER, Role.BUFFER)
        return {p.fqn: self.homes[slots[p.name]] for p in ports if slots[p.name] in self.homes}

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


def _measured(path: str | os.PathLike[str]) -> Network:
    try:
        return plain.load(Network, Path(path))
    except OSError as error:
        raise ValueError(
            f"option network={str(path)!r}: {error.strerror}; `pfeife bench-network` writes one"
        ) from None


def _counted(program: Program) -> str:
    nodes = len(program.module.graph.nodes)
    return f"{len(program.inputs)} inputs, {len(program.outputs)} outputs, {nodes} nodes"


def _described(plan: Plan, program: Program) -> str:
    if log.isEnabledFor(logging.DEBUG):
        log.debug("the plan:\n%s", report.plan_table(plan, program))
    peak = report.size(_peak(plan, program))
    return f"{report.summary(plan, program)}, {peak} at the peak of the worst rank"


def _peak(plan: Plan, program: Program) -> int:
    """Bytes of the rank that needs most."""
    return max(curve.peak for curve in memory_curves(program, lower(plan.schedule, program)))


def backend(**options: Any) -> Backend:
    """A backend for torch.compile or torch.compiler.set_default_backend; see `Options`.

    Raises ValueError for an unknown option or a wrong value.
    """
    return Backend(options_from(options))


def entry(
    module: fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable:
    """What the name "pfeife" in torch.compile means."""
    if mode not in (None, "default"):
        raise ValueError(f"mode={mode!r}: pfeife has options, no modes")
    return backend(**(options or {}))(module, examples)


def compile(step: Callable[..., Any], *, in_dims: Any = 0, **options: Any) -> Callable[..., Any]:
    """torch.compile with this backend, with the batch dimension marked on every call.

    `in_dims` says for the positional arguments where the batch is, as in torch.vmap: a number,
    None for none, or a nested structure of them; keyword arguments have it in front. The
    result's `backend` attribute has what was compiled. Raises ValueError for wrong options.
    """
    ours = backend(**options)
    compiled = torch.compile(step, backend=ours)

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        dims = _torch.leaf_dims(in_dims, args) + _torch.leaf_dims(0, kwargs)
        leaves = pytree.tree_leaves(args) + pytree.tree_leaves(kwargs)
        for leaf, dim in zip(leaves, dims, strict=True):
            if isinstance(leaf, torch.Tensor) and dim is not None and leaf.dim() > 0:
                if not -leaf.dim() <= dim < leaf.dim():
                    raise ValueError(
                        f"in_dims: a tensor of {leaf.dim()} dimensions has no dimension {dim}"
                    )
                torch._dynamo.mark_dynamic(leaf, dim % leaf.dim())
        return compiled(*args, **kwargs)

    run.backend = ours  # type: ignore[attr-defined]
    return run
