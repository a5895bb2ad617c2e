"""While a constructor runs whose operations are written to a tape and not executed.

Its tensors are absent ones whose recipes have no source yet. The way of what it does with them:

    weight.tolist()      `reading` sees torch's functions: values are made from the tape
    weight.uniform_()    autograd          as ever: the key of absent tensors is left out meanwhile
                         `Recording`       on the tape, with results that are absent, too; but
                                           a view runs, and so does what has values: what was there
                                           before, and tensors on the meta device

Between draws the generator has states of our own, by which it is seen when somebody seeds it, and
to which a state is that somebody puts back.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.frontend.deferred.init_replay import Operation, Tape, View
from pfeife.frontend.deferred.tensors import Recipe, is_recorded, view_of
from pfeife.frontend.watch.modes import Calls, Operations
from pfeife.frontend.watch.user_lines import calling_line

_STATES = 0x7066656966650000  # seeds of the states that stand for those after draws
_SEED = 8  # bytes
_READING = {"tolist", "numpy", "__array__", "__repr__"}
_MAKING = {"new", "new_tensor"}  # of which the tensor says but the dtype and the device
_STORED = {"__reduce_ex__", "__dlpack__", "share_memory_", "storage", "_typed_storage"}


class Recording(Operations):
    """Sees all operations below autograd."""

    supports_higher_order_operators = False

    def __init__(self) -> None:
        super().__init__()
        begin = torch.get_rng_state()
        self.tape = Tape(begin)
        self.mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
        self.recipes: list[Recipe] = []  # of all storages
        self.marks = {_text(begin): 0}  # draws by the states that stand for what is behind them

    def instead(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What an operation gives, which is recorded or done."""
        tensors = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        absent = [tensor for tensor in tensors if _torch.is_absent(tensor)]
        if absent:
            # Views look at no memory, and a tape has none: they simply run.
            if _torch.makes_view(func) or _torch.changes_layout(func):
                return func(*args, **kwargs)
            others = (tensor for tensor in absent if not is_recorded(tensor))
            for tensor in others:  # of a batch of rank 0, or of a model that was deferred before
                raise _torch.record_of(tensor).refusal(str(func))
        elif str(func) == "aten.lift_fresh.default":  # torch.tensor(...)
            return self._recorded(torch.ops.aten.clone.default, args, {})
        # Left to be recorded are draws and what makes tensors of numbers alone.
        elif _is_meta(tensors, kwargs) or (tensors and not _torch.draws(func)):
            return self._at_once(func, args, kwargs)
        for target in pytree.tree_leaves(list(_torch.written(func, args, kwargs))):
            if isinstance(target, torch.Tensor) and not is_recorded(target):
                raise ValueError(
                    f"{func} writes to a tensor {list(target.shape)} that was not made by torch "
                    "inside of pfeife.deferred_init(), with values that are not there yet; make "
                    f"it inside, with torch ({calling_line()})"
                )
        return self._recorded(func, args, kwargs)

    def _at_once(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What is computed of values that are there."""
        before = torch.get_rng_state()
        result = func(*args, **kwargs)
        # It would go on from a mark, whose numbers are not those after the last draw.
        if not torch.equal(before, torch.get_rng_state()):
            raise ValueError(f"{func} draws random numbers, which is not told ({calling_line()})")
        return result

    def _recorded(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """The results of an operation, which have no memory; those that are no tensors, with the
        values that they have."""
        recorded = pytree.tree_map_only(torch.Tensor, self._said, (args, kwargs))
        results = self._shapes(func, args, kwargs)
        # By identity: an operation in place gives the very tensor that it was given.
        leaves, tree = pytree.tree_flatten(results)
        arguments = {id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs))}
        state = self._state(func, [*arguments.values(), *leaves]) if _torch.draws(func) else None
        where = calling_line()
        made: list[View | None] = []
        # What an operation returns of its arguments (in place) has a View already.
        for at, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if id(leaf) not in arguments:
                leaves[at] = self._absent(func, leaf, where)
            made.append(None if id(leaf) in arguments or leaf.is_meta else self._view(leaves[at]))
        draw = len(self.tape.draws) if _torch.draws(func) else None
        default = torch.get_default_dtype()
        self.tape.add(
            Operation(func, recorded[0], recorded[1], tuple(made), default, where, draw, state)
        )
        if draw is not None:
            self._mark()
        return pytree.tree_unflatten(leaves, tree)

    def _shapes(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What an operation gives: its own arguments, tensors of its results' layouts, values."""
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        fakes = {at: _torch.fake_on(leaf, leaf.device, self.mode) for at, leaf in tensors.items()}
        fake_args, fake_kwargs = pytree.tree_map_only(
            torch.Tensor, lambda leaf: fakes[id(leaf)], (args, kwargs)
        )
        try:
            with self.mode:
                result = func(*fake_args, **fake_kwargs)
        except Exception as error:
            changing = any(True for _ in _torch.written(func, args, kwargs))
            # Its result depends on values, as that of `nonzero`, so it is run on copies of them: it
            # must not write, which would be lost, nor draw, which would move the generator.
            if not _torch.has_no_rule(error) or _torch.draws(func) or changing:
                raise
            with _unseen():
                return func(*pytree.tree_map(self.real, args), **pytree.tree_map(self.real, kwargs))
        arguments = {id(fake): tensors[at] for at, fake in fakes.items()}
        return pytree.tree_map(lambda leaf: arguments.get(id(leaf), leaf), result)

    def _absent(self, func: Any, tensor: torch.Tensor, line: str) -> torch.Tensor:
        """A tensor without memory that looks like another one."""
        if (
            tensor.layout != torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_quantized
            or tensor.storage_offset()
        ):
            raise ValueError(
                f"{func} makes a tensor that is not dense ({tensor.layout}): make it outside of "
                f"pfeife.deferred_init() ({line})"
            )
        with _unseen():
            if tensor.is_meta:
                return _torch.as_meta(tensor)
            recipe = Recipe(None, len(self.recipes), tuple(tensor.shape), line)
            self.recipes.append(recipe)
            return _torch.without_values(tensor, tensor.device, recipe)

    def _said(self, tensor: torch.Tensor) -> Any:
        """A tensor among the arguments as the tape has it; others than ours as they are now."""
        if is_recorded(tensor):
            return self._view(tensor)
        with _unseen():
            return tensor.detach().clone()

    def _view(self, tensor: torch.Tensor) -> View:
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                "a conjugated view is not recorded: call .resolve_conj(), or make the tensor "
                f"outside of pfeife.deferred_init() ({calling_line()})"
            )
        return view_of(tensor)

    def real(self, value: Any) -> Any:
        """A tensor with the values that it has now, in memory of its own; anything else as it
        is."""
        if not is_recorded(value):
            return value
        with _unseen():
            view = self._view(value)
            return view.of(self.tape.values({view.storage})[view.storage])

    def _state(self, func: Any, leaves: Sequence[Any]) -> torch.Tensor | int | None:
        """What the generator has been set to since the last draw, None for nothing. Raises
        ValueError for draws of other generators."""
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if any(source is not torch.default_generator for source in generators) or devices - {"cpu"}:
            what = "a generator of its own" if generators else f"the generator of {sorted(devices)}"
            raise ValueError(
                f"{func} draws from {what} ({calling_line()}): inside of pfeife.deferred_init() "
                "draw from torch's default generator of the CPU"
            )
        return self.state()

    def end(self) -> None:
        """From now on the tensors of this recording are deferred ones."""
        for recipe in self.recipes:
            recipe.source = self.tape

    def state(self) -> torch.Tensor | int | None:
        """What the generator has been set to since the last draw, None for nothing."""
        state = torch.get_rng_state()
        draws = self.marks.get(_text(state))
        if draws is None:
            return state
        return None if draws == len(self.tape.draws) else draws

    def _mark(self) -> None:
        """Gives the generator the state that stands for the one after the last draw; what it was
        seeded with is what it was (`torch.initial_seed()`), which states begin with."""
        seed = torch.get_rng_state()[:_SEED]
        torch.default_generator.manual_seed(_STATES + len(self.tape.draws))
        mark = torch.get_rng_state()
        mark[:_SEED] = seed
        torch.set_rng_state(mark)
        self.marks[_text(mark)] = len(self.tape.draws)


