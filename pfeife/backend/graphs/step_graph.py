"""A step as a graph, and its program of one microbatch."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from pfeife import _torch
from pfeife.backend.settings.options import Options
from pfeife.frontend.aot.joint import trace
from pfeife.frontend.arguments import Argument, Inputs, at_sizes
from pfeife.frontend.capture import with_flags, with_reductions
from pfeife.frontend.captured import Captured, Door, part_shape
from pfeife.frontend.checks.check_capture import Doubled
from pfeife.frontend.forward import Forward
from pfeife.frontend.microbatch import check_outputs
from pfeife.frontend.results import Key, Loss, label
from pfeife.ir.parts import Role, captured_sizes
from pfeife.ir.sizes import is_open

log = logging.getLogger("pfeife")


class Graph:
    """A step as a graph, and how it is captured as a program of one microbatch."""

    step: Forward
    inputs: Inputs
    sure: bool  # whether what is cut is taken for the batch
    said: bool  # whether the caller has said that it is, if rows depend on one another
    counting: Sequence[int] = ()  # which arguments are the number of rows
    doubled: Doubled | None = None  # runs the step on twice the rows, where `step` does not

    @functools.cached_property
    def dims(self) -> Sequence[int | None]:
        """Where the batch is in every argument, None for nowhere."""
        return [argument.batch_dim for argument in self.inputs.arguments]

    def key(self, args: Sequence[Any]) -> tuple:
        """What a program is built for, beside the shapes and numbers that are guarded."""
        return ()

    def check(self, args: Sequence[Any], options: Options) -> None:
        """Raises ValueError for a call that cannot be cut into microbatches."""

    def capture(self, args: Sequence[Any], options: Options) -> Captured:
        """The program; raises ValueError for a graph that cannot be cut into microbatches."""
        raise NotImplementedError

    def check_unseen(self, captured: Captured) -> None:
        """Raises ValueError for what must not be cut unless the first call has been checked."""


class Losses:
    """Which result of a graph is the loss; what it was with gradients is known without them."""

    def __init__(self, step: Forward, losses: dict[Any, Key], frame: Any):
        self.leaves, self.results = step.leaves, step.results
        self.frame, self.losses = frame, losses

    def asked(self, options: Options) -> Loss:
        """What was asked for; without gradients also what the step's loss was with them."""
        # With gradients the loss is found by what is differentiable; without, nothing is, and
        # evaluation has to join it as training does.
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
        seen = self.losses.get(self.frame)
        if seen in named:
            return seen
        return named[0] if len(named) == 1 and options.loss_reduction != "auto" else None

    def note(self, captured: Captured) -> None:
        """Remembers the loss of a program with gradients."""
        if captured.program.ports(Role.TANGENT) and "loss" in captured.results:
            self.losses[self.frame] = captured.label("loss")


class MicrobatchGraph(Graph):
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
        self.sure, self.door, self.said = True, door, said

    def capture(self, args: Sequence[Any], options: Options) -> Captured:
        """The program, for all sizes of its arguments that are open; where there is none, for those
        of the call. Raises ValueError for results that cannot be joined, NotOpen for a trace with
        open sizes of which there is no program for all of them."""
        arguments = self.inputs.arguments
        if not any(argument.role == Role.SIZE or _is_open(argument) for argument in arguments):
            return self._captured(self.inputs, args, options)
        shapes = shapes_of(args, self.dims, options.cut)
        # A trace was made for the sizes of this call; Dynamo's graph may be of an earlier one.
        inputs = at_sizes(self.inputs, shapes) if self.door == "dynamo" else self.inputs
        try:
            captured = self._captured(inputs, args, options)
            # torch may have taken a size for a number on the way, so that the program holds for no
            # other.
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
        captured = self._captured(self._fixed(args, options), args, options)
        return attrs.evolve(captured, at=shapes)

    def _fixed(self, args: Sequence[Any], options: Options) -> Inputs:
        """The inputs of the first microbatch of a call, for no other sizes."""
        examples = (argument.example for argument in self.inputs.arguments)
        mode = next(each.fake_mode for each in examples if isinstance(each, _torch.FakeTensor))
        shapes = shapes_of(args, self.dims, options.cut)
        return at_sizes(self.inputs, shapes, fixed=True, mode=mode)

    def _captured(self, inputs: Inputs, args: Sequence[Any], options: Options) -> Captured:
        if options.microbatches > 1 and all(dim is None for dim in self.dims):
            raise ValueError(
                f"microbatches={options.microbatches}, but the step is given no tensor that could "
                "be cut: pass the batch as arguments, and say with in_dims where it is"
            )
        loss = self.losses.asked(options)
        # Each is a run of Dynamo or of a trace, and several rules may ask for the same.
        larger = functools.cache(self.grown)
        # A number that Python sets from the rows of a microbatch would be another one than that of
        # the whole batch.
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
        # Where no rule of an operation tells where its rows are, twice the rows do.
        if any(port.shape and port.name in captured.unknown for port in captured.program.outputs):
            captured = self._with_dims(captured, larger(2)[0])
        return check_outputs(captured, options.reduce, options.microbatches)

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


class NotOpen(ValueError):
    """Raised for a trace with open sizes of which there is no program; what is traced for those of
    a call alone may still have one."""


def shapes_of(args: Sequence[Any], dims: Sequence[int | None], count: int) -> tuple[Any, ...]:
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
    return [_grown(result.shape, grown.shape) for result, grown in pairs]


def _grown(shape: Sequence[int], other: Sequence[int]) -> int | None:
    grown = [i for i, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 else None
