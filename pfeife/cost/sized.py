"""What stands for tensors, bodies and messages where only their bytes count."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch

from pfeife.compilers.piece import inputs
from pfeife.cost.body import Body, rounded
from pfeife.ir.nodes import node_bytes, returned, value_of
from pfeife.ir.parts import Call, Kind, Port, Role
from pfeife.lowering.buckets import Bucket
from pfeife.lowering.envelope import Envelope
from pfeife.lowering.telling import tellings
from pfeife.lowering.wiring import Wiring
from pfeife.runtime.buffered import Buffered
from pfeife.runtime.results import outputs_by_node

_TOLD = "members' parameters"


class Ledger:
    """The bytes that live, by what they are, and the most that did: `peak` since somebody last
    looked, `at_peak` ever."""

    def __init__(self, rounding: int):
        self.rounding = rounding
        self.live = self.peak = self.highest = 0
        self.words: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}

    def allocated(self, size: int, word: str) -> "Storage":
        """A new storage of so many bytes, rounded up."""
        size = rounded(size, self.rounding)
        self.count(size, word)
        self.note()
        return Storage(self, size, word)

    def count(self, size: int, word: str) -> None:
        """Bytes that storages are made of."""
        self.live += size
        self.words[word] += size

    def note(self, more: int = 0, word: str = "temporaries") -> None:
        """Takes down a peak: what is live and `more` bytes beside it."""
        total = self.live + more
        self.peak = max(self.peak, total)
        if total > self.highest:
            self.highest = total
            self.at_peak = {**self.words, word: self.words[word] + more}


class Storage:
    """Bytes that the ledger has counted, until no value looks at them: CPython frees what nobody
    refers to at once, here as with the tensors of a real step."""

    __slots__ = ("bytes", "ledger", "word")

    def __init__(self, ledger: Ledger, size: int, word: str):
        self.ledger, self.bytes, self.word = ledger, size, word

    def rename(self, word: str) -> None:
        """Says what they are from now on."""
        self.ledger.words[self.word] -= self.bytes
        self.ledger.words[word] += self.bytes
        self.word = word

    def __del__(self) -> None:
        self.ledger.live -= self.bytes
        self.ledger.words[self.word] -= self.bytes


class ReceiveBuffer:
    """One of those that large values arrive in: it stays, and so does not count as live, and is
    `used` as long as a value looks at it."""

    __slots__ = ("size", "used")

    def __init__(self, used: Counter[int], size: int):
        self.used, self.size = used, size
        used[size] += 1

    def rename(self, word: str) -> None:
        """A buffer stays one, whatever it holds."""

    def __del__(self) -> None:
        self.used[self.size] -= 1


class Value:
    """What stands for a tensor: `bytes` of its own in a storage (None: one that the rank holds all
    the time), and what the interpreter itself does to tensors."""

    __slots__ = ("bytes", "ledger", "storage", "strides")

    def __init__(
        self,
        ledger: Ledger,
        storage: Storage | ReceiveBuffer | None,
        size: int,
        strides: tuple[int, ...] = (),
    ):
        self.ledger, self.storage, self.bytes, self.strides = ledger, storage, size, strides

    def like(self, word: str) -> "Value":
        """A new one of the same size."""
        return Value(self.ledger, self.ledger.allocated(self.bytes, word), self.bytes)

    def clone(self) -> "Value":
        """A loss of its own, as the program returns it."""
        return self.like("outputs")  # a loss

    def add_(self, other: "Value") -> "Value":
        """Itself: to add in place takes no memory."""
        return self

    def __add__(self, other: "Value") -> "Value":
        return self.like("gradients")

    def new_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> "Value":
        """A gradient of some shape and dtype, in a new storage."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return Value(self.ledger, self.ledger.allocated(size, "gradients"), size)

    def to(self, dtype: torch.dtype) -> "Value":
        """A copy in another dtype, counted as of the same size."""
        return self.like("cast parameters")


