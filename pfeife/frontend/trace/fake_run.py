"""A run of a step on tensors without storage: what it reads, does, and leaves behind."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.frontend.arguments import fake_like
from pfeife.frontend.watch.executed import Executed, pausing
from pfeife.frontend.watch.guards import Guard
from pfeife.frontend.watch.modes import Operations
from pfeife.frontend.watch.reachable_state import SIMPLE, Change, Places, Slot, short
from pfeife.frontend.watch.value_guards import Answering


@attrs.frozen(eq=False)
class FakeRun:
    """What a run on tensors without storage has shown: its operations and what they read, what it
    was told, the code that it executed, its result, and what it left behind."""

    seen: "Seen"
    answering: Answering
    executed: Executed
    result: Any
    changes: Sequence[Change]


_OWN = ("aten", "prim", "prims", "c10d", "_c10d_functional")  # namespaces of torch's operations


class Seen(Operations):
    """Sees all `operations`, and what they read: the `fake` tensors and the `real` ones, which have
    storage, by identity. While torch computes them, nobody notes what code is executed."""

    def __init__(self) -> None:
        super().__init__()
        self.real: dict[int, torch.Tensor] = {}
        self.fake: dict[int, torch.Tensor] = {}
        self.operations: list[tuple] = []

    def instead(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An operation, which is noted."""
        with pausing():
            self._note(func, args, kwargs)
            if getattr(func, "namespace", "") in _OWN:
                return func(*args, **kwargs)
        return func(*args, **kwargs)  # which may run code of the user's

    def _note(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise ValueError(
                "the step draws from a generator of its own: its microbatches would not get "
                "the numbers that they get in eager; draw from torch's default generator"
            )
        for tensor in (leaf for leaf in leaves if isinstance(leaf, torch.Tensor)):
            tensors = self.fake if isinstance(tensor, _torch.FakeTensor) else self.real
            tensors[id(tensor)] = tensor
        # Of a size what it is now: a second run may know it as a number.
        numbers = (
            _torch.size_now(leaf) if isinstance(leaf, torch.SymInt) else leaf
            for leaf in leaves
            if isinstance(leaf, (torch.SymInt, *SIMPLE))
        )
        texts = map(repr, numbers)
        if getattr(func, "namespace", "") != "prim":  # questions for devices, which come and go
            self.operations.append((str(func), *texts))


def resized(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Padding and interpolation run by kernels in Python, as in AOTAutograd: those in C++ ask for
    sizes as numbers. Not of tensors whose sizes data decide, of which the former ask more."""
    asks = func in (F.pad, F.interpolate)
    if asks and not any(map(_torch.is_of_data, _torch.sizes_and_numbers((args, kwargs)))):
        with _torch.python_kernels():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def stand_ins(
    places: Places, mode: _torch.FakeTensorMode, device: torch.device | None = None
) -> dict[Slot, torch.Tensor]:
    """Fake tensors for those that a step reaches, one for each, on `device` for meta tensors."""
    fakes: dict[int, torch.Tensor] = {}
    values = {}
    for slot in places.slots:
        tensor = slot.get()
        plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer, _torch.FakeTensor)
        if plain and tensor.layout == torch.strided and slot.is_open:
            if id(tensor) not in fakes:
                fakes[id(tensor)] = fake_like(mode, tensor, device=device)
            values[slot] = fakes[id(tensor)]
    return values


def check_alike(first: FakeRun, second: FakeRun) -> None:
    """Raises ValueError unless both runs did the same, on the same tensors."""
    # What the step makes anew is another tensor in each run (the first run's are alive, so that no
    # identity comes twice): one that both have met was there before, and nobody has found it.
    lost = next((tensor for at, tensor in second.seen.real.items() if at in first.seen.real), None)
    if lost is not None:
        grad = " that requires gradients" if lost.requires_grad else ""
        raise ValueError(
            f"the step reads a tensor {list(lost.shape)}{grad} that is in no module, list, dict or "
            "variable that Pfeife finds: pass it as an argument, or make it a buffer or a "
            "parameter of a module"
        )
    constants, repeated = list(first.seen.real.values()), list(second.seen.real.values())
    same = len(constants) == len(repeated) and all(
        left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
        for left, right in zip(constants, repeated, strict=True)
    )
    pairs = zip(first.seen.operations, second.seen.operations, strict=False)
    difference = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if not same or difference or len(first.seen.operations) != len(second.seen.operations):
        what = f": {' '.join(difference[0])}, then {' '.join(difference[1])}" if difference else ""
        raise ValueError(
            f"the step does something else when it runs a second time on the same data{what}; what "
            "it depends on (the time, a counter, a file) would be frozen"
        )


def check_steady(before: Sequence[Guard], run: FakeRun) -> None:
    """Raises ValueError if a run has asked the world outside, or has left something else than it
    found."""
    if run.executed.questions:
        raise ValueError(
            f"{run.executed.questions[0]} whenever the step runs: the answer would be frozen; ask "
            "outside of the step, around its call to log that, and pass the answer as an argument "
            "to compute with it"
        )
    for guard in before:
        changed = guard.broken()
        if changed:
            line = run.executed.line(guard.part.words)
            raise ValueError(
                f"the step changes {changed}, whenever it runs{f' ({line})' if line else ''}; "
                "traced, it would not: keep it in a tensor, such as a buffer, or change it outside "
                "of the step"
            )


def kept_slots(changes: Sequence[Change]) -> list[Slot]:
    """The slots that a run leaves tensors in. Raises ValueError for other changes."""
    for change in changes:
        if isinstance(change.slot.container, list):
            raise ValueError(
                f"the step changes the list {change.slot.name.rpartition('.')[0]}, which a traced "
                "step cannot: return the value instead"
            )
        if not isinstance(change.after, torch.Tensor):
            raise ValueError(
                f"the step sets {change.slot.name} from {short(change.before)} to "
                f"{short(change.after)} whenever it runs; traced, it would not: keep it in a "
                "tensor, such as a buffer, or set it outside of the step"
            )
    return [change.slot for change in changes]
