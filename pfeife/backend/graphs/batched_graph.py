"""Dynamo's graph of the whole batch, whose rows are a symbol."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import fx

from pfeife import _torch
from pfeife.backend.graphs.step_graph import Graph, Losses, shapes_of
from pfeife.backend.settings.options import Options
from pfeife.frontend.aot.joint import trace
from pfeife.frontend.arguments import Argument, fake_like, with_open_sizes
from pfeife.frontend.cache.capture_cache import Folder
from pfeife.frontend.capture import with_reductions
from pfeife.frontend.captured import Captured
from pfeife.frontend.describe import describe
from pfeife.frontend.dynamo import dynamo_forward
from pfeife.frontend.microbatch import check_outputs
from pfeife.frontend.results import Key, Loss
from pfeife.ir.nodes import returned, source_line
from pfeife.ir.parts import Role

log = logging.getLogger("pfeife")


class BatchedGraph(Graph):
    """Dynamo's graph of the whole batch, whose rows are a symbol. Raises ValueError where it
    cannot be told which symbol that is."""

    def __init__(
        self, module: fx.GraphModule, examples: Sequence[Any], losses: dict[Any, Key] | None = None
    ):
        self.module, self.inputs = module, describe(module, examples, whole=True)
        nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.examples = [node.meta.get("example_value") for node in nodes]
        self.shapes: list[Sequence[Any]] = [getattr(each, "shape", ()) for each in self.examples]
        self.step = dynamo_forward(module)
        self.losses = Losses(self.step, {} if losses is None else losses, _torch.frame())
        # dynamic=True hands Python floats over as tensors that the graph only asks for their item.
        self.numbers = [
            bool(n.users) and all((u.op, u.target) == ("call_method", "item") for u in n.users)
            for n in nodes
        ]
        # Who has marked a dimension has said where the batch is; else it is taken for dimension 0,
        # which the first call has to bear out.
        self.marked = self.sure = any(_marks(e) for e in examples)
        self.said = True  # what is not marked is refused
        self.shows = True  # a run may show where rows are, if no rule tells it
        self.sizes = self._batch_sizes(examples)
        sizes = enumerate(argument.example for argument in self.inputs.arguments)
        self.counting = [index for index, size in sizes if self._counts(size)]

    @functools.cached_property
    def dims(self) -> Sequence[int | None]:
        """Where the batch is in every argument, None for nowhere."""
        return [
            self._dim(argument, shape) if argument.role == Role.CONSTANT else None
            for argument, shape in zip(self.inputs.arguments, self.shapes, strict=True)
        ]

    def key(self, args: Sequence[Any]) -> tuple:
        """What a program is built for, beside the sizes that it assumes: the numbers that are
        baked in."""
        pairs = zip(args, self.numbers, strict=True)
        return tuple(repr(float(value)) for value, number in pairs if number)

    def check(self, args: Sequence[Any], options: Options) -> None:
        """Raises ValueError for a call whose rows do not belong together or do not divide."""
        if options.cut > 1:
            _check_rows(self._rows(args), options.cut, options.apart)

    def _rows(self, args: Sequence[Any]) -> dict[str, int]:
        """How many rows each tensor of the batch has, in the order of the arguments."""
        rows: dict[str, int] = {}
        inputs = zip(self.inputs.arguments, self.dims, self.shapes, args, strict=True)
        for argument, dim, shape, value in sorted(inputs, key=lambda item: item[0].position):
            if argument.role == Role.CONSTANT and argument.given and len(shape):
                if not self.marked:
                    rows[argument.names[0]] = value.shape[0]
                elif dim is not None:
                    rows[argument.names[0]] = value.shape[dim]
        return rows

    def _batch_sizes(self, examples: Sequence[Any]) -> list[Any]:
        """The symbolic sizes that count rows: those of the marked dimensions; without marks,
        that of dimension 0 of the tensor arguments."""
        triples = zip(self.inputs.arguments, self.shapes, examples, strict=True)
        sizes = [
            shape[dim]
            for argument, shape, example in triples
            if argument.role == Role.CONSTANT and argument.given and len(shape)
            for dim in (_marks(example) if self.marked else [0])
        ]
        return [size for size in sizes if not isinstance(size, int)]

    def _dim(self, argument: Argument, shape: Sequence[Any]) -> int | None:
        dims = [i for i, size in enumerate(shape) if self._is_batch(size)]
        # A sequence may be as long as the batch has rows: then both have one symbol, and nobody can
        # tell them apart.
        if len(dims) > 1 or (dims and not argument.given):
            what = f"dimensions {dims} of" if argument.given else "a size of the closed-over tensor"
            raise ValueError(
                f"input {argument.names[0]}: {what} {tuple(shape)} looks like the batch; say "
                "where it is with torch._dynamo.mark_dynamic, or use pfeife.compile, which cuts "
                "the batch before it is captured (in_dims)"
            )
        return dims[0] if dims else None

    def _counts(self, value: Any) -> bool:
        """Whether an argument is the number of rows."""
        return isinstance(value, torch.SymInt) and self._is_batch(value)

    def _is_batch(self, size: Any) -> bool:
        if isinstance(size, int):
            return False
        # By expression, not by value: two sizes that happen to be equal in this call have symbols
        # of their own.
        return any(size.node.expr == batch.node.expr for batch in self.sizes)

    def capture(self, args: Sequence[Any], options: Options) -> Captured:
        """The program at the microbatch's shapes. Raises ValueError if the batch does not
        divide, or the graph was specialised to the full batch."""
        count = options.cut
        # Dynamo makes a size a number where it has seen no other one yet, and where it is 0 or 1:
        # such a graph holds for these rows alone.
        if count > 1 and all(dim is None for dim in self.dims):
            raise ValueError(
                f"microbatches={count}, but the graph is specialised to this batch: no input has "
                "a symbolic batch dimension. Use pfeife.compile(step, ...), or "
                "torch.compile(..., dynamic=True), or torch._dynamo.mark_dynamic on every batch "
                "input; a batch of one row is always specialised"
            )
        if count > 1:
            _check_rows(self._rows(args), count, options.apart)
            self._check_asked(args, count)
            _check_pairs(self.module, self._is_batch)
        try:
            if self.is_open:
                # A program for all sizes first: it spares a build for each length that comes. Not
                # every step has one.
                captured = self._captured(args, options, is_open=True)
                if not captured.breaks(args, count):
                    return captured
        except ValueError as error:
            log.debug("a program for each size, since there is none for all: %s", error)
        return attrs.evolve(self._captured(args, options), at=shapes_of(args, self.dims, count))

    @functools.cached_property
    def is_open(self) -> bool:
        """Whether any sizes are left open."""
        return any(not isinstance(size, int) for shape in self.shapes for size in shape)

    def _captured(self, args: Sequence[Any], options: Options, is_open: bool = False) -> Captured:
        """The program of a microbatch, for the sizes of a call or, `is_open`, for all."""
        loss, count = self.losses.asked(options), options.cut
        at = functools.partial(self._at, args, count, loss, cache=options.cache)
        captured = with_reductions(
            at(is_open=is_open),
            options.loss_reduction,
            lambda gradients, times: at(times=times, gradients=gradients).program,
            args if count > 1 and self.shows and options.check else None,
            lambda: at(gradients=False).program,
        )
        self.losses.note(captured)
        return check_outputs(captured, options.reduce, options.microbatches)

    def _at(
        self,
        args: Sequence[Any],
        count: int,
        loss: Loss,
        times: int = 1,
        gradients: bool = True,
        cache: Folder = None,
        is_open: bool = False,
    ) -> Captured:
        """The program of one of `count` microbatches, or of one that is so many times as large."""
        arguments = [
            attrs.evolve(argument, role=None, example=_Number(float(value)))
            if number
            else self._at_microbatch(argument, dim, value, count, times)
            for argument, dim, value, number in zip(
                self.inputs.arguments, self.dims, args, self.numbers, strict=True
            )
        ]
        inputs = attrs.evolve(self.inputs, arguments=arguments)
        if is_open:
            inputs = with_open_sizes(inputs, self.examples, self.sizes)
        dims = [self._result_dim(_shape(node)) for node in returned(self.module)]
        return trace(self.step, inputs, loss, dims, gradients, cache)

    def _result_dim(self, shape: Sequence[Any]) -> int | None:
        dims = [i for i, size in enumerate(shape) if self._is_batch(size)]
        return dims[0] if len(dims) == 1 else None

    def _check_asked(self, args: Sequence[Any], count: int) -> None:
        """Raises ValueError if what Python has asked of the rows of the batch is not so for those
        of a microbatch."""
        triples = zip(self.dims, self.shapes, args, strict=True)
        # Dynamo has recorded what the step asked of the sizes of the whole batch. These guards have
        # to hold for a microbatch too, as its rows are the ones that the program computes with.
        each = {s[dim].node.expr: v.shape[dim] // count for dim, s, v in triples if dim is not None}
        broken = _torch.broken_guard(self.sizes, each)
        if broken:
            raise ValueError(
                f"the step depends on the batch size: with {sorted(set(each.values()))} rows a "
                f"microbatch, {broken} no longer holds. If that is a kernel's choice rather than "
                "the step's, pfeife.compile captures the step at a microbatch's size"
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
        # Several times as many rows tell which dimensions of the results grow with them.
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


def _check_rows(rows: Mapping[str, int], count: int, apart: int) -> None:
    """Raises ValueError unless all tensor arguments have as many rows, and these divide; `apart`
    replicas are given rows of their own."""
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"microbatch: the inputs have {rows} rows, which do not belong together: backend="
            '"pfeife" cuts every tensor argument along dimension 0. Use pfeife.compile and say '
            "with in_dims where the batch is (None: nowhere)"
        )
    for name, size in rows.items():
        if size % count:
            divides = next(n for n in range(count, 0, -1) if size % n == 0)
            raise ValueError(
                f"microbatch: input {name} with {size} rows does not divide into {count} "
                f"microbatches{' of each replica' if apart > 1 else ''}; pass "
                f"microbatches={divides * apart}, or drop_last=True in the loader"
            )


def _check_pairs(module: fx.GraphModule, is_batch: Callable[[Any], bool]) -> None:
    """Raises ValueError if something has a number for every pair of rows: then the dimension may be
    another one than the batch, such as that of a sequence."""
    for node in module.graph.nodes:
        pairs = sum(map(is_batch, _shape(node))) > 1
        if node.target is F.scaled_dot_product_attention:  # makes none that could be seen
            pairs = is_batch(_shape(node.args[0])[-2])
        if pairs:
            raise ValueError(
                f"{source_line(node)} computes something for every pair of rows of dimension "
                "0, so this may not be the batch. Use pfeife.compile and say with in_dims "
                "where the batch is"
            )


def _shape(node: fx.Node) -> Sequence[Any]:
    """The shape of what a node of Dynamo's graph computes, () if it is no tensor."""
    return tuple(getattr(node.meta.get("example_value"), "shape", ()))
