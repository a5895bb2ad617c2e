"""One of the graphs of a step that Dynamo has broken, and all of them together.

    x -> [graph 0] -> h -> Python -> [graph 1] -> loss        in between is the whole batch

Each graph computes what eager does on the whole batch: in microbatches where that is the same, in
one if not, or as it is.
"""

import functools
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from pfeife import _torch
from pfeife.backend.graphs.batched_graph import BatchedGraph
from pfeife.backend.settings.options import Options
from pfeife.frontend.arguments import Argument, fake_like
from pfeife.frontend.capture import reduced_as
from pfeife.frontend.captured import Captured
from pfeife.frontend.dynamo import copied
from pfeife.frontend.results import Loss
from pfeife.frontend.rows.reductions import derive
from pfeife.frontend.rows.value import Unknown
from pfeife.ir.nodes import returned
from pfeife.ir.parts import Port, Role
from pfeife.runtime.distributed.state.remote_parameters import version_of
from pfeife.runtime.failure import PipelineError

log = logging.getLogger("pfeife")


class Piece(BatchedGraph):
    """A graph of a broken step. `rows` has the dimension of the batch of tensors that earlier
    graphs have returned."""

    def __init__(self, module: fx.GraphModule, examples: Sequence[Any], rows: WeakIdKeyDictionary):
        self.whole, self.rows = module, rows
        self.places = [rows.get(value) if _is_tensor(value) else None for value in examples]
        self.values = [_example(node) for node in returned(module)]
        self.tensors = [i for i, value in enumerate(self.values) if _is_tensor(value)]
        # Sizes among the results are numbers for the step's Python: they are computed from the
        # shapes of the arguments, and no pipeline has to send them.
        alone = module if len(self.tensors) == len(self.values) else _without(module, self.tensors)
        super().__init__(alone, examples)
        self.marked |= any(dim is not None for dim in self.places)
        self.sure = False  # what the caller has said is about the batch that the step was given
        self.shows = False  # only rules tell what holds for every batch
        self.is_open = False  # what runs as it is does so at one shape

    def key(self, args: Sequence[Any]) -> tuple:
        """What is known of a call: the shapes, and all numbers."""
        return tuple(
            tuple(value.shape) if _is_tensor(value) else repr(float(value)) for value in args
        )

    def check(self, args: Sequence[Any], options: Options) -> None:
        """Nothing: each shape is captured, and what cannot be cut runs whole."""

    def _batch_sizes(self, examples: Sequence[Any]) -> list[Any]:
        """The sizes of the rows that earlier graphs have returned, if they have."""
        pairs = zip(self.shapes, self.places, strict=True)
        # What an earlier graph has returned with the batch in a known dimension tells more than a
        # guess.
        returned_sizes = [shape[dim] for shape, dim in pairs if dim is not None]
        if not returned_sizes:
            return super()._batch_sizes(examples)
        return [size for size in returned_sizes if not isinstance(size, int)]

    def _dim(self, argument: Argument, shape: Sequence[Any]) -> int | None:
        """Where the batch is, if it can be in one place."""
        # Without raising: a graph that cannot be cut may still run whole.
        return self._result_dim(shape)

    def results(self, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> list[Any]:
        """All results of the graph, sizes too, from those that are tensors."""
        places = range(len(self.values))
        others = [index for index in places if index not in self.tensors]
        sizes = [self.values[index] for index in others]
        numbers = _torch.numbers_of(sizes, self.step.arguments, args)
        results = dict(zip([*self.tensors, *others], [*tensors, *numbers], strict=True))
        return [results[index] for index in places]

    def note(self, results: Sequence[Any]) -> None:
        """Remembers where the batch is in what goes to the step's Python."""
        for example, value in zip(self.values, results, strict=True):
            dim = self._result_dim(example.shape) if _is_tensor(example) else None
            if dim is not None:
                self.rows[value] = dim

    def shared(self, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
        """What looks at one memory in eager, of results that are tensors and of arguments."""
        pairs = enumerate(zip(self.step.arguments, args, strict=True))
        places = range(len(self.tensors))
        seen = [
            value
            for at, (example, value) in pairs
            if _is_tensor(example) and any(self.step.is_itself(at, index) for index in places)
        ]
        return [*(tensors[index] for index in self.step.shared()), *seen]

    def capture(self, args: Sequence[Any], options: Options) -> Captured:
        """The program. Raises ValueError for whatever keeps it from being captured."""
        try:
            return self._cut(args, options) if options.microbatches > 1 else self._uncut(args)
        except (ValueError, PipelineError):
            raise
        except Exception as error:  # Dynamo's graph at sizes that it was not made for
            line = (str(error).strip() or "it failed").splitlines()[0]
            raise ValueError(f"{type(error).__name__}: {line}") from error

    def _loss(self) -> Loss:
        """Inside only what alone is differentiable: everything else may be differentiated too."""
        results, leaves = self.step.results, self.step.leaves
        trained = [index for index, result in enumerate(results) if result.requires_grad]
        if len(trained) != 1 or results[trained[0]].dim() or not torch.is_grad_enabled():
            return "outside"
        is_returned = leaves is None or any(leaf.index == trained[0] for leaf in leaves)
        return None if is_returned else "outside"

    def _cut(self, args: Sequence[Any], options: Options) -> Captured:
        """The program of a microbatch. Raises ValueError unless all microbatches together are
        known to compute what the whole batch gives."""
        inputs = zip(self.inputs.arguments, self.shapes, self.dims, args, strict=True)
        for argument, shape, dim, value in inputs:
            several = sum(self._is_batch(size) for size in shape) > 1
            if dim is None and _is_tensor(value) and (several or value.grad_fn is not None):
                dims = "several dimensions that may be" if several else "no dimension that is"
                raise ValueError(
                    f"{argument.names[0]} {list(value.shape)} has {dims} that of the batch"
                )
        # What was said of the loss and of results is about those of the step, and these are those
        # of a part of it.
        own = attrs.evolve(options, loss=self._loss(), reduce={}, loss_reduction="auto")
        captured = super().capture(args, own)
        if captured.changed:  # what looks at the same memory in eager is a copy between graphs
            raise ValueError(f"it changes {next(iter(captured.changed))} in place")
        carried = set(captured.carried.values())
        for port in captured.program.ports(Role.LOSS, Role.OUTPUT):
            # The next graph goes on with the result as with that of the whole batch, so that only
            # what is exactly that may be joined here.
            uneven = port.reduction == "mean" and port.counts
            last = port.reduction == "last" and port.name not in carried
            if uneven or last or (port.batch_dim is None and port.name in captured.unknown):
                why = captured.unknown.get(port.name)
                because = f", because of {why}" if why else ""
                raise ValueError(f"how its microbatches are joined is not known{because}")
        return captured

    def _uncut(self, args: Sequence[Any]) -> Captured:
        """The program of the whole batch."""
        captured = self._at(args, 1, self._loss())
        outputs = tuple(_alone(port) for port in captured.program.outputs)
        program = attrs.evolve(captured.program, outputs=outputs)
        return attrs.evolve(captured, program=program, unknown={})

    def _at_microbatch(
        self, argument: Argument, dim: int | None, value: Any, count: int, times: int
    ) -> Argument:
        """Of the whole batch everything that is no state is an input of the batch, so that every
        rank gets its gradient."""
        state = argument.role != Role.CONSTANT
        # Between graphs gradients flow through everything that is no state.
        if count > 1 or state or (value.is_leaf and value.requires_grad and not argument.given):
            return super()._at_microbatch(argument, dim, value, count, times)
        like = fake_like(argument.example.fake_mode, value)
        return attrs.evolve(argument, role=Role.BATCH, example=like)

    def check_unseen(self, captured: Captured) -> None:
        """Raises ValueError unless the graph itself tells that no row depends on others."""
        for how in derive(captured.program).values():
            if isinstance(how, Unknown):
                raise ValueError(
                    f"whether rows depend on one another is not known, because of {how}"
                )


def _alone(port: Port) -> Port:
    """A result of the only microbatch."""
    if port.role == Role.LOSS:
        return attrs.evolve(port, reduction="mean")
    return reduced_as(port, "last") if port.role == Role.OUTPUT else port


def _without(module: fx.GraphModule, tensors: Sequence[int]) -> fx.GraphModule:
    """A graph that returns some of its results."""
    copy = copied(module)
    output = next(node for node in reversed(copy.graph.nodes) if node.op == "output")
    output.args = (tuple(output.args[0][index] for index in tensors),)
    copy.recompile()
    return copy


def _example(node: Any) -> Any:
    """An example of what a graph returns, which may be a number itself."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class Shared:
    """Tensors that look at one memory in eager, and are copies here: results of one graph, or one
    and what the graph was given. Who writes to one of them must write to none of these."""

    def __init__(self) -> None:
        # Each with its version and the name of its graph; held until it has been checked once.
        self.new: list[tuple[torch.Tensor, int, str]] = []
        self.seen: list[tuple[weakref.ref[torch.Tensor], int, str]] = []

    def forget(self) -> None:
        """Another step begins."""
        self.new.clear()
        self.seen.clear()

    def check(self) -> None:
        """Raises RuntimeError if one of them has been written to."""
        seen = ((ref(), version, name) for ref, version, name in self.seen)
        for tensor, version, name in (*self.new, *seen):
            if tensor is not None and version_of(tensor) != version:
                raise RuntimeError(
                    f"between two graphs of the step a tensor that {name} has returned or was "
                    "given was changed in place, and another result of it looks at the same "
                    "memory: with Pfeife that is a copy. Make a new tensor instead (a = a + 1)"
                )
        self.seen.extend((weakref.ref(tensor), version, name) for tensor, version, name in self.new)
        self.new.clear()

    def add(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Watches what a graph of that name shares."""
        self.new.extend((tensor, version_of(tensor), name) for tensor in tensors)


@attrs.frozen
class Part:
    """What became of one graph: `instead` says what it does and why where it is not pipelined.
    `seconds` are estimated, None where nobody knows; `broken` is the break that made it, as
    `graph_break` has it."""

    instead: str
    seconds: float | None
    broken: tuple[str, str]


def share_of(parts: Iterable[Part]) -> float:
    """How much of the known time of some graphs is pipelined, from 0 to 1."""
    seconds = [(not part.instead, part.seconds or 0.0) for part in parts]
    total = sum(each for _, each in seconds)
    return sum(each for piped, each in seconds if piped) / total if total else 0.0


class Parts:
    """What became of the graphs of a broken step, by whoever runs them."""

    def __init__(self) -> None:
        self.by_runner: dict[Any, Part] = {}
        self.shared = Shared()
        self.first: Any = None
        self.warn = functools.cache(self._warn)  # once

    def begin(self, who: Any, *, warn: bool) -> None:
        """Someone's graph is about to run. If that is the first graph of another step, all are
        known: says once, if it shall `warn`, that less than half of the time is pipelined. Raises
        RuntimeError as `Shared` does."""
        again, self.first = self.first is who, self.first or who
        if again:
            self.shared.forget()
        self.shared.check()
        is_whole = any(part.instead for part in self.by_runner.values())
        if again and warn and is_whole and self.share() < 0.5:
            self.warn()

    def _warn(self) -> None:
        whole = [part for part in self.by_runner.values() if part.instead]
        worst = max(whole, key=lambda part: part.seconds or 0.0)
        log.warning(
            "%s: the break that costs most is %s (%s); its graph %s",
            *(self.summary.replace(" so far", ""), *worst.broken, worst.instead),
        )

    def share(self) -> float:
        """How much of the time of the graphs so far is pipelined."""
        return share_of(self.by_runner.values())

    @property
    def summary(self) -> str:
        """How many of the graphs so far are pipelined, and how much of their time."""
        parts = self.by_runner.values()
        seconds = sum(part.seconds or 0.0 for part in parts)
        unknown = sum(part.seconds is None for part in parts)
        beside = f", the time of {unknown} is not known" if unknown else ""
        return (
            f"of the step's {len(parts)} graphs so far {sum(not part.instead for part in parts)} "
            f"are pipelined, {100 * self.share():.0f} % of {seconds:.2g} s (estimated{beside})"
        )
