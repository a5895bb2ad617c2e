"""What a constructor has done with tensors, as data, and its values made from that.

A tape is a list of operations on storages. Views are not on it: each tensor that an operation takes
is said by where it lies in its storage.

    0  #0 = empty(4, 3)          linear.py, line 105
    1  uniform_(#0[:, :])        draw 0
    2  #1 = empty(4)
    3  uniform_(#1[:])           draw 1: to have #1, draw 0 is run on memory that is given back
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch
from torch.utils import _pytree as pytree

from pfeife import _torch

Storages = dict[int, torch.UntypedStorage]


class Source(Protocol):
    """What makes storages by their numbers: a tape, or a checkpoint."""

    @property
    def digest(self) -> str:
        """A text that those of the same values share."""

    def values(self, wanted: Collection[int]) -> Storages:
        """The storages with these numbers."""


LARGE = 1 << 16  # elements of a draw behind which the generator's state is kept
# Draws whose count of numbers is told by the shape of what they fill.
BY_SHAPE = {
    *("normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
}
GIVEN = ("aten.bernoulli_.float", "aten.normal.float_float")


@attrs.frozen
class View:
    """A tensor by where it lies in a storage, which has a number."""

    storage: int
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def at(cls, storage: int, tensor: torch.Tensor) -> "View":
        """That of a tensor in the storage with this number."""
        layout = tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        return cls(storage, tensor.dtype, tensor.device, *layout)

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, in its storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)

    @property
    def size(self) -> int:
        """The bytes of a storage that this ends."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (self.offset + last + 1) * self.dtype.itemsize

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this layout; where a dimension has one entry, its stride is free."""
        if tensor.dtype != self.dtype or tuple(tensor.shape) != self.shape:
            return False
        steps = zip(self.shape, self.stride, tensor.stride(), strict=True)
        same = all(recorded == actual or size == 1 for size, recorded, actual in steps)
        return same and (tensor.storage_offset() == self.offset or 0 in self.shape)


@attrs.frozen(eq=False)
class Operation:
    """One operation. In `args` and `kwargs` there are Views, and tensors that were there before.
    `made` has for each of its results the View, None for what it returns of its arguments;
    `default` is the default dtype when it ran, `line` the user's.

    `draw` counts those that take numbers from torch's default generator. `state` is what that was
    set to before: a state, or that after so many draws; None if it just went on."""

    function: _torch.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: tuple[View | None, ...]
    default: torch.dtype
    line: str
    draw: int | None = None
    state: torch.Tensor | int | None = None

    @property
    def taken(self) -> tuple[View, ...]:
        """The Views among its arguments."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, View))

    @property
    def changed(self) -> frozenset[int]:
        """The storages that it makes or writes to."""
        written = pytree.tree_leaves(list(_torch.written(self.function, self.args, self.kwargs)))
        leaves = [*written, *self.made]
        return frozenset(leaf.storage for leaf in leaves if isinstance(leaf, View))

    @property
    def touched(self) -> frozenset[int]:
        """The storages that it makes, reads or writes to."""
        made = [view.storage for view in self.made if view is not None]
        return frozenset([*(view.storage for view in self.taken), *made])

    @property
    def is_told_by_shape(self) -> bool:
        """Whether how many numbers it draws depends on shapes alone, and not on values."""
        name = str(self.function)
        return name.split(".")[1] in BY_SHAPE or name in GIVEN

    @property
    def largest(self) -> int:
        """The elements of the largest tensor that it takes or makes."""
        views = [*self.taken, *(view for view in self.made if view is not None)]
        return max((torch.Size(view.shape).numel() for view in views), default=0)

    def results(self, tensor_of: Callable[[View], torch.Tensor]) -> list[torch.Tensor]:
        """Its results, on tensors for its Views."""
        args, kwargs = pytree.tree_map_only(View, tensor_of, (self.args, dict(self.kwargs)))
        with _default_dtype(self.default):
            result = self.function(*args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def run(self, storages: Storages) -> None:
        """Runs it on the storages that there are, and adds those that it makes. Raises ValueError
        for results of another layout than that which was recorded."""
        results = self.results(lambda view: view.of(storages[view.storage]))
        for view, result in zip(self.made, results, strict=True):
            if view is None:
                continue
            if not view.fits(result):
                raise ValueError(
                    f"{self.function} has made {list(result.shape)} {result.dtype} with strides "
                    f"{result.stride()}, where {list(view.shape)} {view.dtype} with {view.stride} "
                    f"was recorded ({self.line}): torch's rule for its shape is wrong; make this "
                    "tensor outside of pfeife.deferred_init()"
                )
            storages[view.storage] = result.untyped_storage()


class Tape:
    """All operations in their order; `begin` is the generator's state before them.

    To have #1 of the drawing above, the generator must be where it was before draw 1:

        draw      0          1          2          3        `states` has it before 0 and, since
        states    x                     x                   draw 1 is a large one, before 2
        wanted               #1                             set to x, draw 0 for nothing, draw 1
        wanted                                     #3       set to the second x, draw 2 ..., draw 3
    """

    def __init__(self, begin: torch.Tensor):
        self.operations: list[Operation] = []
        self.draws: list[int] = []  # their places among the operations
        self.states = {0: begin}  # of the generator, after so many draws

    def add(self, operation: Operation) -> None:
        """Puts an operation at the end; draws are counted without gaps."""
        if operation.draw is not None:
            assert operation.draw == len(self.draws)
            self.draws.append(len(self.operations))
        self.operations.append(operation)

    @functools.cached_property
    def digest(self) -> str:
        """A text that tapes of the same values share."""
        # Equal operations from an equal state of the generator make equal values: ranks compare it
        # in place of values that nobody has made.
        digest = hashlib.sha256(_bytes(self.states[0]))
        for operation in self.operations:
            for leaf in pytree.tree_leaves((operation.args, operation.kwargs, operation.state)):
                is_tensor = isinstance(leaf, torch.Tensor)
                digest.update(_bytes(leaf) if is_tensor else f"{type(leaf)} {leaf}".encode())
            digest.update(f"{operation.function} {operation.made} {operation.default}".encode())
        return digest.hexdigest()

    def values(self, wanted: Collection[int], before: int | None = None) -> Storages:
        """The storages with these numbers, as they were `before` an operation, or at the end.

        No memory is held but for them and for what an operation yet to come reads. The default
        generator is left as it is."""
        plan = self._needed(wanted, len(self.operations) if before is None else before)
        # A later operation overwrites an earlier one's entry, so that the last one is left.
        last = {number: at for at in plan for number in self.operations[at].touched}
        storages: Storages = {}
        position, room = -1, torch.UntypedStorage(0)
        with torch.random.fork_rng(devices=[]), _as_recorded():
            for at in plan:
                operation = self.operations[at]
                if operation.draw is not None:
                    self._seek(operation, position, room)
                    position = operation.draw + 1
                operation.run(storages)
                self._keep(operation)
                for number in operation.touched:
                    if last[number] == at and number not in wanted:
                        storages.pop(number, None)
        return storages

    def state_after(self, draws: int | None = None) -> torch.Tensor:
        """The generator's state after so many draws, or all of them."""
        with torch.random.fork_rng(devices=[]), _as_recorded():
            target = len(self.draws) if draws is None else draws
            self._go_on(target, -1, torch.UntypedStorage(0))
            return torch.get_rng_state()

    def _needed(self, wanted: Iterable[int], before: int) -> list[int]:
        """The operations that some storages are made by, in order."""
        live, plan = set(wanted), []
        # Backwards, from what is wanted to what it was made of. A storage that an operation writes
        # to stays live, since what was done to it before counts too.
        for at in range(before - 1, -1, -1):
            operation = self.operations[at]
            if operation.changed & live:
                live |= operation.touched
                plan.append(at)
        return plan[::-1]

    def _seek(self, operation: Operation, position: int, room: torch.UntypedStorage) -> None:
        """Brings the generator from where it is, after `position` draws (-1: anywhere), to where it
        was before a draw. Others are made for nothing meanwhile, in `room`."""
        assert operation.draw is not None
        if isinstance(operation.state, torch.Tensor):
            torch.set_rng_state(operation.state)
        else:
            draws = operation.draw if operation.state is None else operation.state
            self._go_on(draws, position, room)

    def _go_on(self, draws: int, position: int, room: torch.UntypedStorage) -> None:
        """Brings the generator to where it was after so many draws."""
        start = max(at for at in self.states if at <= draws)
        # From the last state that was kept before, unless the generator is already further.
        if not start <= position <= draws:
            torch.set_rng_state(self.states[start])
            position = start
        for number in range(position, draws):
            operation = self.operations[self.draws[number]]
            self._seek(operation, number, room)
            self._draw_for_nothing(operation, room)
            self._keep(operation)

    def _keep(self, operation: Operation) -> None:
        """Keeps the generator's state behind large draws."""
        if operation.draw is not None and operation.largest >= LARGE:
            self.states.setdefault(operation.draw + 1, torch.get_rng_state())

    def _draw_for_nothing(self, operation: Operation, room: torch.UntypedStorage) -> None:
        """Takes the numbers of a draw. If shapes tell how many, any memory will do, and all such
        draws have the same: freed and asked for again, the parts that remain would add up."""
        assert operation.draw is not None
        if operation.is_told_by_shape:
            size = max((view.size for view in operation.taken), default=0)
            if room.nbytes() < size:
                room.resize_(size)
            operation.results(lambda view: view.of(room))
            return
        # Else what it reads tells, which is therefore made first; that leaves the generator as it
        # is.
        taken = {view.storage for view in operation.taken}
        storages = self.values(taken, self.draws[operation.draw])
        operation.results(lambda view: view.of(storages[view.storage]))


def _bytes(tensor: torch.Tensor) -> bytes:
    return f"{tensor.dtype} {tensor.shape}".encode() + tensor.cpu().contiguous().numpy().tobytes()


@contextlib.contextmanager
def _as_recorded() -> Iterator[None]:
    """While operations run as they ran: without gradients and autocast, and unseen."""
    with torch.no_grad(), _torch.no_autocast(), _torch.no_dispatch():
        yield


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
