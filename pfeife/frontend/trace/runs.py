"""The runs of a step on a call's first microbatch: on fake tensors, and in eager.

Fake runs find what the step reads and does; a run in eager has the values that it asks for.
"""

import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from pfeife import _torch
from pfeife.frontend.arguments import fake_like
from pfeife.frontend.batch import Arguments
from pfeife.frontend.deferred.tensors import check_values
from pfeife.frontend.results import tensors_in
from pfeife.frontend.trace.fake_run import FakeRun, Seen, kept_slots, resized, stand_ins
from pfeife.frontend.trace.open_sizes import Opening, Place
from pfeife.frontend.trace.traced import Warm, layout_of
from pfeife.frontend.watch.data_writes import OwnBackward, copied_data, refused_gradients
from pfeife.frontend.watch.executed import Executed, noting
from pfeife.frontend.watch.foreign_generators import drawing_line, refusal, watching
from pfeife.frontend.watch.modes import Calls
from pfeife.frontend.watch.reachable_state import Change, Places, state_kept
from pfeife.frontend.watch.restore import alike, torchs_generators, values_kept
from pfeife.frontend.watch.user_lines import user_line
from pfeife.frontend.watch.value_guards import Answering, Known, Noting, spelled

Step = Callable[..., Any]
Told = Callable[[], AbstractContextManager[None]]  # while the step runs, of what it is told


