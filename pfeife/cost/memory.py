"""The account of bytes that a rank holds through a schedule."""

from collections import Counter, deque
from collections.abc import Mapping
from itertools import count

import attrs
from torch import fx

from pfeife.cost.body import Body, rounded
from pfeife.data.optimizers import Optimizer, optimizer_bytes
from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, Schedule
from pfeife.data.timeline import MemoryCurve, MemoryPoint
from pfeife.ir.program import Call, Kind, Message, Program, Role, find_node, holders, returned
from pfeife.lowering.clocks import released
from pfeife.lowering.envelope import Channel, Envelope
from pfeife.lowering.wiring import Wiring, summed_in_place


def memory_curves(
    program: Program,
    schedule: Schedule,
    *,
    optimizer: Optimizer | None = None,
    rounding: int = 1,
) -> tuple[MemoryCurve, ...]:
    """For every rank the bytes of a step of a lowered schedule, each rank a process.

    What the runtime does is followed action by action: values are dropped after their last use,
    messages have their buffers before they arrive (see `posted_ahead`), what is sent is kept until
    it has surely arrived (see `released`), small values travel together (see `Envelope`), large
    ones arrive in buffers that stay (see `Buffers`; those are what all steps but the first find),
    gradients are added in place where that is possible. `optimizer` is the real one, its class, or
    bytes for each element of a parameter (see `optimizer_bytes`); every allocation is rounded up
    to a multiple of `rounding` bytes (512 for torch's CUDA allocator). What an operation needs
    inside itself is not known.
    """
    wiring = Wiring(program)
    bodies = {
        call.node: _Sizes(
            Body.of(program.body(call), rounding), frozenset(summed_in_place(program, call))
        )
        for call in program.calls
    }
    known = released(schedule)
    return tuple(
        _Rank(wiring, bodies, rank, actions, known[rank], rounding).curve(schedule, optimizer)
        for rank, actions in enumerate(schedule.ranks)
    )


@attrs.frozen
class _Sizes:
    """A call's body, and the gradient ports whose first value takes up the later ones'."""

    body: Body
    summed: frozenset[str]


def trained_parameters(program: Program) -> set[str]:
    """The parameters for which an optimizer keeps state: those with a gradient; all of them where
    the program has no backward, since what trains them is another."""
    role = Role.GRADIENT if program.ports(Role.TANGENT) else Role.PARAMETER
    return {port.fqn for port in program.ports(role)}


class _Rank:
    """The storages that one rank holds, by number, each with how often it is held."""

    def __init__(
        self,
        wiring: Wiring,
        bodies: Mapping[str, _Sizes],
        rank: int,
        actions: tuple[Action, ...],
        known: Mapping[int, Mapping[int, int]],
        rounding: int,
    ):
        self.wiring, self.bodies, self.program = wiring, bodies, wiring.program
        self.rank, self.actions, self.rounding = rank, actions, rounding
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
        self.buffers: dict[int, list[int]] = {}  # of large values that arrive, by their size
        self.channels: dict[int, Channel] = {}
        self.taken: Counter[int] = Counter()
        self.envelopes: dict[str, Envelope] = {}
        results = returned(self.program.module)
        self.ports: dict[str, list] = {}
        for port in self.program.outputs:
            self.ports.setdefault(results[port.name].name, []).append(port)

    def curve(self, schedule: Schedule, optimizer: Optimizer | None) -> MemoryCurve:
        announced: dict[int, list[Envelope]] = {}
        for action in self.actions:
            if action.do in RECEIVES:
                message = self.wiring.message(action)
                announced.setdefault(message.source, []).append(self._envelope(message))
        for source, envelopes in announced.items():
            self.channels[source] = Channel(tuple(envelopes))
            self._post(source, 0)
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

    def _held(self, schedule: Schedule, optimizer: Optimizer | None) -> dict[str, int]:
        found = {}
        trained = trained_parameters(self.program)
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
                found["optimizer"] = sum(
                    state(port.shape, port.dtype) for port in mine if port.fqn in trained
                )
        found["receive buffers"] = sum(size * len(them) for size, them in self.buffers.items())
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
        body = self.bodies[call.node].body
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
        for name, storage in made:
            for port in self.ports.get(name, ()):
                if port.role == Role.LOSS:
                    self._hold(self._allocate(port.bytes, "outputs"))
                elif port.role != Role.GRADIENT:
                    self._hold(storage, "outputs")
                elif port.name not in self.sums:
                    self.sums[port.name] = self._hold(storage, "gradients")
                elif port.name not in self.bodies[call.node].summed:
                    total = self._hold(self._allocate(port.bytes, "gradients"))
                    self._drop(self.sums[port.name])
                    self.sums[port.name] = total

    def _send(self, action: Action) -> None:
        message = self.wiring.message(action)
        envelope = self._envelope(message)
        leaving: list[int] = []
        for piece in envelope.pieces:
            name = message.values[piece[0]]
            value = find_node(self.program.module, name).meta["val"]
            if len(piece) == 1 and value.stride() == envelope.layouts[piece[0]].strides:
                found = self.values.get((action.microbatch, name))
                leaving += [] if found is None else [self._hold(found)]
            else:  # sent as a dense copy, together with others
                size = envelope.piece_bytes(piece)
                leaving.append(self._hold(self._allocate(size, "leaving")))
        self.leaving.setdefault(message.destination, deque()).append(leaving)

    def _receive(self, action: Action) -> None:
        message = self.wiring.message(action)
        for name, storage in zip(
            message.copies, self.posted[message.source].popleft(), strict=True
        ):
            self.values[action.microbatch, name] = storage
        before = self.channels[message.source].ahead[self.taken[message.source]]
        self.taken[message.source] += 1
        self._post(message.source, before)

    def _post(self, source: int, before: int) -> None:
        """Allocates what is posted now, beside the messages that were posted `before`."""
        posted = self.posted.setdefault(source, deque())
        channel = self.channels[source]
        for envelope in channel.envelopes[before : channel.ahead[self.taken[source]]]:
            storages = [0] * len(envelope.layouts)
            for piece in envelope.pieces:
                size = envelope.piece_bytes(piece)
                large = envelope.layouts[piece[0]].large
                storage = self._buffer(size) if large else self._allocate(size, "received")
                for index in piece:
                    storages[index] = self._hold(storage)
            posted.append(storages)

    def _buffer(self, size: int) -> int:
        """A receive buffer that is free; they stay, and so do not count as live."""
        known = self.buffers.setdefault(self._rounded(size), [])
        free = next((storage for storage in known if not self.holds[storage]), None)
        if free is None:
            free = next(self.fresh)
            self.words[free] = "receive buffers"
            known.append(free)
        return free

    def _envelope(self, message: Message) -> Envelope:
        if message.node not in self.envelopes:
            self.envelopes[message.node] = self.wiring.envelope(message)
        return self.envelopes[message.node]

    def _rounded(self, size: int) -> int:
        return rounded(size, self.rounding)

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
            self.live -= self.sizes.pop(storage, 0)

    def _note(self, more: int, word: str = "") -> None:
        """Takes down a peak: what is live and `more` bytes beside it."""
        self.peak = max(self.peak, self.live + more)
        if self.live + more > self.highest:
            self.highest, found = self.live + more, Counter({word: more} if more else {})
            for storage, size in self.sizes.items():
                found[self.words[storage]] += size
            self.at_peak = dict(found)
