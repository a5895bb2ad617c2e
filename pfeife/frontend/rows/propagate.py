"""An abstract run of a flat graph: how its results depend on the rows of the batch."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.frontend.rows.table import rule_of
from pfeife.frontend.rows.value import FIXED, Known, RowOperation, Rows, Stuck, Unknown, moves
from pfeife.ir.nodes import bound

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
    rows_of: dict[fx.Node, Any] = {}
    for node in nodes:
        if node.op == "placeholder" or "val" not in node.meta:  # a branch of torch.cond
            rows_of[node] = inputs.get(node, FIXED)
            continue
        operation = RowOperation(node, bound(node), rows_of, rows, twins.get(node))
        # The first Unknown goes on to all that is computed from it, so that the one in a result
        # names the node at which the rules ended.
        stuck = next(
            (k for k in map(rows_of.get, node.all_input_nodes) if isinstance(k, Unknown)), None
        )
        result = _onwards(operation, stuck) if stuck else _by_rule(operation)
        looked = isinstance(result, Unknown) and node in seen
        rows_of[node] = Rows(varies=True, dim=seen[node]) if looked else result
    return {node: _settled(node, rows_of[node]) for node in wanted}


def _onwards(operation: RowOperation, stuck: Unknown) -> Unknown:
    """What is computed of an unknown value. One of all rows beside rows (x - x.amax(0)) makes each
    of these depend on the others."""
    operands = map(operation.rows_of.get, operation.node.all_input_nodes)
    if stuck.whole and any(map(_has_rows, operands)):
        return Unknown(operation.node, mixes=True)
    return stuck


def _has_rows(rows: Any) -> bool:
    return isinstance(rows, Rows) and rows.dim is not None


def _by_rule(operation: RowOperation) -> Any:
    """What the rule of an operation finds, Unknown if none is for it and its operands."""
    try:
        return _noting_losses(operation, rule_of(operation)(operation))
    except Stuck as reason:
        # With a value for every pair of rows these look at one another, whatever the operation.
        mixes = reason.mixes or _has_pairs(operation)
        # Of sums and means over the rows comes something that has none, whatever the operation.
        operands = [rows for _, rows in operation.operands()]
        of_sums = any(map(moves, operands)) and not any(map(_has_rows, operands))
        return Unknown(operation.node, reason.numbers, mixes, reason.whole or of_sums)
    except KeyError:  # an overload without the argument that the rule is about
        return Unknown(operation.node, mixes=_has_pairs(operation))


def _has_pairs(operation: RowOperation) -> bool:
    """Whether a value has something for every pair of rows: for twice the rows it is larger in two
    dimensions; or another number of these, as where one row is squeezed away."""
    values = [node.meta.get("val") for node in (operation.node, operation.twin) if node is not None]
    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    if len(shapes) < 2:
        return False
    one, two = shapes
    return len(one) != len(two) or sum(map(operator.ne, one, two)) > 1


def _noting_losses(operation: RowOperation, result: Any) -> Any:
    """What a rule has found, where it has dropped numbers that may count rows."""
    if isinstance(result, tuple):
        return tuple(_noting_losses(operation, part) for part in result)
    # Only rules that can say what a number does to the result keep `maybe`; the others give an
    # empty one, and (x / len(x)).exp() must not pass for a function of the rows alone.
    operands = [rows for _, rows in operation.operands() if isinstance(rows, Rows)]
    lost = any(rows.lost or (rows.maybe - {0} and not result.maybe) for rows in operands)
    return attrs.evolve(result, lost=True) if lost else result


def _settled(node: fx.Node, result: Any) -> Known:
    """Unknown where numbers in a value may count rows."""
    if isinstance(result, Rows) and result.dim is None:
        if result.lost or result.maybe - {0}:
            return Unknown(node, numbers=True)
        # What grows with the square or the inverse of the number of rows is no sum and no mean of
        # the microbatches' values; nor is a mean by a count of the batch's, times the rows.
        if result.power not in (0, 1) or (result.power and result.counts):
            return Unknown(node)
    return result


def ancestors(graph: fx.Graph, wanted: Sequence[fx.Node]) -> list[fx.Node]:
    """All that the wanted nodes are computed from, in order."""
    needed = set(wanted)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in needed]


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
