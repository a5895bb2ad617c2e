"""The second door: a step that is traced as it runs, for what Dynamo does not take as one graph.

The step itself runs, on tensors without storage: its loggers, prints and branches on what is no
tensor just run, and AOTAutograd records the operations. That is sound only as far as nothing else
steers it: two runs must do the same, and what the step reaches (`places`) must be as it was.
"""

import logging
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import attrs
import torch
from torch import fx, nn

from pfeife import _torch
from pfeife.frontend.arguments import Argument, Inputs, Kept, aliases, fake_like, port_name
from pfeife.frontend.batch import Arguments, Leaf
from pfeife.frontend.checks.foreign_generators import drawing_line, refusal, watching
from pfeife.frontend.checks.restore import alike, torchs_generators, values_kept
from pfeife.frontend.deferred.tensors import check_values
from pfeife.frontend.forward import Forward
from pfeife.frontend.results import Leaf as Result
from pfeife.frontend.results import tensors_in
from pfeife.frontend.trace.data_writes import DataWrites, OwnBackward, OwnGradients
from pfeife.frontend.trace.executed import Executed, noting
from pfeife.frontend.trace.fake_run import (
    FakeRun,
    Resizing,
    Seen,
    check_alike,
    check_steady,
    kept_slots,
    stand_ins,
)
from pfeife.frontend.trace.guards import Steering
from pfeife.frontend.trace.open_sizes import Opening, Place
from pfeife.frontend.trace.reachable_state import Places, Slot, StateGuard
from pfeife.frontend.trace.traced import Read, Traced, Warm, check_rebuilt, kind_of
from pfeife.frontend.trace.user_lines import noted as lines_noted
from pfeife.frontend.trace.user_lines import user_line
from pfeife.frontend.trace.value_guards import Answering, Known, Noting, Spelling, ValueGuard
from pfeife.ir.parts import Role

log = logging.getLogger("pfeife")
Step = Callable[..., Any]
Told = Callable[[], AbstractContextManager[None]]  # while the step runs, of what it is told


def traced(
    step: Step,
    call: Arguments,
    device: torch.device | None = None,
    places: Mapping[Place, str] | None = None,
    warm: Warm | None = None,
) -> Traced:
    """A step, traced on the first microbatch of a call. Where it asks for values of tensors, it
    gets those of that microbatch, see `answers`. The step is told that it is compiled, which keeps
    many from asking for values; one that fails so, but not in eager, is traced without. Tensors on
    the meta device are traced as those of a `device`. The sizes at `places` are open, see
    `open_sizes`: where the step cannot be traced with them, it is for those of this call. `warm`
    is what an eager run has shown, for who has no values to run it with.

    Raises ValueError, with the line of the step, for one that does something else in a second run,
    draws numbers elsewhere than from torch, makes tensors whose sizes depend on data, or leaves
    numbers or objects of Python's behind.
    """
    make, refused = partial(_Tracer, step, call, device), ""
    kernels = True
    # Every round gives something up (kernels, the sizes that a step fixes, all sizes), so it ends.
    while places:
        try:
            return _told(partial(make, places, kernels), warm)
        except _OfData:
            kernels = False
        except _Fixed as error:
            places = {place: name for place, name in places.items() if name not in error.names}
            refused = str(error)
        except Exception as error:
            places, refused = {}, str(error)
    if refused:
        log.debug("a trace for each size, since there is none for all: %s", refused)
    trace = _told(partial(make, {}, False), warm)
    return attrs.evolve(trace, sizes=attrs.evolve(trace.sizes, refused=refused))


def _told(make: Callable[..., "_Tracer"], warm: Warm | None) -> Traced:
    """The step, which is told that it is compiled, if that does not make it fail."""
    try:
        return _traced(partial(make, _torch.said_to_compile), warm)
    except ValueError as error:
        if error.__cause__ is None:  # it is refused for what it does, not since it has failed
            raise
        return _traced(partial(make, nullcontext), warm)


