"""The second door: a step that is traced as it runs, for what Dynamo does not take as one graph.

The step itself runs, on tensors without storage: its loggers, prints and branches on what is no
tensor just run, and AOTAutograd records the operations. That is sound only as far as nothing else
steers it: two runs must do the same, and what the step reaches (`places`) must be as it was.
"""

import copy
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import attrs
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.frontend.answers import Answer, Answering, Asking
from pfeife.frontend.arguments import Argument, Inputs, Kept, fake_like, port_name
from pfeife.frontend.batch import Arguments, Leaf, fields_of
from pfeife.frontend.forward import Forward
from pfeife.frontend.frozen import drawing_line, reading, refusal, watching
from pfeife.frontend.places import SIMPLE, Change, Held, Places, Slot, contents_of, is_equal
from pfeife.frontend.results import Leaf as Result
from pfeife.frontend.user_lines import noted, user_line
from pfeife.ir.program import Role

Step = Callable[..., Any]
Read = tuple[Leaf | Slot, ...]  # where the value of an argument is: all places of one tensor


@attrs.frozen(eq=False)
class Traced:
    """A step as it was traced for a call, and what must hold for another call to do the same.

    `reads` has for every argument of the `forward` where its value is. `assumed` has what is in
    the other slots that the step reaches, `contents` how many there are (`Places.contents`), `kind`
    the kind of the call (`kind_of`). `made` is what the step returned, with the fake tensors of
    `forward.results` in it; `kept` are the slots that the step writes tensors to, by the indices of
    the results; the last results are flags, one for each of the `answers`.
    """

    forward: Forward
    inputs: Inputs
    reads: tuple[Read, ...]
    assumed: Mapping[Slot, Any]
    contents: Sequence[tuple[Any, Any, tuple[str, ...]]]
    kind: tuple
    made: Any
    kept: Mapping[int, Slot]
    answers: tuple[Answer, ...]
    modules: tuple[nn.Module, ...]

    def broken(self, call: Arguments) -> str:
        """What does not hold any more for a call, "" if all does."""
        if kind_of(call) != self.kind:
            return "the arguments of the call, or the modes under which it is made"
        for slot, value in self.assumed.items():
            now = slot.get()
            both = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
            if not both and not is_equal(now, value):
                return f"{slot.name}, which was {_short(value)} and is {_short(now)}"
        for one, contents, words in self.contents:
            if contents_of(one) != contents:
                return f"what is in {'.'.join(words) or 'the step'}"
        for argument, read in zip(self.inputs.arguments, self.reads, strict=True):
            values = [one.get() for one in read if isinstance(one, Slot)]
            if any(value is not values[0] for value in values) or not all(
                isinstance(value, torch.Tensor) and _layout(value) == _layout(argument.example)
                for value in values
            ):
                return f"the tensor {argument.names[0]}"
        return ""

    def values(self, leaves: Sequence[Leaf]) -> list[torch.Tensor]:
        """The arguments of a call with the whole batch."""
        found = {leaf.name: leaf.whole for leaf in leaves}
        return [
            read[0].get() if isinstance(read[0], Slot) else found[read[0].name]
            for read in self.reads
        ]

    def returned(self, results: Sequence[torch.Tensor]) -> Any:
        """What the step returns, of the results of a call; writes what the step keeps. Raises
        ValueError where the step would have got other answers in this call."""
        flags = results[len(results) - len(self.answers) :]
        for answer, flag in zip(self.answers, flags, strict=True):
            if flag:
                raise ValueError(
                    f"{answer.line} asks for the value of a tensor: it was {answer.value} where "
                    "the step was traced, and is not in each microbatch of this call, so the step "
                    "would do something else there; compute it with tensors (torch.where)"
                )
        for index, slot in self.kept.items():
            slot.put(results[index])
        memo: dict[int, Any] = {id(one): one for one in self.modules}
        pairs = zip(self.forward.results, results, strict=True)
        memo |= {id(example): result for example, result in pairs}
        return copy.deepcopy(self.made, memo)


