"""Numbers that only data tell where a kernel takes a plain float: the momentum of a batch norm that
averages over all batches (`momentum=None`), which is another one in each.

torch's C++ has no symbols there and asks what the number is. But nothing is made of a momentum
except running statistics, and those by the kernel alone: another number can stand in its place
until the graph is made. If the functions in `_KERNELS` move: torch refuses such a step, or asks,
and gets one answer for all microbatches.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

_KERNELS = {"batch_norm": torch.batch_norm, "instance_norm": torch.instance_norm}
_PLACE = 6  # of the momentum among their arguments
INSTEAD = 0.0  # of a number
MARK = "pfeife_number"  # on the nodes of a kernel: which of the numbers it reads


class _Making(threading.local):
    """The numbers that kernels were given so far in the graph that this thread makes."""

    numbers: list[torch.Tensor] | None = None


_MAKING = _Making()


def is_unknown(value: Any) -> bool:
    """Whether a value is a number that only data tell."""
    return isinstance(value, torch.SymInt | torch.SymFloat) and not value.node.has_hint()


def _reader(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that takes such a number, too."""

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        numbers = _MAKING.numbers
        if numbers is None or len(args) <= _PLACE or not is_unknown(args[_PLACE]):
            return kernel(*args, **kwargs)
        # As a result of its own the number is computed by the graph; the mark tells later which
        # kernel has to read it.
        mark = len(numbers)
        numbers.append(torch.scalar_tensor(args[_PLACE], dtype=torch.float64, device="cpu"))
        with fx.traceback.annotate({MARK: mark}):
            return kernel(*args[:_PLACE], INSTEAD, *args[_PLACE + 1 :], **kwargs)

    return call


_READERS = {name: _reader(kernel) for name, kernel in _KERNELS.items()}


def as_torchs(function: Any) -> Any:
    """torch's own function for one that stands in its place, or the function itself."""
    name = next((name for name, reader in _READERS.items() if reader is function), None)
    return function if name is None else _KERNELS[name]


@functools.cache
def known_to_dynamo() -> None:
    """Dynamo puts calls of the readers into its graphs, as it does with the kernels'."""
    torch.compiler.allow_in_graph(list(_READERS.values()))


class _Places:
    """Where torch's functions look for the kernels: readers stand there while any thread makes a
    graph."""

    def __init__(self) -> None:
        self.lock, self.makers = threading.Lock(), 0

    def count(self, more: int) -> None:
        """Notes that a thread begins (1) or ends (-1)."""
        with self.lock:
            self.makers += more
            for name, kernel in (_READERS if self.makers else _KERNELS).items():
                setattr(torch, name, kernel)


_PLACES = _Places()


@contextlib.contextmanager
def numbers_for_kernels() -> Iterator[list[torch.Tensor]]:
    """While this thread makes a graph, in which kernels take such numbers. Gives these as tensors,
    in the order of the calls; the kernels do not read them yet, see `frontend.kernel_numbers`."""
    before, _MAKING.numbers = _MAKING.numbers, []
    _PLACES.count(1)
    try:
        yield _MAKING.numbers
    finally:
        _PLACES.count(-1)
        _MAKING.numbers = before


@contextlib.contextmanager
def floats() -> Iterator[None]:
    """While `float(tensor)` in torch's batch norms is a number that only data tell, as in Dynamo:
    Python's own must be told what it is. If the module moves: that is told, and one answer holds
    for all microbatches."""
    module: Any = torch.nn.modules.batchnorm
    module.float = _float
    try:
        yield
    finally:
        # Python's again, which it reads while it has none of its own; not what it had when this
        # began, which may be that of another thread that has traced meanwhile.
        vars(module).pop("float", None)


def _float(value: Any) -> Any:
    return torch.sym_float(value.item()) if isinstance(value, torch.Tensor) else float(value)
