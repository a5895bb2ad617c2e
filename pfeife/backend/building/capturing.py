"""The first phase: the program of a microbatch, checked on the first call."""

from collections.abc import Sequence
from functools import partial

import attrs

from pfeife import _torch
from pfeife.backend.building.own_passes import check_unchanged
from pfeife.backend.building.sharding import sharding
from pfeife.backend.building.sync_batch_norm import check_synced
from pfeife.backend.building.task import Task
from pfeife.frontend.captured import Captured
from pfeife.frontend.checks.check_capture import check_first_call
from pfeife.frontend.checks.check_trace import check_traced
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.passes import accumulate_in, defer_batch_norm, master_weights, record
from pfeife.passes.compose import History, Pass
from pfeife.runtime.distributed.world.together import together


def capture(task: Task) -> Sequence[tuple[Captured, History]]:
    """The program of a microbatch, and how passes made it, in each way to cut it over members; if
    a rank refuses the step, all do (collective)."""

    def ways() -> list[Sequence[Pass]]:
        # Ours first, so that the caller's passes see the program that is going to run.
        first, last = _passes(task, captured), task.passes.get("flat", ())
        return [(*first, *way, *last) for way in sharding(task, captured)]

    def run(passes: Sequence[Pass]) -> History:
        return record(captured.program, *passes, start="capture")

    with task.show.phase("capturing") as phase:
        captured = together(lambda: _checked(task), task.world, "the captured program")
        # Also of what is refused later: it is then that somebody reads it.
        task.artifacts.program("capture", captured.program)
        task.artifacts.premises(captured.program.premises)
        what = "what passes make of the captured program"
        histories = [
            # Apart: members decide together, which they cannot where a pass has failed on one.
            together(partial(run, passes), task.world, what)
            for passes in together(ways, task.world, what)
        ]
        phase.outcome = lambda: _counted(histories[-1][-1].program)
    for way in histories:
        task.artifacts.history(way)
    return [(attrs.evolve(captured, program=way[-1].program), way) for way in histories]


@_torch.one_at_a_time
def _checked(task: Task) -> Captured:
    """The program as captured. Raises ValueError where it is not what the step computes, as far as
    its first call tells."""
    options, graph, args = task.options, task.graph, task.args
    # Without torchrun replicas are of this process, and their norms join as those of ranks would.
    check_synced(graph.inputs.modules, task.world.size if task.world else options.replicas)
    captured = graph.capture(args, options)
    checks = options.check and task.has_values
    if options.microbatches > 1:
        # What the first call cannot show, as it is not cut here or there are no values to run it
        # with, has to be known without.
        seen = checks and options.cut > 1
        if not seen or not check_first_call(
            graph.step,
            captured,
            args,
            graph.sure,
            graph.doubled,
            decided=options.loss_reduction != "auto",
            counting=graph.counting,
        ):
            graph.check_unseen(captured)
    if checks and captured.door == "trace":
        check_traced(graph.step, captured, args)
    return captured


def _passes(task: Task, captured: Captured) -> list[Pass]:
    """What makes sums of gradients, and the caller's own parameters, as wide as was asked for, has
    batch norms track the whole batch."""
    wide, narrow = task.options.accumulate, task.options.param_dtype
    passes = [] if wide is None else [accumulate_in(wide)]
    if task.options.deferred_batch_norm:
        passes.append(defer_batch_norm())
    if narrow is not None:
        slots, ports = task.slots(captured), captured.program.ports(Role.PARAMETER)
        for dtype in sorted({slots[port.name].dtype for port in ports} - {narrow}, key=str):
            masters = {port.name for port in ports if slots[port.name].dtype == dtype}
            passes.append(master_weights(dtype, masters))
    return passes


def check_own_passes(task: Task, captured: Captured, history: History) -> None:
    """Raises ValueError if one of the caller's own passes has changed what is computed; if a rank
    finds that, all do (collective)."""
    own = {id(each) for passes in task.passes.values() for each in passes}
    passed = [step for step in history if id(step.made_by) in own]
    check = task.options.check
    within = None if isinstance(check, bool) else check
    if passed:
        together(
            lambda: check_unchanged(passed, captured, task.args, within),
            task.world,
            "what the passes compute",
        )


def _counted(program: Program) -> str:
    nodes = len(program.module.graph.nodes)
    return f"{len(program.inputs)} inputs, {len(program.outputs)} outputs, {nodes} nodes"
