"""The gradient of a step's loss, which the step needs before it arrives.

The schedule, backwards included, runs inside of the call. What arrives at the loss afterwards is a
factor of all gradients, but for those that are lost: in float16 nothing is smaller than 6e-8, and
it is for their sake that a GradScaler scales the loss. A step with such gradients therefore runs
with the gradient that its loss was given last.

    call        all F and B, with the last gradient of the loss
    backward    the same has arrived:  the gradients are handed out as they are
                another one:           the step runs again, with that

So every gradient has the bits that eager's backward gives it, an overflow included. A scaler
changes its scale every 2,000 steps, and after an overflow. The gradients of the first run go before
the second: it needs no more memory than any, but for copies of buffers that a step updates.
"""

import contextlib
import inspect
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

import attrs
import torch

from pfeife.ir.evaluate import Result, State
from pfeife.ir.flops import underflows
from pfeife.ir.parts import Port
from pfeife.ir.program import Program
from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.runtime.distributed.state.remote_parameters import version_of
from pfeife.runtime.protocols import Pipeline

log = logging.getLogger("pfeife")
FIRST = float(inspect.signature(torch.amp.GradScaler).parameters["init_scale"].default)
_MANY = 5  # steps that run twice, one after the other
_PLACE = "the gradient of a step's loss"


class LossScale:
    """The gradients that the loss of a program was given last; before any, the first one of a
    GradScaler."""

    def __init__(self) -> None:
        # One more than it takes to tell the `_MANY`th change in a row from those after it.
        self.latest = deque([FIRST], maxlen=_MANY + 2)

    @property
    def value(self) -> float:
        """The last one."""
        return self.latest[-1]

    def note(self, value: float) -> None:
        """Such a gradient has arrived. Warns, once, where each is another one than before."""
        before = self.value
        self.latest.append(value)
        changed = [last != then for then, last in pairwise(self.latest)]
        in_a_row = sum(1 for _ in takewhile(bool, reversed(changed)))
        world = world_so_far()
        # A scaler changes its factor once in a while. A loop that does so in each step pays twice
        # for all of them, and should know.
        if in_a_row == _MANY and not (world and world.rank):
            log.warning(
                "the gradient of the loss was another one in each of the last %d steps (%g, then "
                "%g). A step whose gradients are in float16 then runs twice: scale the loss alike "
                "in every call, and divide the gradients by what changes",
                *(_MANY, before, value),
            )


def loss_scale_of(program: Program) -> LossScale | None:
    """None for a program whose backwards have the range of float32, as bfloat16 has."""
    return LossScale() if underflows(program) else None


@attrs.define(eq=False)
class _Saved:
    """One of the tensors that autograd saves, and its version, None once it was dropped. With it
    goes what runs its step `again`, so that the backward which frees the one frees the other."""

    tensor: torch.Tensor
    version: int | None
    again: "Again"


class Gradients:
    """Those of a step among what autograd saves: they may be dropped, and all is freed by the
    backward as others are. Autograd alone holds them, this only knows where they are."""

    def __init__(self) -> None:
        self.places: list[weakref.ref[_Saved]] = []

    @property
    def parts(self) -> list[_Saved]:
        """Those that autograd still has."""
        return [part for part in (place() for place in self.places) if part is not None]

    def saving(self, again: "Again") -> contextlib.AbstractContextManager[Any]:
        """What is saved meanwhile belongs to these, with what runs the step `again`."""

        def pack(tensor: torch.Tensor) -> _Saved:
            # Weak, so that autograd alone decides how long they live.
            part = _Saved(tensor, version_of(tensor), again)
            self.places.append(weakref.ref(part))
            return part

        return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)

    @property
    def again(self) -> "Again":
        """What runs the step again; only while autograd has it."""
        return self.parts[0].again

    @property
    def dropped(self) -> bool:
        """Whether nobody can ask for them again."""
        return any(part.version is None for part in self.parts)

    def drop(self) -> None:
        """Nobody asks for them again."""
        for part in self.parts:
            part.tensor, part.version = part.tensor.new_empty(0), None


def _unpack(part: _Saved) -> torch.Tensor:
    """What autograd itself does not look at where there are hooks."""
    if part.version is not None and version_of(part.tensor) != part.version:
        raise RuntimeError(
            "a gradient that a step has handed out was changed in place, and its graph was "
            "retained for another backward: clone it first"
        )
    return part.tensor


@attrs.frozen(eq=False)
class Again:
    """A step that has run with some gradient of its loss, and all that it takes to run it with
    another one: `read` are the tensors that it reads, by what they are called, with the versions
    that they must still have."""

    pipeline: Pipeline
    state: State
    microbatches: Sequence[Any]
    seed: int
    read: Sequence[tuple[str, torch.Tensor, int]]

    @staticmethod
    def of(
        pipeline: Pipeline,
        state: State,
        microbatches: Sequence[Any],
        seed: int,
        ports: Iterable[Port],
        slots: Mapping[str, Any],
    ) -> "Again":
        """`ports` are those whose tensors in `slots` are read as they are."""
        pairs = [(port.fqn, slots[port.name]) for port in ports]
        read = [(name, value, version_of(value)) for name, value in pairs]
        return Again(pipeline, state, microbatches, seed, read)

    def result(self, scale: float) -> Result:
        """The step with this gradient of the loss (collective). Raises RuntimeError, under torchrun
        CollectiveError on all ranks, if what it reads has been changed."""
        # Every rank has its own reason, and all must run again or none.
        world, refused = world_so_far(), self._changed(scale)
        if world:
            with world.busy(lambda: Activity(_PLACE)):
                world.agreed(f"{scale}", _PLACE, refused=refused)
        elif refused:
            raise refused
        step = self.pipeline.start(self.state, self.microbatches, seed=self.seed, scale=scale)
        step.run()
        return step.result(outputs=False)

    def _changed(self, scale: float) -> RuntimeError | None:
        names = [name for name, value, version in self.read if version_of(value) != version]
        if not names:
            return None
        return RuntimeError(
            f"{names[0]} was changed in place between a call of the step and its backward, which "
            f"must run the step again: its gradients are in float16, and that of the loss is "
            f"{scale:g} now; call backward before anything is changed"
        )