class Runs:
    """A step on a call's first microbatch, with what all of its runs share: stand-ins (`values`)
    for the tensors in its `places`, the fake `batch`, the symbols of the sizes that are open."""

    def __init__(
        self,
        step: Step,
        call: Arguments,
        device: torch.device | None,
        places: Mapping[Place, str],
        kernels: bool,
        context: Told,
        data_values: Known | None = None,
    ):
        self.step, self.call, self.told, self.known = step, call, context, data_values or Known()
        self.places = Places(step, call.others)
        # Not where data decide sizes: what torch then checks of both has no flag.
        self.kernels = kernels and not self.known.noted
        self.mode = _torch.symbolic_mode()
        self.opening = Opening(self.mode, call, places)
        # By identity: a tensor that is given twice is one, as in eager.
        fakes = {
            id(leaf.first): fake_like(self.mode, leaf.first, *layout, device)
            for leaf, layout in zip(call.leaves, self.opening.layouts, strict=True)
        }
        self.batch = [fakes[id(leaf.first)] for leaf in call.leaves]
        self.values = stand_ins(self.places, self.mode, device)

    def fake(self) -> FakeRun:
        """A run on fake tensors. Raises ValueError if it does more than can be traced."""
        # What a run may leave, in the order of what a person would rather be told.
        layouts = list(map(layout_of, self.batch))
        try:
            with torchs_generators() as states, watching() as moved:
                fake_run = self._on_fakes()
                seeded = any(
                    not torch.equal(generator.get_state(), state) for generator, state in states
                )
        except Exception as error:
            raise plain_reason(error) from error
        if moved:
            # Once more, only to find the line that draws.
            with torchs_generators(), watching():
                raise refusal(drawing_line(self._on_fakes, moved))
        if layouts != list(map(layout_of, self.batch)):
            raise ValueError(
                "the step changes the shape or strides of one of its arguments in place: do that "
                "with a view (x = x.t())"
            )
        if seeded:
            raise ValueError(
                "the step seeds torch's default generator, or draws from it for tensors that do "
                "not depend on its arguments: seed outside of the step. (Where it does neither, "
                "another thread has drawn meanwhile, whose numbers come again: have it wait until "
                "the step is captured)"
            )
        self._check_stand_ins()
        fixed = self.opening.fixed()
        if self.kernels and fake_run.answering.of_data:
            raise OfData
        if fixed:
            raise Fixed(fixed)
        return fake_run

    def _check_stand_ins(self) -> None:
        """Raises ValueError if a run has changed of a tensor what no operation does."""
        for slot, tensor in self.values.items():
            if slot.get().requires_grad != tensor.requires_grad:
                raise ValueError(
                    f"the step sets requires_grad of {slot.name}: do that outside of the step"
                )
        if any(tensor.is_leaf and tensor.grad is not None for tensor in self.values.values()):
            raise OwnBackward("")
        for slot, tensor in self.values.items():
            if _torch.hooks_of(tensor):
                raise ValueError(
                    f"the step puts a hook on {slot.name}, one more whenever it runs: do that "
                    "once, outside of the step"
                )

    def _on_fakes(self) -> FakeRun:
        seen, executed, answering = Seen(), Executed(), self.answering()
        # The last mode sees operations first: `answering`, then `seen`, then the fake tensors'.
        contexts = (
            self.mode,
            # As in AOTAutograd: some of torch's kernels in C++ (pad, interpolate) ask for sizes.
            _torch.python_kernels() if self.kernels else Calls(resized),
            _torch.forgetting_symbols(self.mode),
            seen,
            self.told(),
            answering.active(),
            copied_data(self.values.values(), self.batch),
            refused_gradients(self.values.values(), fake=True),
            _torch.numbers_for_kernels(),
            _torch.quiet_fakes(),
        )
        with ExitStack() as stack:
            changes = stack.enter_context(state_kept(self.places, self.values))
            for context in contexts:
                stack.enter_context(context)
            with noting(executed):
                result = self.called(self.batch)
        return FakeRun(seen, answering, executed, result, changes)

    def answering(self) -> Answering:
        """What answers the questions of one run, from the first one on."""
        return Answering(self.mode, self.known, self.opening.known)

    def called(self, batch: Sequence[torch.Tensor], traced: bool = True) -> Any:
        """What the step returns for these tensors of the call; `traced` as Dynamo would have it of
        Python's functions of numbers, else as in eager."""
        args, kwargs = self.call.made(batch)
        with ExitStack() as stack:
            stack.enter_context(_torch.eager_stance())
            stack.enter_context(_torch.converting_others())
            if traced:
                for instead in (_torch.extremes, _torch.floats, _torch.texts_of_numbers):
                    stack.enter_context(instead())
            if traced and self.known.pinned:
                stack.enter_context(Calls(spelled))
            return self.step(*args, **kwargs)

    def warm(self) -> Warm:
        """Runs the first microbatch in eager and keeps what that leaves behind, but for values of
        tensors and the state of the generator. Raises ValueError if a second run, from what the
        first one leaves, has other results: the trace is of later runs."""
        arguments = (leaf.first for leaf in self.call.leaves)  # of the caller's own memory
        tensors = {
            id(tensor): tensor for tensor in (*(slot.get() for slot in self.values), *arguments)
        }.values()
        # A deferred model, or one of other ranks, has nothing to run on.
        check_values(tensors, "the step asks for values, or is another one at its first call")
        noting = Noting()
        first, changes = self._eager(tensors, noting)
        # Tensors were put back, and lists are never kept; what else the first run has left is what
        # the second one finds, and the trace.
        for change in changes:
            if change.slot not in self.values and not isinstance(change.slot.container, list):
                change.slot.put(change.after)
        left = [value for _, value in tensors_in([change.after for change in changes])]
        second, again = self._eager([*tensors, *left], nullcontext())
        results = (dict(tensors_in(result)) for result in (first, second))
        if not all(map(alike, *(by_path.values() for by_path in results))):
            kept_slots(again)  # what changes with each run is told as that
            names = sorted({change.slot.name for change in changes})
            raise ValueError(
                f"the step computes something else in its first run, which sets {names}, than in "
                "later ones: run it once before it is compiled"
            )
        return Warm(frozenset(change.slot for change in changes), noting.noted)

    def _eager(
        self, tensors: Collection[torch.Tensor], noting: AbstractContextManager[Any]
    ) -> tuple[Any, list[Change]]:
        """The results of the first microbatch in eager, and what has changed meanwhile in the
        slots, which are put back, as are the values of the tensors."""
        contexts = (torchs_generators(), watching(), self.told())
        try:
            with values_kept(tensors), state_kept(self.places, {}) as changes, ExitStack() as stack:
                for context in (*contexts, refused_gradients(tensors, fake=False), noting):
                    stack.enter_context(context)
                result = self.called([leaf.first.detach() for leaf in self.call.leaves])
        except Exception as error:
            raise plain_reason(error) from error
        return result, changes


def plain_reason(error: Exception) -> Exception:
    """What kept a step from being traced, and the line of the step."""
    is_explained = isinstance(error, ValueError) and "could not be traced" in str(error)
    if is_explained or isinstance(error, OwnBackward):
        return error
    where = user_line(error.__traceback__)
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if any(frame.f_code is torch.autograd.backward.__code__ for frame in frames):
        return OwnBackward(where)
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    asks = _torch.asks_for_values(error)
    if asks:
        text = f"it asks for the value of a tensor ({text.split('. ')[0]})"
    kind = Asks if asks else ValueError
    return kind(f"the step could not be traced: {text}{f' ({where})' if where else ''}")


class Fixed(Exception):
    """Raised for open sizes, by their names, that a run takes for certain numbers."""

    def __init__(self, names: Sequence[str]):
        super().__init__(f"the step takes {', '.join(names)} for certain numbers")
        self.names = names


class OfData(Exception):
    """Raised where data decide sizes, beside those that are open."""


class Asks(ValueError):
    """Raised for a step that asks for the values of tensors."""
