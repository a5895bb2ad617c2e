"""Arguments of a call that the step changes in place: the program computes their new values, which
are written to the caller's own tensors once all microbatches have run.

    labels    rows 0 1 | 2 3          each microbatch reads a copy of its rows
    new       rows 0 1 | 2 3          joined, then labels.copy_(new)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pfeife.frontend.captured import Captured
from pfeife.ir.parts import Role
from pfeife.runtime.distributed.world.together import together
from pfeife.runtime.distributed.world.world import World


def agree_on_changed(captured: Captured, args: Sequence[Any], world: World | None) -> None:
    """Raises ValueError, on all ranks if on any, for an argument that the step changes in place
    and that shares memory with another one, or with itself: what the step reads of one memory
    under two names would have to change with it."""
    if captured.changed:
        together(
            lambda: _check_apart(captured, args),
            world,
            "the arguments that the step changes in place",
        )


def _check_apart(captured: Captured, args: Sequence[Any]) -> None:
    pairs = zip(captured.ports, args, strict=True)
    tensors = ((port, value) for port, value in pairs if port and port.role != Role.SIZE)
    extents = [(port, _extent(value)) for port, value in tensors]
    slots = captured.slots(args)
    for port, (where, first, last) in extents:
        if port.name not in captured.changed:
            continue
        own = slots[port.name]
        if any(size > 1 and not step for size, step in zip(own.shape, own.stride(), strict=True)):
            raise ValueError(
                f"the step changes its input {port.fqn} in place, which is expanded: several of "
                f"its rows are one memory; hand over a copy ({port.fqn}.clone())"
            )
        for other, (there, begin, end) in extents:
            # Each microbatch reads copies: a write that the step sees through another name in eager
            # would not be seen here.
            if other is not port and there == where and begin <= last and first <= end:
                raise ValueError(
                    f"the step changes its input {port.fqn} in place, which shares memory with "
                    f"{other.fqn}: hand over a copy ({port.fqn}.clone())"
                )


def _extent(value: torch.Tensor) -> tuple[int, int, int]:
    """The storage of a tensor, and its first and last byte there."""
    steps = ((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    width = value.element_size()
    first = int(value.storage_offset()) * width
    last = first + (sum(map(int, steps)) + 1) * width - 1 if value.numel() else first - 1
    return int(value.untyped_storage()._cdata), first, last


def write_changed(
    captured: Captured, slots: Mapping[str, Any], values: Mapping[str, torch.Tensor]
) -> None:
    """Writes what the step has made of arguments and of state in place to the call's own `slots`,
    by the names of their ports; `values` are the outputs of the whole batch."""
    state = {name: captured.carried[name] for name in captured.in_place}
    with torch.no_grad():
        for name, new in {**captured.changed, **state}.items():
            slots[name].copy_(values[new])
