"""An abstract run of a flat graph: how its results depend on the rows of the batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.frontend.rows.table import rule_of
from pfeife.frontend.rows.value import FIXED, Known, RowOperation, Rows, Stuck, Unknown, bound

_NONE: Mapping[fx.Node, Any] = {}


def follow(
    graph: fx.Graph,
    inputs: Mapping[fx.Node, Rows],
    wanted: Sequence[fx.Node],
    rows: int,
    twins: Mapping[fx.Node, fx.Node] = _NONE,
    seen: Mapping[fx.Node, int] = _NONE,
) -> dict[fx.Node, Known]:
    """What is known of the `wanted` nodes of a graph captured for so many `rows`.

    `twins` are the nodes of the graph for twice the rows: they tell numbers that count rows from
    others. `seen` has the dimensions that are known to have rows where no rule says it: of a node
    without a rule for its operands, and of one whose operands are unknown.
    """
    nodes = ancestors(graph, wanted)
    known: dict[fx.Node, Any] = {}
    for node in nodes:
        if node.op == "placeholder" or "val" not in node.meta:  # a branch of torch.cond
            known[node] = inputs.get(node, FIXED)
            continue
        one = RowOperation(node, bound(node), known, rows, twins.get(node))
        stuck = next(
            (k for k in map(known.get, node.all_input_nodes) if isinstance(k, Unknown)), None
        )
        found = stuck or _by_rule(one)
        looked = isinstance(found, Unknown) and node in seen
        known[node] = Rows(varies=True, dim=seen[node]) if looked else found
    return {node: _settled(node, known[node]) for node in wanted}


def _by_rule(one: RowOperation) -> Any:
    """What the rule of an operation finds, Unknown if none is for it and its operands."""
    try:
        return _noting_losses(one, rule_of(one)(one))
    except Stuck as reason:
        return Unknown(one.node, reason.numbers, reason.mixes or _has_pairs(one))
    except KeyError:  # an overload without the argument that the rule is about
        return Unknown(one.node, mixes=_has_pairs(one))


def _has_pairs(one: RowOperation) -> bool:
    """Whether a value has something for every pair of rows: for twice the rows it is larger in two
    dimensions."""
    values = [node.meta.get("val") for node in (one.node, one.twin) if node is not None]
    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    return len(shapes) == 2 and sum(a != b for a, b in zip(*shapes, strict=True)) > 1


def _noting_losses(one: RowOperation, found: Any) -> Any:
    """What a rule has found, where it has dropped numbers that may count rows."""
    if isinstance(found, tuple):
        return tuple(_noting_losses(one, part) for part in found)
    operands = [rows for _, rows in one.operands() if isinstance(rows, Rows)]
    lost = any(rows.lost or (rows.maybe - {0} and not found.maybe) for rows in operands)
    return attrs.evolve(found, lost=True) if lost else found


def _settled(node: fx.Node, found: Any) -> Known:
    """Unknown where numbers in a value may count rows."""
    if isinstance(found, Rows) and found.dim is None:
        if found.lost or found.maybe - {0}:
            return Unknown(node, numbers=True)
        if found.power not in (0, 1) or (found.power and found.counts):
            return Unknown(node)
    return found


def ancestors(graph: fx.Graph, wanted: Sequence[fx.Node]) -> list[fx.Node]:
    """All that the wanted nodes are computed from, in order."""
    found = set(wanted)
    for node in reversed(graph.nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in found]


def paired(
    graph: fx.Graph, wanted: Sequence[fx.Node], other: fx.Graph, twins: Sequence[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """All that the wanted nodes are computed from, each with the same of another graph; none if
    that has another form."""
    pairs = ancestors(graph, wanted), ancestors(other, twins)
    forms = [
        [(n.op, n.target if n.op == "call_function" else "") for n in nodes] for nodes in pairs
    ]
    return dict(zip(*pairs, strict=True)) if forms[0] == forms[1] else {}
