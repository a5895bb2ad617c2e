"""How the microbatches of every result are put together, read off the flat graph.

A result that has rows is joined along them. Any other is a sum over the rows (added up), a mean
over them (averaged), or a mean by a count that the batch decides, such as the targets that are
not ignored (averaged by that count).
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import attrs
import torch
from torch import fx, nn

from pfeife import _torch
from pfeife.frontend.rows.by_running import Sample, seen_rows
from pfeife.frontend.rows.propagate import ancestors, follow, paired
from pfeife.frontend.rows.value import Known, Rows, Unknown, source_of
from pfeife.ir.nodes import bound, operation_name, returned, source_line
from pfeife.ir.parts import Count, Port, Role, captured_sizes
from pfeife.ir.program import Program
from pfeife.ir.seeding import seeded
from pfeife.ir.sizes import broken_limit, resized, settled

LossReduction = Literal["mean", "sum", "auto"]
Larger = Callable[[bool, int], Program]


def derive_reductions(
    program: Program,
    loss_reduction: LossReduction = "auto",
    larger: Larger | None = None,
    sample: Callable[[], Sample] | None = None,
    fixed: Callable[[], Program] | None = None,
) -> tuple[Program, dict[str, str], dict[str, str]]:
    """A flat program whose ports say how their microbatches are put together, by port name
    what kept that from being known (such a loss is averaged), and where rows look at one another.

    `larger` gives the program for so many times the rows, with or without gradients; it is asked
    only where a number may count rows or no rule tells, and then `sample` for values with which
    both are run. A program that leaves its rows open is that for more rows as well. Of one that
    leaves sizes open, `fixed` gives that for its own sizes alone, which may be taken apart as
    `larger` is.
    """
    rows_of = _tried(program, loss_reduction, larger, sample, fixed)
    among = {node for rows in rows_of.values() if isinstance(rows, Rows) for node in rows.counts}
    divided = [node for node in program.module.graph.nodes if node in among]  # alike on all ranks
    counts = {node: _count(program, node) for node in divided}
    # A mean is unknown all the same if its count needs more than the batch.
    uncounted = [node for node, count in counts.items() if not count]
    countable = [node for node, count in counts.items() if count]
    ports, unknown, mixed = [], {}, {}
    for port in program.outputs:
        rows = rows_of.get(port.name)
        if isinstance(rows, Unknown) and rows.mixes:
            mixed[port.name] = str(rows)
        if port.role == Role.LOSS and loss_reduction != "auto":
            ports.append(attrs.evolve(port, reduction=loss_reduction))
            continue
        without = [n for n in uncounted if isinstance(rows, Rows) and n in rows.counts]
        rows = Unknown(without[0]) if without else rows
        if isinstance(rows, Rows):
            port = _with_reduction(program, port, rows, countable)
        elif rows is not None and port.batch_dim is None:
            unknown[port.name] = str(rows)
        if port.role == Role.LOSS and port.reduction in (None, "same"):
            port = attrs.evolve(port, reduction="mean")
        ports.append(port)
    made = tuple(count for count in counts.values() if count)
    return attrs.evolve(program, outputs=tuple(ports), counts=made), unknown, mixed


def _tried(
    program: Program,
    loss_reduction: LossReduction,
    larger: Larger | None,
    sample: Callable[[], Sample] | None,
    fixed: Callable[[], Program] | None,
) -> dict[str, Known]:
    """What is known of every loss and output of a flat program, by port name. What is cheap comes
    first, and what follows is tried for what is still unknown:

        the rules alone                                     nothing is traced
        beside the program for twice the rows: its forward  it tells the numbers that count rows
          or all of it, where the forward has another form
        the same, both run on two microbatches              rows that come back behind operations
                                                              without a rule
        the program for two rows, of one for one row        which dimension of 1 has the row
        all of this for fixed sizes, of one that leaves     `larger` may be traced for fixed sizes,
          them open                                           and then has their form

    Where the caller says how losses combine, and there is nothing else to know, the rules alone say
    whether rows look at one another.
    """
    decided = loss_reduction != "auto" and not program.ports(Role.OUTPUT)

    def attempt(plain: Program, larger: Larger | None) -> dict[str, Known]:
        if not decided:
            return derive(plain, larger, sample)
        # Of one row the rules alone do not even know where it is.
        return _beside_larger(plain, larger if _rows(plain) == 1 else None, None)

    plain = settled(program)
    rows_of = attempt(plain, larger and _of_open_rows(program, larger))
    unknown = any(isinstance(rows, Unknown) for rows in rows_of.values())
    if plain is not program and fixed and unknown:
        other = fixed()
        rows_of = {n: _moved(other, plain, rows) for n, rows in attempt(other, larger).items()}
    return {name: _in_program(program, rows) for name, rows in rows_of.items()}


def _of_open_rows(program: Program, larger: Larger) -> Larger:
    """The same as `larger`, without a trace where the program itself holds for more rows."""

    def more(gradients: bool, times: int) -> Program:
        sizes = _sizes_of_rows(program, times)
        if not sizes or broken_limit(program, sizes):
            return larger(gradients, times)
        return settled(resized(program, sizes))

    return more


def _sizes_of_rows(program: Program, times: int) -> dict[str, int]:
    """The sizes of a program for so many times as many rows; none where they are not open, or are
    sizes of anything else."""
    rows: set[Any] = set()
    others: set[Any] = set()  # symbols
    for port in program.inputs:
        sizes = dict(enumerate(port.shape if port.sizes is None else port.sizes))
        if port.role == Role.BATCH and port.shape:
            rows.add(sizes.pop(port.batch_dim or 0))
        if port.role != Role.TANGENT:
            others.update(*(getattr(size, "free_symbols", ()) for size in sizes.values()))
    # A size that other dimensions have as well (a square, a length equal to the rows) would grow
    # in these too.
    captured = captured_sizes(program)
    counts = {name for name in captured if _torch.name_of_size(name) in rows - others}
    if not rows or len(counts) != len(rows):
        return {}
    return {name: number * (times if name in counts else 1) for name, number in captured.items()}


def _in_program(program: Program, rows: Known) -> Known:
    """What is known of a settled program, of the nodes of the program itself."""
    if not isinstance(rows, Rows) or not rows.counts:
        return rows
    return attrs.evolve(rows, counts=frozenset(program.node(n.name) for n in rows.counts))


def _moved(fixed: Program, settled: Program, rows: Known) -> Known:
    """What is known of a result of a program, of the nodes of one that computes the same in perhaps
    another order. Raises ValueError if what a mean counts is not the same there."""
    if not isinstance(rows, Rows):
        return rows
    names = {node.name for node in settled.module.graph.nodes}
    for node in rows.counts:
        there = settled.node(node.name) if node.name in names else None
        counts = _count(fixed, node), _count(settled, there) if there else None
        operations = [_operations(count) if count else [] for count in counts]
        if operations[0] != operations[1] or not operations[0]:
            raise ValueError(f"the count in {source_line(node)} is another one for other sizes")
    return _in_program(settled, rows)


def _operations(count: Count) -> list[str]:
    """What a count computes, whatever its nodes are called. Slices of all that there is (x[:, 1]),
    which a trace of open sizes has and another one has not, are left out."""
    meant: dict[fx.Node, fx.Node] = {}
    for node in count.module.graph.nodes:
        same = _of_all(node)
        meant[node] = node if same is None else meant[same]
    needed: set[fx.Node] = set()
    for node in reversed(meant):
        if node.op == "output" or node in needed:
            needed |= {meant[source] for source in node.all_input_nodes}
    places: dict[fx.Node, int] = {}
    for node in meant:
        if node.op in ("output", "placeholder") or node in needed:
            places[node] = len(places)
    return [
        f"{node.op} {node.target} "
        f"{fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: places[meant[source]])}"
        for node in places
    ]


def _of_all(node: fx.Node) -> fx.Node | None:
    """What a slice of a whole dimension is, or a tensor with one written to it; else None."""
    aten = torch.ops.aten
    if node.target not in (aten.slice.Tensor, aten.slice_scatter.default):
        return None
    arguments = bound(node)
    first, last, step = (arguments[name] for name in ("start", "end", "step"))
    if first not in (0, None) or step != 1 or not (last is None or last == sys.maxsize):
        return None
    source: fx.Node = node.args[0 if node.target is aten.slice.Tensor else 1]  # type: ignore[assignment]
    return source


def derive(
    program: Program,
    larger: Larger | None = None,
    sample: Callable[[], Sample] | None = None,
) -> dict[str, Known]:
    """What is known of every loss and output of a flat program, by port name; the arguments are as
    in `derive_reductions`."""
    rows_of = _beside_larger(program, larger, sample)
    stuck = [name for name, rows in rows_of.items() if isinstance(rows, Unknown)]
    if larger is None or _rows(program) > 1 or not stuck:
        return rows_of
    return rows_of | _of_two_rows(larger, stuck)


def _of_two_rows(larger: Larger, names: Sequence[str]) -> dict[str, Known]:
    """What the program for two rows knows of results of that for one row, in which a dimension of
    1 may be that of the row or any other. Not what a count of its own divides."""

    def more(gradients: bool, times: int) -> Program:
        return larger(gradients, 2 * times)

    for gradients in (False, True):
        with suppress(Exception):  # a step that more rows break tells nothing
            rows_of = _beside_larger(larger(gradients, 2), more, None)
            results = {name: rows_of.get(name) for name in names}
            return {
                n: rows for n, rows in results.items() if isinstance(rows, Rows) and not rows.counts
            }
    return {}


def _beside_larger(
    program: Program, larger: Larger | None, sample: Callable[[], Sample] | None
) -> dict[str, Known]:
    """What the rules tell, with the program for twice the rows beside it where they need it."""
    rows_of = _derive(program)
    stuck = [rows for rows in rows_of.values() if isinstance(rows, Unknown)]
    if larger is None or not any(unknown.numbers or sample for unknown in stuck):
        return rows_of
    twins: dict[fx.Node, fx.Node] = {}
    for gradients in (False, True):  # a forward alone is traced in a third of the time
        with suppress(Exception):  # a step that twice the rows break tells nothing
            twice = larger(gradients, 2)
            twins = paired(*_wanted(program), *_wanted(twice))
        if twins:
            break
    else:
        return rows_of
    rows_of = _derive(program, twins)
    if sample is None or not any(isinstance(rows, Unknown) for rows in rows_of.values()):
        return rows_of
    seen = seen_rows((program, twice), (tuple(twins), tuple(twins.values())), sample())
    return _derive(program, twins, seen)


def _derive(program: Program, *more: Mapping[fx.Node, Any]) -> dict[str, Known]:
    """The same by the rules and what `follow` is given beside them."""
    graph, wanted = _wanted(program)
    inputs = {program.node(p.name): _given(p) for p in program.ports(Role.BATCH)}
    rows_of = follow(graph, inputs, wanted, _rows(program), *more)
    names = [port.name for port in program.ports(Role.LOSS, Role.OUTPUT)]
    return {name: rows_of[node] for name, node in zip(names, wanted, strict=True)}


def _rows(program: Program) -> int:
    """Rows of the microbatch that a program is for."""
    places = [(p, _given(p).dim) for p in program.ports(Role.BATCH)]
    return math.gcd(*[p.shape[dim] for p, dim in places if dim is not None]) or 1


def _wanted(program: Program) -> tuple[fx.Graph, list[fx.Node]]:
    """A program's graph, and what it returns of its forward."""
    results = returned(program.module)
    return program.module.graph, [results[p.name] for p in program.ports(Role.LOSS, Role.OUTPUT)]


