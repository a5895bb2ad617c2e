"""Dynamo's graph of a step, where the batch is in it, and its program of one microbatch."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
import torch.nn.functional as F
from torch import fx

from pfeife import _torch
from pfeife.backend.settings.options import Options
from pfeife.frontend.arguments import (
    Argument,
    Inputs,
    at_sizes,
    fake_like,
    with_open_sizes,
)
from pfeife.frontend.cache.capture_cache import Folder
from pfeife.frontend.capture import with_flags, with_reductions
from pfeife.frontend.captured import Captured, Door, part_shape
from pfeife.frontend.checks.check_capture import Doubled
from pfeife.frontend.describe import describe
from pfeife.frontend.dynamo import dynamo_forward
from pfeife.frontend.forward import Forward
from pfeife.frontend.joint import trace
from pfeife.frontend.microbatch import check_outputs
from pfeife.frontend.results import Key, Loss, label
from pfeife.ir.nodes import returned, source_line
from pfeife.ir.parts import Role
from pfeife.ir.sizes import captured_sizes, is_open

log = logging.getLogger("pfeife")


class Graph(Protocol):
    """Dynamo's graph, and how it is captured as a program of one microbatch."""

    step: Forward
    inputs: Inputs
    sure: bool  # whether what is cut is taken for the batch
    said: bool  # whether the caller has said that it is, if rows depend on one another
    counting: Sequence[int]  # which arguments are the number of rows
    doubled: Doubled | None  # runs the step on twice the rows, where `step` does not

    @property
    def dims(self) -> Sequence[int | None]:
        """Where the batch is in every argument, None for nowhere."""

    def key(self, args: Sequence[Any]) -> tuple:
        """What a program is built for."""

    def check(self, args: Sequence[Any], options: Options) -> None:
        """Raises ValueError for a call that cannot be cut into microbatches."""

    def capture(self, args: Sequence[Any], options: Options) -> Captured:
        """The program; raises ValueError for a graph that cannot be cut into microbatches."""

    def check_unseen(self, captured: Captured) -> None:
        """Raises ValueError for what must not be cut unless the first call has been checked."""


class Losses:
    """Which result of a graph is the loss; what it was with gradients is known without them."""

    def __init__(self, step: Forward, known: dict[Any, Key], frame: Any):
        self.leaves, self.results = step.leaves, step.results
        self.frame, self.known = frame, known

    def asked(self, options: Options) -> Loss:
        """What was asked for; without gradients also what the step's loss was with them."""
        if options.loss is not None or torch.is_grad_enabled():
            return options.loss
        scalars = [
            index
            for index, value in enumerate(self.results)
            if isinstance(value, torch.Tensor)
            and not value.dim()
            and value.is_floating_point()
            and (self.leaves is None or any(leaf.index == index for leaf in self.leaves))
        ]
        named = [label(index, self.leaves) for index in scalars]
        seen = self.known.get(self.frame)
        if seen in named:
            return seen
        return named[0] if len(named) == 1 and options.loss_reduction != "auto" else None

    def note(self, captured: Captured) -> None:
        """Remembers the loss of a program with gradients."""
        if captured.program.ports(Role.TANGENT) and "loss" in captured.results:
            self.known[self.frame] = captured.label("loss")


