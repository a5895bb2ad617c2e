"""What both doors know of a step."""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import attrs
import torch

from pfeife.backend.building.residence import residence
from pfeife.backend.doors.invocation import Invocation, Run
from pfeife.backend.entry import Backend
from pfeife.backend.graphs.step_graph import Losses, MicrobatchGraph
from pfeife.backend.steps import Steps
from pfeife.frontend.arguments import Inputs
from pfeife.frontend.batch import Arguments
from pfeife.frontend.captured import Door
from pfeife.frontend.checks.capture_view import CaptureView
from pfeife.frontend.checks.check_capture import Doubled
from pfeife.frontend.forward import Forward
from pfeife.runtime.distributed.process_group import world_so_far

log = logging.getLogger("pfeife")
Grown = Callable[[int], tuple[Forward, Inputs]]


@attrs.frozen(eq=False)
class Doorway:
    """A step in front of its doors: how state is seen during a capture (`view`), whether the caller
    has `said` where the batch is, for which sizes a program is (`dynamic`, as in torch.compile),
    and what runs the result. `current` has the invocation that is on its way, for who is called by
    Dynamo, or by what is built: these get the arguments of Dynamo's calls and not ours."""

    step: Callable[..., Any]
    name: str
    backend: Backend
    view: CaptureView
    said: bool
    dynamic: bool | None
    run: Run
    current: ContextVar[Invocation]
    drops: Iterator[int] = attrs.field(factory=itertools.count)

    @property
    def most(self) -> int:
        """How many programs of the step are kept."""
        return self.backend.options.max_programs

    def steps(
        self,
        forward: Forward,
        inputs: Inputs,
        grown: Grown,
        frame: Any,
        door: Door,
        doubled: Doubled | None = None,
    ) -> Steps:
        """What is built of a captured microbatch, nothing yet. `frame` is what its loss is known
        by; the others as for `MicrobatchGraph`."""
        # By frame, so that evaluation finds what training has found.
        losses = Losses(forward, self.backend.losses, frame)
        graph = MicrobatchGraph(forward, inputs, grown, losses, door, self.said, doubled)
        return Steps(self.backend, graph, self.name, self._settle)

    def _settle(self, state: Sequence[tuple[str, torch.Tensor, torch.device]]) -> None:
        """Brings parameters and buffers to the devices of their stages."""
        self.view.add(residence().settle(state, self.view.device))

    def tell_of_drops(self) -> None:
        """Says that not all programs are kept; the first time that it is called."""
        world = world_so_far()
        if next(self.drops) == 0 and not (world and world.rank):
            log.warning(
                "%s has been captured for %d sizes, each with a program of its own: from now on "
                "earlier ones are dropped (max_programs=%d)",
                *(self.name, self.most, self.most),
            )


def larger(invocation: Invocation, times: int) -> Arguments:
    """The call of a first microbatch that has so many times as many rows."""
    leaves = invocation.call.grown(times)
    args, kwargs = invocation.call.made(leaf.first for leaf in leaves)
    return attrs.evolve(invocation.call, leaves=leaves, args=args, kwargs=kwargs)
