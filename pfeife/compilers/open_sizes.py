"""Pieces whose sizes those of the batch decide: compiled once, for all sizes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pfeife import _torch

Make = Callable[[fx.GraphModule, list[Any]], Callable]


def is_open(node: fx.Node) -> bool:
    """Whether sizes of the batch decide that of a node's value, or are it."""
    return "sizes" in node.meta or isinstance(node.meta.get("val"), int)


def compile_open(piece: fx.GraphModule, inputs: Sequence[fx.Node], make: Make) -> Callable:
    """What a compiler makes of a piece, given examples of symbolic sizes. Where it has assumed of
    them what does not hold in a call, or no symbol can stand for one, the piece runs as its graph.
    Its inputs are dense."""
    graph = _torch.function_of(piece)
    try:
        examples = _torch.SymbolicExamples([_given(node) for node in inputs])
    except ValueError:
        return graph
    compiled = make(piece, examples.values)
    limits = examples.assumed()

    def run(*values: Any) -> Any:
        # A compiler may have taken two sizes for equal, or one for even: where a call breaks that,
        # its code would give wrong numbers, and the graph gives the right ones.
        if limits and not _hold(limits, examples.named(values)):
            return graph(*values)
        dense = (
            value.contiguous() if isinstance(value, torch.Tensor) else value for value in values
        )
        return compiled(*dense)

    return run


def _given(node: fx.Node) -> tuple[str, Any, Any]:
    """The name of an input, its value, and its sizes, as expressions where they are open."""
    value = node.meta["val"]
    if isinstance(value, int):
        return node.name, value, None
    return node.name, value, node.meta["sizes"][0] if "sizes" in node.meta else tuple(value.shape)


def _hold(limits: Sequence[Any], named: Mapping[str, int]) -> bool:
    try:
        return all(_torch.holds(limit, named) for limit in limits)
    except ValueError:  # of a size that no input tells
        return False
