"""Questions that a branch asks of sizes and numbers which only data tell: what answers them where a
step is traced, and how a graph computes whether an answer is right."""

import builtins
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental import recording, sym_node, symbolic_shapes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Max
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import TensorReferenceAnalysis

from pfeife._torch.kernel_numbers import is_unknown
from pfeife._torch.sizes import Symbolic, is_unbacked
from pfeife._torch.tensors import FakeTensorMode

Tell = Callable[[Any], Any]  # the value of an expression, None where it is not known


class Environment(ShapeEnv):
    """Symbols, of which somebody may `tell` what they are; it is asked where torch would refuse.

    If `_evaluate_expr` moves: steps that branch on what data decide are refused. (torch's own way,
    `fake_tensor_propagate_real_tensors`, computes all values twice and checks no floats.)
    """

    tell: Tell | None = None
    answers: dict[Any, Any]  # also for the backward, in which nobody tells anything new

    def _evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            # First what has been answered before: a question has one answer in the whole trace.
            value = self.answers.get(orig_expr)
            if value is None and self.tell:
                value = self.tell(orig_expr)
            if value is None and _is_asked_by_autograd():
                value = _of_some(orig_expr)
            if value is None:
                raise
            self.answers[orig_expr] = value
            if orig_expr.is_Symbol and orig_expr.is_integer:
                self.size_like.discard(orig_expr)  # of which torch takes none for 0 or 1
                self._set_replacement(orig_expr, value, "told")  # for sizes of what is made of it
            return value


def _is_asked_by_autograd() -> bool:
    """Whether one of torch's own formulas for gradients asks, none of somebody's in Python."""
    frame: Any = sys._getframe(1)
    # Formulas in C++ have no frames in Python: below those of torch's symbols comes the call that
    # has started the engine.
    while frame and frame.f_code.co_filename in (__file__, *_SYMBOLIC):
        frame = frame.f_back
    return bool(frame) and frame.f_code is torch.autograd.graph._engine_run_backward.__code__


_SYMBOLIC = tuple(module.__file__ for module in (recording, sym_node, symbolic_shapes))


def _of_some(expression: Any) -> Any:
    """The value of an expression if no size in it is 0, None if it takes more to know that.

    Strides are made of max(1, size). Formulas for gradients compare them, to choose a layout; of
    tensors without elements any is as good.
    """
    sizes = {
        width: next(iter(width.free_symbols)) for width in expression.atoms(Max) if _is_width(width)
    }
    value = expression.xreplace(sizes)
    return None if value.free_symbols else value


def _is_width(extreme: Any) -> bool:
    return len(extreme.args) == 2 and 1 in extreme.args and len(extreme.free_symbols) == 1


def symbolic_mode() -> FakeTensorMode:
    """A mode in which what only data tell has a symbol while a graph is traced."""
    environment = Environment()
    environment.answers = {}
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment)


@contextmanager
def telling(mode: FakeTensorMode, tell: Tell) -> Iterator[None]:
    """While a mode's symbols are asked what they are, and are told. Fake tensors forget the symbols
    of their values that an earlier run was told (if `epoch` moves: a second run asks for less, and
    such steps have a program for each size)."""
    mode.epoch += 1
    with patch.object(mode.shape_env, "tell", tell):
        yield


def extremes() -> AbstractContextManager[Any]:
    """While Python's max and min of numbers that only data tell (`max(1, count)`) are such numbers,
    as Dynamo has it, and no question which is the larger one. Of all else they are as ever."""

    def instead(python: Callable[..., Any], *kinds: Callable[..., Any]) -> Callable[..., Any]:
        def extreme(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 2 and not kwargs:
                for is_kind, one_of in zip((is_unknown, _is_count), kinds, strict=True):
                    numbers = all(is_kind(argument) or type(argument) is int for argument in args)
                    if numbers and any(map(is_kind, args)):
                        return one_of(*args)
            return python(*args, **kwargs)

        return extreme

    larger, smaller = instead(max, torch.sym_max, _larger), instead(min, torch.sym_min, _smaller)
    return patch.multiple(builtins, max=larger, min=smaller)


@contextmanager
def texts_of_numbers() -> Iterator[None]:
    """While the text of a symbolic number (`caches[f"{x.shape[1]} words"]`) is that of the number,
    which is asked for. torch itself, and who logs, gets that of the symbol. If `__repr__` moves:
    a step that makes keys of sizes finds none of them, or those of another size."""

    def instead(kind: Any, plain: type) -> Callable[[Any], str]:
        by_torch: Callable[[Any], str] = kind.__repr__

        def text(number: Any) -> str:
            asking = sys._getframe(1).f_code.co_filename
            inner = asking.startswith(_WITHOUT_ASKING)
            return by_torch(number) if inner else repr(plain(number))

        return text

    with ExitStack() as stack:
        for kind, plain in zip(Symbolic, (int, float, bool), strict=True):
            stack.enter_context(patch.object(kind, "__repr__", instead(kind, plain)))
        yield


_WITHOUT_ASKING = (
    *(f"{os.path.dirname(str(module.__file__))}{os.sep}" for module in (torch, sympy, logging)),
    f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}",
)