def _given(port: Port) -> Rows:
    """A tensor of the batch has rows, in front unless said otherwise; one without dimensions is
    the same for all microbatches (a count that the loop knows)."""
    if not port.shape:
        return Rows()
    return Rows(varies=True, dim=port.batch_dim or 0)


def _with_reduction(program: Program, port: Port, rows: Rows, counts: list[fx.Node]) -> Port:
    if rows.dim is not None:
        whole = port.batch_dim is None and rows.before == 1 and port.role == Role.OUTPUT
        return attrs.evolve(port, batch_dim=rows.dim) if whole else port
    if rows.power:
        return attrs.evolve(port, reduction="sum")
    if not rows.varies:
        same = not _changes(program, returned(program.module)[port.name])
        return attrs.evolve(port, reduction="same") if same else port
    by = tuple(index for index, node in enumerate(counts) if node in rows.counts)
    # Means by several counts, or by one beside a plain mean, have no weight in common: they are
    # averaged, which holds where the counts are even.
    weighted = len(by) == 1 and not rows.plain
    return attrs.evolve(port, reduction="weighted" if weighted else "mean", counts=by)


def _changes(program: Program, value: fx.Node) -> bool:
    """Whether a value is drawn at random, or read from a buffer that the step updates."""
    updated = {port.fqn for port in program.ports(Role.BUFFER_UPDATE)}
    carried = {p.name for p in program.ports(Role.BUFFER, Role.SEED) if p.fqn in {*updated, "seed"}}
    return any(node.name in carried for node in ancestors(program.module.graph, [value]))


