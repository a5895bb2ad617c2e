"""Where the batch is in Dynamo's graph, and how it is cut into microbatches and joined again."""

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.arguments import Argument, describe, fake_like
from pfeife.capture import Captured, trace, with_reductions
from pfeife.evaluate import Divisor, add, combined, over
from pfeife.options import Options
from pfeife.program import Port, Role, returned
from pfeife.results import Key, Loss, index_of, label, leaves_of


class BatchedGraph:
    """Dynamo's graph and which dimension of what is the batch."""

    def __init__(
        self,
        module: fx.GraphModule,
        examples: Sequence[Any],
        losses: dict[Any, Key] | None = None,
    ):
        """`losses` has what was the loss of frames seen with gradients; it is added to."""
        self.module, self.arguments = module, describe(module, examples)
        self.leaves, self.frame = leaves_of(module), _torch.frame()
        self.losses = {} if losses is None else losses
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
        loss = self._loss(options)
        captured = with_reductions(
            self._at(args, count, loss),
            options.loss_reduction,
            lambda: self._at(args, count, loss, times=2).program,
        )
        if captured.program.ports(Role.TANGENT) and "loss" in captured.results:
            self.losses[self.frame] = captured.label("loss")
        return check_outputs(captured, options, count)

    def _loss(self, options: Options) -> Loss:
        """What was asked for; without gradients also what the step's loss was with them."""
        if options.loss is not None or torch.is_grad_enabled():
            return options.loss
        scalars = [
            index
            for index, value in enumerate(self.results)
            if isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point()
        ]
        named = [label(index, self.leaves) for index in scalars]
        seen = self.losses.get(self.frame)
        if seen in named:
            return seen
        return named[0] if len(named) == 1 and options.loss_reduction != "auto" else None

    def _at(self, args: Sequence[Any], count: int, loss: Loss, times: int = 1) -> Captured:
        """The program of one of `count` microbatches, or of one that is so many times as large."""
        arguments = [
            attrs.evolve(argument, role=None, example=_Number(float(value)))
            if number
            else self._at_microbatch(argument, dim, value, count, times)
            for argument, dim, value, number in zip(
                self.arguments, self.dims, args, self.numbers, strict=True
            )
        ]
        dims = [self._result_dim(getattr(result, "shape", ())) for result in self.results]
        return trace(self.module, arguments, loss, dims, self.leaves)

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
        self, argument: Argument, dim: int | None, value: Any, count: int, times: int
    ) -> Argument:
        if argument.role is None:
            batch = self._is_batch(argument.example)
            each = int(value) // count * times if batch else int(value)
            return attrs.evolve(argument, example=each)
        if argument.role != Role.CONSTANT:
            return argument
        shape = [*value.shape]
        if dim is None:
            return attrs.evolve(argument, example=fake_like(argument.example.fake_mode, value))
        shape[dim] = shape[dim] // count * times
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


def check_outputs(captured: Captured, options: Options, count: int) -> Captured:
    """The results' reductions with those that the options ask for. Raises ValueError unless it is
    known how to join every result's microbatches."""
    asked = {captured.results[_result(key, captured)]: how for key, how in options.reduce.items()}
    ports = []
    for port in captured.program.outputs:
        if port.role == Role.LOSS and asked.get(port.name, port.reduction) != port.reduction:
            raise ValueError(
                f"option reduce: the result {captured.label(port.name)!r} is the loss, and its "
                f"microbatches are combined as {port.reduction!r}: say loss_reduction="
                f'"{asked[port.name]}"'
            )
        if port.role == Role.OUTPUT and port.name in asked:
            how: Any = asked[port.name]
            port = attrs.evolve(port, reduction=how, counts=(), batch_dim=None)
        if port.role == Role.OUTPUT and count > 1 and not (port.reduction or _joined(port)):
            raise ValueError(_unjoinable(captured, port))
        ports.append(port)
    return attrs.evolve(captured, program=attrs.evolve(captured.program, outputs=tuple(ports)))


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
    return (
        f"result {key!r} of the step ({port.dtype} {list(port.shape)}) has no batch dimension of "
        "its own, so its microbatches cannot be joined"
        f"{f' (what it is of the batch is not known, because of {why})' if why else ''}: say how "
        f'with reduce={{{key!r}: "mean"}} or "sum", say that it is the loss with loss={key!r}, '
        "or return the loss alone (a buffer that the step assigns anew is a result too: "
        "change it in place)"
    )


def join(port: Port, values: list[torch.Tensor], divided: Sequence[Divisor]) -> torch.Tensor:
    """A result of the whole batch; `divided` are its divisors (`evaluate.divisors`)."""
    if port.batch_dim is not None:
        return torch.cat(values, port.batch_dim)
    if len(values) == 1 or port.reduction == "same":
        return values[0]
    return add(values) if port.reduction == "sum" else combined(values, divided)


def cut(
    port: Port, whole: torch.Tensor | None, count: int, divided: Sequence[Divisor]
) -> Sequence[torch.Tensor]:
    """An output's gradient as the gradients of its microbatches."""
    if whole is None:
        return [torch.zeros(port.shape, dtype=port.dtype, device=port.device)] * count
    if port.batch_dim is not None:
        return whole.chunk(count, port.batch_dim)
    return [over(whole, by) for by in divided]
