"""What a captured step is: its program, and how calls and results belong to its ports."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import torch

from pfeife.frontend.arguments import Kept
from pfeife.frontend.results import Key, Leaf, label
from pfeife.frontend.watch.data_writes import OwnBackward
from pfeife.frontend.watch.user_lines import is_torchs
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.ir.sizes import broken_limit, sizes_of_shapes

Door = Literal["dynamo", "trace"]  # how a step was captured


def neither(dynamo: Exception, trace: Exception, cut: str = "") -> Exception:
    """What to say of a step that neither door takes; errors of the step's own are said as they
    are, and what any door has to refuse, once. `cut` says what a microbatch has of the arguments,
    on which a step may fail that runs on the whole batch."""
    # A trace runs the step, so that what else it raises is an error of the user's own code.
    if not isinstance(trace, ValueError) or isinstance(trace, OwnBackward):
        return trace
    return RefusedByBoth(dynamo, trace, cut if is_torchs(trace.__cause__) else "")


class RefusedByBoth(ValueError):
    """Raised for a step that neither door takes, with what each of them has said; in the message
    stands once what fails in both."""

    def __init__(self, dynamo: Exception, trace: Exception, cut: str):
        more = f". {cut}; if that is not right, say with in_dims where the batch is" if cut else ""
        both = f"{dynamo}; nor by running it without torch.compile: {trace}"
        same = is_torchs(trace.__cause__) and str(trace.__cause__).split("\n")[0] in str(dynamo)
        super().__init__(f"{trace if same else both}{more}")
        self.doors: dict[str, str] = {"dynamo": str(dynamo), "trace": str(trace)}


def taken(name: str, door: Door, refused: Exception | None = None) -> str:
    """How a step is captured, and why: what Dynamo has `refused`, if it was asked."""
    if door == "dynamo":
        return f"{name} is captured by Dynamo as one graph"
    why = f", since {refused}" if refused else " because that was asked for"
    return f"{name} is traced as it runs{why}"


def part_shape(shape: Sequence[int], dim: int | None, count: int) -> tuple[int, ...]:
    """The shape of one of `count` parts of a tensor that is cut along a dimension, if at all."""
    return tuple(n // count if at == dim else n for at, n in enumerate(shape))


def _advice(unknown: str) -> str:
    """What to do about a loss of which no rule tells how microbatches combine."""
    if unknown.startswith("nll_loss"):  # others have a count
        return (
            "its classes have weights, whose sum over the whole batch divides it. Compute that "
            "outside of the step (total = weight[targets].sum()), pass it as an argument, and "
            'return F.cross_entropy(..., weight=weight, reduction="sum") / total; or say '
            'loss_reduction="mean" if their average is right'
        )
    return (
        'say loss_reduction="mean" if that is right, or "sum" if the loss is a sum over the rows '
        "(perhaps divided by a count that is an input)"
    )


@attrs.frozen(eq=False)
class Captured:
    """A program and how Dynamo's positional arguments and results belong to its ports.

    `arguments` has an input port's name for every argument of the graph, None for a number; those
    are in `numbers`. `results` has an output port's name for every result, `leaves` where each
    stands in what the step returns. `detached` are the indices of those that the step has detached.
    `unknown` says of results why it is not known how their microbatches combine, `mixed` where rows
    of the batch look at one another for them. `kept` are the results that the step assigns to
    attributes, `carried` has those by the input ports whose value in the next microbatch they are,
    and `in_place` such ports that are their own result (`self.n += 1`). `changed` has the output
    ports that are what the step makes of batch inputs which it changes in place, by the names of
    these. `moved` are input ports that the step assigns to attributes, and of the values of those
    that are `assumed` something is assumed. `door` is how the step was captured, `flags` are the
    results that are not 0 in microbatches for which a trace is wrong (`answers`). `at` are the
    shapes and numbers of the arguments of a microbatch, where the program is for nothing else.
    """

    program: Program
    arguments: tuple[str | None, ...]
    numbers: tuple[Any, ...]
    results: tuple[str, ...]
    detached: tuple[int, ...]
    leaves: tuple[Leaf, ...] | None = None
    unknown: Mapping[str, str] = attrs.field(factory=dict)
    mixed: Mapping[str, str] = attrs.field(factory=dict)
    kept: Mapping[str, Kept] = attrs.field(factory=dict)
    carried: Mapping[str, str] = attrs.field(factory=dict)
    in_place: tuple[str, ...] = ()
    changed: Mapping[str, str] = attrs.field(factory=dict)
    moved: Mapping[str, str] = attrs.field(factory=dict)
    assumed: tuple[str, ...] = ()
    door: Door = "dynamo"
    flags: tuple[str, ...] = ()
    at: tuple[Any, ...] | None = None

    @property
    def ports(self) -> list[Port | None]:
        """The input of the program that each argument is, None for a number."""
        inputs = {port.name: port for port in self.program.inputs}
        return [inputs[name] if name else None for name in self.arguments]

    def part(self, args: Sequence[Any], index: int) -> list[Any]:
        """The arguments of a microbatch, from those of a call."""
        values = []
        for value, port, number in zip(args, self.ports, self.numbers, strict=True):
            if port is None:
                values.append(number)
            elif port.role == Role.SIZE:
                values.append(value)
            elif port.batch_dim is None:
                wanted = port.dtype if port.role == Role.PARAMETER else value.dtype
                values.append(value.detach().to(wanted))  # master weights are cast
            else:
                size = port.shape[port.batch_dim]
                values.append(value.detach().narrow(port.batch_dim, index * size, size))
        return values

    def sizes(self, args: Sequence[Any], count: int) -> dict[str, int]:
        """The values of the program's size ports in a call of so many microbatches, by their names,
        from the arguments of the call."""
        if not self.program.ports(Role.SIZE):
            return {}
        shapes: dict[str, Any] = {}
        for port, value in zip(self.ports, args, strict=True):
            if port is not None and port.role == Role.SIZE:
                shapes[port.name] = value
            elif port is not None and port.sizes is not None:
                shapes[port.name] = part_shape(value.shape, port.batch_dim, count)
        return sizes_of_shapes(self.program, shapes)

    def breaks(self, args: Sequence[Any], count: int) -> str:
        """What the program assumes of the sizes of its arguments and is otherwise in a call of so
        many microbatches, "" if nothing."""
        # With open sizes it holds for all calls that break none of its limits, else for one alone.
        if self.at is None:
            return broken_limit(self.program, self.sizes(args, count))
        ports = zip(self.ports, args, self.at, strict=True)
        for port, value, expected in ports:
            dim = port.batch_dim if port else None
            tensor = isinstance(value, torch.Tensor)
            if (part_shape(value.shape, dim, count) if tensor else value) != expected:
                return f"{port.fqn if port else 'a number'} is {expected}"
        return ""

    def slots(self, values: Sequence[Any]) -> dict[str, Any]:
        """Arguments of a microbatch by the names of the program's inputs."""
        pairs = zip(self.arguments, values, strict=True)
        return {name: value for name, value in pairs if name}

    def label(self, result: str) -> Key:
        """How options call a result."""
        return label(self.results.index(result), self.leaves)

    def is_returned(self, result: str) -> bool:
        """Whether the step itself returns it, as far as that is known."""
        index = self.results.index(result)
        return self.leaves is None or any(leaf.index == index for leaf in self.leaves)

    def mixing(self) -> str:
        """What to say where rows depend on one another, and nobody has said that they are the
        batch; "" else."""
        if not self.mixed:
            return ""
        names = [port.fqn for port in self.program.ports(Role.BATCH) if port.batch_dim is not None]
        return (
            f"the rows (dimension 0) of {names} depend on one another, in "
            f"{next(iter(self.mixed.values()))}: those of a microbatch among themselves, so that "
            "this is not what the whole batch gives. If the batch is in another dimension, as for "
            "layers without batch_first, say where with in_dims of pfeife.compile; if it is there, "
            f"say in_dims={{{names[0]!r}: 0}}"
        )

    def warning(self) -> str:
        """What to say where the loss is averaged because nothing else is known; "" else."""
        return "".join(
            f"how the losses of microbatches combine is not known, because of "
            f"{self.unknown[port.name]}: they are averaged; {_advice(self.unknown[port.name])}"
            for port in self.program.ports(Role.LOSS)
            if port.name in self.unknown
        )
