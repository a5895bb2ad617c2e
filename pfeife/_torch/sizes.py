"""Sizes and numbers that only data tell (`x.nonzero()`, `x.item()`), or the shapes of a call's
arguments: torch gives them symbols.

If the symbols' ranges move: a bound of `largest` alone is as good for everything but the account of
memory.
"""

import contextlib
import functools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from pfeife._torch.tensors import FakeTensor, FakeTensorMode

Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
Size: TypeAlias = int | Any  # of a dimension: a number, or sympy's expression of named sizes
_ENDLESS = 2**40  # no bound of a size that somebody has set


def forgetting_symbols(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """While the symbols that a mode makes are not looked for in a graph, for there is none."""
    forgetting: contextlib.AbstractContextManager[None]
    forgetting = mode.shape_env.ignore_fresh_unbacked_symbols()  # type: ignore[union-attr]
    return forgetting


class Symbols:
    """The symbols of a capture for sizes of its arguments, by those of another one (Dynamo's); each
    begins with the size that is in `values`, or that the other one has seen, and is taken to be 2
    or more. If they are `fixed`, there are numbers in their place."""

    def __init__(
        self, mode: FakeTensorMode, values: Mapping[Any, int] | None = None, fixed: bool = False
    ):
        self.environment: Any = mode.shape_env
        self.values, self.fixed = values or {}, fixed
        self.own: dict[Any, Any] = {}  # by those of the other one
        self.others: list[Any] = []  # the other one's environment, once a size of it is known

    def __call__(self, size: Any) -> Any:
        """What a size is here: a number as it is, the other one's symbols as those of this
        capture."""
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.shape_env.replace(size.node.expr)
        if not expression.free_symbols:
            return int(expression)
        if any(is_unbacked(symbol) for symbol in expression.free_symbols):
            return size
        values = {**_hints(size.node.shape_env), **self.values}
        numbers = {symbol: values[symbol] for symbol in expression.free_symbols}
        hint = int(expression.xreplace(numbers))
        if self.fixed:
            return hint
        self.others = [size.node.shape_env]
        for symbol in sorted(numbers, key=str):
            if symbol not in self.own:
                self.own[symbol] = _new(self.environment, len(self.own), int(numbers[symbol]))
        own = expression.xreplace(self.own)
        return self.environment.create_symintnode(own, hint=hint, source=None)

    def assume(self) -> None:
        """Takes for granted what the other capture has assumed of these sizes so far."""
        for guard in (guard for environment in self.others for guard in environment.guards):
            if guard.expr.free_symbols and guard.expr.free_symbols <= self.own.keys():
                self.environment.evaluate_expr(guard.expr.xreplace(self.own))


def new_size(mode: FakeTensorMode, number: int, hint: int) -> Any:
    """A symbolic size in a mode, which is so large now. Raises ValueError as `_new` does."""
    environment: Any = mode.shape_env
    return environment.create_symintnode(_new(environment, number, hint), hint=hint, source=None)


def _new(environment: Any, number: int, hint: int) -> Any:
    """A symbol for a size that is so large now. Raises ValueError for 0 and 1, of which torch makes
    no symbols, and says nothing, and for what is no size."""
    if hint < 2:
        raise ValueError(f"no symbol stands for the size {hint}")
    source = ConstantSource(f"size_{number}")
    return environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)


