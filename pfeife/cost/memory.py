"""The account of bytes: what a stage keeps, and what a rank holds through a schedule."""

import inspect
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from pfeife.clocks import released
from pfeife.outline import storage_owner
from pfeife.plan import RECEIVES, SENDS, Action, Do, MemoryCurve, MemoryPoint, Schedule
from pfeife.program import (
    Call,
    Kind,
    Message,
    Program,
    Role,
    call_of,
    find_node,
    holders,
    node_bytes,
    receive,
    returned,
)
from pfeife.wiring import Wiring, summed_in_place


@attrs.frozen
class StageMemory:
    """Bytes of one stage: its parameters, what one microbatch keeps from its forward to its
    backward (values that look at one another's storage are counted once), and the most that one
    of its bodies needs beside its arguments while it runs, results included."""

    parameters: int
    saved: int
    temporaries: int


def stage_memory(program: Program) -> tuple[StageMemory, ...]:
    """The account of every stage of a partitioned program."""
    sizes = {port.fqn: port.bytes for port in program.ports(Role.PARAMETER)}
    parameters, saved, most = ([0] * program.units for _ in range(3))
    for name, users in holders(program).items():
        for unit in {call.unit for call in users}:
            parameters[unit] += sizes[name]
    bodies = {call.node: Body.of(program.body(call)) for call in program.calls}
    for call in program.calls:
        most[call.unit] = max(most[call.unit], bodies[call.node].peak)
    for unit, storages in enumerate(kept_storages(program)):
        saved[unit] = sum(storage.bytes for storage in storages)
    found = zip(parameters, saved, most, strict=True)
    return tuple(StageMemory(*one) for one in found)


@attrs.frozen
class Storage:
    """Memory that a call allocates in one microbatch, by the node of the call's body, or of the
    program if the call's rank receives it."""

    call: str
    node: str
    bytes: int


def storage_of(program: Program, value: fx.Node) -> Storage | None:
    """Whose storage a value of a graph of calls looks at; None for an input's."""
    if value.op != "call_function":
        return None
    maker = value.all_input_nodes[0]
    if maker.target is receive:
        return Storage(maker.name, value.name, node_bytes(value))
    body = program.module.get_submodule(str(maker.target))
    assert isinstance(body, fx.GraphModule)
    return storage_in(program, maker, body, returned(body)[value.args[1]])


def storage_in(
    program: Program, call: fx.Node, body: fx.GraphModule, node: fx.Node
) -> Storage | None:
    """Whose storage a node of a call's body looks at; None for an input's, or no tensor."""
    owner = storage_owner(node)
    if owner.op == "call_function":
        size = node_bytes(owner)
        return Storage(call.name, owner.name, size) if isinstance(_value(owner), Tensor) else None
    if owner.op != "placeholder":
        return None
    placeholders = [one for one in body.graph.nodes if one.op == "placeholder"]
    return storage_of(program, call.all_input_nodes[placeholders.index(owner)])


def kept_storages(program: Program) -> tuple[frozenset[Storage], ...]:
    """For every stage what forwards made and its backward reads."""
    calls = {call.node: call for call in program.calls}
    kept: list[set[Storage]] = [set() for _ in range(program.units)]
    for value in program.module.graph.nodes:
        maker = calls.get(call_of(value).name) if value.op == "call_function" else None
        if maker is None or maker.kind != Kind.FORWARD:
            continue
        readers = [calls[user.name] for user in value.users if user.name in calls]
        units = {reader.unit for reader in readers if reader.kind != Kind.FORWARD}
        storage = storage_of(program, value) if units else None
        for unit in units if storage else ():
            assert storage is not None
            kept[unit].add(storage)
    return tuple(frozenset(one) for one in kept)


