"""Where to cut: by dynamic programming, by module names, or by markers in the model."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
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
from pfeife.sched.cutting.account import (
    all_the_time,
    held_from,
    left_out,
    posted,
    saved_by,
    units_of,
)
from pfeife.sched.cutting.room import NoRoom
from pfeife.sched.cutting.workload import Workload


@attrs.frozen
class Clusters:
    """A workload per cluster and per border.

    `seconds` are of one microbatch, forward and backward; `crossing[c]` are the bytes of
    activations and gradients that a cut before cluster c sends for each microbatch; `blocked` has
    the borders at which a cut would tear a buffer's updates apart.
    """

    seconds: tuple[float, ...]
    crossing: tuple[int, ...]
    blocked: frozenset[int] = frozenset()


def clusters_of(work: Workload) -> Clusters:
    """A workload as `balanced` looks at it: per cluster its seconds and bytes, summed over forward
    and backward, and per border the bytes that a cut there would send."""
    seconds = tuple(sum(work.of(kind, unit) for kind in work.seconds) for unit in range(work.units))
    change = [0] * work.units
    for flow in work.flows:
        ends = [flow.unit, *(unit for unit, _ in flow.readers)]
        change[min(ends)] += flow.bytes
        change[max(ends)] -= flow.bytes
    return Clusters(seconds, (0, *accumulate(change[:-1])), work.blocked)


# What is best for the stages so far by the cluster they end before, and where the last starts.
_Row = dict[int, tuple[float, int]]
_HALVINGS = 6  # of the room that a stage has on a rank with several


def balanced(
    work: Workload,
    stage_ranks: Sequence[int],
    *,
    machine: Machine,
    in_flight: Sequence[int],
    microbatches: int,
    memory_limit: float | None = None,
) -> tuple[int, ...]:
    """The stage of every cluster, contiguous, such that the slowest stage is as fast as can be.

    Dynamic programming over (stages so far, clusters so far), twice: for the slowest stage, then
    for the least sum of squares of the stages' seconds among the cuts that are no slower. A
    stage's seconds are its computation and what the transfers over its borders take of its time
    (see `Machine.overlap`), or the transfer over its first border if that is longer; its bytes are
    what it has all the time and what `in_flight[stage]` microbatches save (see `account`); of the
    `memory_limit` bytes of a rank no stage has much more than its share. Raises ValueError if there
    are more stages than clusters or open borders, NoRoom if none of the cuts fits.
    """
    clusters, stages = clusters_of(work), len(stage_ranks)
    if stages > work.units:
        raise ValueError(
            f"{stages} stages, but the program has only {work.units} clusters to cut between "
            "(if Dynamo broke the step into several graphs, TORCH_LOGS=graph_breaks says where)"
        )
    limit = machine.memory if memory_limit is None else memory_limit
    memory = _Memory(work, stage_ranks, in_flight, microbatches)
    seconds = _stage_seconds(clusters, machine)

    def fastest(room: float) -> tuple[int, ...] | None:
        """The cut, with stages of at most so many bytes."""

        def cost(stage: int, first: int, end: int) -> float:
            if room < math.inf and memory.share(stage, first, end, room) > room:
                return math.inf
            return seconds(first, end)

        slowest = _best(clusters, stages, cost, max)
        if slowest is None:
            return None
        # The slowest stage alone decides the pace, but of the cuts that are as good in that the
        # most even one is less at the mercy of wrong costs.
        most = slowest[0]
        squares = _best(clusters, stages, cost, lambda sums, one: sums + one**2, most)
        return squares[1] if squares else None

    found = _roomy(fastest, memory, limit)
    if found is not None:
        return found
    roomiest = _best(clusters, stages, partial(memory.share, room=math.inf), max)
    if roomiest is None or memory.most(roomiest[1]) > limit:
        raise _refusal(clusters, stages, limit, roomiest and memory.most(roomiest[1]) - limit)
    return roomiest[1]


def _stage_seconds(clusters: Clusters, machine: Machine) -> Callable[[int, int], float]:
    """Seconds of a stage from its first cluster to before `end`."""
    crossing, time = clusters.crossing, [0, *accumulate(clusters.seconds)]

    def seconds(first: int, end: int) -> float:
        inner = (at for at in (first, end) if 0 < at < len(crossing))
        busy = sum(machine.send_seconds(crossing[at]) for at in inner)
        arriving = machine.transfer_seconds(crossing[first]) if first else 0.0
        return max(time[end] - time[first] + busy, arriving)

    return seconds


def _best(
    clusters: Clusters,
    stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    most: float = math.inf,
) -> tuple[float, tuple[int, ...]] | None:
    """The least that `join` makes of the stages' costs, none of which is more than `most` or
    endless, and the cut; `cost` is asked for a stage, its first cluster and the one after its
    last."""
    # rows[s][end]: the clusters before `end` as s stages, the best value and where the last starts.
    #
    #     clusters   0 1 2 3 4 5 6 7           row 3, end 7, from row 2, end 5:
    #     stages     0 0 0|1 1|2 2|            join(value of 0 0 0|1 1, cost of stage 2)
    #
    # An end leaves a cluster for each stage to come.
    count = len(clusters.seconds)
    rows: list[_Row] = [{0: (0.0, 0)}]
    for stage in range(stages):
        row: _Row = {}
        for end in range(stage + 1, count - (stages - 1 - stage) + 1):
            for first, (before, _) in rows[-1].items():
                if first < end and not (first and first in clusters.blocked):
                    found = cost(stage, first, end)
                    if found <= most and found < math.inf:
                        candidate = (join(before, found), first)
                        row[end] = min(row.get(end, candidate), candidate)
        rows.append(row)
    return (rows[-1][count][0], _traced(rows, count)) if count in rows[-1] else None


def _roomy(
    fastest: Callable[[float], tuple[int, ...] | None], memory: "_Memory", limit: float
) -> tuple[int, ...] | None:
    """The fastest cut that fits, by what a stage may have: a rank with one stage gives it all, and
    of several one may have more than its share, which is looked for by halving."""
    low, high, chosen = 0.0, float(limit), None
    tried = fastest(high)
    if tried is None or memory.most(tried) <= limit:
        return tried
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = fastest(middle)
        if tried is not None and memory.most(tried) > limit:
            high = middle
        else:
            low, chosen = middle, tried or chosen
    return chosen


class _Memory:
    """What contiguous stages need, and their ranks."""

    def __init__(
        self,
        work: Workload,
        stage_ranks: Sequence[int],
        in_flight: Sequence[int],
        microbatches: int,
    ):
        self.work, self.stage_ranks, self.in_flight = work, stage_ranks, in_flight
        self.microbatches = microbatches
        self.stages = Counter(stage_ranks)  # of every rank
        self.growing = [held_from(work, first) for first in range(work.units)]
        # By first cluster and length: state, what a microbatch holds, what a rank needs once.
        self.spans: list[list[tuple[int, int, int]]] = [[] for _ in range(work.units)]

    def share(self, stage: int, first: int, end: int, room: float) -> float:
        """What a stage needs, and its part of what all stages of its rank need together; endless
        where that is surely more than `room`."""
        spans, rank = self.spans[first], self.stage_ranks[stage]
        less = left_out(self.work, rank) / self.stages[rank]
        while len(spans) < end - first:
            if spans and spans[-1][0] + less > room:  # state only grows
                return math.inf
            found = next(self.growing[first])
            together = found.temporaries + posted(found, 1, self.microbatches)
            spans.append((found.state, max(found.saved, found.kept), together))
        state, saved, together = spans[end - first - 1]
        return state + self.in_flight[stage] * saved + together / self.stages[rank] + less

    def most(self, stage_of: Sequence[int]) -> int:
        """What the worst rank needs."""
        ranks = all_the_time(self.work, stage_of, self.stage_ranks, self.microbatches)
        for stage, units in enumerate(units_of(stage_of, len(self.stage_ranks))):
            ranks[self.stage_ranks[stage]] += self.in_flight[stage] * saved_by(self.work, units)
        return max(ranks)


def _refusal(clusters: Clusters, stages: int, limit: float, lacks: float | None) -> ValueError:
    """Why there are no cuts: the memory, or the borders that are closed."""
    closed = sorted(clusters.blocked)
    why = f"no cut may part what updates and reads one buffer, so borders {closed} are closed"
    if lacks is None:
        return ValueError(f"no cut into {stages} stages: {why}")
    text = (
        f"no cut into {stages} stages fits {limit} bytes a rank: with the roomiest one the worst "
        f"rank lacks {lacks}; use more stages, smaller microbatches or a larger limit"
    )
    return NoRoom(f"{text}; {why}" if closed else text, lacks)


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