class MicrobatchGraph:
    """A step at the shapes of a microbatch; `grown` gives it and its inputs for a microbatch with
    so many times as many rows. `door` is how it was captured; `said` whether the caller has said
    where the batch is."""

    def __init__(
        self,
        step: Forward,
        inputs: Inputs,
        grown: Callable[[int], tuple[Forward, Inputs]],
        losses: Losses,
        door: Door,
        said: bool,
        doubled: Doubled | None = None,
    ):
        self.step, self.inputs, self.grown, self.losses = step, inputs, grown, losses
        self.doubled = doubled
        self.counting: Sequence[int] = ()
        self.sure, self.door, self.said = True, door, said
        self.dims: Sequence[int | None] = [one.batch_dim for one in self.inputs.arguments]

    def key(self, args: Sequence[Any]) -> tuple:
        """What a program is built for, beside the shapes and numbers that are guarded."""
        return ()

    def capture(self, args: Sequence[Any], options: Options) -> Captured:
        """The program, for all sizes of its arguments that are open; where there is none, for those
        of the call. Raises ValueError for results that cannot be joined, NotOpen for a trace with
        open sizes of which there is no program for all of them."""
        inputs = self.inputs
        if any(argument.role == Role.SIZE or _is_open(argument) for argument in inputs.arguments):
            shapes = _shapes(args, self.dims, options.cut)
            if self.door == "dynamo":  # else it was traced for the sizes of this call
                inputs = at_sizes(inputs, shapes)
            try:
                captured = self._captured(inputs, args, options)
                broken = captured.breaks(args, options.cut)
                if captured_sizes(captured.program) != captured.sizes(args, options.cut):
                    broken = broken or "it was traced for the sizes of another call"
                if not broken:
                    return captured
            except ValueError as error:
                broken = str(error)
            log.debug("a program for each size, since there is none for all: %s", broken)
            if self.door == "trace":  # in which answers are those for the sizes of its call
                raise NotOpen(broken)
            inputs = self._fixed(args, options)
            return attrs.evolve(self._captured(inputs, args, options), at=shapes)
        return self._captured(inputs, args, options)

    def _fixed(self, args: Sequence[Any], options: Options) -> Inputs:
        """The inputs of the first microbatch of a call, for no other sizes."""
        examples = (argument.example for argument in self.inputs.arguments)
        mode = next(one.fake_mode for one in examples if isinstance(one, _torch.FakeTensor))
        shapes = _shapes(args, self.dims, options.cut)
        return at_sizes(self.inputs, shapes, fixed=True, mode=mode)

    def _captured(self, inputs: Inputs, args: Sequence[Any], options: Options) -> Captured:
        if options.microbatches > 1 and all(dim is None for dim in self.dims):
            raise ValueError(
                f"microbatches={options.microbatches}, but the step is given no tensor that could "
                "be cut: pass the batch as arguments, and say with in_dims where it is"
            )
        loss = self.losses.asked(options)
        larger = functools.cache(self.grown)
        if options.microbatches > 1 and self.inputs.numbers:
            self._check_numbers(larger(2)[1].numbers)
        captured = trace(self.step, inputs, loss, cache=options.cache)
        if captured.program.ports(Role.SIZE) and not is_open(captured.program):
            raise ValueError("torch takes each of its sizes for a number")
        captured = with_reductions(
            captured,
            options.loss_reduction,
            lambda gradients, times: (
                trace(*larger(times), loss, gradients=gradients, cache=options.cache).program
            ),
            args if options.cut > 1 and options.check else None,
            lambda: trace(self.step, self._fixed(args, options), loss, gradients=False).program,
        )
        captured = with_flags(captured, inputs.flags)
        captured = attrs.evolve(captured, door=self.door)
        self.losses.note(captured)
        if any(port.shape and port.name in captured.unknown for port in captured.program.outputs):
            captured = self._with_dims(captured, larger(2)[0])
        return check_outputs(captured, options.reduce, options.microbatches)

    def check_unseen(self, captured: Captured) -> None:
        """Nothing: the caller has said where the batch is."""

    def check(self, args: Sequence[Any], options: Options) -> None:
        """Nothing: the batch was cut before the step was captured."""

    def _check_numbers(self, others: Mapping[str, Any]) -> None:
        """Raises ValueError for a number that the step assigns and that is another one with more
        rows."""
        for name, value in self.inputs.numbers.items():
            if name not in others or others[name] != value:
                raise ValueError(
                    f"the step assigns {value!r} to {name}, which Python has computed from the "
                    "size of one microbatch: assign it outside of the step, where the whole batch "
                    "is, or compute it with tensors"
                )

    def _with_dims(self, captured: Captured, other: Forward) -> Captured:
        """The same with the dimension that grows with the rows (as `other` tells, the step for
        more of them), in those results of which their operations do not tell it."""
        dims = dict(zip(captured.results, grown_dims(self.step, other), strict=True))
        outputs = [
            attrs.evolve(port, batch_dim=dims[port.name])
            if port.role == Role.OUTPUT and port.name in captured.unknown
            else port
            for port in captured.program.outputs
        ]
        return attrs.evolve(
            captured, program=attrs.evolve(captured.program, outputs=tuple(outputs))
        )