@attrs.frozen(eq=False)
class Body:
    """What a body allocates: bytes by the node that made a storage, the maker of every result's
    storage (an argument's node is not among `sizes`), and the peak while it runs, arguments not
    counted.

    A value is freed after the last node that reads it or a view of it, as fx's code does. Every
    storage is rounded up to a multiple of `rounding` bytes.
    """

    sizes: dict[fx.Node, int]
    results: tuple[fx.Node, ...]
    peak: int

    @staticmethod
    def of(body: fx.GraphModule, rounding: int = 1) -> "Body":
        nodes = [node for node in body.graph.nodes if node.op == "call_function"]
        owners = {node: storage_owner(node) for node in nodes}
        parts: dict[fx.Node, list[fx.Node]] = {}  # of an operation with several results
        for node in nodes:
            source = node.all_input_nodes[0] if node.all_input_nodes else None
            if owners[node] is node and isinstance(_value(node), torch.Tensor) and source in parts:
                parts[source].append(node)
            elif owners[node] is node and not isinstance(_value(node), torch.Tensor):
                parts[node] = []
        part_of = {part: whole for whole, group in parts.items() for part in group}
        ends: dict[fx.Node, int] = {}
        for index, node in enumerate(nodes):
            for one in (node, *node.all_input_nodes):
                if one in owners:
                    ends[owners[one]] = index
                for part in parts.get(one, ()):  # the tuple holds all its parts
                    ends[part] = max(ends.get(part, 0), index)
        results = returned(body)
        kept = [storage_owner(node) for node in results]
        ends |= {owner: len(nodes) for owner in kept}
        sizes = {n: _rounded(node_bytes(n), rounding) for n in nodes if owners[n] is n}
        sizes |= {node: _untaken(node, group, rounding) for node, group in parts.items()}
        born: dict[fx.Node, list[fx.Node]] = {}
        for node in sizes:
            born.setdefault(part_of.get(node, node), []).append(node)
        dying: dict[int, int] = Counter()
        for node, size in sizes.items():
            dying[ends[node]] += size
        live = peak = 0
        for index, node in enumerate(nodes):
            live += sum(sizes[one] for one in born.get(node, ()))
            peak = max(peak, live)
            live -= dying[index]
        return Body(sizes, tuple(kept), peak)


def _untaken(node: fx.Node, parts: Iterable[fx.Node], rounding: int) -> int:
    """Bytes of the results of an operation that are made although nothing asks for them."""
    values, taken = _value(node), {part.args[1] for part in parts}
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    mask: Any = given.get("output_mask")  # some fake kernels return what it says is not wanted
    return sum(
        _rounded(_bytes(value), rounding)
        for index, value in enumerate(values if isinstance(values, tuple | list) else ())
        if index not in taken and isinstance(value, torch.Tensor) and (mask is None or mask[index])
    )


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def memory_curves(
    program: Program,
    schedule: Schedule,
    *,
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None = None,
    ahead: int = 2,
    rounding: int = 1,
) -> tuple[MemoryCurve, ...]:
    """For every rank the bytes of a step of a lowered schedule, each rank a process.

    What the runtime does is followed action by action: values are dropped after their last use,
    `ahead` messages of every channel have their buffers before they arrive, what is sent is
    kept until it has surely arrived (see `released`), gradients are added in place where that is
    possible. `optimizer` is
    the real one or its class (see `optimizer_bytes`); every allocation is rounded up to a
    multiple of `rounding` bytes (512 for torch's CUDA allocator). What an operation needs inside
    itself is not known.
    """
    wiring = Wiring(program)
    bodies = {call.node: Body.of(program.body(call), rounding) for call in program.calls}
    known = released(schedule)
    return tuple(
        _Rank(wiring, bodies, rank, actions, known[rank], ahead, rounding).curve(
            schedule, optimizer
        )
        for rank, actions in enumerate(schedule.ranks)
    )


