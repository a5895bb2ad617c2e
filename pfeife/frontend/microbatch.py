"""How the microbatches of results are joined to the batch's, and its gradients cut again."""

from collections.abc import Mapping, Sequence

import attrs
import torch

from pfeife.frontend.capture import reduced_as
from pfeife.frontend.captured import Captured
from pfeife.frontend.results import Key, index_of
from pfeife.ir.combine import Divisor, add, combined, over
from pfeife.ir.parts import Port, Role


def check_outputs(captured: Captured, reduce: Mapping[Key, str], count: int) -> Captured:
    """The results' reductions with those that `reduce` asks for. Raises ValueError unless it is
    known how to join every result's microbatches."""
    if count > 1:
        _check_kept(captured)
    reductions = {captured.results[_result(key, captured)]: how for key, how in reduce.items()}
    ports = []
    for port in captured.program.outputs:
        if port.role == Role.LOSS and reductions.get(port.name, port.reduction) != port.reduction:
            raise ValueError(
                f"option reduce: the result {captured.label(port.name)!r} is the loss, and its "
                f"microbatches are combined as {port.reduction!r}: say loss_reduction="
                f'"{reductions[port.name]}"'
            )
        if port.role == Role.OUTPUT and port.name in reductions:
            port = reduced_as(port, reductions[port.name])
        if port.role == Role.OUTPUT and _only_kept(captured, port):
            port = reduced_as(port, "last")
        if port.role == Role.OUTPUT and count > 1 and not (port.reduction or _joined(port)):
            raise ValueError(_unjoinable(captured, port))
        ports.append(port)
    return attrs.evolve(captured, program=attrs.evolve(captured.program, outputs=tuple(ports)))


def _only_kept(captured: Captured, port: Port) -> bool:
    """Whether a result is there for an attribute alone, and has neither rows nor the same value in
    every microbatch."""
    joinable = _joined(port) or port.reduction == "same"
    return port.name in captured.kept and not captured.is_returned(port.name) and not joinable


def _check_kept(captured: Captured) -> None:
    """Raises ValueError for state that the step reads and assigns anew, if microbatches cannot
    carry it on."""
    inputs = {port.name: port for port in captured.program.inputs}
    outputs = {port.name: port for port in captured.program.outputs}
    updated = {port.fqn for port in captured.program.ports(Role.BUFFER_UPDATE)}
    for decides in captured.assumed:
        if inputs[decides].fqn in updated:
            raise ValueError(
                f"the step takes another way for other values of {inputs[decides].fqn}, and "
                "changes it: what the first microbatch does may be wrong for the next. Where this "
                "makes something ready for the first step, call the model once before it is "
                "compiled; else choose with torch.where"
            )
    for moved, to in captured.moved.items():
        if moved in captured.carried:
            raise ValueError(
                f"the step keeps {inputs[moved].fqn} as {to}, and it is another one in every "
                f"microbatch: keep a copy ({to} = {inputs[moved].fqn}.clone())"
            )
    for result, assignment in captured.kept.items():
        # What is carried has a port that the next microbatch reads; all else would be lost.
        for place in assignment.replaces:
            name = captured.arguments[place]
            if name is None or name in captured.carried or inputs[name].role == Role.BATCH:
                continue
            new, old = outputs[result], inputs[name]
            if (new.dtype, new.shape) != (old.dtype, old.shape):
                raise ValueError(
                    f"the step assigns {assignment.name} anew and reads it in the next "
                    f"microbatch, but it was {old.dtype} {list(old.shape)} and becomes {new.dtype} "
                    f"{list(new.shape)}: keep its dtype and shape"
                )
            raise ValueError(
                f"the step assigns {assignment.name} anew, with its gradients, and reads it in the "
                f"next microbatch: detach what is kept ({assignment.name} = value.detach())"
            )


def _result(key: Key, captured: Captured) -> int:
    index = index_of(key, captured.leaves, "option reduce")
    if not 0 <= index < len(captured.results):
        raise ValueError(f"option reduce: there are no results {[index]}")
    return index


def _joined(port: Port) -> bool:
    return port.batch_dim is not None


def _unjoinable(captured: Captured, port: Port) -> str:
    key = captured.label(port.name)
    why = captured.unknown.get(port.name)
    if why and "_local_scalar_dense" in why:  # what `.item()` is in a graph
        return (
            f"result {key!r} of the step is a number that it reads from a tensor, as `.item()` "
            f"does ({why}): return the tensor, and read it outside"
        )
    return (
        f"result {key!r} of the step ({port.dtype} {list(port.shape)}) has no batch dimension of "
        "its own, so its microbatches cannot be joined"
        f"{f' (what it is of the batch is not known, because of {why})' if why else ''}: say how "
        f'with reduce={{{key!r}: "mean"}} or "sum", say that it is the loss with loss={key!r}, '
        "or return the loss alone"
    )


def join(port: Port, values: list[torch.Tensor], divided: Sequence[Divisor]) -> torch.Tensor:
    """A result of the whole batch; `divided` are its divisors (`combine.divisors`)."""
    if port.batch_dim is not None:
        return torch.cat(values, port.batch_dim)
    if len(values) == 1 or port.reduction in ("same", "last"):
        return values[-1].clone()  # the caller may write to it before the backward
    return add(values) if port.reduction == "sum" else combined(values, divided)


def cut(
    port: Port,
    whole: torch.Tensor | None,
    count: int,
    divided: Sequence[Divisor],
    sizes: Mapping[str, int],
) -> Sequence[torch.Tensor]:
    """An output's gradient as the gradients of its microbatches, where the size ports have such
    values."""
    # Nobody asks for the gradient of this result, but the program has a tangent for it.
    if whole is None:
        shape = port.shape_at(sizes)
        return [torch.zeros(shape, dtype=port.dtype, device=port.device)] * count
    # The transpose of `join`: rows go back to their microbatch, a sum's gradient to all of them.
    if port.batch_dim is not None:
        return whole.chunk(count, port.batch_dim)
    if port.reduction == "last":
        return [torch.zeros_like(whole)] * (count - 1) + [whole]
    return [over(whole, by) for by in divided]
