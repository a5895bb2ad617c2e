"""Where the batch is in Dynamo's graph, and how it is cut into microbatches and joined again."""

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.arguments import Argument, describe, fake_like
from pfeife.capture import Captured, trace
from pfeife.options import Options
from pfeife.program import Port, Program, Role, returned


class BatchedGraph:
    """Dynamo's graph and which dimension of what is the batch."""

    def __init__(self, module: fx.GraphModule, examples: Sequence[Any]):
        self.module, self.arguments = module, describe(module, examples)
        nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.shapes = [getattr(n.meta.get("example_value"), "shape", ()) for n in nodes]
        self.results = [n.meta.get("example_value") for n in returned(module)]
        # dynamic=True hands Python floats over as tensors that the graph only asks for their item.
        self.numbers = [
            bool(n.users) and all((u.op, u.target) == ("call_method", "item") for u in n.users)
            for n in nodes
        ]
        self.marked = any(_marks(e) for e in examples)
        self.sizes = self._batch_sizes(examples)
        self.dims = [
            self._dim(argument.names, shape) if argument.role == Role.CONSTANT else None
            for argument, shape in zip(self.arguments, self.shapes, strict=True)
        ]

    def key(self, args: Sequence[Any]) -> tuple:
        """What a program is built for: the shapes, and the numbers that are baked in."""
        return tuple(
            float(value)
            if number
            else tuple(value.shape)
            if isinstance(value, torch.Tensor)
            else int(value)
            for value, number in zip(args, self.numbers, strict=True)
        )

    def _batch_sizes(self, examples: Sequence[Any]) -> list[Any]:
        """The symbolic sizes that count rows: those of the marked dimensions; without marks,
        that of dimension 0 of the first tensor argument where it is symbolic."""
        found: list[Any] = []
        for argument, shape, example in zip(self.arguments, self.shapes, examples, strict=True):
            if argument.role != Role.CONSTANT:
                continue
            dims = _marks(example) if self.marked else ([0] if not found and len(shape) else [])
            found += [shape[dim] for dim in dims if not isinstance(shape[dim], int)]
        return found

    def _dim(self, names: tuple[str, ...], shape: Sequence[Any]) -> int | None:
        dims = [i for i, size in enumerate(shape) if self._is_batch(size)]
        if len(dims) > 1:
            raise ValueError(
                f"input {names[0]}: dimensions {dims} of {tuple(shape)} all look like the batch; "
                "use pfeife.compile, which marks the batch dimension alone (in_dims)"
            )
        return dims[0] if dims else None

    def _is_batch(self, size: Any) -> bool:
        if isinstance(size, int):
            return False
        return any(size.node.expr == batch.node.expr for batch in self.sizes)

    def captured(self, args: Sequence[Any], options: Options) -> Captured:
        """The program at the microbatch's shapes. Raises ValueError if the batch does not
        divide, or the graph was specialised to the full batch."""
        count = options.microbatches
        if count > 1 and all(dim is None for dim in self.dims):
            raise ValueError(
                f"microbatches={count}, but the graph is specialised to this batch: no input has "
                "a symbolic batch dimension. Use pfeife.compile(step, ...), or "
                "torch.compile(..., dynamic=True), or torch._dynamo.mark_dynamic on every batch "
                "input; a batch of one row is always specialised"
            )
        rows = {}
        for argument, dim, value in zip(self.arguments, self.dims, args, strict=True):
            if dim is not None:
                rows[argument.names[0]] = value.shape[dim]
        uneven = {name: size for name, size in rows.items() if size % count}
        if uneven:
            name, size = next(iter(uneven.items()))
            fits = next(n for n in range(count, 0, -1) if size % n == 0)
            raise ValueError(
                f"microbatch: input {name} with {size} rows does not divide into {count} "
                f"microbatches; pass microbatches={fits}, or drop_last=True in the loader"
            )
        each = next(iter(rows.values()), count) // count
        broken = _torch.broken_guard(self.sizes, each)
        if broken:
            raise ValueError(
                f"the step depends on the batch size: with {each} rows a microbatch, {broken} "
                "no longer holds"
            )
        arguments = [
            attrs.evolve(argument, role=None, example=_Number(float(value)))
            if number
            else self._at_microbatch(argument, dim, value, count)
            for argument, dim, value, number in zip(
                self.arguments, self.dims, args, self.numbers, strict=True
            )
        ]
        dims = [
            next((i for i, s in enumerate(getattr(r, "shape", ())) if self._is_batch(s)), None)
            for r in self.results
        ]
        captured = trace(self.module, arguments, options.loss, dims)
        check_outputs(captured.program, options, count)
        return captured

    def _at_microbatch(
        self, argument: Argument, dim: int | None, value: Any, count: int
    ) -> Argument:
        if argument.role is None:
            batch = self._is_batch(argument.example)
            return attrs.evolve(argument, example=int(value) // count if batch else int(value))
        if argument.role != Role.CONSTANT:
            return argument
        shape = [*value.shape]
        if dim is None:
            return attrs.evolve(argument, example=fake_like(argument.example.fake_mode, value))
        shape[dim] //= count
        example = fake_like(argument.example.fake_mode, value, tuple(shape))
        return attrs.evolve(argument, role=Role.BATCH, example=example, batch_dim=dim)


@attrs.frozen
class _Number:
    """A Python float where Dynamo's graph expects a tensor and asks for its item."""

    value: float

    def item(self) -> float:
        return self.value


def _marks(example: Any) -> list[int]:
    return sorted(_torch.marked_dims(example)) if isinstance(example, torch.Tensor) else []


def check_outputs(program: Program, options: Options, count: int) -> None:
    for port in program.ports(Role.OUTPUT):
        index = int(port.name.removeprefix("output_"))
        if count > 1 and port.batch_dim is None and index not in options.reduce:
            raise ValueError(
                f"result {index} of the step ({port.dtype} {list(port.shape)}) has no batch "
                "dimension, so its microbatches cannot be joined: say how with "
                f'reduce={{{index}: "mean"}} or "sum", or return the loss alone'
            )


def join(port: Port, values: list[torch.Tensor], options: Options) -> torch.Tensor:
    if port.batch_dim is not None:
        return torch.cat(values, port.batch_dim)
    if len(values) == 1:
        return values[0]
    total = functools.reduce(torch.add, values)
    how = options.reduce[int(port.name.removeprefix("output_"))]
    return total / len(values) if how == "mean" else total


def cut(
    port: Port, whole: torch.Tensor | None, count: int, options: Options
) -> Sequence[torch.Tensor]:
    """An output's gradient as the gradients of its microbatches."""
    if whole is None:
        return [torch.zeros(port.shape, dtype=port.dtype, device=port.device)] * count
    if port.batch_dim is not None:
        return whole.chunk(count, port.batch_dim)
    how = options.reduce.get(int(port.name.removeprefix("output_")), "sum")
    return [whole / count if how == "mean" else whole] * count
