"""`p.data = value` in a step, which momentum encoders have: a change of `p` in place.

In eager `p` gets the storage of `value`. Where nothing else looks at that storage, this is what
`p.copy_(value)` does, and AOTAutograd takes it for a change in place like any other:

    k.data = k.data * 0.9 + q.data * 0.1        k.copy_(k.data * 0.9 + q.data * 0.1)
    k.data = q.data                             refused: from then on both would be one
    k[:2].data = q.data                         refused: in eager, k stays as it is
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from pfeife import _torch
from pfeife.frontend.watch.modes import Calls
from pfeife.frontend.watch.user_lines import calling_line
from pfeife.ir.nodes import source_line


def copied_data(
    state: Iterable[torch.Tensor] = (), arguments: Sequence[torch.Tensor] = ()
) -> Calls:
    """Makes copies of such writes while a step runs. Raises ValueError for those that give away the
    memory of one of the step's `state` or of the caller's `arguments`, change a shape or dtype, or
    write to what may be a part of another tensor: every argument may."""
    storages = {_storage(tensor) for tensor in (*state, *arguments)}

    def instead(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func != torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            return func(*args, **kwargs)
        # Without tensors to compare with, the writes were checked in an earlier run.
        if storages:
            target, value = args
            if any(target is argument for argument in arguments):
                raise _of_a_part(calling_line())
            _check(target, value, storages, calling_line())
        return _written(*args)

    return Calls(instead)


class OwnBackward(ValueError):
    """Raised for a step that reads or sets gradients that are the loop's."""

    def __init__(self, where: str):
        super().__init__(
            "the step calls backward(), or reads or sets gradients itself"
            f"{f' ({where})' if where else ''}: compile what computes the loss and returns it; "
            "loss.backward(), optimizer.step() and zero_grad() stay in the loop as they are"
        )


_GRADIENTS = {getattr(torch.Tensor.grad, name) for name in ("__get__", "__set__", "__delete__")}


def refused_gradients(tensors: Iterable[torch.Tensor], fake: bool) -> Calls:
    """Refuses what a step reads and sets of gradients (`zero_grad()`), but for those of tensors
    that it has made: the trace has none, and would leave them as they are. `tensors` are those
    of others; if the step runs on fake tensors, so are all that are real. Raises OwnBackward."""
    others = {id(tensor): tensor for tensor in tensors}

    def instead(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func in _GRADIENTS and (args[0].requires_grad or len(args) > 1):  # others have none
            is_real = fake and not isinstance(args[0], _torch.FakeTensor)
            if is_real or id(args[0]) in others:
                raise OwnBackward(calling_line())
        return func(*args, **kwargs)

    return Calls(instead)


class WritingData(fx.Interpreter):
    """Makes copies of such writes in Dynamo's graph."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A call of Dynamo's graph; a write of data is a copy."""
        if _torch.sets_data(target, args):
            return _written(*args)
        return super().call_function(target, args, kwargs)


def check_writes(module: fx.GraphModule) -> None:
    """Raises ValueError as `copied_data`, for Dynamo's graph."""
    values = {
        node: node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")
    }
    for node in module.graph.nodes:
        if _torch.sets_data(node.target, node.args):
            target, value = node.args
            others = [
                example for placeholder, example in values.items() if placeholder is not target
            ]
            storages = {
                _storage(example) for example in others if isinstance(example, torch.Tensor)
            }
            examples = target.meta["example_value"], value.meta["example_value"]
            _check(*examples, storages, source_line(node))


def check_given(module: fx.GraphModule, placeholders: Collection[fx.Node]) -> None:
    """Raises ValueError where Dynamo's graph sets the data of what the caller has given."""
    for node in module.graph.nodes:
        if _torch.sets_data(node.target, node.args) and node.args[0] in placeholders:
            raise _of_a_part(source_line(node))


def _written(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return target.copy_(value)


def _of_a_part(line: str) -> ValueError:
    return ValueError(
        f"the step sets the data of an argument or of a part of a tensor ({line}), where eager "
        "leaves the whole as it is: write to it, by one.copy_(other), or make a new one"
    )


def _check(target: torch.Tensor, value: torch.Tensor, storages: Iterable[int], line: str) -> None:
    # Of a view eager would replace the memory of that one tensor, and leave its base.
    if target._is_view():
        raise _of_a_part(line)
    if target.shape != value.shape or target.dtype != value.dtype or target.device != value.device:
        raise ValueError(
            "the step sets the data of a tensor to one of another shape, dtype or device "
            f"({line}): do that outside of the step"
        )
    # In eager later writes to one of the two would be seen in the other; a copy is not.
    if _storage(value) in storages:
        raise ValueError(
            f"the step gives two tensors the same memory ({line}), which cannot be captured: copy "
            "the value, by one.copy_(other) under torch.no_grad()"
        )


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata
