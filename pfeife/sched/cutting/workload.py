"""A fused program in numbers, and the scheduling problem that cuts and placements make of it."""

from collections.abc import Mapping, Sequence

import attrs

from pfeife.cost.body import Body
from pfeife.data.machine import Machine, Network
from pfeife.data.plan import RecomputeOption
from pfeife.ir.program import (
    Call,
    Kind,
    Program,
    Role,
    call_of,
    holders,
    is_source,
    node_bytes,
    returned,
)
from pfeife.lowering.envelope import travel
from pfeife.lowering.predict import check_costs
from pfeife.lowering.problem import Edge, Problem, StageCosts

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_BACKWARD, Kind.WEIGHT_BACKWARD)


@attrs.frozen
class Flow:
    """A value that one cluster's call makes for others: bytes, and who reads it."""

    bytes: int
    unit: int
    kind: Kind
    readers: tuple[tuple[int, Kind], ...]


@attrs.frozen
class Workload:
    """A fused program with costs, cluster by cluster: what all decide by who plan it.

    `seconds[kind][cluster]` of one microbatch, its gradients being added to those of earlier ones;
    `parameters` has bytes and clusters of every parameter; `temporaries` the most bytes that a
    body of the cluster needs while it runs; `blocked` the borders at which a cut would tear a
    buffer's updates apart. `recompute` says by cluster what its backward does again; `relieved`
    how many bytes of a microbatch that saves.
    """

    seconds: dict[Kind, tuple[float, ...]]
    parameters: tuple[tuple[int, frozenset[int]], ...]
    flows: tuple[Flow, ...]
    temporaries: tuple[int, ...]
    blocked: frozenset[int] = frozenset()
    recompute: dict[int, RecomputeOption] = attrs.Factory(dict)
    relieved: dict[int, int] = attrs.Factory(dict)

    @property
    def units(self) -> int:
        return len(self.temporaries)

    @property
    def splittable(self) -> bool:
        """Whether the costs of input- and weight-backwards are known."""
        return Kind.BACKWARD not in self.seconds

    def of(self, kind: Kind, unit: int) -> float:
        return self.seconds[kind][unit] if kind in self.seconds else 0.0


def workload_of(program: Program, duplicated: Sequence[str] = ()) -> Workload:
    """The numbers of a fused and annotated program; split into input- and weight-backwards if
    the program is. Values named in `duplicated` flow nowhere. Raises ValueError where a call
    has no seconds."""
    check_costs(program)
    calls = {call.node: call for call in program.calls}
    seconds: dict[Kind, list[float]] = {}
    temporaries = [0] * program.units
    for call in program.calls:
        per_unit = seconds.setdefault(call.kind, [0.0] * program.units)
        per_unit[call.unit] += (call.seconds or 0.0) + call.accumulate_seconds
        peak = Body.of(program.body(call)).peak
        temporaries[call.unit] = max(temporaries[call.unit], peak)
    sizes = {port.fqn: port.bytes for port in program.ports(Role.PARAMETER)}
    parameters = tuple(
        (sizes[name], frozenset(call.unit for call in users))
        for name, users in holders(program).items()
    )
    return Workload(
        {kind: tuple(values) for kind, values in seconds.items()},
        parameters,
        tuple(_flows(program, calls, set(duplicated))),
        tuple(temporaries),
        blocked_borders(program),
    )


def _flows(program: Program, calls: Mapping[str, Call], duplicated: set[str]):
    """The values that calls make and others read; in front of them the storages are not told
    apart, so views of one value count each."""
    for node in program.module.graph.nodes:
        if is_source(node) or node.op == "call_module" or node.name in duplicated:
            continue
        maker = calls.get(call_of(node).name)
        readers = {
            (calls[user.name].unit, calls[user.name].kind)
            for user in node.users
            if user.name in calls
        }
        if maker is not None and readers:
            yield Flow(node_bytes(node), maker.unit, maker.kind, tuple(sorted(readers)))


def blocked_borders(program: Program) -> frozenset[int]:
    """The borders between clusters at which a cut would tear a buffer's updates apart."""
    calls = {call.node: call for call in program.calls}
    updated = {port.fqn for port in program.ports(Role.BUFFER_UPDATE)}
    names = {p.name: p.fqn for p in program.ports(Role.BUFFER) if p.fqn in updated}
    results = returned(program.module)
    made = {p.fqn: results[p.name] for p in program.ports(Role.BUFFER_UPDATE)}
    blocked: set[int] = set()
    for node in program.module.graph.nodes:
        if node.name in names:
            involved = [call_of(made[names[node.name]]), *node.users]
            units = [calls[one.name].unit for one in involved if one.name in calls]
            blocked |= set(range(min(units, default=0) + 1, max(units, default=0) + 1))
    return frozenset(blocked)


def stage_problem(
    work: Workload,
    stage_of: Sequence[int],
    stage_ranks: Sequence[int],
    microbatches: int,
    *,
    machine: Machine,
    network: Network | None = None,
    memory_limit: int | None = None,
    state_factor: float = 0.0,
    ahead: int = 2,
) -> Problem:
    """The problem of scheduling given stages on given ranks.

    A rank's memory for activations is `memory_limit` without its parameters, their gradients
    and optimizer state (`state_factor` times the parameters), the temporaries of its largest
    body, and the buffers of `ahead` messages on each channel.
    """
    return _Builder(work, stage_of, stage_ranks, machine, network).problem(
        microbatches, memory_limit, state_factor, ahead
    )


class _Builder:
    def __init__(
        self,
        work: Workload,
        stage_of: Sequence[int],
        stage_ranks: Sequence[int],
        machine: Machine,
        network: Network | None,
    ):
        self.work, self.stage_of, self.stage_ranks = work, stage_of, tuple(stage_ranks)
        self.machine, self.network = machine, network
        count = len(self.stage_ranks)
        self.saved, self.kept = [0] * count, [0] * count
        self.sent: dict[tuple[int, int, bool], list[int]] = {}  # bytes of a message's values
        for flow in work.flows:
            self._keep(flow)
            self._send(flow)

    def _keep(self, flow: Flow) -> None:
        """What a stage holds for its backwards."""
        late: dict[int, set[Kind]] = {}
        for unit, kind in flow.readers:
            if kind in _BACKWARDS:
                late.setdefault(self.stage_of[unit], set()).add(kind)
        for stage, kinds in late.items():
            for_weights = Kind.WEIGHT_BACKWARD in kinds
            if flow.kind == Kind.FORWARD:
                self.saved[stage] += flow.bytes
                self.kept[stage] += flow.bytes if for_weights else 0
            elif for_weights:
                self.kept[stage] += flow.bytes

    def _send(self, flow: Flow) -> None:
        """To every other rank once, for the first stage there that reads it."""
        # The first to read a value is the lowest stage, of a gradient the highest; an edge is named
        # by its forward direction in both cases.
        maker = self.stage_of[flow.unit]
        forward = flow.kind == Kind.FORWARD
        first: dict[int, int] = {}
        for unit, kind in flow.readers:
            stage = self.stage_of[unit]
            if stage != maker and (kind == Kind.FORWARD) == forward:
                pick = min if forward else max
                rank = self.stage_ranks[stage]
                first[rank] = pick(first.get(rank, stage), stage)
        for stage in first.values():
            key = (maker, stage, True) if forward else (stage, maker, False)
            self.sent.setdefault(key, []).append(flow.bytes)

    def _transfer(self, source: int, destination: int, forward: bool) -> float:
        sizes = self.sent.get((source, destination, forward))
        ends = (self.stage_ranks[source], self.stage_ranks[destination])
        if not sizes or ends[0] == ends[1]:
            return 0.0
        link = self.network.link(*(ends if forward else ends[::-1])) if self.network else None
        return travel(sizes, link or self.machine).arriving

    def problem(
        self, microbatches: int, limit: int | None, state_factor: float, ahead: int
    ) -> Problem:
        pairs = sorted({(source, destination) for source, destination, _ in self.sent})
        edges = tuple(
            Edge(a, b, self._transfer(a, b, True), self._transfer(a, b, False)) for a, b in pairs
        )
        stages = tuple(self._costs(stage) for stage in range(len(self.stage_ranks)))
        ranks = 1 + max(self.stage_ranks)
        memory = None
        if limit is not None:
            taken = [self._taken(rank, state_factor, ahead) for rank in range(ranks)]
            memory = tuple(float(max(limit - one, 0)) for one in taken)
        return Problem(stages, self.stage_ranks, microbatches, edges, memory)

    def _costs(self, stage: int) -> StageCosts:
        def total(kind: Kind) -> float:
            values = self.work.seconds.get(kind, ())
            return sum(v for unit, v in enumerate(values) if self.stage_of[unit] == stage)

        again = sum(
            option.extra_seconds
            for unit, option in self.work.recompute.items()
            if self.stage_of[unit] == stage
        )
        less = sum(
            size for unit, size in self.work.relieved.items() if self.stage_of[unit] == stage
        )
        kept = self.kept[stage]
        saved = max(self.saved[stage], kept)
        return StageCosts(
            total(Kind.FORWARD),
            total(Kind.BACKWARD) + total(Kind.INPUT_BACKWARD) + again,
            total(Kind.WEIGHT_BACKWARD),
            float(max(saved - less, 0)),
            float(min(kept, max(saved - less, 0))),
            self.work.splittable,
        )

    def _taken(self, rank: int, state_factor: float, ahead: int) -> int:
        """Bytes of a rank that are not activations."""
        mine = {unit for unit, stage in enumerate(self.stage_of) if self.stage_ranks[stage] == rank}
        held = sum(size for size, units in self.work.parameters if units & mine)
        temporaries = self._temporaries(rank)
        arriving = sum(
            sum(sizes)
            for (source, destination, forward), sizes in self.sent.items()
            if self.stage_ranks[destination if forward else source] == rank
            and self.stage_ranks[source] != self.stage_ranks[destination]
        )
        return int(held * (2 + state_factor)) + temporaries + ahead * arriving

    def _temporaries(self, rank: int) -> int:
        """Of the largest cluster: a stage's body frees what its clusters no longer need."""
        return max(
            (
                size
                for unit, size in enumerate(self.work.temporaries)
                if self.stage_ranks[self.stage_of[unit]] == rank
            ),
            default=0,
        )