def kind_of(call: Arguments) -> tuple:
    """All about a call that a trace depends on, but for what the step reaches by itself."""
    first = [leaf.first for leaf in call.leaves]
    types = sorted({one.device.type for one in first} | {"cpu"})
    at = [id(one) for one in first]
    return (
        pytree.tree_structure((call.args, call.kwargs)),
        tuple(
            (leaf.name, leaf.dim, _layout(one), at.index(id(one)))
            for leaf, one in zip(call.leaves, first, strict=True)
        ),
        tuple(
            (name, value) if isinstance(value, SIMPLE) else (name, id(value))
            for name, value in call.others.items()
        ),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        hash(frozenset(os.environ.items())),
    )


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, SIMPLE) else f"a {type(value).__name__}"


def _layout(value: torch.Tensor) -> tuple:
    return value.shape, value.stride(), value.dtype, value.device, value.requires_grad


def traced(step: Step, call: Arguments) -> Traced:
    """A step, traced on the first microbatch of a call. Where it asks for values of tensors, it
    gets those of that microbatch, see `answers`.

    Raises ValueError, with the line of the step, for one that does something else in a second run,
    draws numbers elsewhere than from torch, makes tensors whose sizes depend on data, or leaves
    numbers or objects of Python's behind.
    """
    tracer, left = _Tracer(step, call), frozenset[Slot]()
    try:
        first = tracer.run()
    except _Asks:
        first = None
    if first is None or first.changes:  # perhaps what a first call alone does: caches, hooks
        left, answers = tracer.warm()
        tracer = _Tracer(step, call, answers)
        first = tracer.run()
    return tracer.traced(first, left)


@attrs.frozen(eq=False)
class _Run:
    """What a run on tensors without storage has shown: the tensors with storage that it met, the
    fake ones that it read, by identity, its operations, its result, what it left behind, the
    lines in which it opened files, and flags for the answers that it got."""

    real: Mapping[int, torch.Tensor]
    fake: Mapping[int, torch.Tensor]
    operations: Sequence[tuple]
    result: Any
    changes: Sequence[Change]
    opened: Sequence[str]
    flags: Sequence[torch.Tensor]


