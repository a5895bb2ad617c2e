"""What is built of a graph of a step that Dynamo has broken into several."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from pfeife.backend.building.build import estimated_seconds
from pfeife.backend.building.builder import Builder
from pfeife.backend.building.compiled import Compiled
from pfeife.backend.graphs.graph_breaks import Part, Parts, Piece
from pfeife.backend.settings.options import Options
from pfeife.backend.shared.context import Context
from pfeife.backend.steps import Steps, is_trained
from pfeife.data.progress import Shown, shown
from pfeife.ir.parts import Role
from pfeife.runtime.distributed.batches.rank_zero import Sent
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.distributed.state.owned import least_loaded
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.failure import CollectiveError

log = logging.getLogger("pfeife")
MOST_SHAPES = 16  # for which one graph of several is built, where it may run as it is


class PieceSteps(Steps):
    """What a backend has built of one graph of a step that Dynamo has broken.

    One without parameters runs as it is, on ranks on all of them, and so does in one process what
    cannot be cut. On ranks that runs with one microbatch, on its stages or on one rank.
    """

    def __init__(self, backend: Context, piece: Piece, name: str, broken: tuple[str, str]):
        super().__init__(backend, piece, name)
        self.piece, self.broken = piece, broken
        self.whole: set[tuple] = set()  # the shapes of which it runs as it is

    @property
    def parts(self) -> Parts:
        """The graphs of the step, as this call has them."""
        return self.backend.parts[torch.is_grad_enabled()]

    def __call__(
        self, args: Sequence[Any], options: Options | None = None, sent: Sent | None = None
    ) -> list[Any]:
        """One call with what the step's Python has made of the whole batch. Raises as `Steps`."""
        world = world_so_far()
        ranks = self.backend.builder.mesh(world).ranks if world else 1
        stages = self.backend.options.stages or ranks
        # Before anything runs: the first graph of the next step shows that the last step is
        # complete.
        self.parts.begin(self, warn=stages > 1 and not (world and world.rank))
        key = self.piece.key(args)
        # A graph that runs whole once does so again, unless its state has come to ranks that alone
        # have its values.
        if key not in self.whole or _owned(world, args):
            try:
                tensors = super().__call__(args, options, sent)
                # In eager a result may be a view of another one, or of an argument. Here it is a
                # copy: nobody notices, unless it is written to.
                self.parts.shared.add(self.name, self.piece.shared(tensors, args))
                results = self.piece.results(tensors, args)
                self.piece.note(results)
                return results
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
                compiled = super()._built(way, args, world, show)
            except ValueError as error:
                refused.append(error)
            else:
                return attrs.evolve(compiled, uncut=_first_line(refused[0]) if refused else "")
        # To run it on every rank is right only where all have the same values.
        if refused and world and (_owned(world, args) or self._differs(args, world)):
            raise refused[0]
        raise _RunsWhole(_first_line(refused[0]) if refused else "it has no parameters")

    def _ways(
        self, builder: Builder, args: Sequence[Any], world: World | None
    ) -> Iterator[Builder]:
        """How the graph may be built, the best way first."""
        pairs = list(zip(self.graph.inputs.arguments, args, strict=True))
        owned = _owned(world, args)
        if not (owned or any(argument.role == Role.PARAMETER for argument, _ in pairs)):
            return
        # A graph that comes in ever new shapes costs more to build than it saves.
        if world is None and len(self.known) + len(self.whole) >= MOST_SHAPES:
            raise _RunsWhole(f"it has come in more than {MOST_SHAPES} shapes")
        yield builder
        trains = owned or any(is_trained(argument, value) for argument, value in pairs)
        if world is None or builder.options.replicas > 1 or not trains:
            return  # every replica has rows of its own
        uncut = attrs.evolve(builder, options=_one_microbatch(builder.options))
        yield uncut
        ranks = builder.mesh(world).ranks
        # The whole graph on one rank, the one with least state so far.
        least = world.decided_by_rank_zero(lambda: str(least_loaded(world.ownership.known, ranks)))
        yield attrs.evolve(uncut, options=attrs.evolve(uncut.options, stages=1), home=int(least))

    def _differs(self, args: Sequence[Any], world: World) -> bool:
        """Whether ranks have other values than one another (collective)."""
        pairs = zip(self.graph.inputs.arguments, args, strict=True)
        tensors = {a.names[0]: value for a, value in pairs if isinstance(value, torch.Tensor)}
        return bool(world.differing(tensors))

    def explained(self, args: Sequence[Any], show: Shown) -> Part:
        """What would become of the graph in one process, at a call with these arguments."""
        try:
            return self._part(self.build(args, self.backend.options, show))
        except _RunsWhole as refused:
            return self._whole(args, str(refused))

    def _summary(self, compiled: Compiled) -> str:
        return self._noted(self._part(compiled), compiled.summary)

    def _part(self, compiled: Compiled) -> Part:
        instead = "runs on one rank" if compiled.program.units == 1 else ""
        if compiled.microbatches < self.backend.options.microbatches:
            instead = "is not cut into microbatches"
        why = f", since {compiled.uncut}" if instead and compiled.uncut else ""
        return Part(f"{instead}{why}", compiled.seconds, self.broken)

    def _whole(self, args: Sequence[Any], why: str) -> Part:
        """Of a graph that runs as it is; its seconds are estimated once."""
        before = self.parts.by_runner.get(self)
        if before is None:
            options = _one_microbatch(self.backend.options)
            builder = attrs.evolve(self.backend.builder, options=options)
            seconds = estimated_seconds(builder, self.piece, args, self.artifacts)
        else:
            seconds = before.seconds
        return Part(f"runs whole, since {why}", seconds, self.broken)

    def _note_whole(self, args: Sequence[Any], why: str) -> None:
        world, words = world_so_far(), self._noted(self._whole(args, why), "")
        show = shown(log, progress=False, rank=world.rank if world else 0)
        log.log(show.level, "%scompiled %s: %s", show.who, self.name, words)

    def _noted(self, part: Part, summary: str) -> str:
        self.parts.by_runner[self] = part
        return "; ".join(filter(None, (summary, part.instead, self.parts.summary)))


class _RunsWhole(CollectiveError):
    """All ranks run a graph as it is, each for itself."""


def _one_microbatch(options: Options) -> Options:
    """The options of a graph that is not cut into microbatches; what was said of cuts and schedules
    is meant for others."""
    return attrs.evolve(
        options,
        microbatches=1,
        replicas=1,
        mesh=None,
        schedule="1f1b",
        plan=None,
        split_at=None,
        partition=None,
        recompute=None,
        costs="estimate",
    )


def _owned(world: World | None, args: Sequence[Any]) -> bool:
    """Whether a rank trains any of these, so that others have no values of it."""
    return world is not None and world.ownership.owns_any(args)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