class SymbolicExamples:
    """Examples of inputs whose sizes are expressions of names: symbols of torch's for these, which
    are now what the numbers and shapes of the inputs are."""

    def __init__(self, inputs: Sequence[tuple[str, Any, Any]]):
        """`inputs` have a name, a value (a number or a tensor), and the sizes of a tensor. Raises
        ValueError for sizes that no symbol can stand for."""
        self.environment: Any = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.environment)
        self.places: dict[str, tuple[int, int | None]] = {}  # by names: of an input, a dimension
        self.hints: dict[str, int] = {}
        for at, (name, value, sizes) in enumerate(inputs):
            if sizes is None:
                self.places[name], self.hints[name] = (at, None), value
            for dim, size in enumerate(sizes or ()):
                if isinstance(size, sympy.Symbol):
                    self.places.setdefault(str(size), (at, dim))
                    self.hints[str(size)] = int(value.shape[dim])
        self.own: dict[Any, Any] = {}  # symbols, by the names
        self.values = [self._value(*example) for example in inputs]

    def _value(self, name: str, value: Any, sizes: Any) -> Any:
        if sizes is None:
            return self._size(name_of_size(name), value)
        if all(type(size) is int for size in sizes):
            with self.mode:
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
        # Dense, whatever the strides were: `compile_open` makes all inputs so.
        shape = [self._size(*pair) for pair in zip(sizes, value.shape, strict=True)]
        with self.mode:
            return torch.empty(shape, dtype=value.dtype, device=value.device)

    def _size(self, size: Size, hint: int) -> Any:
        if isinstance(size, int):
            return size
        names = size.free_symbols
        if any(str(name) not in self.hints for name in names):
            names = {size}  # an expression of sizes that no input tells is a size by itself
            self.hints.setdefault(str(size), hint)
        for name in sorted(names, key=str):
            if name not in self.own:
                hint_of_name = self.hints[str(name)]
                self.own[name] = _new(self.environment, len(self.own), hint_of_name)
        own = size.xreplace(self.own)
        return self.environment.create_symintnode(own, hint=hint, source=None)

    def assumed(self) -> tuple[Any, ...]:
        """What was assumed of the sizes so far, as expressions of their names."""
        return _assumed(self.environment, {own: name for name, own in self.own.items()})

    def named(self, values: Sequence[Any]) -> dict[str, int]:
        """The sizes by their names in a call with such values."""
        return {
            name: int(values[at]) if dim is None else values[at].shape[dim]
            for name, (at, dim) in self.places.items()
        }


def size_now(size: torch.SymInt) -> int | None:
    """What a size is in this call, without that anything is assumed of it; None if data decide."""
    expression = size.node._expr.xreplace(_hints(size.node.shape_env))
    return None if expression.free_symbols else int(expression)


def symbol_named(value: Any) -> Any:
    """The symbol that a symbolic number is, also where a trace takes it for a certain number; None
    for an expression or a plain number."""
    # `node.expr` would have the number in the symbol's place already.
    expression = value.node._expr if isinstance(value, torch.SymInt) else None
    return expression if isinstance(expression, sympy.Symbol) else None


def python_kernels() -> contextlib.AbstractContextManager[None]:
    """While operations run by torch's kernels in Python where there are such: those in C++ may ask
    fake tensors for sizes as numbers. If the name moves: AOTAutograd's tracing uses it."""
    dispatcher: contextlib.AbstractContextManager[None] = enable_python_dispatcher()
    return dispatcher


def is_fixed(size: torch.SymInt) -> bool:
    """Whether a trace takes a symbolic size for a certain number."""
    return bool(size.node.expr.is_number)


def name_of_size(name: str) -> sympy.Symbol:
    """The symbol of a named size in the expressions of a program."""
    return sympy.Symbol(name, integer=True, positive=True)