def _is_count(value: Any) -> bool:
    """Whether a value is a whole number in a tensor."""
    plain = isinstance(value, torch.Tensor) and not value.dim()
    return plain and value.dtype == torch.int64


def _larger(first: Any, second: Any) -> torch.Tensor:
    return torch.maximum(*_tensors(first, second))


def _smaller(first: Any, second: Any) -> torch.Tensor:
    return torch.minimum(*_tensors(first, second))


def _tensors(*numbers: Any) -> list[torch.Tensor]:
    """Numbers beside a tensor as tensors where that one is."""
    device = next(number.device for number in numbers if isinstance(number, torch.Tensor))
    return [torch.as_tensor(number, dtype=torch.int64, device=device) for number in numbers]


def is_decided_by_data(operation: Any) -> bool:
    """Whether data may decide the sizes of what an operation gives, or numbers in it."""
    tags = getattr(operation, "tags", ())
    of_torch = getattr(operation, "namespace", "") in ("aten", "prim", "prims", "")
    kinds = torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output
    return not of_torch or any(kind in tags for kind in kinds)


def sizes_and_numbers(result: Any) -> list[Any]:
    """The sizes of all tensors that an operation gives, and the numbers among them."""
    numbers: list[Any] = []
    for leaf in pytree.tree_leaves(result):
        numbers += leaf.shape if isinstance(leaf, torch.Tensor) else [leaf]
    return numbers


def is_of_data(value: Any) -> bool:
    """Whether data decide a size or a number."""
    return isinstance(value, Symbolic) and any(map(is_unbacked, value.node.expr.free_symbols))


def symbol_of(value: Any) -> Any:
    """The symbol that stands for a number alone, None if there is none."""
    if not isinstance(value, Symbolic):
        return None
    expression = value.node.expr
    if isinstance(value, torch.SymBool) and expression.is_Relational:  # u0 == 1
        expression = expression.lhs
    return expression if expression.is_Symbol else None


def as_answer(number: Any) -> Any:
    """A number as torch is told it; booleans have symbols for 0 and 1."""
    return sympy.sympify(int(number) if isinstance(number, bool) else number)


def as_number(answer: Any) -> bool | int | float:
    """The number that torch was told."""
    if answer in (sympy.true, sympy.false):
        return bool(answer)
    return int(answer) if answer.is_integer else float(answer)


def value_of(expression: Any, values: Mapping[Any, Any]) -> Any:
    """The value of an expression, None if it is not known."""
    value = expression.xreplace(values)
    return None if value.free_symbols else value


def computed(expression: Any, tensors: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """An expression as a tensor, of tensors for its symbols. Raises ValueError for what no tensors
    compute."""
    try:
        tensor: torch.Tensor = sympy_interp(_Tensors, dict(tensors), expression)
    except Exception as error:
        raise ValueError(f"no graph computes {expression}, which the step asks for") from error
    return tensor


class _Tensors(TensorReferenceAnalysis):
    """How expressions are computed by tensors, with what torch leaves out."""

    @staticmethod
    def mod(x: Any, y: Any) -> Any:
        return torch.remainder(x, y)

    python_mod = mod

    @staticmethod
    def int_truediv(x: Any, y: Any) -> torch.Tensor:
        """As Python divides whole numbers, up to 2**53."""
        return torch.true_divide(x.to(torch.float64), y.to(torch.float64))

    @staticmethod
    def where(condition: Any, if_true: Any, if_false: Any) -> torch.Tensor:
        return torch.where(condition, if_true, if_false)