class SizedBody:
    """A call's body that only takes memory.

    It notes what the body needs while it runs, and gives values of its results' sizes, which look
    at an argument's storage where the results do.
    """

    def __init__(self, ledger: Ledger, wiring: Wiring, call: Call):
        body = wiring.program.body(call)
        account = Body.of(body, ledger.rounding)
        place = {node: i for i, node in enumerate(inputs(body))}
        owners = list(dict.fromkeys(account.results))
        self.ledger, self.peak = ledger, account.peak + call.inside_bytes
        self.owners = [(place.get(owner), account.sizes.get(owner, 0)) for owner in owners]
        self.new = sum(size for argument, size in self.owners if argument is None)
        self.results = [
            (owners.index(owner), node_bytes(node), value.stride() if value is not None else ())
            for node, owner in zip(returned(body), account.results, strict=True)
            for value in [value_of(node)]
        ]
        # Until the program returns it, a result is what backwards read, or one backward the other.
        self.word = "saved" if call.kind == Kind.FORWARD else "passed back"
        always, first = self._words(wiring, call)
        self.words = chain([always + first], repeat(always))  # of microbatch after microbatch

    def _words(self, wiring: Wiring, call: Call) -> tuple[list[tuple[int, str]], ...]:
        """What results are that the program returns, always and after the first microbatch alone
        (a gradient is kept, later ones are added to it)."""
        outputs = outputs_by_node(wiring.program)
        ports = [(i, port) for name, i in wiring.results(call) for port in outputs.get(name, ())]
        summed, copied = Role.GRADIENT, Role.LOSS
        always = [(i, "outputs") for i, port in ports if port.role not in (summed, copied)]
        return always, [(i, "gradients") for i, port in ports if port.role == summed]

    def __call__(self, *arguments: Value) -> list[Value]:
        # The peak first, while the arguments that it comes beside are still counted.
        self.ledger.note(self.peak)
        self.ledger.count(self.new, self.word)  # all at once, and part of what was noted
        storages = [
            Storage(self.ledger, size, self.word) if place is None else arguments[place].storage
            for place, size in self.owners
        ]
        results = [
            Value(self.ledger, storages[at], size, strides) for at, size, strides in self.results
        ]
        for index, word in next(self.words):
            storage = results[index].storage
            if storage is not None:
                storage.rename(word)
        return results


