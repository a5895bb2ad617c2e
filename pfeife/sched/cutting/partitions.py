"""Cuts by other measures than seconds, in the words that users of DeepSpeed know."""

import re
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from torch import fx

from pfeife.ir.messages import holders
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.sched.cutting.borders import between, evenest, stages_from
from pfeife.sched.cutting.cuts import forward_units, split_at
from pfeife.sched.cutting.workload import blocked_borders

# "parameters", "uniform", "type:Regex"; the clusters at which stages start, or the modules; or a
# function that gives the stage of every cluster.
Partition = str | Sequence[int] | Sequence[str] | Callable[[Program], Sequence[int]]


def partitioned(program: Program, how: Partition, stages: int) -> tuple[int, ...]:
    """The stage of every cluster of a fused program.

    "uniform" gives the stages about as many clusters, "parameters" about as many elements of
    trained parameters, "type:Regex" about as many of the modules whose class has a name that the
    expression is found in (in any case; stages start where such modules start): DeepSpeed's
    `partition_method`. In all of these the largest stage is as small as can be. Numbers are the
    clusters at which a stage starts, names the modules (`fuse` must have been given those as
    boundaries). What a function returns is taken as it is. Raises ValueError for fewer borders than
    it takes, for names and numbers that are not there, and for a border between those that update
    and read one buffer.
    """
    units = program.units
    if callable(how):
        stage_of = tuple(how(program))
        if len(stage_of) != units:
            raise ValueError(
                f"partition={how!r}: it returned {len(stage_of)} stages for {units} clusters"
            )
        return stage_of
    if not isinstance(how, str):
        return _by_hand(program, how)
    borders, weights = list(range(1, units)), [1.0] * units
    if how == "parameters":
        weights = _elements(program)
    elif how.startswith("type:"):
        starts = _modules(program, how.removeprefix("type:"))
        borders, weights = sorted({*starts} - {0}), [float(starts.count(u)) for u in range(units)]
    blocked = blocked_borders(program)
    open_ = [border for border in borders if border not in blocked]
    if stages > len(open_) + 1:
        raise ValueError(
            f"partition={how!r}: {stages} stages, and only {len(open_)} places for a border "
            "between them"
        )
    return even(weights, open_, stages)


def even(weights: Sequence[float], borders: Sequence[int], stages: int) -> tuple[int, ...]:
    """The stage of every cluster, stages starting at some of the borders, such that the heaviest
    is as light as can be, and among such cuts the least sum of squares (see `evenest`)."""
    edges = [0, *borders, len(weights)]
    load = between(np.array([0.0, *accumulate(weights)])[edges])
    return stages_from(evenest(edges, stages, lambda stage: load) or (), len(weights))


def _by_hand(program: Program, how: Sequence[int] | Sequence[str]) -> tuple[int, ...]:
    if all(isinstance(border, str) for border in how):
        return split_at(program, {str(module): "begin" for module in how})
    starts = [int(start) for start in how]
    inside = range(1, program.units)
    if starts != sorted(set(starts)) or any(start not in inside for start in starts):
        raise ValueError(
            f"partition={starts}: the clusters at which stages start go up, from 1 to "
            f"{program.units - 1}: the program has {program.units} clusters"
        )
    return stages_from(starts, program.units)


def _elements(program: Program) -> list[float]:
    """By cluster the elements of trained parameters, each where it is used first."""
    trained = {port.fqn for port in program.ports(Role.GRADIENT)}
    elements = [0.0] * program.units
    users = holders(program)
    for port in program.ports(Role.PARAMETER):
        # Where nothing is trained, all parameters count.
        if users.get(port.fqn) and (port.fqn in trained or not trained):
            first = min(call.unit for call in users[port.fqn])
            elements[first] += port.bytes // port.dtype.itemsize
    return elements


def _modules(program: Program, pattern: str) -> list[int]:
    """The clusters in which modules start whose class has such a name, once a module."""
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"partition='type:{pattern}': {error}") from None
    first: dict[str, int] = {}
    classes: set[str] = set()
    for node, unit in forward_units(program).items():
        for path, kind in module_stack(node):
            classes.add(kind)
            if wanted.search(kind):
                first.setdefault(path, unit)
    if not first:
        raise ValueError(
            f"partition='type:{pattern}': no module has such a class; there are {sorted(classes)}"
        )
    return list(first.values())


def module_stack(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """The modules that a node was captured in, from the outermost: paths and names of classes."""
    return tuple(node.meta.get("module_stack") or ())