class _Seen(_torch.TorchDispatchMode):
    """Sees all operations, and what they read."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.real: dict[int, torch.Tensor] = {}
        self.fake: dict[int, torch.Tensor] = {}
        self.operations: list[tuple] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        said: list[str] = []
        for one in pytree.tree_leaves((args, kwargs)):
            if isinstance(one, torch.Tensor):
                known = self.fake if isinstance(one, _torch.FakeTensor) else self.real
                known[id(one)] = one
            elif isinstance(one, torch.Generator):
                raise ValueError(
                    "the step draws from a generator of its own: its microbatches would not get "
                    "the numbers that they get in eager; draw from torch's default generator"
                )
            elif isinstance(one, SIMPLE):
                said.append(repr(one))
        if getattr(func, "namespace", "") != "prim":  # questions for devices, which come and go
            self.operations.append((str(func), *said))
        return func(*args, **(kwargs or {}))


class _Tracer:
    """Runs of a step on a call's first microbatch."""

    def __init__(self, step: Step, call: Arguments, answers: Sequence[Answer] = ()):
        self.step, self.call, self.answers = step, call, answers
        self.places = Places(step, call.others)
        self.mode = _torch.symbolic_mode()
        known = {id(leaf.first): fake_like(self.mode, leaf.first) for leaf in call.leaves}
        self.batch = [known[id(leaf.first)] for leaf in call.leaves]
        self.values = _stand_ins(self.places, self.mode)
        self.paths = {
            id(module): f"@{root}.{path}".rstrip(".")
            for root, outer in reversed(self.places.roots.items())
            for path, module in outer.named_modules()
        }

    def run(self) -> _Run:
        """A run on fake tensors. Raises ValueError if it does more than can be traced."""
        before = torch.get_rng_state()
        try:
            with torch.random.fork_rng(devices=[]), watching() as moved:
                found = self._on_fakes()
                seeded = not torch.equal(before, torch.get_rng_state())
        except Exception as error:
            raise plain_reason(error) from error
        if moved:
            raise refusal(drawing_line(self._on_fakes, moved))
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
        return found

    def _on_fakes(self) -> _Run:
        seen, held = _Seen(), Held(self.places, self.values)
        symbols, told = _torch.forgetting_symbols(self.mode), Answering(self.answers)
        run = (held, self.mode, symbols, seen, _torch.said_to_compile(), told)
        with ExitStack() as stack, reading() as opened:
            for one in run:
                stack.enter_context(one)
            result = self._called(self.batch)
        changes = tuple(held.changes)
        known = seen.real, seen.fake, seen.operations
        return _Run(*known, result, changes, tuple(opened), told.flags)

    def _is_frozen(self, slot: Slot) -> bool:
        """Whether a run has made a tensor ask for gradients that did not, or the other way."""
        now: torch.Tensor = slot.get()
        return bool(now.requires_grad != self.values[slot].requires_grad)

    def _called(self, batch: Sequence[torch.Tensor]) -> Any:
        args, kwargs = self.call.made(batch)
        with _torch.eager_stance():
            return self.step(*args, **kwargs)

    def warm(self) -> tuple[frozenset[Slot], Sequence[Answer]]:
        """Runs the first microbatch in eager and keeps what that leaves behind, but for values of
        tensors and the state of the generator. Gives the slots in which it has left something, and
        the values of tensors that it has asked for."""
        tensors = {id(one): one for one in (slot.get() for slot in self.values)}.values()
        before = [(one, one.detach().clone()) for one in tensors]
        held, asking = Held(self.places, {}), Asking()
        try:
            with held, torch.random.fork_rng(devices=_devices()), _torch.said_to_compile(), asking:
                self._called([leaf.first.detach() for leaf in self.call.leaves])
        except Exception as error:
            raise plain_reason(error) from error
        finally:
            with torch.no_grad():
                for one, value in before:
                    if _differ(one, value):
                        one.copy_(value)
        for change in held.changes:
            if change.slot not in self.values and not isinstance(change.slot.container, list):
                change.slot.put(change.after)
        return frozenset(change.slot for change in held.changes), asking.answers

    def traced(self, first: _Run, left: frozenset[Slot]) -> Traced:
        """The step's forward, after a first run; `left` are the slots in which an eager run leaves
        something."""
        second = self.run()
        _check_alike(first, second)
        if second.opened:
            raise ValueError(
                f"{second.opened[0]} opens a file or a connection whenever the step runs: what is "
                "read there would be frozen; read it outside of the step"
            )
        # Other changes come from what stood in the slots, as where a module checks its weights.
        kept_slots = _kept([change for change in second.changes if change.slot in left])
        after = {change.slot: change.after for change in second.changes}
        found = list(_tensors(second.result))
        results = list({id(one): one for _, one in found}.values())
        _check_rebuilt(second.result, results)
        index = {id(one): at for at, one in enumerate(results)}
        leaves = tuple(Result(path, index[id(one)]) for path, one in found)
        kept = {len(results) + i: slot for i, slot in enumerate(kept_slots)}
        results += [after[slot] for slot in kept_slots]
        flags = range(len(results), len(results) + len(second.flags))
        results += second.flags
        known, reads = self._arguments(second.fake)
        taken: set[str] = set()
        arguments = [attrs.evolve(one, name=port_name(one.name, taken)) for one in known]
        examples = tuple(one.example for one in arguments)
        run = self._forward(reads, leaves, kept_slots)
        changing = {slot for read in reads for slot in read} | {*kept_slots}
        return Traced(
            Forward(run, examples, tuple(results), leaves, tuple(a.line for a in self.answers)),
            self._inputs(arguments, reads, kept, tuple(flags)),
            tuple(reads),
            {slot: value for slot, value in self.places.now().items() if slot not in changing},
            self.places.contents(),
            kind_of(self.call),
            second.result,
            kept,
            tuple(self.answers),
            tuple(m for root in self.places.roots.values() for m in root.modules()),
        )

    def _arguments(self, used: Mapping[int, torch.Tensor]) -> tuple[list[Argument], list[Read]]:
        """What the step reads, each tensor once: of the call, and what it finds by itself."""
        found: dict[int, tuple[Argument, Read]] = {}
        for position, (leaf, fake) in enumerate(zip(self.call.leaves, self.batch, strict=True)):
            if id(fake) in used and id(fake) not in found:
                role = Role.CONSTANT if leaf.dim is None else Role.BATCH
                found[id(fake)] = (
                    Argument(leaf.name, role, (leaf.name,), fake, leaf.dim, position, given=True),
                    (leaf,),
                )
        slots: dict[int, list[Slot]] = {}
        for slot, fake in self.values.items():
            slots.setdefault(id(fake), []).append(slot)
        state = [tuple(slots[at]) for at in used if at in slots]
        return (
            [*(one for one, _ in found.values()), *self._state(state)],
            [*(read for _, read in found.values()), *state],
        )

    def _state(self, state: Sequence[Sequence[Slot]]) -> Iterator[Argument]:
        """The tensors that the step finds by itself, as arguments, by their slots."""
        roots = self._used({id(slots[0].get()) for slots in state})
        names = {
            at: tuple(f"{root}.{name}" if len(roots) > 1 else name for root, name in several)
            for at, several in _aliases(roots).items()
        }
        modules = [module for outer in roots.values() for module in outer.modules()]
        buffers = {id(module._buffers) for module in modules}
        inside = {id(one._parameters) for one in modules} | buffers
        for slots in state:
            one = slots[0].get()
            if slots[0].words[0] in self.call.others and id(slots[0].container) not in inside:
                raise ValueError(
                    f"{slots[0].name} is a tensor inside of an argument that Pfeife does not look "
                    "into, so it cannot be cut into microbatches: pass tensors, or lists, tuples, "
                    "dicts, mappings or dataclasses of them"
                )
            if isinstance(one, nn.Parameter):
                role = Role.PARAMETER
            elif any(id(slot.container) in buffers for slot in slots):
                role = Role.BUFFER
            else:
                role = Role.CONSTANT
            called = names.get(id(one), (slots[0].name,))
            yield Argument(called[0], role, called, self.values[slots[0]])

    def _used(self, tensors: Collection[int]) -> dict[str, nn.Module]:
        """The outermost modules that have some of these tensors, given by identity."""
        return {
            root: outer
            for root, outer in self.places.roots.items()
            if any(id(one) in tensors for one in (*outer.parameters(), *outer.buffers()))
        }

    def _inputs(
        self,
        arguments: list[Argument],
        reads: Sequence[Read],
        kept: Mapping[int, Slot],
        flags: tuple[int, ...],
    ) -> Inputs:
        roots = self._used({id(one.get()) for r in reads for one in r if isinstance(one, Slot)})
        replaces = {
            index: tuple(at for at, read in enumerate(reads) if slot in read)
            for index, slot in kept.items()
        }
        return Inputs(
            arguments,
            {f"@{root}": root for root in roots},
            weakref.WeakSet(roots.values()),
            {index: Kept(slot.name, replaces[index]) for index, slot in kept.items()},
            moved={},
            numbers={},
            flags=flags,
        )

    def _forward(
        self, reads: Sequence[Read], leaves: Sequence[Result], kept: Sequence[Slot]
    ) -> Callable[..., list[torch.Tensor]]:
        """Runs the step on values of its arguments."""

        def run(*values: Any) -> list[torch.Tensor]:
            pairs = [(one, v) for r, v in zip(reads, values, strict=True) for one in r]
            given = {one: value for one, value in pairs if isinstance(one, Slot)}
            firsts = {id(one.first): value for one, value in pairs if isinstance(one, Leaf)}
            batch = [firsts.get(id(leaf.first), leaf.first) for leaf in self.call.leaves]
            held, told = Held(self.places, given), Answering(self.answers)
            traced = fx.traceback.has_preserved_node_meta()
            try:
                with held, noted(self.paths), told if traced else nullcontext():
                    result = self._called(batch)
            except Exception as error:
                raise plain_reason(error) from error
            found = list(_tensors(result))
            after = {change.slot: change.after for change in held.changes}
            same = [path for path, _ in found] == [leaf.path for leaf in leaves]
            if not same or any(slot not in after for slot in kept):
                raise ValueError("the step returns something else in a second run")
            distinct = {leaf.index: one for leaf, (_, one) in zip(leaves, found, strict=True)}
            # In eager the step finds its own answers.
            flags = told.flags if traced else [torch.zeros(())] * len(self.answers)
            ordered = [distinct[at] for at in sorted(distinct)]
            return [*ordered, *(after[slot] for slot in kept), *flags]

        return run


