"""Where to cut: by dynamic programming, by module names, or by markers in the model."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise

import attrs
from torch import fx

from pfeife.cost.estimate import node_seconds
from pfeife.data.machine import Machine
from pfeife.ir.boundary import is_boundary
from pfeife.ir.outline import inline
from pfeife.ir.program import (
    Kind,
    Program,
    Role,
    is_source,
    node_bytes,
    source_line,
)
from pfeife.ir.seeding import seeded
from pfeife.sched.cutting.room import NoRoom
from pfeife.sched.cutting.workload import Workload


@attrs.frozen
class Clusters:
    """A workload per cluster and per border.

    `seconds` are of one microbatch, forward and backward; `parameters` and `saved` (per
    microbatch, from forward to backward) are bytes; `crossing[c]` are the bytes of activations
    and gradients that a cut before cluster c sends for each microbatch; `blocked` has the
    borders at which a cut would tear a buffer's updates apart.
    """

    seconds: tuple[float, ...]
    parameters: tuple[int, ...]
    saved: tuple[int, ...]
    crossing: tuple[int, ...]
    blocked: frozenset[int] = frozenset()


def clusters_of(work: Workload) -> Clusters:
    """A workload as `balanced` looks at it: per cluster its seconds and bytes, summed over forward
    and backward, and per border the bytes that a cut there would send."""
    seconds = tuple(sum(work.of(kind, unit) for kind in work.seconds) for unit in range(work.units))
    parameters, saved, change = ([0] * work.units for _ in range(3))
    for size, units in work.parameters:
        for unit in units:
            parameters[unit] += size
    for flow in work.flows:
        if flow.kind == Kind.FORWARD and any(kind != Kind.FORWARD for _, kind in flow.readers):
            saved[flow.unit] += flow.bytes
        ends = [flow.unit, *(unit for unit, _ in flow.readers)]
        change[min(ends)] += flow.bytes
        change[max(ends)] -= flow.bytes
    crossing = (0, *accumulate(change[:-1]))
    return Clusters(seconds, tuple(parameters), tuple(saved), crossing, work.blocked)


# What is best for the stages so far by the cluster they end before, and where the last starts.
_Row = dict[int, tuple[float, int]]


def balanced(
    clusters: Clusters,
    stages: int,
    *,
    machine: Machine,
    in_flight: Sequence[int],
    memory_limit: int | None = None,
    state_factor: float = 0.0,
) -> tuple[int, ...]:
    """The stage of every cluster, contiguous, such that the slowest stage is as fast as can be.

    Dynamic programming over (stages so far, clusters so far), twice: for the slowest stage, then
    for the least sum of squares of the stages' seconds among the cuts that are no slower. A
    stage's seconds are its computation and what the transfers over its borders take of its time
    (see `Machine.overlap`), or the transfer over its first border if that is longer; its bytes are
    parameters, their gradients, optimizer state (`state_factor` times the parameters), and what
    `in_flight[stage]` microbatches save. Raises ValueError if there are more stages than
    clusters, NoRoom if none of the cuts fits `memory_limit` bytes.
    """
    count = len(clusters.seconds)
    if stages > count:
        raise ValueError(
            f"{stages} stages, but the program has only {count} clusters to cut between "
            "(if Dynamo broke the step into several graphs, TORCH_LOGS=graph_breaks says where)"
        )
    limit = machine.memory if memory_limit is None else memory_limit
    crossing = clusters.crossing
    time, size = [0, *accumulate(clusters.seconds)], stage_bytes(clusters, state_factor)

    def stage_seconds(stage: int, first: int, end: int) -> float | None:
        if size(in_flight[stage], first, end) > limit or (first and first in clusters.blocked):
            return None
        busy = sum(machine.send_seconds(crossing[at]) for at in (first, end) if 0 < at < count)
        arriving = machine.transfer_seconds(crossing[first]) if first else 0.0
        return max(time[end] - time[first] + busy, arriving)

    # rows[s][end]: the clusters before `end` as s stages, the best value and where the last starts.
    #
    #     clusters   0 1 2 3 4 5 6 7           row 3, end 7, from row 2, end 5:
    #     stages     0 0 0|1 1|2 2|            join(value of 0 0 0|1 1, seconds of stage 2)
    #
    # An end leaves a cluster for each stage to come. The slowest stage alone decides the pace, but
    # of the cuts that are as good in that the most even one is less at the mercy of wrong costs.
    def best(join: Callable[[float, float], float], most: float) -> list[_Row]:
        rows: list[_Row] = [{0: (0.0, 0)}]
        for stage in range(stages):
            row: _Row = {}
            for end in range(stage + 1, count - (stages - 1 - stage) + 1):
                for first, (before, _) in rows[-1].items():
                    seconds = stage_seconds(stage, first, end) if first < end else None
                    if seconds is not None and seconds <= most:
                        candidate = (join(before, seconds), first)
                        row[end] = min(row.get(end, candidate), candidate)
            rows.append(row)
        return rows

    slowest = best(max, math.inf)[-1].get(count)
    if slowest is None:
        raise NoRoom(_refusal(clusters, stages, limit))
    return _traced(best(lambda squares, seconds: squares + seconds**2, slowest[0]), count)


def stage_bytes(clusters: Clusters, state_factor: float = 0.0) -> Callable[[int, int, int], float]:
    """What a stage needs as `balanced` counts, by the microbatches in flight, its first cluster and
    the one after its last."""
    held, kept = ([0, *accumulate(values)] for values in (clusters.parameters, clusters.saved))

    def size(in_flight: int, first: int, end: int) -> float:
        parameters = (2 + state_factor) * (held[end] - held[first])
        return parameters + in_flight * (kept[end] - kept[first])

    return size


def _refusal(clusters: Clusters, stages: int, limit: int) -> str:
    """Why there are no cuts: the memory, or the borders that are closed."""
    sizes = zip(clusters.parameters, clusters.saved, strict=True)
    smallest = max(2 * parameters + saved for parameters, saved in sizes)
    text = (
        f"no cut into {stages} stages fits {limit} bytes a rank (the largest cluster alone takes "
        f"{smallest}); use more stages, smaller microbatches or a larger limit"
    )
    if clusters.blocked:
        closed = sorted(clusters.blocked)
        text += (
            f"; no cut may part what updates and reads one buffer, so borders {closed} are closed"
        )
    return text


def _traced(rows: list[_Row], end: int) -> tuple[int, ...]:
    stage_of: list[int] = []
    for stage in range(len(rows) - 1, 0, -1):
        first = rows[stage][end][1]
        stage_of = [stage - 1] * (end - first) + stage_of
        end = first
    return tuple(stage_of)


def marked(program: Program) -> tuple[int, ...]:
    """The stage of every cluster as `stage_boundary` calls in the model have it; all in stage 0
    where there are none."""
    starts = set()
    for unit in range(1, program.units):
        nodes = program.body(program.call(Kind.FORWARD, unit)).graph.nodes
        if is_boundary(next(node for node in nodes if node.op == "call_function")):
            starts.add(unit)
    return _stages(starts, program.units)


def split_at(program: Program, points: Mapping[str, str]) -> tuple[int, ...]:
    """The stage of every cluster with a cut at the start or end of each named module.

    `points` has a side, "begin" or "end", by the path of a module ("blocks.4"). `fuse` must have
    been given the same points, so that clusters end there. Raises ValueError for a module that
    computes nothing, and where a cluster goes on across a point.
    """
    flat, groups = inline(program)
    forward = [
        n
        for n in flat.module.graph.nodes
        if n.name in groups and groups[n.name].kind == Kind.FORWARD
    ]
    starts = set()
    for path, side in points.items():
        inside = [i for i, node in enumerate(forward) if _inside(node, path)]
        if not inside:
            raise ValueError(f"split at {path}: no module of that name computes anything")
        position = inside[0] if side == "begin" else inside[-1] + 1
        if 0 < position < len(forward):
            before, after = (groups[forward[p].name].unit for p in (position - 1, position))
            if before == after:
                raise ValueError(
                    f"split at {path}: cluster {after} goes on across this point; "
                    f"give fuse the same boundaries ({source_line(forward[position])})"
                )
            starts.add(after)
    return _stages(starts, program.units)


def _stages(starts: set[int], units: int) -> tuple[int, ...]:
    return tuple(accumulate(int(unit in starts) for unit in range(units)))


def _inside(node: fx.Node, path: str) -> bool:
    here = str(node.meta.get("module_path") or "")
    return here == path or here.startswith(f"{path}.")


def cheap_to_recompute(
    program: Program, machine: Machine, owned: Collection[str] = ()
) -> tuple[str, ...]:
    """Forward values that a stage computes faster for itself than it would receive them.

    Masks, rotary tables and their like: they depend on inputs only (no parameters, no updated
    buffers, no random numbers, nothing of what is `owned` on some ranks alone), and their whole
    computation is estimated to take less than a transfer. Names are those of the inlined program.
    """
    flat, groups = inline(program)
    updated = {*owned, *(port.fqn for port in flat.ports(Role.BUFFER_UPDATE))}
    plain = {
        port.name
        for port in flat.ports(Role.BUFFER, Role.CONSTANT, Role.BATCH)
        if port.fqn not in updated
    }
    cones: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in flat.module.graph.nodes:
        if node.op == "get_attr" or node.name in plain:
            cones[node] = frozenset()
        elif (
            not is_source(node)
            and node.op == "call_function"
            and node.target is not seeded
            and groups[node.name].kind == Kind.FORWARD
            and all(source in cones for source in node.all_input_nodes)
        ):
            cones[node] = frozenset({node}).union(*(cones[s] for s in node.all_input_nodes))
    cheap: set[str] = set()
    known = {node: node_seconds(node, machine) for node in cones}
    for node, cone in cones.items():
        seconds = math.fsum(known[n] for n in cone)
        if cone and seconds < machine.transfer_seconds(node_bytes(node)):
            cheap |= {n.name for n in cone}
    order = [node.name for node in flat.module.graph.nodes]
    return tuple(name for name in order if name in cheap)


def borders(stage_of_cluster: Sequence[int]) -> tuple[int, ...]:
    """The clusters at which a new stage starts, the first left out."""
    return tuple(i + 1 for i, (a, b) in enumerate(pairwise(stage_of_cluster)) if a != b)
