"""Sizes and numbers that only data tell (`x.nonzero()`, `x.item()`): torch gives them symbols.

If the symbols' ranges move: a bound of `largest` alone is as good for everything but the account of
memory.
"""

import contextlib
import re
import sys
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pfeife._torch.tensors import FakeTensor, FakeTensorMode

Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ENDLESS = 2**40  # no bound of a size that somebody has set


def forgetting_symbols(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """While the symbols that a mode makes are not looked for in a graph, for there is none."""
    forgetting: contextlib.AbstractContextManager[None]
    forgetting = mode.shape_env.ignore_fresh_unbacked_symbols()  # type: ignore[union-attr]
    return forgetting


def without_symbols(value: Any, largest: int) -> tuple[Any, bool]:
    """A fake value with numbers in place of symbols, and whether a tensor in it had any.

    A size gets the most that it can be, or `largest` where there is no bound; sizes that are
    computed of one another stay consistent.
    """
    leaves, structure = pytree.tree_flatten(value)
    told = [_told(leaf, largest) for leaf in leaves]
    return pytree.tree_unflatten([one for one, _ in told], structure), any(by for _, by in told)


def _told(value: Any, largest: int) -> tuple[Any, bool]:
    if isinstance(value, Symbolic):
        return _number(value, largest)[0], False
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value, False
    numbers = (*value.shape, *value.stride())
    if not any(isinstance(one, Symbolic) for one in numbers):
        return value, False
    told = [_number(one, largest) for one in numbers]
    sizes = [number for number, _ in told]
    with value.fake_mode:  # type: ignore[attr-defined]
        like = torch.empty_strided(
            sizes[: value.dim()], sizes[value.dim() :], dtype=value.dtype, device=value.device
        )
    return like, any(by for _, by in told)


def _number(value: Any, largest: int) -> tuple[Any, bool]:
    """A number, and whether data decide it."""
    if not isinstance(value, Symbolic):
        return value, False
    environment = value.node.shape_env
    expression = environment.replace(value.node.expr)
    symbols = expression.free_symbols
    plain = expression.xreplace({one: _most(environment, one, largest) for one in symbols})
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    return kind(plain), bool(symbols)


def _most(environment: Any, symbol: Any, largest: int) -> Any:
    """The most that a symbol can be."""
    name = "backed_var_to_val" if hasattr(environment, "backed_var_to_val") else "var_to_val"
    hints = getattr(environment, name)
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
    known = any(node.target is torch.ops.aten._assert_scalar.default for node in joint.graph.nodes)
    if environment is None or known:
        return joint
    made = {one for node in joint.graph.nodes for one in node.meta.get("unbacked_bindings") or ()}
    # Every run of the step has made symbols of its own for the same numbers.
    deferred = environment.deferred_runtime_asserts.items()
    assumed = {_of_any(one.expr): one.expr for _, several in deferred for one in several}
    asserted = [several for s, several in deferred if s is not None and s in made and s.is_integer]
    kept = {_of_any(one.expr) for several in asserted for one in several}
    for expression in (assumed[one] for one in assumed if one not in kept):
        raise ValueError(
            f"the step takes it for granted of a number of data that {expression}, which a traced "
            "step does not check when it runs: take that check out"
        )
    if made:
        insert_deferred_runtime_asserts(joint, environment, "joint")
    return joint


def _of_any(expression: Any) -> str:
    """An expression of whatever symbols."""
    return re.sub(r"\b(u|zuf)\d+\b", "_", str(expression))


def order_of_facts() -> Any:
    """The generator by which sympy, which has torch's symbols, shuffles what it looks at first; it
    changes no result. If it moves: None, and a step with such symbols seems to draw by it."""
    return getattr(sys.modules.get("sympy.core.random"), "_assumptions_rng", None)
