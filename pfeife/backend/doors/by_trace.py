"""The second door: the step runs on fake tensors, and what it computes is written down.

A trace holds for the calls that give the same answers to what the step's Python has asked. Those
that were used last are kept, up to a number; a call takes the last one that holds for it, or is
traced.
"""

import logging
from collections.abc import Sequence
from typing import Any

import attrs

from pfeife.backend.doors.doorway import Doorway, larger
from pfeife.backend.doors.invocation import Invocation
from pfeife.backend.graphs.step_graph import NotOpen
from pfeife.backend.steps import Steps
from pfeife.frontend.arguments import Inputs
from pfeife.frontend.batch import Arguments, function_of
from pfeife.frontend.forward import Forward
from pfeife.frontend.trace.open_sizes import open_places
from pfeife.frontend.trace.traced import kind_of
from pfeife.frontend.trace.tracing import Traced, traced
from pfeife.frontend.watch.restore import set_states, torchs_states
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.failure import PipelineError

log = logging.getLogger("pfeife")


class TraceDoor:
    """What was traced of a step."""

    def __init__(self, doorway: Doorway):
        self.doorway = doorway
        self.known: list[tuple[Traced, Steps]] = []  # what was used last is the last

    def __call__(self, invocation: Invocation) -> Any:
        """Runs what was traced of the step for such a call, or traces it. Where a trace has another
        answer than the call, another one is taken, with the same random numbers. (On ranks those
        that there are: each lacks parameters, without which nobody knows the answers.) Where there
        is no program of a new trace for several sizes, there is a trace for each."""
        invocation.at = "trace"
        call = invocation.call
        states, tried, refused = torchs_states(), list[Traced](), ""
        while True:
            trace, steps, is_new = self._fitting(invocation, tried, refused)
            try:
                results = self.doorway.run(invocation, steps, trace.values(call.leaves))
                return trace.returned(results)
            except PipelineError:
                raise
            except (ValueError, IndexError, RuntimeError) as error:
                refused = self._next(call, trace, is_new, tried, error) or refused
            tried.append(trace)
            # The next trace draws what this one has drawn: a call uses its numbers once.
            set_states(states)

    def _next(
        self,
        call: Arguments,
        trace: Traced,
        is_new: bool,
        tried: Sequence[Traced],
        error: Exception,
    ) -> str:
        """What to do after an error of a trace: raises it, or returns, for another one to be taken;
        then why sizes must be closed, "" if they need not be.

        error                          of a new trace               of an earlier one
        no program for open sizes      closes them, traces anew     another, or anew
        another answer than the call   raises                       another, or anew (*)
        any other                      raises                       raises

        (*) On ranks only another that there is."""
        cause, closed = trace.unfit(error), ""
        if any(isinstance(e, NotOpen) for e in (error, error.__cause__)):
            if is_new:  # sizes are closed, then; else those of this call may be open
                self.known.pop()
                closed = str(error)
        elif cause is error:
            raise error
        elif is_new or (world_so_far() and not self._untried(call, [*tried, trace])):
            raise cause from error
        log.debug("%s is traced anew: %s", self.doorway.name, cause)
        return closed

    def _fitting(
        self, invocation: Invocation, tried: Sequence[Traced], refused: str
    ) -> tuple[Traced, Steps, bool]:
        """What was traced last of those that hold for a call and were not tried, or a new trace;
        `refused` says why its sizes are not open, "" if they may be."""
        call = invocation.call
        with self.doorway.view.seen():
            fitting = self._untried(call, tried)
        if not fitting and len(self.known) == self.doorway.most:
            self._drop_oldest(call)
        if fitting:
            self.known.remove(fitting)
        self.known.append(fitting or self._traced(invocation, refused))
        return *self.known[-1], not fitting

    def _drop_oldest(self, call: Arguments) -> None:
        """Makes room for a trace of other sizes. Raises ValueError where something else is another
        one with every call."""
        last = self.known[-1][0]
        # Other sizes may come back, as batches do. A number that counts the steps does not: each
        # trace would be used once, for ever.
        if last.kind != kind_of(call) or not last.sizes.broken(call):
            raise ValueError(
                f"{self.doorway.name} has been traced {self.doorway.most} times, the last time "
                f"because of {self._broken(call)}: keep what changes with every call in a tensor"
            )
        _, steps = self.known.pop(0)
        steps.close()
        self.doorway.tell_of_drops()

    def _untried(self, call: Arguments, tried: Sequence[Traced]) -> tuple[Traced, Steps] | None:
        """What was traced last of those that hold for a call and were not tried."""
        pairs = (pair for pair in reversed(self.known) if pair[0] not in tried)
        return next((pair for pair in pairs if not pair[0].broken(call)), None)

    def _broken(self, call: Arguments) -> str:
        """Why the last trace does not hold for a call."""
        broken = self.known[-1][0].broken(call) if self.known else "nothing was traced"
        return broken or "the values of tensors that it asks for"

    def _traced(self, invocation: Invocation, refused: str) -> tuple[Traced, Steps]:
        """A new trace for a call: of its kind, those sizes are open that are others now, unless
        they were `refused`."""
        # Python runs on real shapes, and may ask for values.
        invocation.everything()
        call, view, step = invocation.call, self.doorway.view, self.doorway.step
        log.debug("%s is traced because of %s", self.doorway.name, self._broken(call))
        kind = kind_of(call)
        alike = [trace for trace, _ in self.known if trace.kind == kind]
        places = {}
        if not refused and not any(trace.sizes.refused for trace in alike):
            shapes = [trace.sizes.shapes for trace in alike]
            places = open_places(call, shapes, self.doorway.dynamic)
        # On ranks, each of which lacks parameters by then, the answers are those of before.
        earlier = alike or [trace for trace, _ in self.known]
        warm = earlier[-1].warm if earlier and world_so_far() else None
        with view.seen(values=True):
            trace = traced(step, call, places=places, warm=warm)
        if refused:
            trace = attrs.evolve(trace, sizes=attrs.evolve(trace.sizes, refused=refused))
        view.check(trace.inputs)

        def grown(times: int) -> tuple[Forward, Inputs]:
            with view.seen(values=True):
                several = traced(step, larger(self.doorway.current.get(), times))
            return several.forward, several.inputs

        frame = getattr(function_of(step), "__code__", type(step))
        return trace, self.doorway.steps(trace.forward, trace.inputs, grown, frame, "trace")
