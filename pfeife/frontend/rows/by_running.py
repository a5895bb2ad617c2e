"""Where rows come back behind an operation that no rule knows, as a run shows.

    two microbatches, each alone       a -> x        b -> y
    both as one                     [a b] -> [x y]          rows, along the dimension that grew

A mixture of experts sorts the tokens of all rows, and puts what comes of each back in its place.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.frontend.watch.deterministic import Draws, Expected, Unseeded, close
from pfeife.ir.parts import Port
from pfeife.ir.program import Program

log = logging.getLogger("pfeife")
# How far the same rows of one dtype may be apart, as a share of the largest value: what other
# kernels for other numbers of rows round, and less than rows would change that have a little of
# others in them (a small part of a mean over all rows).
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5}
_ROUNDING_OF_HALVES = 0.02


@attrs.frozen(eq=False)
class Sample:
    """The values of two microbatches by the names of a program's inputs."""

    first: Mapping[str, Any]
    second: Mapping[str, Any]

    def both(self, port: Port) -> Any:
        """An input's values as those of one microbatch."""
        value = self.first.get(port.name)
        if port.batch_dim is None or value is None:
            return value
        return torch.cat([value, self.second[port.name]], port.batch_dim)


def seen_rows(
    programs: tuple[Program, Program],
    nodes: tuple[Sequence[fx.Node], Sequence[fx.Node]],
    sample: Sample,
) -> dict[fx.Node, int]:
    """By node the dimension with its rows, each of which is the same in the company of others;
    without those nodes of which a run does not show it.

    `programs` are flat, the second for twice the rows. `nodes` are the same ones of both, in
    order. Where operations draw and in what fails nothing is seen.
    """
    program, twice = programs
    both = {port.name: sample.both(port) for port in program.inputs}
    dims: dict[fx.Node, int] = {}
    try:
        with torch.no_grad(), _torch.no_autocast(), Expected():
            # The three runs go on in step, node by node, so that no more of their values is held
            # than later nodes need.
            apart = zip(
                *(
                    _values(program, nodes[0], values.get)
                    for values in (sample.first, sample.second)
                ),
                strict=True,
            )
            together = _values(twice, nodes[1], both.get)
            for node, (first, second), whole in zip(nodes[0], apart, together, strict=True):
                dim = _dim(first, second, whole)
                if dim is not None:
                    dims[node] = dim
    except Draws as draws:
        log.debug("what no rule knows is not looked at, since the step draws by %s", draws)
        return {}
    except Exception as error:  # the step itself will say where
        log.debug("what no rule knows is not looked at, since the step fails: %s", error)
    return dims


def _values(
    program: Program, nodes: Sequence[fx.Node], value_of: Callable[[str], Any]
) -> Iterator[Any]:
    """The nodes' values in order, none of them kept after it is read last."""
    run = Unseeded(program.module)
    last = {operand: node for node in nodes for operand in node.all_input_nodes}
    for node in nodes:
        run.env[node] = value_of(node.name) if node.op == "placeholder" else run.run_node(node)
        yield run.env[node]
        for operand in node.all_input_nodes:
            if last[operand] is node:
                del run.env[operand]


def _dim(first: Any, second: Any, whole: Any) -> int | None:
    """Along which dimension the values of two microbatches, other ones, are that of both."""
    if not isinstance(first, torch.Tensor) or first.is_meta or not first.is_floating_point():
        return None
    grown = [i for i, (a, b) in enumerate(zip(first.shape, whole.shape, strict=True)) if a != b]
    # Equal values prove nothing: what is the same in all rows can be joined so as well.
    if len(grown) != 1 or first.shape != second.shape or torch.equal(first, second):
        return None
    joined = torch.cat([first, second], grown[0])
    # What is not finite proves nothing either.
    if joined.shape != whole.shape or not (joined.isfinite().all() and whole.isfinite().all()):
        return None
    rounding = _ROUNDING.get(joined.dtype, _ROUNDING_OF_HALVES)
    return grown[0] if close(joined, whole, rounding, noise=0) else None
