"""torch.compile's entry: from Dynamo's graph to a pipelined step that autograd can use."""

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from pfeife import _torch
from pfeife.backend.artifacts import Artifacts
from pfeife.backend.build import Builder
from pfeife.backend.call import Compiled, run_step
from pfeife.backend.graphs import BatchedGraph, Graph
from pfeife.backend.options import Options, options_from, versions
from pfeife.backend.pieces import Part, Parts, Piece
from pfeife.cost import machine
from pfeife.data import plain
from pfeife.data.machine import Machine, Network
from pfeife.data.progress import Shown, shown
from pfeife.frontend.arguments import Argument
from pfeife.frontend.dynamo import compiled_too_often
from pfeife.frontend.results import Key
from pfeife.ir.program import Role
from pfeife.runtime.distributed.foreign import version_of
from pfeife.runtime.distributed.process_group import join_world, world_so_far
from pfeife.runtime.distributed.world import World, checksum
from pfeife.runtime.failure import PipelineError, Refusal

log = logging.getLogger("pfeife")
_ARGUMENTS = "the arguments of this call"
MOST_BUILDS = 64  # that one graph keeps
MOST_SHAPES = 16  # for which one graph of several is built, where it may run as it is


class Backend:
    """A compile backend with its options bound. `compiled` lists what it has built and keeps."""

    def __init__(self, options: Options):
        self.options = options
        self.alike = [*versions(), str(options)]  # on every rank
        self.compiled: list[Compiled] = []
        self.losses: dict[Any, Key] = {}  # by frames, for calls without gradients
        # Of a step that Dynamo has broken: with gradients, and without.
        self.parts = {True: Parts(), False: Parts()}
        self.rows = WeakIdKeyDictionary()  # where the batch is in what these have returned
        self.broken: tuple[str, str] | None = None  # the last break, as `graph_break` has it
        given = options.machine
        target = given if isinstance(given, Machine | None) else machine(given)
        links = options.network
        network = links if isinstance(links, Network | None) else _measured(links)
        self.builder = Builder(options, target, network)

    def __call__(self, module: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Callable:
        """Called by Dynamo with a graph of the whole batch; the program is built at the first call
        of the result, for each shape that it is called with.

        What is wrong is raised at that call, since torch may be told to suppress what a backend
        raises, and to go on with eager.
        """
        try:
            if _torch.is_last_compilation():
                raise compiled_too_often()
            name, broken = _torch.frame_name(), _torch.graph_break()
            if broken:
                if broken[0] or self.broken is None:
                    self.broken = broken[0] or "it goes on after another graph", broken[1]
                piece = Piece(module, examples, self.rows)
                steps: Steps = PieceSteps(self, piece, name, self.broken)
            else:
                steps = Steps(self, BatchedGraph(module, examples, self.losses), name)
        except Exception as error:
            return _raising(error)
        return lambda *args: steps(args)


class Steps:
    """What a backend has built of one of Dynamo's graphs: the `MOST_BUILDS` that were used last, by
    shapes, numbers and count of microbatches. All ranks keep the same ones, as they make the same
    calls."""

    def __init__(self, backend: Backend, graph: Graph, name: str):
        self.backend, self.graph, self.name = backend, graph, name
        self.artifacts = Artifacts(_torch.compilation())
        self.known: dict[tuple, Compiled] = {}  # what was used last is the last
        self.warned = False
        self.sums = WeakIdKeyDictionary()  # of tensors, with their versions
        self.numbers, self.count = WeakIdKeyDictionary(), itertools.count()

    def __call__(self, args: Sequence[Any], options: Options | None = None) -> list[torch.Tensor]:
        """One call with the whole batch: builds the program if it is not known, and runs it.

        Raises ValueError for what cannot be built, on all ranks; PipelineError when another rank
        fails.
        """
        options = options or self.backend.options
        world = join_world(self._device(args), options.timeout)
        builder = self.backend.builder
        if options is not self.backend.options:
            builder = attrs.evolve(builder, options=options)
        key = (options.microbatches, *self.graph.key(args), self._trained(args) if world else ())
        compiled = self.known.get(key)
        if world and compiled and builder.outdated(compiled, args, world):
            compiled = None
        seed = _seed(compiled)
        if world:
            seed = self._agreed(world, args, compiled, options, seed)
        if compiled is not None:
            self.known[key] = self.known.pop(key)
            return run_step(compiled, options, args, seed)
        show = shown(log, progress=options.progress, rank=world.rank if world else 0)
        with world.building("a step") if world else contextlib.nullcontext():
            compiled = self._built(builder, args, world, show)
        self._keep(key, compiled, world)
        seed = _seed(compiled)
        if world and _draws(compiled):
            seed = _common_seed(world, world.agreed("", "the seed", number=seed).numbers)
        results = run_step(compiled, options, args, seed, show)
        log.log(show.level, "%scompiled %s: %s", show.who, self.name, self._summary(compiled))
        return results

    def _built(
        self, builder: Builder, args: Sequence[Any], world: World | None, show: Shown
    ) -> Compiled:
        device = self._device(args)
        return builder.build(self.graph, args, world, device, show, self.artifacts)

    def _summary(self, compiled: Compiled) -> str:
        return compiled.summary

    def _trained(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Which parameters a call has, as numbers: Dynamo has one graph for all modules of a class,
        and each of them is trained on ranks of its own."""
        pairs = zip(self.graph.inputs.arguments, args, strict=True)
        found = [one for argument, one in pairs if _is_trained(argument, one)]
        return tuple(self.numbers.setdefault(one, next(self.count)) for one in found)

    def _keep(self, key: tuple, compiled: Compiled, world: World | None) -> None:
        """Keeps what was built, and drops what has not been used for longest beyond the limit."""
        self.known[key] = compiled
        self.backend.compiled.append(compiled)
        modules = {trained for *_, trained in self.known}
        if len(self.known) <= MOST_BUILDS * len(modules):
            return
        dropped = self.known.pop(next(iter(self.known)))
        listed = self.backend.compiled
        listed[:] = [one for one in listed if one is not dropped]
        if not self.warned and not (world and world.rank):
            log.warning(
                "%s has been built for more than %d different shapes and numbers: from now on "
                "those that have not come for longest are dropped. Each new one is a build: pass "
                "numbers that change with every call as tensors, and pad what has many lengths",
                *(self.name, MOST_BUILDS),
            )
        self.warned = True

    def _agreed(
        self,
        world: World,
        args: Sequence[Any],
        compiled: Compiled | None,
        options: Options,
        seed: int,
    ) -> int:
        """The seed of rank 0, once all ranks have said that they are about to do the same."""
        borrowed = compiled.borrowed if compiled else None
        with world.building("the arguments of a step"):
            text, news, refused = "", "", None
            try:
                text = self._said(args, compiled, options)
                news = world.ownership.news(borrowed, args)
            except (PipelineError, Refusal):
                raise
            except Exception as error:
                refused = error
            found = world.agreed(text, _ARGUMENTS, number=seed, note=news, refused=refused)
            world.ownership.agree(world, found.notes, borrowed, args)
        return _common_seed(world, found.numbers)

    def _said(self, args: Sequence[Any], compiled: Compiled | None, options: Options) -> str:
        """All that a call's program and its messages depend on, a line each."""
        gradients = f"gradients {'on' if torch.is_grad_enabled() else 'off'}"
        built = f"program {compiled.digest}" if compiled else "a program that is not built yet"
        lines = [
            *self.backend.alike,
            f"the step {self.name} in {options.microbatches} microbatches, {gradients}",
            f"{built}, {self.graph.inputs.mode}",
        ]
        arguments, dims = self.graph.inputs.arguments, self.graph.dims
        for argument, dim, value in zip(arguments, dims, args, strict=True):
            if isinstance(value, torch.Tensor):
                where = f"{value.dtype} {list(value.shape)} on {value.device.type}"
                lines.append(f"{argument.names[0]}: {where}")
                state = argument.role in (Role.PARAMETER, Role.BUFFER)
                trained = state or (dim is None and value.requires_grad)
                if options.compare_batches and not (trained or self._is_computed(value)):
                    lines[-1] += f", values with the checksum {self._checksum(value, dim):x}"
        return "\n".join(lines)

    def _is_computed(self, value: torch.Tensor) -> bool:
        """Whether an argument is none of the batch's that the caller has made."""
        return False

    def _checksum(self, value: torch.Tensor, dim: int | None) -> int:
        """Of what is the same tensor at every call, such as a mask, it is computed once."""
        version = version_of(value)
        if dim is not None or version < 0:
            return checksum(value)
        if self.sums.get(value, (None, 0))[0] != version:
            self.sums[value] = version, checksum(value)
        return int(self.sums[value][1])

    def _device(self, args: Sequence[Any]) -> torch.device:
        """Where the parameters are, or else the first tensor."""
        pairs = list(zip(self.graph.inputs.arguments, args, strict=True))
        tensors = [(a.role, v) for a, v in pairs if isinstance(v, torch.Tensor)]
        state = [value for role, value in tensors if role == Role.PARAMETER]
        found = [*state, *(value for _, value in tensors)]
        return found[0].device if found else torch.device("cpu")


class PieceSteps(Steps):
    """What a backend has built of one graph of a step that Dynamo has broken.

    One without parameters runs as it is, on ranks on all of them, and so does in one process what
    cannot be cut. On ranks that runs with one microbatch, on its stages or on one rank.
    """

    def __init__(self, backend: Backend, piece: Piece, name: str, broken: tuple[str, str]):
        super().__init__(backend, piece, name)
        self.piece, self.broken = piece, broken
        self.whole: set[tuple] = set()  # the shapes of which it runs as it is
        self.why = ""  # what kept it from being cut

    @property
    def parts(self) -> Parts:
        """The graphs of the step, as this call has them."""
        return self.backend.parts[torch.is_grad_enabled()]

    def __call__(self, args: Sequence[Any], options: Options | None = None) -> list[Any]:
        """One call with what the step's Python has made of the whole batch. Raises as `Steps`."""
        world = world_so_far()
        ranks = self.backend.builder.mesh(world).ranks if world else 1
        stages = self.backend.options.stages or ranks
        self.parts.begin(self, warn=stages > 1 and not (world and world.rank))
        key = self.piece.key(args)
        if key not in self.whole or _owned(world, args):
            try:
                tensors = super().__call__(args, options)
                self.parts.shared.add(self.name, self.piece.shared(tensors, args))
                found = self.piece.results(tensors, args)
                self.piece.note(found)
                return found
            except _RunsWhole as refused:
                self.whole.add(key)
                self._note_whole(args, str(refused))
        results = list(self.piece.whole(*args))
        self.piece.note(results)
        return results

    def _is_computed(self, value: torch.Tensor) -> bool:
        return value.grad_fn is not None

    def _built(
        self, builder: Builder, args: Sequence[Any], world: World | None, show: Shown
    ) -> Compiled:
        refused: list[ValueError] = []
        for way in self._ways(builder, args, world):
            try:
                found = super()._built(way, args, world, show)
            except ValueError as error:
                refused.append(error)
            else:
                self.why = _first_line(refused[0]) if refused else ""
                return found
        if refused and world and (_owned(world, args) or self._differs(args, world)):
            raise refused[0]
        why = _first_line(refused[0]) if refused else "it has no parameters"
        raise _RunsWhole(why)

    def _ways(
        self, builder: Builder, args: Sequence[Any], world: World | None
    ) -> Iterator[Builder]:
        """How the graph may be built, the best way first."""
        pairs = list(zip(self.graph.inputs.arguments, args, strict=True))
        owned = _owned(world, args)
        if not (owned or any(argument.role == Role.PARAMETER for argument, _ in pairs)):
            return
        yield builder if world else self._unless_ever_new(builder)
        trains = owned or any(_is_trained(argument, value) for argument, value in pairs)
        if world is None or builder.options.replicas > 1 or not trains:
            return  # every replica has rows of its own
        one = attrs.evolve(builder, options=_one_microbatch(builder.options))
        yield one
        ranks = builder.mesh(world).ranks
        least = world.decided_by_rank_zero(lambda: str(world.ownership.least(ranks)))
        yield attrs.evolve(one, options=attrs.evolve(one.options, stages=1), home=int(least))

    def _unless_ever_new(self, builder: Builder) -> Builder:
        if len(self.known) + len(self.whole) >= MOST_SHAPES:
            raise _RunsWhole(f"it has come in more than {MOST_SHAPES} shapes")
        return builder

    def _differs(self, args: Sequence[Any], world: World) -> bool:
        """Whether ranks have other values than one another (collective)."""
        pairs = zip(self.graph.inputs.arguments, args, strict=True)
        tensors = {a.names[0]: one for a, one in pairs if isinstance(one, torch.Tensor)}
        return bool(world.differing(tensors))

    def _summary(self, compiled: Compiled) -> str:
        cut, asked = compiled.microbatches, self.backend.options.microbatches
        instead = "runs on one rank" if compiled.program.units == 1 else ""
        if cut < asked:
            instead = "is not cut into microbatches"
        because = f"{instead}, since {self.why}" if instead and self.why else instead
        return self._noted(Part(because, compiled.seconds, self.broken), compiled.summary)

    def _note_whole(self, args: Sequence[Any], why: str) -> None:
        """Says that the graph runs as it is; its seconds are estimated once."""
        world, known = world_so_far(), self.parts.found.get(self)
        options = _one_microbatch(self.backend.options)
        builder = attrs.evolve(self.backend.builder, options=options)
        seconds = known.seconds if known else builder.seconds(self.piece, args, self.artifacts)
        said = self._noted(Part(f"runs whole, since {why}", seconds, self.broken), "")
        show = shown(log, progress=False, rank=world.rank if world else 0)
        log.log(show.level, "%scompiled %s: %s", show.who, self.name, said)

    def _noted(self, part: Part, summary: str) -> str:
        self.parts.found[self] = part
        return "; ".join(filter(None, (summary, part.instead, self.parts.summary)))


class _RunsWhole(Refusal):
    """All ranks run a graph as it is, each for itself."""


def _one_microbatch(options: Options) -> Options:
    """The options of a graph that is not cut into microbatches; what was said of cuts and schedules
    is meant for others."""
    return attrs.evolve(
        options,
        microbatches=1,
        replicas=1,
        schedule="1f1b",
        plan=None,
        split_at=None,
        partition=None,
        recompute=None,
        costs="estimate",
    )


def _is_trained(argument: Argument, value: Any) -> bool:
    """Whether the step trains an argument: no input that the caller wants a gradient of."""
    tensor = isinstance(value, torch.Tensor) and not argument.given
    return tensor and value.requires_grad and value.is_leaf


def _owned(world: World | None, args: Sequence[Any]) -> bool:
    """Whether a rank trains any of these, so that others have no values of it."""
    return world is not None and world.ownership.owns_any(args)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _draws(compiled: Compiled | None) -> bool:
    return compiled is not None and bool(compiled.program.ports(Role.SEED))


def _seed(compiled: Compiled | None) -> int:
    """The seed of a call, from torch's default generator, of a program that draws."""
    return int(torch.randint(2**62, ())) if _draws(compiled) else 0


def _common_seed(world: World, seeds: Sequence[int]) -> int:
    if len(set(seeds)) > 1 and not world.warned:
        world.warned = True
        log.warning(
            "rank %d: torch's default generator is in another state on other ranks; all draw from "
            "the seed of rank 0: seed every rank alike (torch.manual_seed) if the step is to be "
            "repeatable",
            world.rank,
        )
    return seeds[0]


def _raising(error: Exception) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise error.with_traceback(None)

    return refuse


def _measured(path: str | os.PathLike[str]) -> Network:
    try:
        return plain.load(Network, Path(path))
    except OSError as error:
        raise ValueError(
            f"option network={str(path)!r}: {error.strerror}; `pfeife bench-network` writes one"
        ) from None


def backend(**options: Any) -> Backend:
    """A backend for torch.compile or torch.compiler.set_default_backend; see `Options`.

    Raises ValueError for an unknown option or a wrong value.
    """
    return Backend(options_from(options))


# The backends of torch.compile(..., backend="pfeife"), by what compiles all graphs of one of these.
_named = WeakIdKeyDictionary()


def entry(
    module: fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable:
    """What the name "pfeife" in torch.compile means."""
    if mode not in (None, "default"):
        raise ValueError(f"mode={mode!r}: pfeife has options, no modes")
    who = _torch.who_compiles()
    if who not in _named:
        _named[who] = backend(**(options or {}))
    found: Callable = _named[who](module, examples)
    return found
