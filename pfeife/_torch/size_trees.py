"""Expressions of named sizes as trees of plain values, and back: exactly, or not at all.

rows                     "rows"
2*rows + 1               ["Add", 1, ["Mul", 2, "rows"]]
(length//2) >= 3         ["GreaterThan", ["FloorDiv", "length", 2], 3]

A tree names one of the functions below: nothing of it is run as a program, or read as a text.
"""

import re
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy import functions

from pfeife._torch.sizes import name_of_size

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OF_SYMPY = (
    *(sympy.Add, sympy.Mul, sympy.Pow),
    *(sympy.Equality, sympy.Unequality, sympy.LessThan, sympy.StrictLessThan),
    *(sympy.GreaterThan, sympy.StrictGreaterThan, sympy.And, sympy.Or, sympy.Not),
)
# Torch's own functions of sizes. If one moves: programs that have it are not written to files.
_OF_TORCH = (
    *("FloorDiv", "Mod", "PythonMod", "CleanDiv", "ModularIndexing", "Max", "Min", "Where"),
    *("IntTrueDiv", "FloatTrueDiv", "ToFloat", "Identity", "PowByNatural"),
    *("CeilToInt", "FloorToInt", "TruncToInt", "TruncToFloat", "RoundToInt"),
)
_FUNCTIONS: dict[str, Any] = {
    **{function.__name__: function for function in _OF_SYMPY},
    **{name: getattr(functions, name) for name in _OF_TORCH if hasattr(functions, name)},
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_POWERS = ("Pow", "PowByNatural")
_LARGEST_POWER = 64  # of all powers around a size: larger numbers would take forever


def is_expression(value: Any) -> bool:
    """Whether a value is an expression of sizes, or what is said of them."""
    return isinstance(value, sympy.Basic)


def tree_of_size(expression: Any) -> Any:
    """An expression as a tree. Raises ValueError for one that would not come back as it is."""
    tree = _tree(expression)
    again = size_of_tree(tree)
    if again != expression or str(again) != str(expression):
        raise ValueError(f"the size {expression} has no spelling")
    return tree


def _tree(expression: Any) -> Any:
    if isinstance(expression, sympy.Symbol):
        return str(expression)
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Float):
        return float(expression)
    if type(expression) not in _NAMES:
        raise ValueError(f"a size is computed by {type(expression).__name__}")
    return [_NAMES[type(expression)], *map(_tree, expression.args)]


def size_of_tree(tree: Any) -> sympy.Basic:
    """The expression of a tree. Raises ValueError for what is no tree of one."""
    try:
        return _expression(tree, _LARGEST_POWER)
    except RecursionError:
        raise ValueError("this is no size: it is too deep") from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{str(tree)[:80]} is no size: {error}") from None


def _expression(tree: Any, power: int) -> sympy.Basic:
    """An expression which stands in a power of so much at most."""
    if type(tree) is int:
        return sympy.Integer(tree)
    if type(tree) is float:
        return sympy.Float(tree)
    if type(tree) is str and _NAME.fullmatch(tree):
        return name_of_size(tree)
    if type(tree) is not list or len(tree) < 2 or str(tree[0]) not in _FUNCTIONS:
        raise ValueError(f"{str(tree)[:80]} is no size")
    name, *parts = tree
    if name in _POWERS:
        power = _inner_power(parts, power)
    arguments = [_expression(part, power) for part in parts]
    return _FUNCTIONS[name](*arguments, evaluate=False)


def _inner_power(parts: list[Any], power: int) -> int:
    exponent = parts[-1]
    if len(parts) != 2 or type(exponent) is not int or not 0 < exponent <= power:
        raise ValueError(f"{str(parts)[:80]} is no power of a size")
    # Powers within one another multiply: so much is left for those inside.
    return power // exponent