class _Rank:
    """The storages that one rank holds, by number, each with how often it is held."""

    def __init__(
        self,
        wiring: Wiring,
        bodies: Mapping[str, Body],
        rank: int,
        actions: tuple[Action, ...],
        known: Mapping[int, Mapping[int, int]],
        ahead: int,
        rounding: int,
    ):
        self.wiring, self.bodies, self.program = wiring, bodies, wiring.program
        self.rank, self.actions, self.ahead, self.rounding = rank, actions, ahead, rounding
        self.sizes: dict[int, int] = {}
        self.words: dict[int, str] = {}
        self.holds: Counter[int] = Counter()
        self.fresh = count()
        self.live = self.peak = self.highest = 0
        self.at_peak: dict[str, int] = {}
        self.values: dict[tuple[int | None, str], int] = {}
        self.sums: dict[str, int] = {}
        self.released = known
        self.leaving: dict[int, deque[list[int]]] = {}
        self.posted: dict[int, deque[list[int]]] = {}
        self.announced: dict[int, deque[Message]] = {}
        results = returned(self.program.module)
        self.ports: dict[str, list] = {}
        for port in self.program.outputs:
            self.ports.setdefault(results[port.name].name, []).append(port)

    def curve(self, schedule: Schedule, optimizer: Any) -> MemoryCurve:
        for action in self.actions:
            if action.do in RECEIVES:
                message = self.wiring.message(action)
                self.announced.setdefault(message.source, deque()).append(message)
        for source in self.announced:
            self._post(source)
        points = []
        last = self.wiring.last_uses(self.actions)
        for index, (action, drops) in enumerate(zip(self.actions, last, strict=True)):
            self.peak = self.live
            self._note(0)
            self._run(action)
            for name in drops:
                storage = self.values.pop((action.microbatch, name), None)
                if storage is not None:
                    self._drop(storage)
            for destination, many in self.released.get(index, {}).items():
                for _ in range(many):
                    for storage in self.leaving[destination].popleft():
                        self._drop(storage)
            points.append(MemoryPoint(action, self.peak, self.live))
        return MemoryCurve(self.rank, self._held(schedule, optimizer), tuple(points), self.at_peak)

    def _held(self, schedule: Schedule, optimizer: Any) -> dict[str, int]:
        found = {}
        for role, word in ((Role.PARAMETER, "parameters"), (Role.BUFFER, "buffers")):
            homes = holders(self.program, role)
            mine = [
                port
                for port in self.program.ports(role)
                if any(call.rank == self.rank for call in homes.get(port.fqn, ()))
            ]
            found[word] = sum(self._rounded(port.bytes) for port in mine)
            if role == Role.PARAMETER and optimizer is not None:
                state = optimizer_bytes(optimizer)
                found["optimizer"] = sum(state(port.shape, port.dtype) for port in mine)
        batch = sum(port.bytes for port in self.program.ports(Role.BATCH))
        return {**found, "batch": batch * schedule.microbatches}

    def _run(self, action: Action) -> None:
        if action.do in SENDS:
            self._send(action)
        elif action.do in RECEIVES:
            self._receive(action)
        elif action.do == Do.REDUCE_GRAD:
            for reduction in self.program.reductions:
                if reduction.stages[0] == action.stage and self.rank in reduction.ranks:
                    sizes = {p.fqn: p.bytes for p in self.program.ports(Role.GRADIENT)}
                    self._hold(self._allocate(sizes[reduction.name], "gradients"))
        else:
            for call in self.wiring.calls(action):
                self._compute(call, action.microbatch)

    def _compute(self, call: Call, microbatch: int | None) -> None:
        body = self.bodies[call.node]
        self._note(body.peak, "temporaries")
        word = "saved" if call.kind == Kind.FORWARD else "passed back"
        storages: dict[fx.Node, int] = {}
        placeholders = [n for n in self.program.body(call).graph.nodes if n.op == "placeholder"]
        for node, name in zip(placeholders, self.wiring.arguments(call), strict=True):
            if (microbatch, name) in self.values:
                storages[node] = self.values[microbatch, name]
        made = []
        for name, index in self.wiring.results(call):
            maker = body.results[index]
            if maker in body.sizes and maker not in storages:
                storages[maker] = self._allocate(body.sizes[maker], word, note=False)
            if maker in storages:
                self.values[microbatch, name] = self._hold(storages[maker])
                made.append((name, storages[maker]))
        summed = summed_in_place(self.program, call)
        for name, storage in made:
            for port in self.ports.get(name, ()):
                if port.role == Role.LOSS:
                    self._hold(self._allocate(port.bytes, "outputs"))
                elif port.role != Role.GRADIENT:
                    self._hold(storage, "outputs")
                elif port.name not in self.sums:
                    self.sums[port.name] = self._hold(storage, "gradients")
                elif port.name not in summed:
                    total = self._hold(self._allocate(port.bytes, "gradients"))
                    self._drop(self.sums[port.name])
                    self.sums[port.name] = total

    def _send(self, action: Action) -> None:
        message = self.wiring.message(action)
        leaving: list[int] = []
        for name in message.values:
            value = find_node(self.program.module, name).meta["val"]
            if value.stride() == torch.empty_like(value, device="meta").stride():
                found = self.values.get((action.microbatch, name))
                leaving += [] if found is None else [self._hold(found)]
            else:  # sent as a dense copy
                leaving.append(self._hold(self._allocate(_bytes(value), "leaving")))

        self.leaving.setdefault(message.destination, deque()).append(leaving)

    def _receive(self, action: Action) -> None:
        message = self.wiring.message(action)
        for name, storage in zip(
            message.copies, self.posted[message.source].popleft(), strict=True
        ):
            self.values[action.microbatch, name] = storage
        self._post(message.source)

    def _post(self, source: int) -> None:
        posted, announced = self.posted.setdefault(source, deque()), self.announced[source]
        while announced and len(posted) < self.ahead:
            nodes = [find_node(self.program.module, n) for n in announced.popleft().values]
            posted.append(
                [self._hold(self._allocate(_bytes(n.meta["val"]), "received")) for n in nodes]
            )

    def _rounded(self, size: int) -> int:
        return _rounded(size, self.rounding)

    def _allocate(self, size: int, word: str, note: bool = True) -> int:
        storage = next(self.fresh)
        self.sizes[storage], self.words[storage] = self._rounded(size), word
        self.live += self.sizes[storage]
        if note:
            self._note(0)
        return storage

    def _hold(self, storage: int, word: str | None = None) -> int:
        self.holds[storage] += 1
        self.words[storage] = word or self.words[storage]
        return storage

    def _drop(self, storage: int) -> None:
        self.holds[storage] -= 1
        if not self.holds[storage]:
            self.live -= self.sizes.pop(storage)

    def _note(self, more: int, word: str = "") -> None:
        """Takes down a peak: what is live and `more` bytes beside it."""
        self.peak = max(self.peak, self.live + more)
        if self.live + more > self.highest:
            self.highest, found = self.live + more, Counter({word: more} if more else {})
            for storage, size in self.sizes.items():
                found[self.words[storage]] += size
            self.at_peak = dict(found)


def _rounded(size: int, rounding: int) -> int:
    return -(-size // rounding) * rounding


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.dtype.itemsize


def optimizer_bytes(
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer],
) -> Any:
    """A function from a parameter's shape and dtype to the bytes of its optimizer state.

    The real one's class is asked: it steps tiny parameters with the same defaults, and what it
    then keeps is scaled up.
    """
    options = optimizer.defaults if isinstance(optimizer, torch.optim.Optimizer) else {}
    kind = type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer

    def state(shape: Iterable[int], dtype: torch.dtype) -> int:
        small = torch.zeros([min(size, 2) for size in shape], dtype=dtype, requires_grad=True)
        small.grad = torch.zeros_like(small)
        known = inspect.signature(kind).parameters  # AdamW has defaults that it does not take
        trial = kind([small], **{name: options[name] for name in options if name in known})
        trial.step()
        whole = torch.Size(tuple(shape)).numel()
        return sum(
            _bytes(kept) * whole // small.numel() if kept.shape == small.shape else _bytes(kept)
            for kept in trial.state[small].values()
            if isinstance(kept, torch.Tensor)
        )

    return state
