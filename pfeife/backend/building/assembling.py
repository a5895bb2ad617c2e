"""The last phase: what runs the ranks of a planned program in this process."""

from collections.abc import Callable

import attrs
import torch

from pfeife.backend.building.task import Task, with_index
from pfeife.backend.settings.option_checks import described
from pfeife.compilers import compile_bodies
from pfeife.data.machine import Mesh
from pfeife.data.schedule import Schedule
from pfeife.frontend.captured import Captured
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.state.remote_parameters import UntrainedState
from pfeife.runtime.failure import CollectiveError
from pfeife.runtime.local.pipeline import LocalPipeline
from pfeife.runtime.protocols import Pipeline


def assemble(
    task: Task, captured: Captured, program: Program, schedule: Schedule
) -> tuple[Pipeline, UntrainedState | None]:
    """What runs the program's ranks in this process, and the state that it borrows from others. On
    ranks the state that they train is theirs from here on."""
    world, options, place = task.world, task.options, task.place
    mesh = Mesh(len(schedule.ranks), options.replicas, members=options.members)
    if world:
        mesh = attrs.evolve(mesh, order=task.builder.mesh(world).order)
    task.artifacts.ranks(program, range(mesh.ranks) if place is None else [place])
    # Before state is given to its ranks, below: where a compiler fails, nothing has changed yet.
    bodies = _bodies(task, program)
    with task.show.phase("building") as phase:
        actions = mesh.replicas * sum(map(len, schedule.ranks))
        phase.outcome = lambda: f"{actions} actions on {mesh.size} ranks"
        if options.runtime is not None:
            return _of_ones_own(task, program, schedule, bodies), None
        if world is None or place is None:
            return LocalPipeline(program, schedule, task.devices(mesh.ranks), bodies), None
        apart, carried = options.apart > 1, captured.carried
        pipeline = DistributedPipeline(
            program,
            schedule,
            task.device_of(program),
            bodies,
            timeout=options.timeout,
            mesh=mesh,
            apart=apart,
        )
        slots, modules = task.slots(captured), task.graph.inputs.modules
        # From here on a parameter is trained by the ranks of its stages, and its values elsewhere
        # go.
        world.ownership.settle(program, slots, mesh, modules, world, carried, apart)
        # State that the step carries along is replaced at each call, so that it is borrowed from
        # nobody.
        names = [None if name in carried else name for name in captured.arguments]
        known = world.ownership.known
        return pipeline, UntrainedState.of(program, names, task.args, place, known)


def _of_ones_own(
    task: Task, program: Program, schedule: Schedule, bodies: dict[str, Callable]
) -> Pipeline:
    """The pipeline of the option `runtime`. Raises ValueError where it says that it lacks
    gradients: nobody would notice that it does."""
    runtime = task.options.runtime
    assert runtime is not None
    pipeline = runtime(program, schedule, bodies)
    lacks = {port.fqn for port in program.ports(Role.GRADIENT)} - pipeline.gradients
    if lacks:
        raise ValueError(
            f"option runtime={described(runtime)}: its pipeline says that it has no gradients of "
            f"{sorted(lacks)}, which the program has"
        )
    return pipeline


def _bodies(task: Task, program: Program) -> dict[str, Callable]:
    """The compiled bodies of a rank, or of all in this process. If one of several processes cannot
    compile its own, all refuse (collective)."""
    world, options = task.world, task.options
    if options.compiler == "aot_eager" and not options.cuda_graphs:
        return {}
    devices = {with_index(torch.device(name)) for name in options.devices or ()}
    if devices - {task.device_of(program)}:
        raise ValueError(
            f"option devices={options.devices}: bodies are compiled and captured as CUDA "
            "graphs for the device of the step's capture, not for others; on several devices "
            "take compiler='aot_eager' without cuda_graphs, or a process a GPU (torchrun)"
        )
    bodies, refusal = {}, ""
    try:
        with task.show.phase("compiling") as phase:
            bodies = compile_bodies(
                program,
                options.compiler,
                rank=task.place,
                cuda_graphs=options.cuda_graphs,
                progress=phase.progress,
            )
    except ValueError as error:
        if world is None:
            raise
        refusal = str(error)
    # Not by an agreement: ranks compile other bodies, so that each has its own reason.
    for rank, text in enumerate(world.from_all_ranks(refusal) if world else ()):
        if text:
            raise CollectiveError(f"rank {rank}: {text}")
    return bodies
