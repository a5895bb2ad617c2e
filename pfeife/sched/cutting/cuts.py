"""Where to cut by hand: at markers in the model, or at modules by their names."""

from collections.abc import Mapping

from torch import fx

from pfeife.ir.nodes import is_boundary, is_number, source_line
from pfeife.ir.outline import inline
from pfeife.ir.parts import Kind
from pfeife.ir.program import Program
from pfeife.passes.fuse import module_path
from pfeife.sched.cutting.borders import stages_from


def marked(program: Program) -> tuple[int, ...]:
    """The stage of every cluster as `stage_boundary` calls in the model have it; all in stage 0
    where there are none."""
    starts = set()
    for unit in range(1, program.units):
        nodes = program.body(program.call(Kind.FORWARD, unit)).graph.nodes
        if is_boundary(next(node for node in nodes if node.op == "call_function")):
            starts.add(unit)
    return stages_from(starts, program.units)


def split_at(program: Program, points: Mapping[str, str]) -> tuple[int, ...]:
    """The stage of every cluster with a cut at the start or end of each named module.

    `points` has a side, "begin" or "end", by the path of a module ("blocks.4"). `fuse` must have
    been given the same points, so that clusters end there. Raises ValueError for a module that
    computes nothing, and where a cluster goes on across a point.
    """
    unit_of = forward_units(program)
    forward = [node for node in unit_of if not is_number(node)]
    starts = set()
    for path, side in points.items():
        inside = [i for i, node in enumerate(forward) if is_within(module_path(node), path)]
        if not inside:
            raise ValueError(f"split at {path}: no module of that name computes anything")
        position = inside[0] if side == "begin" else inside[-1] + 1
        if 0 < position < len(forward):
            before, after = (unit_of[forward[p]] for p in (position - 1, position))
            if before == after:
                raise ValueError(
                    f"split at {path}: cluster {after} goes on across this point; "
                    f"give fuse the same boundaries ({source_line(forward[position])})"
                )
            starts.add(after)
    return stages_from(starts, program.units)


def forward_units(program: Program) -> dict[fx.Node, int]:
    """The operations of the forwards of clusters, in their order, with their clusters."""
    flat, groups = inline(program)
    nodes = [node for node in flat.module.graph.nodes if node.name in groups]
    calls = {node: groups[node.name] for node in nodes}
    return {node: call.unit for node, call in calls.items() if call.kind == Kind.FORWARD}


def is_within(path: str, module: str) -> bool:
    """Whether a path is that of a module, or of one inside of it."""
    return f"{path}.".startswith(f"{module}.")
