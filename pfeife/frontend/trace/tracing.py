"""The second door: a step that is traced as it runs, for what Dynamo does not take as one graph.

The step itself runs, on tensors without storage: its loggers, prints and branches on what is no
tensor just run, and AOTAutograd records the operations. That is sound only as far as nothing else
steers it: two runs must do the same, and what the step reaches (`places`) must be as it was.

Which of the runs of a step is which, each on the first microbatch:

    first     fake tensors   asks for no values and leaves nothing behind? then go on at `second`
    warm x 2  values         in eager: the answers to what it asks, and what a first call leaves
                             behind (caches, hooks); both must have the same results
    first     fake tensors   again, with these answers in hand
    second    fake tensors   does the same as `first`, and leaves all that steers it as it was; else
                             it may have known more (sizes, a cache), and a third one is compared
    traced    AOTAutograd's  as often as that traces a function, by `_forward`: the joint graph

All of these once more with less taken for granted (`traced`, `_told`), where they cannot be done.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.frontend.arguments import port_name
from pfeife.frontend.batch import Arguments, Leaf
from pfeife.frontend.forward import Forward
from pfeife.frontend.results import Leaf as Result
from pfeife.frontend.results import tensors_in
from pfeife.frontend.trace.fake_run import FakeRun, check_alike, check_steady, kept_slots
from pfeife.frontend.trace.open_sizes import Place
from pfeife.frontend.trace.reads import inputs_of, of_the_call, of_the_step
from pfeife.frontend.trace.runs import Asks, Fixed, OfData, Runs, Step, plain_reason
from pfeife.frontend.trace.traced import Read, Traced, Warm, check_rebuilt, kind_of
from pfeife.frontend.watch.data_writes import copied_data
from pfeife.frontend.watch.guards import Steering
from pfeife.frontend.watch.reachable_state import Slot, state_kept
from pfeife.frontend.watch.user_lines import noted as lines_noted
from pfeife.frontend.watch.value_guards import Answering, Known, ValueGuard

log = logging.getLogger("pfeife")


@_torch.one_at_a_time
def traced(
    step: Step,
    call: Arguments,
    device: torch.device | None = None,
    places: Mapping[Place, str] | None = None,
    warm: Warm | None = None,
) -> Traced:
    """A step, traced on the first microbatch of a call. Where it asks for values of tensors, it
    gets those of that microbatch, see `value_guards`. The step is told that it is compiled, which
    keeps many from asking for values; one that fails so, but not in eager, is traced without.
    Tensors on the meta device are traced as those of a `device`. The sizes at `places` are open,
    see `open_sizes`: where the step cannot be traced with them, it is for those of this call.
    `warm` is what an eager run has shown, for who has no values to run it with.

    Raises ValueError, with the line of the step, for one that does something else in a second run,
    draws numbers elsewhere than from torch, makes tensors whose sizes depend on data, or leaves
    numbers or objects of Python's behind.
    """
    make, refused = partial(Runs, step, call, device), ""
    kernels = True
    # Every round gives something up (kernels, the sizes that a step fixes, all sizes), so it ends.
    while places:
        try:
            return _told(partial(make, places, kernels), warm)
        except OfData:
            kernels = False
        except Fixed as error:
            places = {place: name for place, name in places.items() if name not in error.names}
            refused = str(error)
        except Exception as error:
            places, refused = {}, str(error)
    if refused:
        log.debug("a trace for each size, since there is none for all: %s", refused)
    trace = _told(partial(make, {}, False), warm)
    return attrs.evolve(trace, sizes=attrs.evolve(trace.sizes, refused=refused))


def _told(make: Callable[..., Runs], warm: Warm | None) -> Traced:
    """The step, which is told that it is compiled, if that does not make it fail."""
    try:
        return _traced(partial(make, _torch.said_to_compile), warm)
    except ValueError as error:
        if error.__cause__ is None:  # it is refused for what it does, not since it has failed
            raise
        return _traced(partial(make, nullcontext), warm)


def _traced(make: Callable[..., Runs], warm: Warm | None) -> Traced:
    """By runs that `make` begins anew, on fake tensors alone if the step asks for no values and its
    first call is as later ones."""
    runs = make()
    try:
        first = runs.fake()
    except Asks:
        first = None
    if first is not None and not first.changes:
        return _compared(runs, first)
    warm = warm or runs.warm()  # perhaps what a first call alone does: caches, hooks
    try:
        return _again(make(Known(warm.noted)), warm)
    except ValueError:
        if warm.noted:
            with suppress(ValueError):
                return _again(make(Known(warm.noted, pinned=True)), warm)
        raise


def _again(runs: Runs, warm: Warm) -> Traced:
    return _compared(runs, runs.fake(), warm)


def _compared(
    runs: Runs, first: FakeRun, warm: Warm | None = None, is_first: bool = True
) -> Traced:
    """What a second run shows, which has done the same as the one before, which perhaps
    `is_first`."""
    steering = Steering(runs.step, runs.call.others, first.executed)
    before, second = steering.guards(), runs.fake()
    try:
        check_alike(first, second)
    except ValueError:
        if not is_first or not runs.opening.places:
            raise
        # What the first run has learned of open sizes spares others some operations.
        return _compared(runs, second, warm, is_first=False)
    check_steady(before, second)
    if not first.executed.has_run(second.executed):
        if not is_first:
            raise ValueError("the step runs other code whenever it runs")
        return _compared(runs, second, warm, is_first=False)
    return _described(runs, steering, second, warm)


def _described(runs: Runs, steering: Steering, run: FakeRun, warm: Warm | None) -> Traced:
    """A trace of all that a run has read, returned and left."""
    # Other changes come from what stood in the slots, as where a module checks its weights.
    left = warm.left if warm else ()
    slots = kept_slots([change for change in run.changes if change.slot in left])
    tensors, leaves = _returned(run.result)
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    if next(tensors_in(run.result, kind=numbers), None) is not None:
        sizes = "a size of its arguments, or " if runs.opening.places else ""
        raise ValueError(
            f"the step returns {sizes}a number that it reads from a tensor, as `.item()` does: "
            "return the tensor, and read it outside"
        )
    check_rebuilt(run.result, tensors)
    # First what the step returns, then what it leaves in slots, then the flags: in this order
    # `_forward` gives them.
    after = {change.slot: change.after for change in run.changes}
    written = {len(tensors) + at: slot for at, slot in enumerate(slots)}
    flags, answers = run.answering.flags, tuple(run.answering.answers)
    results = (*tensors, *(after[slot] for slot in slots), *flags)
    used = run.seen.fake
    pairs = [
        *of_the_call(runs.call, runs.batch, used),
        *of_the_step(runs.places, runs.values, used, runs.call.others),
    ]
    reads, taken = tuple(read for _, read in pairs), set[str]()
    arguments = [attrs.evolve(a, name=port_name(a.name, taken)) for a, _ in pairs]
    # Not guarded: what a trace takes as an argument, or writes itself.
    free = {slot for read in reads for slot in read if isinstance(slot, Slot)} | {*slots}
    examples = tuple(argument.example for argument in arguments)
    forward = _forward(runs, reads, leaves, slots, answers)
    flag_indices = tuple(range(len(results) - len(flags), len(results)))
    trace = Traced(
        Forward(forward, examples, results, leaves, tuple(answer.line for answer in answers)),
        inputs_of(runs.places, arguments, reads, written, flag_indices),
        reads,
        steering.guards(free),
        kind_of(runs.call),
        runs.opening.sizes(),
        run.result,
        written,
        answers,
        tuple(module for root in runs.places.roots.values() for module in root.modules()),
        warm,
    )
    return attrs.evolve(trace, inputs=attrs.evolve(trace.inputs, premises=trace.premises))


def _returned(result: Any) -> tuple[list[torch.Tensor], tuple[Result, ...]]:
    """The tensors of what a step returns, each once, and where they stand in it."""
    by_path = list(tensors_in(result))
    tensors = list({id(tensor): tensor for _, tensor in by_path}.values())
    index = {id(tensor): at for at, tensor in enumerate(tensors)}
    return tensors, tuple(Result(path, index[id(tensor)]) for path, tensor in by_path)


def _forward(
    runs: Runs,
    reads: Sequence[Read],
    leaves: Sequence[Result],
    slots: Sequence[Slot],
    answers: Sequence[ValueGuard],
) -> Callable[..., list[torch.Tensor]]:
    """Runs the step on values of its arguments, once more than where it was given `answers`.
    (Eager needs none.)"""

    def run(*values: Any) -> list[torch.Tensor]:
        pairs = [
            (source, value) for read, value in zip(reads, values, strict=True) for source in read
        ]
        slot_values = {slot: value for slot, value in pairs if isinstance(slot, Slot)}
        # One tensor may be several leaves of the call, of which `reads` has the first alone.
        firsts = {id(leaf.first): value for leaf, value in pairs if isinstance(leaf, Leaf)}
        batch = [firsts.get(id(leaf.first), leaf.first) for leaf in runs.call.leaves]
        answering = runs.answering()
        traced = fx.traceback.has_preserved_node_meta()
        around = _as_traced(runs, answering) if traced else nullcontext()
        try:
            with state_kept(runs.places, slot_values) as changes, around:
                result = runs.called(batch, traced)
        except Exception as error:
            if not traced:  # eager's own
                raise
            raise plain_reason(error) from error
        returned = list(tensors_in(result))
        after = {change.slot: change.after for change in changes}
        same = [path for path, _ in returned] == [leaf.path for leaf in leaves]
        if not same or any(slot not in after for slot in slots):
            raise ValueError("the step returns something else in a second run")
        distinct = {leaf.index: tensor for leaf, (_, tensor) in zip(leaves, returned, strict=True)}
        ordered = [distinct[at] for at in sorted(distinct)]
        return [*ordered, *(after[slot] for slot in slots), *answering.flags_of(answers)]

    return run


@contextmanager
def _as_traced(runs: Runs, answering: Answering) -> Iterator[None]:
    """While AOTAutograd runs the step, as it ran on fake tensors."""
    paths = {
        id(module): f"@{root}.{path}".rstrip(".")
        for root, outer in reversed(runs.places.roots.items())
        for path, module in outer.named_modules()
    }
    with runs.told(), lines_noted(paths), answering.active(), copied_data():
        yield