def sizes_at(sizes: Sequence[Size], named: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes where those with names are such numbers. Raises ValueError for a name that is not
    among them."""
    pairs = tuple(sorted(named.items()))
    return tuple([size if isinstance(size, int) else _at(size, pairs) for size in sizes])


@functools.lru_cache(maxsize=2**12)
def _at(size: sympy.Expr, named: tuple[tuple[str, int], ...]) -> int:
    number = size.xreplace({name_of_size(name): sympy.Integer(value) for name, value in named})
    if number.free_symbols:
        raise ValueError(
            f"the size {size} depends on {number.free_symbols}, of which nothing is known"
        )
    return int(number)


def is_single(limits: Sequence[sympy.Basic], name: str, number: int) -> bool:
    """Whether what a trace has assumed leaves a size with a name no other value than a number."""
    symbol = name_of_size(name)
    # The very expressions that `_assumed` makes of a symbol's range, hence unevaluated.
    bounds = (bound(symbol, number, evaluate=False) for bound in (sympy.Ge, sympy.Le))
    return all(bound in limits for bound in bounds)


def holds(limit: sympy.Basic, named: Mapping[str, int]) -> bool:
    """Whether an expression is true where the sizes with names are such numbers."""
    return _holds(limit, tuple(sorted(named.items())))


@functools.lru_cache(maxsize=2**12)
def _holds(limit: sympy.Basic, named: tuple[tuple[str, int], ...]) -> bool:
    numbers = {name_of_size(name): sympy.Integer(value) for name, value in named}
    try:
        truth = limit.subs(numbers)
    except ZeroDivisionError:  # of a size of 0
        return False
    if truth not in (sympy.true, sympy.false):
        raise ValueError(f"{limit} says nothing of the sizes {dict(named)}: it is {truth}")
    return bool(truth)


def with_numbers(
    value: Any, largest: int, names: Mapping[Any, sympy.Symbol]
) -> tuple[Any, bool | tuple[Size, ...], Any]:
    """A fake value with numbers in place of symbols; whether data decide the size of a tensor in
    it, of a single tensor its sizes; and, of a tensor whose sizes and strides those of arguments
    decide, the expressions of them, else None.

    A size gets what it was when the step was captured, the most that it can be, or `largest` where
    there is no bound; sizes that are computed of one another stay consistent. `names` are of the
    arguments' sizes.
    """
    leaves, structure = pytree.tree_flatten(value)
    replacements = [_told(leaf, largest, names) for leaf in leaves]
    if isinstance(value, torch.Tensor):
        return replacements[0]
    numbers = pytree.tree_unflatten([plain for plain, *_ in replacements], structure)
    return numbers, any(by for _, by, _ in replacements), None


def _told(
    value: Any, largest: int, names: Mapping[Any, Any]
) -> tuple[Any, bool | tuple[Size, ...], Any]:
    if isinstance(value, Symbolic):
        return _number(value, largest), False, None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value, False, None
    numbers = (*value.shape, *value.stride())
    # A view may begin where a symbol says, which is no matter of its own sizes.
    if not any(isinstance(number, Symbolic) for number in (*numbers, value.storage_offset())):
        return value, False, None
    sizes = [_number(number, largest) for number in numbers]
    with value.fake_mode:  # type: ignore[attr-defined]
        like = torch.empty_strided(
            sizes[: value.dim()], sizes[value.dim() :], dtype=value.dtype, device=value.device
        )
    written = [_written(number) for number in numbers]
    symbols = {
        symbol for size in written if not isinstance(size, int) for symbol in size.free_symbols
    }
    if any(map(is_unbacked, symbols)):
        known = {symbol: name_of_size(f"of_data_{symbol}") for symbol in symbols} | dict(names)
        sizes_by_data = (
            size if isinstance(size, int) else size.xreplace(known) for size in written
        )
        return like, tuple(sizes_by_data)[: value.dim()], None
    if not symbols:
        return like, False, None
    if not symbols <= names.keys():
        raise ValueError(f"a tensor's memory is laid out by {symbols - names.keys()}")
    named = tuple(size if isinstance(size, int) else size.xreplace(names) for size in written)
    return like, False, (named[: value.dim()], named[value.dim() :])


def is_unbacked(symbol: Any) -> bool:
    """Whether data decide what a symbol is."""
    return str(symbol).startswith(("u", "zuf"))


def named_sizes(sizes: Sequence[Any], names: Mapping[Any, sympy.Symbol]) -> tuple[Size, ...]:
    """Sizes as numbers, or as expressions of names for symbols, as they were made."""
    return tuple(
        size.node._expr.xreplace(names) if isinstance(size, torch.SymInt) else int(size)
        for size in sizes
    )


def _written(value: Any) -> Size:
    """A size as an expression, or a number."""
    if not isinstance(value, Symbolic):
        return int(value)
    expression = value.node.shape_env.replace(value.node.expr)
    return expression if expression.free_symbols else int(expression)


def _number(value: Any, largest: int) -> Any:
    """A number in place of a symbolic one."""
    if not isinstance(value, Symbolic):
        return value
    environment = value.node.shape_env
    expression = environment.replace(value.node.expr)
    symbols = expression.free_symbols
    plain = expression.xreplace({symbol: _most(environment, symbol, largest) for symbol in symbols})
    # sympy's numbers are none of Python's.
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    return kind(plain)


def written_shape(value: torch.Tensor) -> tuple[Size, ...]:
    """A shape as numbers and expressions of symbols, which may be compared without that anything
    is assumed of these."""
    return tuple(map(_written, value.shape))


def assumed_of_sizes(
    sizes: Sequence[torch.SymInt], names: Mapping[Any, sympy.Symbol]
) -> tuple[sympy.Basic, ...]:
    """What a trace has assumed of the arguments' symbolic sizes, as expressions of their `names`
    that are to be true."""
    return _assumed(sizes[0].node.shape_env, names) if sizes else ()


def _assumed(environment: Any, names: Mapping[Any, Any]) -> tuple[sympy.Basic, ...]:
    assumptions = [guard.expr for guard in environment.guards]
    for symbol in names:
        limits = environment.var_to_range[symbol]
        assumptions.append(sympy.Ge(symbol, limits.lower, evaluate=False))
        if limits.upper < _ENDLESS:
            assumptions.append(sympy.Le(symbol, limits.upper, evaluate=False))
    named = dict.fromkeys(assumption.xreplace(names) for assumption in assumptions)
    # What is true of any positive size has become `true` with the names, and has no symbols.
    return tuple(assumption for assumption in named if assumption.free_symbols)


def _hints(environment: Any) -> Mapping[Any, Any]:
    name = "backed_var_to_val" if hasattr(environment, "backed_var_to_val") else "var_to_val"
    hints: Mapping[Any, Any] = getattr(environment, name)
    return hints


def _most(environment: Any, symbol: Any, largest: int) -> Any:
    """The most that a symbol can be."""
    hints = _hints(environment)
    if symbol in hints:
        return hints[symbol]
    if not symbol.is_integer:
        return 1.0
    limits = environment.var_to_range[symbol]
    most = limits.upper if limits.upper < _ENDLESS else largest
    return max(int(most), int(limits.lower) if limits.lower > -_ENDLESS else 0)


def with_assertions(joint: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A joint graph with what was assumed of its symbols as assertions, where it has none: Dynamo
    puts them into its own graphs, a step that just runs (`torch._check`) leaves them to the
    symbols. Raises ValueError for what is assumed of floats, which torch's pass leaves out,
    and of numbers that nothing else reads. If the pass moves: such a step goes on where eager
    stops."""
    from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

    values = [node.meta.get("val") for node in joint.graph.nodes]
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    environment = modes[0].shape_env if modes else None
    has_assertions = any(
        node.target is torch.ops.aten._assert_scalar.default for node in joint.graph.nodes
    )
    if environment is None or has_assertions:
        return joint
    bound = {
        symbol for node in joint.graph.nodes for symbol in node.meta.get("unbacked_bindings") or ()
    }
    # Every run of the step has made symbols of its own for the same numbers.
    deferred = environment.deferred_runtime_asserts.items()
    assumed = {
        _of_any(assertion.expr): assertion.expr for _, several in deferred for assertion in several
    }
    # torch's pass asserts what is kept under a symbol that the graph binds, and no other.
    asserted = [several for s, several in deferred if s is not None and s in bound and s.is_integer]
    inserted = {_of_any(assertion.expr) for several in asserted for assertion in several}
    for expression in (assumed[text] for text in assumed if text not in inserted):
        raise ValueError(
            f"the step takes it for granted of a number of data that {expression}, which a traced "
            "step does not check when it runs: take that check out"
        )
    if bound:
        insert_deferred_runtime_asserts(joint, environment, "joint")
    return joint


def _of_any(expression: Any) -> str:
    """An expression of whatever symbols."""
    return re.sub(r"\b(u|zuf)\d+\b", "_", str(expression))


def order_of_facts() -> Any:
    """The generator by which sympy, which has torch's symbols, shuffles what it looks at first; it
    changes no result. If it moves: None, and a step with such symbols seems to draw by it."""
    return getattr(sys.modules.get("sympy.core.random"), "_assumptions_rng", None)
