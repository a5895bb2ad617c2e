"""Expressions of sizes as plain values: exactly, or not at all."""

import json

import pytest
import sympy
from torch.utils._sympy import functions

from pfeife import _torch

ROWS, LENGTH = map(_torch.name_of_size, ("rows", "length"))
EXPRESSIONS = [
    ROWS,
    2 * ROWS * LENGTH + LENGTH**2 - 3,
    functions.FloorDiv(functions.FloorDiv(LENGTH, 2) - 3, 2) + 1,
    functions.Max(1, functions.FloorDiv(LENGTH, 2)) * functions.Min(ROWS, 7),
    functions.TruncToInt(functions.FloatTrueDiv(LENGTH, 3) * 1.1),
    functions.Mod(LENGTH, 3) + functions.PythonMod(ROWS, 5),
    functions.CeilToInt(functions.IntTrueDiv(LENGTH, ROWS)),
    sympy.Eq(functions.Mod(LENGTH, 8), 0),
    sympy.Ge(ROWS, 1, evaluate=False),
    sympy.Or(sympy.Ne(ROWS, LENGTH), sympy.Lt(LENGTH, 2 * ROWS)),
    sympy.And(sympy.Gt(LENGTH, 2 * ROWS), sympy.Le(ROWS, 9)),
]


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
def test_an_expression_comes_back(expression):
    tree = json.loads(json.dumps(_torch.tree_of_size(expression)))
    found = _torch.size_of_tree(tree)
    assert found == expression and str(found) == str(expression)
    assert sympy.srepr(found) == sympy.srepr(expression)


@pytest.mark.parametrize(
    "expression", [sympy.sqrt(ROWS), sympy.sin(ROWS), sympy.Symbol("rows"), ROWS / 2], ids=str
)
def test_what_has_no_spelling(expression):
    """Another symbol of the name, say."""
    with pytest.raises(ValueError, match=r"a size is computed by|no power|has no spelling"):
        _torch.tree_of_size(expression)


NESTED = "rows"
for _ in range(9):
    NESTED = ["Pow", NESTED, 9]
DEEP = "rows"
for _ in range(10**5):
    DEEP = ["Add", DEEP, 1]


@pytest.mark.parametrize(
    "tree",
    [
        *(None, True, [], ["Add"], ["sin", "rows"], [["Add"], 1], {"Add": 1}, "rows + 1", "é"),
        *(["FloorDiv", "rows"], ["Mod", 1, 2, 3], ["Where", "rows"]),
        *(["Pow", "rows", 10**9], ["Pow", "rows", -1], ["Pow", "rows", "rows"], NESTED, DEEP),
    ],
    ids=lambda tree: str(type(tree)) if tree is DEEP else str(tree)[:30],
)
def test_what_is_no_tree(tree):
    with pytest.raises(ValueError, match="is no"):
        _torch.size_of_tree(tree)