def _count(program: Program, divided: fx.Node) -> Count | None:
    """By what a mean was divided, as a graph of the batch alone; None if it needs more."""
    # A cross entropy counts the targets that are not ignored by itself, so here they are counted
    # anew; anything else is divided by a node, which may have been kept from being zero.
    graph, classes = fx.Graph(), operation_name(divided).startswith("nll_loss")
    arguments = bound(divided)
    if classes and arguments["weight"] is not None:
        return None
    target = arguments["target"] if classes else source_of(divided)
    ignored = arguments["ignore_index"] if classes else None  # a size, perhaps
    ends = [node for node in (target, ignored) if isinstance(node, fx.Node)]
    copies = _cone(program, ends, graph)
    if copies is None:
        return None
    value = copies[target]
    if classes:
        number = copies[ignored] if isinstance(ignored, fx.Node) else ignored
        wanted = graph.call_function(torch.ops.aten.ne.Scalar, (value, number))
        value = graph.call_function(torch.ops.aten.sum.default, (wanted,))
    graph.output(value)
    holder = nn.Module()
    for node in graph.nodes:
        if node.op == "get_attr":
            setattr(holder, node.target, getattr(program.module, node.target))
    module = _torch.graph_module(holder, graph)
    return Count(module, source_line(divided), classes or target is not divided)


def _cone(
    program: Program, ends: Sequence[fx.Node], graph: fx.Graph
) -> dict[fx.Node, fx.Node] | None:
    """Copies of all that nodes are computed from; None unless that is of the batch alone."""
    batch = {port.name for port in program.ports(Role.BATCH, Role.SIZE)}
    copies: dict[fx.Node, fx.Node] = {}
    for node in ancestors(program.module.graph, ends):
        if node.target is seeded or (node.op == "placeholder" and node.name not in batch):
            return None
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies
