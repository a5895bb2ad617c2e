"""Where the batch is in Dynamo's graph, and how it is cut into microbatches and joined again."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.arguments import Argument, describe, fake_like, roots
from pfeife.capture import Captured, trace
from pfeife.options import Options
from pfeife.program import Port, Role, returned


class BatchedGraph:
    """Dynamo's graph and which dimension of what is the batch."""

    def __init__(self, module: fx.GraphModule, examples: Sequence[Any]):
        self.module, self.arguments = module, describe(module, examples)
        self.roots = weakref.WeakSet(roots(module))  # the modules that it takes state from
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

    @functools.cached_property
    def dims(self) -> list[int | None]:
        """Where the batch is in every argument, None for nowhere."""
        return [
            self._dim(argument, shape) if argument.role == Role.CONSTANT else None
            for argument, shape in zip(self.arguments, self.shapes, strict=True)
        ]

    def key(self, args: Sequence[Any]) -> tuple:
        """What a program is built for: the shapes, and the numbers that are baked in."""
        return tuple(
            repr(float(value))
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
        inputs = zip(self.arguments, self.shapes, examples, strict=True)
        for argument, shape, example in sorted(inputs, key=lambda item: item[0].position):
            if argument.role != Role.CONSTANT or not argument.given:
                continue
            dims = _marks(example) if self.marked else ([0] if not found and len(shape) else [])
            found += [shape[dim] for dim in dims if not isinstance(shape[dim], int)]
        return found

    def _dim(self, argument: Argument, shape: Sequence[Any]) -> int | None:
        dims = [i for i, size in enumerate(shape) if self._is_batch(size)]
        if len(dims) > 1 or (dims and not argument.given):
            what = f"dimensions {dims} of" if argument.given else "a size of the closed-over tensor"
            raise ValueError(
                f"input {argument.names[0]}: {what} {tuple(shape)} looks like the batch; use "
                "pfeife.compile, which marks the batch dimension alone (in_dims)"
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
        self._check_rows(args, count)
        arguments = [
            attrs.evolve(argument, role=None, example=_Number(float(value)))
            if number
            else self._at_microbatch(argument, dim, value, count)
            for argument, dim, value, number in zip(
                self.arguments, self.dims, args, self.numbers, strict=True
            )
        ]
        dims = [self._result_dim(getattr(result, "shape", ())) for result in self.results]
        captured = trace(self.module, arguments, options.loss, dims)
        check_outputs(captured, options, count)
        return captured

    def _result_dim(self, shape: Sequence[Any]) -> int | None:
        dims = [i for i, size in enumerate(shape) if self._is_batch(size)]
        return dims[0] if len(dims) == 1 else None

    def _check_rows(self, args: Sequence[Any], count: int) -> None:
        rows: dict[str, int] = {}
        each: dict[Any, int] = {}
        for argument, dim, shape, value in zip(
            self.arguments, self.dims, self.shapes, args, strict=True
        ):
            if dim is not None:
                rows[argument.names[0]] = value.shape[dim]
                each[shape[dim].node.expr] = value.shape[dim] // count
        fewest = min(rows.values(), default=1)
        for name, size in rows.items():
            if size % count:
                fits = next(n for n in range(count, 0, -1) if size % n == 0)
                raise ValueError(
                    f"microbatch: input {name} with {size} rows does not divide into {count} "
                    f"microbatches; pass microbatches={fits}, or drop_last=True in the loader"
                )
            if size % fewest:
                raise ValueError(
                    f"microbatch: the inputs have {rows} rows, which do not belong together; say "
                    "with in_dims where the batch is (None: nowhere)"
                )
        broken = _torch.broken_guard(self.sizes, each)
        if broken:
            raise ValueError(
                f"the step depends on the batch size: with {sorted(set(each.values()))} rows a "
                f"microbatch, {broken} no longer holds"
            )

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


def check_outputs(captured: Captured, options: Options, count: int) -> None:
    """Raises ValueError unless it is known how to join every result's microbatches."""
    program = captured.program
    beyond = sorted(index for index in options.reduce if index >= len(captured.results))
    if beyond:
        raise ValueError(f"option reduce: there are no results {beyond}")
    for port in program.ports(Role.LOSS):
        if options.reduce.get(captured.results.index(port.name), "mean") != "mean":
            raise ValueError(
                "option reduce: the loss of a call is the mean of the microbatch losses; divide a "
                "sum by the number of rows of the whole batch, or compile the model alone"
            )
    for port in program.ports(Role.OUTPUT):
        index = captured.results.index(port.name)
        if count > 1 and port.batch_dim is None and index not in options.reduce:
            raise ValueError(
                f"result {index} of the step ({port.dtype} {list(port.shape)}) has no batch "
                "dimension of its own, so its microbatches cannot be joined: say how with "
                f'reduce={{{index}: "mean"}} or "sum", say that it is the loss with loss={index}, '
                "or return the loss alone (a buffer that the step assigns anew is a result too: "
                "change it in place)"
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
