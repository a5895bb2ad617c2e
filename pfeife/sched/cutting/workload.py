"""A fused program in numbers, cluster by cluster: what those who plan it decide by."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import attrs

from pfeife.cost.body import Body, Storage, storage_of
from pfeife.cost.memory import trained_parameters
from pfeife.data.optimizers import Optimizer, optimizer_bytes
from pfeife.ir.messages import call_of, holders
from pfeife.ir.nodes import is_source, node_bytes, returned
from pfeife.ir.parts import Call, Kind, Role
from pfeife.ir.program import Program
from pfeife.lowering.predict import check_costs


@attrs.frozen
class Flow:
    """A value that one cluster's call makes for others: bytes, and who reads it.

    `storage` is the memory that the value is, or looks at: values with the same one keep it once.
    None for a view of an input, which is there in any case.
    """

    bytes: int
    unit: int
    kind: Kind
    readers: tuple[tuple[int, Kind], ...]
    storage: Storage | None


Seconds = dict[Kind, tuple[float, ...]]  # of a microbatch, by kind and cluster


@attrs.frozen(slots=False)
class Workload:
    """A fused program with costs, cluster by cluster.

    `seconds[kind][cluster]` of one microbatch, its gradients being added to those of earlier ones;
    `state` has the bytes of every parameter (its optimizer state included) and buffer, and the
    clusters that hold it; `gradients` the bytes of the gradients that clusters make. `made` and
    `temporaries` are bytes by kind and cluster: of the results of a call that stay when it is
    over (those that a forward saves are counted with the flows), and the most that it needs beside
    these and beside what is saved. `blocked` are the borders at which a cut would tear a
    buffer's updates apart. `duplicated` are the values that flow nowhere, since every stage that
    reads one computes it for itself. `elsewhere` has the seconds on ranks whose machine is not that
    of the program's costs.
    """

    seconds: Seconds
    state: tuple[tuple[int, frozenset[int]], ...]
    gradients: tuple[int, ...]
    flows: tuple[Flow, ...]
    made: dict[Kind, tuple[int, ...]]
    temporaries: dict[Kind, tuple[int, ...]]
    blocked: frozenset[int] = frozenset()
    duplicated: tuple[str, ...] = ()
    elsewhere: Mapping[int, Seconds] = attrs.Factory(dict)

    @property
    def units(self) -> int:
        """How many clusters there are."""
        return len(self.gradients)

    @property
    def splittable(self) -> bool:
        """Whether the costs of input- and weight-backwards are known."""
        return Kind.BACKWARD not in self.seconds

    @cached_property
    def flows_at(self) -> tuple[tuple[int, ...], ...]:
        """By cluster the flows that it makes or reads."""
        ends = ((flow.unit, *(unit for unit, _ in flow.readers)) for flow in self.flows)
        return _by_cluster(self.units, ends)

    @cached_property
    def state_at(self) -> tuple[tuple[int, ...], ...]:
        """By cluster the entries of the state that it holds."""
        return _by_cluster(self.units, (units for _, units in self.state))

    def of(self, kind: Kind, unit: int, rank: int = 0) -> float:
        """Seconds of a kind of call of a cluster, on a rank."""
        seconds = self.elsewhere.get(rank, self.seconds)
        return seconds[kind][unit] if kind in seconds else 0.0


def _by_cluster(units: int, holders: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    indices: list[list[int]] = [[] for _ in range(units)]
    for index, clusters in enumerate(holders):
        for unit in set(clusters):
            indices[unit].append(index)
    return tuple(map(tuple, indices))


def workload_of(
    program: Program,
    duplicated: Sequence[str] = (),
    optimizer: Optimizer | None = None,
    shards: int = 1,
) -> Workload:
    """The numbers of a fused and annotated program; split into input- and weight-backwards if
    the program is. `duplicated` names values as in `Workload`; `optimizer` is as in
    `memory_curves`, of which replicas keep so many `shards`. Raises ValueError where a call has
    no seconds."""
    check_costs(program)
    flows = tuple(_flows(program, set(duplicated)))
    storages = _Storages(program, flows)
    kinds = dict.fromkeys(call.kind for call in program.calls)
    seconds = {kind: [0.0] * program.units for kind in kinds}
    made, temporaries = ({kind: [0] * program.units for kind in kinds} for _ in range(2))
    for call in program.calls:
        kind, unit = call.kind, call.unit
        seconds[kind][unit] += (call.seconds or 0.0) + call.accumulate_seconds
        stays = storages.staying(call)
        made[kind][unit] = 0 if kind == Kind.FORWARD else stays
        peak = Body.of(program.body(call)).peak + call.inside_bytes
        # A body's peak has its results in it, which are counted elsewhere if they stay, and not its
        # arguments, which nobody counts where they are for this call alone.
        beside = peak - stays + storages.passing(call)
        temporaries[kind][unit] = max(beside, 0)
    results = returned(program.module)
    units = {call.node: call.unit for call in program.calls}
    gradients = [0] * program.units
    for port in program.ports(Role.GRADIENT):
        maker = call_of(results[port.name]).name
        if maker in units:
            gradients[units[maker]] += port.bytes
    return Workload(
        _by_kind(seconds),
        tuple(_state(program, optimizer, shards)),
        tuple(gradients),
        flows,
        _by_kind(made),
        _by_kind(temporaries),
        blocked_borders(program),
        tuple(duplicated),
    )


def _by_kind(columns: Mapping[Kind, list]) -> dict[Kind, tuple]:
    return {kind: tuple(column) for kind, column in columns.items()}


def _flows(program: Program, duplicated: set[str]) -> Iterator[Flow]:
    """The values that calls make and others read."""
    calls = {call.node: call for call in program.calls}
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
            storage = storage_of(program, node)
            yield Flow(node_bytes(node), maker.unit, maker.kind, tuple(sorted(readers)), storage)


def _state(
    program: Program, optimizer: Optimizer | None, shards: int
) -> Iterator[tuple[int, frozenset[int]]]:
    """Bytes of parameters with a share of their optimizer state and of buffers, and the clusters
    with them."""
    trained = trained_parameters(program) if optimizer is not None else set()
    state = optimizer_bytes(optimizer) if optimizer is not None else None
    roles = (Role.PARAMETER, Role.BUFFER)
    users = holders(program, *roles)
    for port in program.ports(*roles):
        state_bytes = state(port.shape, port.given_dtype) if state and port.fqn in trained else 0
        copied = port.bytes if port.held else 0
        units = frozenset(call.unit for call in users.get(port.fqn, ()))
        # What is cut each member keeps a share of, as large as its part; what is gathered has its
        # optimizer state on one of them.
        kept = port.part_bytes * (2 if port.keeper is not None and port.split else 1)
        each = shards if port.keeper is None or port.split else shards * program.members
        yield kept + copied + -(-state_bytes // each), units


class _Storages:
    """Which storages stay from action to action, and which are there for one call alone."""

    def __init__(self, program: Program, flows: Sequence[Flow]):
        self.made: dict[str, set[Storage]] = defaultdict(set)  # by call nodes
        self.read: dict[tuple[int, Kind], set[Storage]] = defaultdict(set)
        self.stays: set[Storage] = set()
        for flow in flows:
            if flow.storage is not None:
                for reader in flow.readers:
                    self.read[reader].add(flow.storage)
                if any(_kept_for(flow.kind, kind) for _, kind in flow.readers):
                    self.stays.add(flow.storage)
                    self.made[flow.storage.call].add(flow.storage)
        results = returned(program.module)
        for port in program.ports(Role.GRADIENT):
            storage = storage_of(program, results[port.name])
            if storage is not None:
                self.made[storage.call].add(storage)

    def staying(self, call: Call) -> int:
        """Bytes of what a call makes and leaves: to backwards, to a weight-backward, gradients."""
        return sum(storage.bytes for storage in self.made[call.node])

    def passing(self, call: Call) -> int:
        """Bytes of what a call reads of others and nobody keeps."""
        read = self.read[call.unit, call.kind] - self.stays
        return sum(storage.bytes for storage in read if storage.call != call.node)


def _kept_for(maker: Kind, reader: Kind) -> bool:
    """Whether what one kind of call makes for another is kept from action to action."""
    if maker == Kind.FORWARD:
        return reader != Kind.FORWARD
    return maker == Kind.INPUT_BACKWARD and reader == Kind.WEIGHT_BACKWARD


def blocked_borders(program: Program) -> frozenset[int]:
    """The borders between clusters at which a cut would tear a buffer's updates apart."""
    calls = {call.node: call for call in program.calls}
    updated = {port.fqn for port in program.ports(Role.BUFFER_UPDATE)}
    names = {p.name: p.fqn for p in program.ports(Role.BUFFER) if p.fqn in updated}
    results = returned(program.module)
    made = {p.fqn: results[p.name] for p in program.ports(Role.BUFFER_UPDATE)}
    gradients = program.ports(Role.GRADIENT)  # of parameters that the step changes in place
    blocked: set[int] = set()
    for node in program.module.graph.nodes:
        if node.name in names:
            trained = [call_of(results[p.name]) for p in gradients if p.fqn == names[node.name]]
            involved = [call_of(made[names[node.name]]), *trained, *node.users]
            units = [calls[caller.name].unit for caller in involved if caller.name in calls]
            blocked |= set(range(min(units, default=0) + 1, max(units, default=0) + 1))
    return frozenset(blocked)