def _traced(make: Callable[..., "_Tracer"], warm: Warm | None) -> Traced:
    tracer = make()
    try:
        first = tracer.run()
    except _Asks:
        first = None
    if first is not None and not first.changes:
        return tracer.traced(first)
    warm = warm or tracer.warm()  # perhaps what a first call alone does: caches, hooks
    try:
        return _again(make(Known(warm.noted)), warm)
    except ValueError:
        if warm.noted:
            with suppress(ValueError):
                return _again(make(Known(warm.noted, pinned=True)), warm)
        raise


def _again(tracer: "_Tracer", warm: Warm) -> Traced:
    return tracer.traced(tracer.run(), warm)


class _Tracer:
    """Runs of a step on a call's first microbatch."""

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
        fakes = {
            id(leaf.first): fake_like(self.mode, leaf.first, *layout, device)
            for leaf, layout in zip(call.leaves, self.opening.layouts, strict=True)
        }
        self.batch = [fakes[id(leaf.first)] for leaf in call.leaves]
        self.values = stand_ins(self.places, self.mode, device)
        self.paths = {
            id(module): f"@{root}.{path}".rstrip(".")
            for root, outer in reversed(self.places.roots.items())
            for path, module in outer.named_modules()
        }

    def run(self) -> FakeRun:
        """A run on fake tensors. Raises ValueError if it does more than can be traced."""
        layouts = list(map(_layout, self.batch))
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
        if layouts != list(map(_layout, self.batch)):
            raise ValueError(
                "the step changes the shape or strides of one of its arguments in place: do that "
                "with a view (x = x.t())"
            )
        frozen = [slot for slot in self.values if self._is_frozen(slot)]
        if frozen:
            raise ValueError(
                f"the step sets requires_grad of {frozen[0].name}: do that outside of the step"
            )
        if seeded:
            raise ValueError(
                "the step seeds torch's default generator, or draws from it for tensors that do "
                "not depend on its arguments: seed outside of the step"
            )
        if any(tensor.is_leaf and tensor.grad is not None for tensor in self.values.values()):
            raise OwnBackward("")
        hooked = next(
            (slot for slot, tensor in self.values.items() if _torch.hooks_of(tensor)), None
        )
        if hooked is not None:
            raise ValueError(
                f"the step puts a hook on {hooked.name}, one more whenever it runs: do that once, "
                "outside of the step"
            )
        fixed = self.opening.fixed()
        if self.kernels and fake_run.of_data:
            raise _OfData
        if fixed:
            raise _Fixed(fixed)
        return fake_run

    def _on_fakes(self) -> FakeRun:
        seen, guard, executed = Seen(), StateGuard(self.places, self.values), Executed()
        symbols, answering = _torch.forgetting_symbols(self.mode), self._answering()
        writes = DataWrites(self.values.values(), self.batch)
        gradients = OwnGradients(self.values.values(), fake=True)
        numbers, quiet = _torch.numbers_for_kernels(), _torch.quiet_fakes()
        # As in AOTAutograd: some of torch's kernels in C++ (pad, interpolate) ask for sizes.
        kernels = _torch.python_kernels() if self.kernels else Resizing()
        # The last mode sees operations first: `answering`, then `seen`, then the fake tensors'.
        contexts = (
            guard,
            self.mode,
            kernels,
            symbols,
            seen,
            self.told(),
            answering,
            writes,
            gradients,
            numbers,
            quiet,
        )
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            with noting(executed):
                result = self._called(self.batch)
        changes = tuple(guard.changes)
        observed = seen.real, seen.fake, seen.operations
        return FakeRun(
            *observed,
            result,
            changes,
            executed,
            answering.flags,
            answering.answers,
            answering.of_data,
        )

    def _answering(self) -> Answering:
        return Answering(self.mode, self.known, self.opening.known)

    def _is_frozen(self, slot: Slot) -> bool:
        """Whether a run has made a tensor ask for gradients that did not, or the other way."""
        now: torch.Tensor = slot.get()
        return bool(now.requires_grad != self.values[slot].requires_grad)

    def _called(self, batch: Sequence[torch.Tensor], traced: bool = True) -> Any:
        args, kwargs = self.call.made(batch)
        extremes, floats = (_torch.extremes(), _torch.floats()) if traced else (nullcontext(),) * 2
        texts = _torch.texts_of_numbers() if traced else nullcontext()
        pinned = Spelling() if traced and self.known.pinned else nullcontext()
        with _torch.eager_stance(), _torch.converting_others(), extremes, floats, texts, pinned:
            return self.step(*args, **kwargs)

    def warm(self) -> Warm:
        """Runs the first microbatch in eager and keeps what that leaves behind, but for values of
        tensors and the state of the generator. Raises ValueError if a second run, from what the
        first one leaves, has other results: the trace is of later runs."""
        arguments = (leaf.first for leaf in self.call.leaves)  # of the caller's own memory
        tensors = {
            id(tensor): tensor for tensor in (*(slot.get() for slot in self.values), *arguments)
        }.values()
        check_values(tensors, "the step asks for values, or is another one at its first call")
        noting = Noting()
        first, guard = self._eager(tensors, noting)
        for change in guard.changes:
            if change.slot not in self.values and not isinstance(change.slot.container, list):
                change.slot.put(change.after)
        left = [value for _, value in tensors_in([change.after for change in guard.changes])]
        second, _ = self._eager([*tensors, *left], nullcontext())
        results = (dict(tensors_in(result)) for result in (first, second))
        if not all(map(alike, *(by_path.values() for by_path in results))):
            names = sorted({change.slot.name for change in guard.changes})
            raise ValueError(
                f"the step computes something else in its first run, which sets {names}, than in "
                "later ones: run it once before it is compiled"
            )
        return Warm(frozenset(change.slot for change in guard.changes), noting.noted)

    def _eager(
        self, tensors: Collection[torch.Tensor], noting: AbstractContextManager[Any]
    ) -> tuple[Any, StateGuard]:
        """The results of the first microbatch in eager, and what has changed meanwhile in the
        slots, which are put back, as are the values of the tensors."""
        guard, gradients = StateGuard(self.places, {}), OwnGradients(tensors, fake=False)
        states, moved = torchs_generators(), watching()
        try:
            with values_kept(tensors), guard, states, moved, self.told(), gradients, noting:
                result = self._called([leaf.first.detach() for leaf in self.call.leaves])
        except Exception as error:
            raise plain_reason(error) from error
        return result, guard

    def traced(self, first: FakeRun, warm: Warm | None = None, is_first: bool = True) -> Traced:
        """The step's forward, after a run, which perhaps `is_first`."""
        steering = Steering(self.step, self.call.others, first.executed)
        before, second = steering.guards(), self.run()
        try:
            check_alike(first, second)
        except ValueError:
            if not is_first or not self.opening.places:
                raise
            # What the first run has learned of open sizes spares others some operations.
            return self.traced(second, warm, is_first=False)
        check_steady(before, second)
        if not first.executed.has_run(second.executed):
            if not is_first:
                raise ValueError("the step runs other code whenever it runs")
            return self.traced(second, warm, is_first=False)
        # Other changes come from what stood in the slots, as where a module checks its weights.
        left = warm.left if warm else ()
        slots = kept_slots([change for change in second.changes if change.slot in left])
        after = {change.slot: change.after for change in second.changes}
        returned = list(tensors_in(second.result))
        numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
        if next(tensors_in(second.result, kind=numbers), None) is not None:
            sizes = "a size of its arguments, or " if self.opening.places else ""
            raise ValueError(
                f"the step returns {sizes}a number that it reads from a tensor, as `.item()` does: "
                "return the tensor, and read it outside"
            )
        # First what the step returns, then what it leaves in slots, then the flags: in this order
        # `_forward` gives them.
        results = list({id(tensor): tensor for _, tensor in returned}.values())
        check_rebuilt(second.result, results)
        index = {id(tensor): at for at, tensor in enumerate(results)}
        leaves = tuple(Result(path, index[id(tensor)]) for path, tensor in returned)
        written = {len(results) + i: slot for i, slot in enumerate(slots)}
        results += [after[slot] for slot in slots]
        flags = range(len(results), len(results) + len(second.flags))
        results += second.flags
        raw_arguments, reads = self._arguments(second.fake)
        taken: set[str] = set()
        arguments = [
            attrs.evolve(argument, name=port_name(argument.name, taken))
            for argument in raw_arguments
        ]
        examples = tuple(argument.example for argument in arguments)
        run = self._forward(reads, leaves, slots, second.answers)
        # Not guarded: what a trace takes as an argument, or writes itself.
        changing = {slot for read in reads for slot in read if isinstance(slot, Slot)} | {*slots}
        trace = Traced(
            Forward(run, examples, tuple(results), leaves, tuple(a.line for a in second.answers)),
            self._inputs(arguments, reads, written, tuple(flags)),
            tuple(reads),
            steering.guards(changing),
            kind_of(self.call),
            self.opening.sizes(),
            second.result,
            written,
            tuple(second.answers),
            tuple(m for root in self.places.roots.values() for m in root.modules()),
            warm,
        )
        return attrs.evolve(trace, inputs=attrs.evolve(trace.inputs, premises=trace.premises))

    def _arguments(self, used: Mapping[int, torch.Tensor]) -> tuple[list[Argument], list[Read]]:
        """What the step reads, each tensor once: of the call, and what it finds by itself."""
        call_arguments: dict[int, tuple[Argument, Read]] = {}
        for position, (leaf, fake) in enumerate(zip(self.call.leaves, self.batch, strict=True)):
            if id(fake) in used and id(fake) not in call_arguments:
                role = Role.CONSTANT if leaf.dim is None else Role.BATCH
                call_arguments[id(fake)] = (
                    Argument(leaf.name, role, (leaf.name,), fake, leaf.dim, position, given=True),
                    (leaf,),
                )
        slots: dict[int, list[Slot]] = {}
        for slot, fake in self.values.items():
            slots.setdefault(id(fake), []).append(slot)
        state = [tuple(slots[at]) for at in used if at in slots]
        return (
            [*(argument for argument, _ in call_arguments.values()), *self._state(state)],
            [*(read for _, read in call_arguments.values()), *state],
        )

    def _state(self, state: Sequence[Sequence[Slot]]) -> Iterator[Argument]:
        """The tensors that the step finds by itself, as arguments, by their slots."""
        roots = self._used({id(slots[0].get()) for slots in state})
        names: dict[int, tuple[str, ...]] = {}
        for root, outer in roots.items():
            prefix = f"{root}." if len(roots) > 1 else ""
            for at, several in aliases(outer).items():
                names[at] = (*names.get(at, ()), *(prefix + name for name in several))
        modules = [module for outer in roots.values() for module in outer.modules()]
        buffers = {id(module._buffers) for module in modules}
        inside = {id(module._parameters) for module in modules} | buffers
        for slots in state:
            tensor = slots[0].get()
            if slots[0].words[0] in self.call.others and id(slots[0].container) not in inside:
                raise ValueError(
                    f"{slots[0].name} is a tensor inside of an argument that Pfeife does not look "
                    "into, so it cannot be cut into microbatches: pass tensors, or lists, tuples, "
                    "dicts, mappings or dataclasses of them"
                )
            if isinstance(tensor, nn.Parameter):
                role = Role.PARAMETER
            elif any(id(slot.container) in buffers for slot in slots):
                role = Role.BUFFER
            else:
                role = Role.CONSTANT
            tensor_names = names.get(id(tensor), (slots[0].name,))
            yield Argument(tensor_names[0], role, tensor_names, self.values[slots[0]])

    def _used(self, ids: Collection[int]) -> dict[str, nn.Module]:
        """The outermost modules that have some of these tensors, given by identity."""
        return {
            root: outer
            for root, outer in self.places.roots.items()
            if any(id(tensor) in ids for tensor in (*outer.parameters(), *outer.buffers()))
        }

    def _inputs(
        self,
        arguments: list[Argument],
        reads: Sequence[Read],
        slots: Mapping[int, Slot],
        flags: tuple[int, ...],
    ) -> Inputs:
        roots = self._used(
            {id(slot.get()) for read in reads for slot in read if isinstance(slot, Slot)}
        )
        replaces = {
            index: tuple(at for at, read in enumerate(reads) if slot in read)
            for index, slot in slots.items()
        }
        return Inputs(
            arguments,
            {f"@{root}": root for root in roots},
            weakref.WeakSet(roots.values()),
            {index: Kept(slot.name, replaces[index]) for index, slot in slots.items()},
            moved={},
            numbers={},
            flags=flags,
        )

    @contextmanager
    def _as_traced(self, answering: Answering) -> Iterator[None]:
        """While AOTAutograd runs the step, as it ran on fake tensors."""
        with self.told(), lines_noted(self.paths), answering, DataWrites():
            yield

    def _forward(
        self,
        reads: Sequence[Read],
        leaves: Sequence[Result],
        slots: Sequence[Slot],
        answers: Sequence[ValueGuard],
    ) -> Callable[..., list[torch.Tensor]]:
        """Runs the step on values of its arguments, once more than where it was given `answers`.
        (Eager needs none.)"""

        def run(*values: Any) -> list[torch.Tensor]:
            pairs = [
                (source, value)
                for read, value in zip(reads, values, strict=True)
                for source in read
            ]
            slot_values = {slot: value for slot, value in pairs if isinstance(slot, Slot)}
            # One tensor may be several leaves of the call, of which `reads` has the first alone.
            firsts = {id(leaf.first): value for leaf, value in pairs if isinstance(leaf, Leaf)}
            batch = [firsts.get(id(leaf.first), leaf.first) for leaf in self.call.leaves]
            guard, answering = StateGuard(self.places, slot_values), self._answering()
            traced = fx.traceback.has_preserved_node_meta()
            try:
                with guard, self._as_traced(answering) if traced else nullcontext():
                    result = self._called(batch, traced)
            except Exception as error:
                if not traced:  # eager's own
                    raise
                raise plain_reason(error) from error
            returned = list(tensors_in(result))
            after = {change.slot: change.after for change in guard.changes}
            same = [path for path, _ in returned] == [leaf.path for leaf in leaves]
            if not same or any(slot not in after for slot in slots):
                raise ValueError("the step returns something else in a second run")
            distinct = {
                leaf.index: tensor for leaf, (_, tensor) in zip(leaves, returned, strict=True)
            }
            ordered = [distinct[at] for at in sorted(distinct)]
            return [*ordered, *(after[slot] for slot in slots), *answering.flags_of(answers)]

        return run


def _layout(value: torch.Tensor) -> tuple:
    return value.shape, value.stride()


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
    kind = _Asks if asks else ValueError
    return kind(f"the step could not be traced: {text}{f' ({where})' if where else ''}")


class _Fixed(Exception):
    """Raised for open sizes, by their names, that a run takes for certain numbers."""

    def __init__(self, names: Sequence[str]):
        super().__init__(f"the step takes {', '.join(names)} for certain numbers")
        self.names = names


class _OfData(Exception):
    """Raised where data decide sizes, beside those that are open."""


class _Asks(ValueError):
    """Raised for a step that asks for the values of tensors."""