def _devices() -> list[int]:
    """The devices whose generators a step may draw from."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have other values somewhere; NaN is as NaN. (Versions do not tell: batch
    norm writes its statistics without a new one.)"""
    return bool((one.ne(other) & (one.eq(one) | other.eq(other))).any())


def _stand_ins(places: Places, mode: _torch.FakeTensorMode) -> dict[Slot, torch.Tensor]:
    """Fake tensors for those that a step reaches, one for each."""
    found: dict[int, torch.Tensor] = {}
    values = {}
    for slot in places.slots:
        one = slot.get()
        plain = type(one) in (torch.Tensor, nn.Parameter, nn.Buffer)
        if plain and one.layout == torch.strided and slot.is_open:
            if id(one) not in found:
                found[id(one)] = fake_like(mode, one)
            values[slot] = found[id(one)]
    return values


def _check_alike(first: _Run, second: _Run) -> None:
    """Raises ValueError unless both runs did the same, on the same tensors."""
    lost = next((one for at, one in second.real.items() if at in first.real), None)
    if lost is not None:
        grad = " that requires gradients" if lost.requires_grad else ""
        raise ValueError(
            f"the step reads a tensor {list(lost.shape)}{grad} that is in no module, list, dict or "
            "variable that Pfeife finds: pass it as an argument, or make it a buffer or a "
            "parameter of a module"
        )
    constants, again = list(first.real.values()), list(second.real.values())
    same = len(constants) == len(again) and all(
        one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(constants, again, strict=True)
    )
    pairs = zip(first.operations, second.operations, strict=False)
    other = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if not same or other or len(first.operations) != len(second.operations):
        what = f": {' '.join(other[0])}, then {' '.join(other[1])}" if other else ""
        raise ValueError(
            f"the step does something else when it runs a second time on the same data{what}; what "
            "it depends on (the time, a counter, a file) would be frozen"
        )