def reading(recording: Recording) -> Calls:
    """Sees what reads memory without an operation, and gives it values."""

    def instead(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        touches_memory = name in {*_READING, *_STORED, *_MAKING, "__deepcopy__"}
        if not (touches_memory and is_recorded(first)):
            return func(*args, **kwargs)
        if name in _MAKING:  # torch's C++ has no device for the key of absent tensors
            with _unseen():
                like = torch.empty(0, dtype=first.dtype, device=first.device)
            return func(like, *args[1:], **kwargs)
        if name in _STORED:
            raise ValueError(
                f"{name} of a tensor {list(first.shape)} inside of pfeife.deferred_init(), where "
                f"it has no memory ({calling_line()})"
            )
        # torch would copy the storage's bytes; a recorded copy is an operation as any other.
        if name == "__deepcopy__":
            with torch.no_grad():
                return _copied(first, args[1])
        result = func(recording.real(first.detach()), *args[1:], **kwargs)
        if name in ("numpy", "__array__"):
            result.flags.writeable = False  # what is written there would not be in the tensor
        return result

    return Calls(instead)


def _copied(tensor: torch.Tensor, memo: dict) -> torch.Tensor:
    """A copy of a tensor, in a copy of its whole storage: those that share it go on to do so."""
    if id(tensor) not in memo:
        key = "pfeife", _torch.record_of(tensor).storage
        if key not in memo:
            size = tensor.untyped_storage().nbytes() // tensor.itemsize
            memo[key] = tensor.detach().as_strided((size,), (1,), 0).clone().untyped_storage()
        clone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        clone.set_(memo[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        clone.requires_grad_(tensor.requires_grad)
        clone.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
        memo[id(tensor)] = clone
    return memo[id(tensor)]


def _is_meta(tensors: Sequence[torch.Tensor], kwargs: dict) -> bool:
    """Whether an operation is one on the meta device, where there are no values in eager either."""
    device = kwargs.get("device")
    named = device is not None and torch.device(device).type == "meta"
    return named or (bool(tensors) and all(tensor.is_meta for tensor in tensors))


def _text(state: torch.Tensor) -> bytes:
    with _unseen():
        return state.numpy().tobytes()


def _unseen() -> Any:
    """While nothing is seen of what runs."""
    return _torch.no_dispatch()