class SizedMessages(Buffered):
    """A transport that sends nothing: its messages only take memory, as torch.distributed's do."""

    device = None

    def __init__(self, ledger: Ledger, replica: int, member: int, members: int):
        super().__init__()
        self.ledger, self.place, self.members = ledger, (replica, member), members
        self.scratch = 0  # bytes of what is being reduced
        self.used: Counter[int] = Counter()  # receive buffers, by their size
        self.most: Counter[int] = Counter()

    @property
    def bytes(self) -> int:
        """Of the receive buffers, which stay."""
        rounding = self.ledger.rounding
        buffers = sum(rounded(size, rounding) * most for size, most in self.most.items())
        return buffers + rounded(self.scratch, rounding)

    def _posted(self, source: int, envelope: Envelope) -> tuple[Any, tuple]:
        # All that travels in one piece looks at that piece's storage, and keeps it together.
        values: dict[int, Value] = {}
        for piece in envelope.pieces:
            storage = self._buffer(envelope, piece)
            for index in piece:
                layout = envelope.layouts[index]
                values[index] = Value(self.ledger, storage, layout.bytes, layout.strides)
        return tuple(values[index] for index in range(len(envelope.layouts))), ()

    def _buffer(self, envelope: Envelope, piece: tuple[int, ...]) -> Storage | ReceiveBuffer:
        # As in the runtime: small pieces are new each time, large ones go into buffers that stay.
        size = envelope.piece_bytes(piece)
        if not envelope.kept(piece[0]):
            return self.ledger.allocated(size, "received")
        buffer = ReceiveBuffer(self.used, size)
        self.most[size] = max(self.most[size], self.used[size])
        return buffer

    def _sent(self, destination: int, values: Any, envelope: Envelope) -> tuple[tuple, list]:
        return (), [self._packed(values, envelope, piece) for piece in envelope.pieces]

    def _packed(self, values: Any, envelope: Envelope, piece: tuple[int, ...]) -> Any:
        """A value itself if it travels alone and is dense, else the memory of a copy."""
        first = piece[0]
        if len(piece) == 1 and values[first].strides == envelope.layouts[first].strides:
            return values[first]
        return self.ledger.allocated(envelope.piece_bytes(piece), "leaving")

    def _wait(self, peer: int, works: Sequence[Any]) -> None:
        """Nothing is on its way."""

    def reduce(self, bucket: Bucket, parts: Sequence[Any]) -> "SizedBeside":
        """Copies of the parts become the sums, or are there until the rank has those that it
        gets."""
        self.scratch = max(self.scratch, bucket.scratch_bytes(*self.place))
        if bucket.sparse:
            names = [reduction.name for reduction in bucket.reductions]
            totals = [part.like("gradients") for part in parts]
            return SizedBeside(dict(zip(names, totals, strict=True)))
        # The flat copy is there until the sums are: all of them in it, or a share beside it.
        flat = self.ledger.allocated(bucket.flat_bytes, "gradients")
        if bucket.cut:
            return self._joined(bucket, parts, flat)
        if not bucket.owned:
            return SizedBeside(_named(bucket, parts, range(len(parts)), flat))
        size = bucket.piece(*self.place) * bucket.dtype.itemsize
        storage = self.ledger.allocated(size, "gradients")
        return SizedBeside(_named(bucket, parts, bucket.share(*self.place), storage), (flat,))

    def _joined(self, bucket: Bucket, parts: Sequence[Any], flat: Storage) -> "SizedBeside":
        """Whole gradients of what members have summed up."""
        owned = bucket.piece(*self.place) * bucket.dtype.itemsize if bucket.owned else 0
        holding = flat, self.ledger.allocated(owned, "gradients")
        whole = {}
        for place in bucket.kept(*self.place):
            reduction = bucket.reductions[place]
            size = parts[place].bytes * (reduction.split.members if reduction.split else 1)
            storage = self.ledger.allocated(size, "gradients")
            whole[reduction.name] = Value(self.ledger, storage, size)
        return SizedBeside(whole, holding)

    def unshard(self, ports: Sequence[Port], layouts: Any, state: Mapping) -> "SizedBeside":
        """What a member does not keep whole is there until it is dropped, and what a keeper sends
        until the others have it."""
        told, sent, here = dict(state), [], self.place[1]
        for telling in tellings(ports, self.members):
            sizes = list(map(telling.bytes, range(self.members)))
            sent.append(self.ledger.allocated(telling.packed_bytes(here), "leaving"))
            one = self.ledger.allocated(sum(sizes), _TOLD) if telling.cut else None
            for member, kept in enumerate(telling.kept):
                if member != here or one is not None:
                    room = one or self.ledger.allocated(sizes[member], _TOLD)
                    told |= {p.fqn: Value(self.ledger, room, p.bytes) for p in kept}
        return SizedBeside(told, sent)


def _named(
    bucket: Bucket, parts: Sequence[Any], places: Iterable[int], storage: Storage
) -> dict[str, Value]:
    """Sums in one storage, by the names of gradients."""
    return {
        bucket.reductions[place].name: Value(parts[place].ledger, storage, parts[place].bytes)
        for place in places
    }


class SizedBeside:
    """What is on its way, and `holding` meanwhile."""

    ended = 0.0

    def __init__(self, result: Mapping[str, Value], holding: Sequence[Storage] = ()):
        self.result, self.holding = result, holding

    def wait(self) -> Mapping[str, Value]:
        """What the rank has of it then, by names."""
        return self.result