def _shapes(args: Sequence[Any], dims: Sequence[int | None], count: int) -> tuple[Any, ...]:
    """The shapes of the first of so many microbatches of a call, and the call's numbers."""
    return tuple(
        part_shape(value.shape, dim, count) if isinstance(value, torch.Tensor) else value
        for value, dim in zip(args, dims, strict=True)
    )


def _is_open(argument: Argument) -> bool:
    """Whether a tensor has symbolic sizes."""
    example = argument.example
    return isinstance(example, torch.Tensor) and any(type(n) is not int for n in example.shape)


def grown_dims(step: Forward, other: Forward) -> list[int | None]:
    """Where the batch is in the results of a step: the only dimension that grows with the number of
    rows."""
    pairs = zip(step.results, other.results, strict=True)
    return [_grown(one.shape, grown.shape) for one, grown in pairs]


def _shape(node: fx.Node) -> Sequence[Any]:
    """The shape of what a node of Dynamo's graph computes, () if it is no tensor."""
    return tuple(getattr(node.meta.get("example_value"), "shape", ()))


def _grown(shape: Sequence[int], other: Sequence[int]) -> int | None:
    grown = [i for i, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 else None


class NotOpen(ValueError):
    """Raised for a trace with open sizes of which there is no program; what is traced for those of
    a call alone may still have one."""


class BatchedGraph:
    """Dynamo's graph of the whole batch, whose rows are a symbol. Raises ValueError where it
    cannot be told which symbol that is."""

    def __init__(
        self,
        module: fx.GraphModule,
        examples: Sequence[Any],
        losses: dict[Any, Key] | None = None,
    ):
        self.module, self.inputs = module, describe(module, examples, whole=True)
        nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.known = [node.meta.get("example_value") for node in nodes]
        self.shapes: list[Sequence[Any]] = [getattr(one, "shape", ()) for one in self.known]
        self.step = dynamo_forward(module)
        self.losses = Losses(self.step, {} if losses is None else losses, _torch.frame())
        # dynamic=True hands Python floats over as tensors that the graph only asks for their item.
        self.numbers = [
            bool(n.users) and all((u.op, u.target) == ("call_method", "item") for u in n.users)
            for n in nodes
        ]
        self.marked = self.sure = any(_marks(e) for e in examples)
        self.said = True  # what is not marked is refused
        self.doubled: Doubled | None = None
        self.shows = True  # a run may show where rows are, if no rule tells it
        self.sizes = self._batch_sizes(examples)
        sizes = enumerate(argument.example for argument in self.inputs.arguments)
        self.counting: Sequence[int] = [index for index, size in sizes if self._counts(size)]

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
            self._check_rows(args, options.cut, options.apart)

    def _batch_sizes(self, examples: Sequence[Any]) -> list[Any]:
        """The symbolic sizes that count rows: those of the marked dimensions; without marks,
        that of dimension 0 of the tensor arguments."""
        given = [
            (argument, shape, example)
            for argument, shape, example in zip(
                self.inputs.arguments, self.shapes, examples, strict=True
            )
            if argument.role == Role.CONSTANT and argument.given and len(shape)
        ]
        if self.marked:
            found = [shape[dim] for _, shape, example in given for dim in _marks(example)]
        else:
            found = [shape[0] for _, shape, _ in given]
        return [size for size in found if not isinstance(size, int)]

    def _dim(self, argument: Argument, shape: Sequence[Any]) -> int | None:
        dims = [i for i, size in enumerate(shape) if self._is_batch(size)]
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
        return any(size.node.expr == batch.node.expr for batch in self.sizes)

    def capture(self, args: Sequence[Any], options: Options) -> Captured:
        """The program at the microbatch's shapes. Raises ValueError if the batch does not
        divide, or the graph was specialised to the full batch."""
        count = options.cut
        if count > 1 and all(dim is None for dim in self.dims):
            raise ValueError(
                f"microbatches={count}, but the graph is specialised to this batch: no input has "
                "a symbolic batch dimension. Use pfeife.compile(step, ...), or "
                "torch.compile(..., dynamic=True), or torch._dynamo.mark_dynamic on every batch "
                "input; a batch of one row is always specialised"
            )
        if count > 1:
            self._check_rows(args, count, options.apart)
            self._check_asked(args, count)
            self._check_pairs()
        try:
            if self.is_open:
                captured = self._captured(args, options, is_open=True)
                if not captured.breaks(args, count):
                    return captured
        except ValueError as error:
            log.debug("a program for each size, since there is none for all: %s", error)
        return attrs.evolve(self._captured(args, options), at=_shapes(args, self.dims, count))

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

    def check_unseen(self, captured: Captured) -> None:
        """Nothing: such a step is taken at the caller's word."""

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
            inputs = with_open_sizes(inputs, self.known, self.sizes)
        dims = [self._result_dim(_shape(node)) for node in returned(self.module)]
        return trace(self.step, inputs, loss, dims, gradients, cache)

    def _result_dim(self, shape: Sequence[Any]) -> int | None:
        dims = [i for i, size in enumerate(shape) if self._is_batch(size)]
        return dims[0] if len(dims) == 1 else None

    def _check_rows(self, args: Sequence[Any], count: int, apart: int) -> None:
        """Raises ValueError unless all tensor arguments have as many rows, and these divide;
        `apart` replicas are given rows of their own."""
        rows: dict[str, int] = {}
        inputs = zip(self.inputs.arguments, self.dims, self.shapes, args, strict=True)
        for argument, dim, shape, value in sorted(inputs, key=lambda item: item[0].position):
            if argument.role == Role.CONSTANT and argument.given and len(shape):
                if not self.marked:
                    rows[argument.names[0]] = value.shape[0]
                elif dim is not None:
                    rows[argument.names[0]] = value.shape[dim]
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

    def _check_asked(self, args: Sequence[Any], count: int) -> None:
        """Raises ValueError if what Python has asked of the rows of the batch is not so for those
        of a microbatch."""
        triples = zip(self.dims, self.shapes, args, strict=True)
        each = {s[dim].node.expr: v.shape[dim] // count for dim, s, v in triples if dim is not None}
        broken = _torch.broken_guard(self.sizes, each)
        if broken:
            raise ValueError(
                f"the step depends on the batch size: with {sorted(set(each.values()))} rows a "
                f"microbatch, {broken} no longer holds. If that is a kernel's choice rather than "
                "the step's, pfeife.compile captures the step at a microbatch's size"
            )

    def _check_pairs(self) -> None:
        """Raises ValueError if something has a number for every pair of rows: then the dimension
        may be another one than the batch, such as that of a sequence."""
        for node in self.module.graph.nodes:
            pairs = sum(self._is_batch(size) for size in _shape(node)) > 1
            if node.target is F.scaled_dot_product_attention:  # makes none that could be seen
                pairs = self._is_batch(_shape(node.args[0])[-2])
            if pairs:
                raise ValueError(
                    f"{source_line(node)} computes something for every pair of rows of dimension "
                    "0, so this may not be the batch. Use pfeife.compile and say with in_dims "
                    "where the batch is"
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
