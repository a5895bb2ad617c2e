"""Questions for the values of tensors (`if mask.any()`), and for sizes that data decide, where a
step is traced.

Numbers and sizes that only data tell are symbols there. Where Python asks what they are, it gets
the answer that a run on real data had, and whether this holds for other data is traced:

    on real data        mask.any() is False          noted: [False]
    traced              mask.any() is u0 == 1
                        `if u0 == 1` gets False      flag = ((u0 == 1) != False)

A flag is one more result of the step, 0.0 in every microbatch for which the answer is right: else
the step is traced anew, for the answers of that call. What is done with numbers without asking
(`x * scale.item()`) is done with those of each microbatch. Where Python takes no symbols (a key of
a dict), all numbers are `pinned`, each with a flag.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from pfeife import _torch
from pfeife.frontend.watch.modes import Operations
from pfeife.frontend.watch.user_lines import calling_line

_NUMBER = torch.ops.aten._local_scalar_dense.default
Noted = Mapping[str, Sequence[Sequence[Any]]]  # by operation and line, for each of the calls


@attrs.frozen
class Known:
    """The sizes and numbers that data have decided in a run, and whether numbers are pinned."""

    noted: Noted = attrs.field(factory=dict)
    pinned: bool = False


@attrs.frozen
class ValueGuard:
    """What Python was told, and the user's line that has asked for it."""

    value: Any
    line: str


class WrongAnswer(ValueError):
    """Raised in a call that would have got another answer; nothing has changed by then. `index` is
    that of the answer."""

    def __init__(self, index: int):
        super().__init__(f"answer {index} of a trace is wrong")
        self.index = index


def fails_elsewhere(lines: Sequence[str], error: Exception) -> ValueError:
    """What to say of a trace that fails on a microbatch which data send another way."""
    where, reason = ", ".join(dict.fromkeys(lines)), str(error).strip().partition("\n")[0]
    detail = "" if reason.startswith("Runtime assertion failed") else f" ({reason})"
    return ValueError(
        f"{where}: what was traced there on the first microbatch fails on another one{detail}: "
        "data decide a number or a size, which the step has asked for, and it is not the same in "
        "each microbatch; compute it with tensors (torch.where), or loop over all there may be"
    )


class Noting(Operations):
    """Notes the sizes and numbers that data decide, in the order of the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: defaultdict[str, list[list[Any]]] = defaultdict(list)

    def instead(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Notes what data decide of an operation's results."""
        func, args, kwargs = _as_number(func, args, kwargs)
        result = func(*args, **kwargs)
        if _torch.is_decided_by_data(func):
            self.noted[_call(func)].append(_torch.sizes_and_numbers(result))
        return result