def _kept(changes: Sequence[Change]) -> list[Slot]:
    """The slots that a run leaves tensors in. Raises ValueError for other changes."""
    for change in changes:
        if isinstance(change.slot.container, list):
            raise ValueError(
                f"the step changes the list {change.slot.name.rpartition('.')[0]}, which a traced "
                "step cannot: return the value instead"
            )
        if not isinstance(change.after, torch.Tensor):
            raise ValueError(
                f"the step sets {change.slot.name} from {_short(change.before)} to "
                f"{_short(change.after)} whenever it runs; traced, it would not: keep it in a "
                "tensor, such as a buffer, or set it outside of the step"
            )
    return [change.slot for change in changes]


def _aliases(roots: Mapping[str, nn.Module]) -> dict[int, list[tuple[str, str]]]:
    """All names of every parameter and buffer, by identity, with their outermost modules."""
    found: dict[int, list[tuple[str, str]]] = {}
    for root, outer in roots.items():
        for name, parameter in outer.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), []).append((root, name))
        for name, buffer in outer.named_buffers(remove_duplicate=False):
            found.setdefault(id(buffer), []).append((root, name))
    return found


def _tensors(
    value: Any, path: tuple[int | str, ...] = (), above: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int | str, ...], torch.Tensor]]:
    """The tensors in what a step returns, and where they are."""
    for keys, leaf in pytree.tree_flatten_with_path(value)[0]:
        here = (*path, *map(_key, keys))
        if isinstance(leaf, torch.Tensor):
            yield here, leaf
        elif not isinstance(leaf, (*SIMPLE, nn.Module, type)) and id(leaf) not in above:
            inside = fields_of(leaf)
            if inside is None:
                inside = dict(getattr(leaf, "__dict__", {}))
            for name, one in inside.items():
                yield from _tensors(one, (*here, name), (*above, id(leaf)))


def _key(key: Any) -> int | str:
    found = next(getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name))
    return found if isinstance(found, int | str) else str(found)


class _Copying(torch.overrides.TorchFunctionMode):
    """Raises ValueError where a tensor is copied."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            raise ValueError(
                "the step returns an object with tensors in it that Pfeife does not find: return "
                "tensors, or lists, tuples, dicts or dataclasses of them"
            )
        return func(*args, **(kwargs or {}))


def _check_rebuilt(made: Any, results: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless what the step returns can be made anew of other tensors."""
    with _Copying():
        copy.deepcopy(made, {id(one): None for one in results})


def plain_reason(error: Exception) -> Exception:
    """What kept a step from being traced, and the line of the step."""
    if isinstance(error, ValueError) and "could not be traced" in str(error):
        return error
    where = user_line(error.__traceback__)
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    asks = _torch.asks_for_values(error)
    if asks:
        text = f"it asks for the value of a tensor ({text})"
    kind = _Asks if asks else ValueError
    return kind(f"the step could not be traced: {text}{f' ({where})' if where else ''}")


class _Asks(ValueError):
    """Raised for a step that asks for the values of tensors."""