class Answering(Operations):
    """Tells what symbols are; `flags` say for each of the `answers` whether it is wrong. `sizes`
    are the open ones of the arguments, by their symbols, and what they are now."""

    def __init__(
        self,
        mode: _torch.FakeTensorMode,
        data_values: Known,
        sizes: Mapping[Any, tuple[Any, int]],
    ):
        super().__init__()
        self.mode, self.known, self.sizes = mode, data_values, sizes
        self.calls: Counter[str] = Counter()
        self.of_data = False  # whether data decide any
        self.values: dict[Any, Any] = {}  # by symbols
        self.tensors: dict[Any, torch.Tensor] = {}
        self.asked: list[tuple[Any, Any]] = []  # expressions whose flags are not yet made
        self.answers, self.flags = list[ValueGuard](), list[torch.Tensor]()

    @contextmanager
    def active(self) -> Iterator[None]:
        """While the step runs and asks."""
        with self, _torch.telling(self.mode, self._tell):
            yield
        # Those that still wait: no other operation comes, before which they would be made.
        self._flag()

    def _tell(self, expression: Any) -> Any:
        """Called while torch is inside of an operation, so that flags must wait."""
        sizes = {symbol: now for symbol, (_, now) in self.sizes.items()}
        value = _torch.value_of(expression, {**sizes, **self.values})
        # What is not known torch refuses; a run in eager then notes it (`Runs.warm`).
        if value is not None:
            self.answers.append(ValueGuard(value, calling_line()))
            self.asked.append((expression, value))
        return value

    def instead(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What an operation gives, with answers for the symbols that it makes."""
        if getattr(func, "namespace", "") != "prim":  # autograd asks so for devices; errors end it
            self._flag()
        func, args, kwargs = _as_number(func, args, kwargs)
        noted: Sequence[Any] = []
        if self.known.noted and _torch.is_decided_by_data(func):
            noted = self._noted(func)
        # A pinned number never becomes a symbol: Python has it at once, and the flag with it.
        if noted and func is _NUMBER and self.known.pinned:
            (value,) = noted
            self.answers.append(ValueGuard(value, calling_line()))
            self.flags.append(_differs(args[0].detach(), value))
            return value
        result = func(*args, **kwargs)
        sizes = _torch.sizes_and_numbers(result)
        self.of_data = self.of_data or any(map(_torch.is_of_data, sizes))
        # Another count is another call than the noted one: nothing is known of it.
        if len(noted) == len(sizes):
            of = args[0] if func is _NUMBER else None
            for symbolic, value in zip(sizes, noted, strict=True):
                self._know(symbolic, value, of)
        return result

    def _noted(self, func: Any) -> Sequence[Any]:
        """What was noted of the same call of an operation."""
        name = _call(func)
        noted, at = self.known.noted.get(name, ()), self.calls[name]
        self.calls[name] += 1
        return noted[at] if at < len(noted) else []

    def _know(self, symbolic: Any, value: Any, of: torch.Tensor | None) -> None:
        """What a symbol is, and a tensor of that: a size, or the number `of` a tensor."""
        symbol = _torch.symbol_of(symbolic)
        if symbol is None or symbol in self.values:
            return
        kind = torch.float64 if isinstance(symbolic, torch.SymFloat) else torch.int64
        self.values[symbol] = _torch.as_answer(value)
        if of is None:
            self.tensors[symbol] = torch.scalar_tensor(symbolic, dtype=kind)
        else:
            self.tensors[symbol] = _as(of.detach(), kind)

    def flags_of(self, answers: Sequence[ValueGuard]) -> list[torch.Tensor]:
        """The flags of the answers that an earlier run was given. Torch's own operations may ask
        less in a trace (dropout, whether it is given anything); what was not asked is not wrong.
        Raises ValueError where more was asked."""
        flags, position = list[torch.Tensor](), 0
        for answer in answers:
            if self.answers[position : position + 1] == [answer]:
                flags.append(self.flags[position])
                position += 1
            else:
                flags.append(torch.zeros(()))
        if position < len(self.answers):
            raise ValueError(f"{self.answers[position].line} asks for values in a second run alone")
        return flags

    def _flag(self) -> None:
        """Makes the flags that wait."""
        questions, self.asked = self.asked, []
        for expression, value in questions:
            sizes = {
                symbol: torch.scalar_tensor(size, dtype=torch.int64)
                for symbol, (size, _) in self.sizes.items()
                if symbol in expression.free_symbols
            }
            tensor = _torch.computed(expression, {**sizes, **self.tensors})
            self.flags.append(_differs(tensor, _torch.as_number(value)))


def _as_number(func: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """Comparisons of whole tensors as questions for a number, which has a symbol."""
    aten = torch.ops.aten
    if func is aten.equal.default and args[0].shape == args[1].shape:
        return _NUMBER, (aten.all.default(aten.eq.Tensor(*args)),), {}
    if func is aten.allclose.default:
        return _NUMBER, (torch.isclose(*args, **kwargs).all(),), {}
    return func, args, kwargs


def spelled(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The text of a number in a tensor (`f"expert_{index}"`) is that of its value, as in eager."""
    if func is torch.Tensor.__format__ and not args[0].dim():
        return format(args[0].item(), *args[1:])
    return func(*args, **kwargs)


def _call(func: Any) -> str:
    """An operation and the user's line that calls it. (Lines apart, what torch's own functions
    check on real data would count.)"""
    return f"{func} in {calling_line()}"


def _differs(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    """1.0 where a tensor of one element is another than a number, else 0.0."""
    wrong = tensor.isnan().logical_not() if math.isnan(value) else tensor.ne(value)
    return _as(wrong, torch.float32)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of one element. (How others of torch's functions come apart depends on who calls.)"""
    aten = torch.ops.aten
    return aten.view.default(aten._to_copy.default(tensor, dtype=dtype), [])
