"""What each stage computes again in its backward: the least time for a number of bytes.

A 0-1 program a stage over "this storage is kept" and "this node is computed again" (Jain et al.,
Checkmate, MLSys 2020, without its order of computation, which here is the backward's own).
"""

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, reduce
from math import gcd
from typing import Literal

import attrs
import numpy as np
import scipy  # whose parts are loaded when they are asked for
from torch import Tensor, fx

from pfeife.compilers.piece import inputs
from pfeife.cost.body import Storage, storage_in, storage_of
from pfeife.cost.estimate import compute_bound, node_seconds
from pfeife.data.machine import Machine
from pfeife.data.plan import RecomputeOption
from pfeife.ir.messages import call_of
from pfeife.ir.nodes import find_node, has_effects, is_source, returned
from pfeife.ir.parts import Kind, Role
from pfeife.ir.program import Program
from pfeife.ir.sizes import numbers_of_sizes

Budget = Literal["none", "full", "selective"] | int | Collection[str]

SEARCH_NODES = 500  # of the search tree, so that large stages take no longer than seconds


def choose_recompute(
    program: Program, budget: Budget, *, machine: Machine, duplicated: Collection[str] = ()
) -> tuple[RecomputeOption, ...]:
    """For every stage of a partitioned program what it recomputes; see `Plan.recompute`.

    "none": nothing. "full": all that it can, so that a stage keeps only its inputs. "selective":
    what keeps the fewest bytes when only operations that the machine computes faster than it
    moves their bytes are done again (Korthikanti et al., Reducing Activation Recomputation in
    Large Transformer Models, 2022, section 5). A number: at most so many bytes a microbatch and
    stage, in the least time. Names of nodes: of what the backward reads all that these compute, and
    nothing else. `duplicated` are the nodes that the plan has every reader compute.
    Raises ValueError if a stage cannot keep as little as the budget, or has no whole backward.
    """
    return tuple(_choice(stage, budget) for stage in _stages(program, machine, duplicated))


def recompute_options(
    program: Program, machine: Machine, *, duplicated: Collection[str] = (), most: int = 8
) -> tuple[tuple[RecomputeOption, ...], ...]:
    """For every stage what it may recompute, from the fastest to the one that keeps least.

    At most `most` options, of which none is as good as another in both bytes and seconds.
    """
    return tuple(_options(stage, most) for stage in _stages(program, machine, duplicated))


def _choice(stage: "_Stage", budget: Budget) -> RecomputeOption:
    if budget == "none":
        return stage.none
    if budget == "full":
        return stage.option(())
    if budget == "selective":
        heavy = {node for node in stage.nodes if compute_bound(node, stage.machine)}
        return attrs.evolve(stage, fixed=_with_parts(stage.fixed | heavy, stage.nodes)).fewest
    if isinstance(budget, Collection) and not isinstance(budget, str):
        others = {n for n in stage.nodes if n.name not in budget and n not in stage.duplicated}
        fixed = _with_parts(stage.fixed | others, stage.nodes)
        return attrs.evolve(stage, fixed=fixed).option(())
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
        raise ValueError(
            f"recompute: {budget!r} is not 'none', 'full', 'selective' or a number of bytes"
        )
    if stage.none.saved <= budget:
        return stage.none
    if stage.fewest.saved > budget:
        raise ValueError(
            f"stage {stage.unit} keeps {stage.none.saved} bytes a microbatch, and still "
            f"{stage.fewest.saved} when it recomputes all that helps, but the budget is {budget}; "
            "use more stages, smaller microbatches or a larger budget"
        )
    return stage.fastest(budget)


def _options(stage: "_Stage", most: int) -> tuple[RecomputeOption, ...]:
    high, low = stage.none.saved, stage.fewest.saved
    budgets = [high - (high - low) * i // (most - 1) for i in range(1, most - 1)]
    candidates = [stage.none, stage.fewest, *(stage.fastest(budget) for budget in budgets)]
    # From the fastest on, those that keep fewer bytes than all before them.
    options: list[RecomputeOption] = []
    for option in sorted(
        candidates, key=lambda option: (option.extra_seconds, option.saved, len(option.names))
    ):
        if not options or option.saved < options[-1].saved:
            options.append(option)
    return tuple(options)


def cheapest_first(
    options: Sequence[Sequence[RecomputeOption]],
    at: Mapping[int, int],
    lacking: float,
    times: Sequence[int] | None = None,
) -> dict[int, int]:
    """Where those at option `at[i]` are when, one after the other, the one that saves its bytes in
    the fewest seconds each has gone on to its next option, until what is lacking is saved or all
    are at their last. An option saves its bytes so many `times`, once unless given."""
    reached = dict(at)

    def price(i: int) -> float:
        now, then = options[i][reached[i]], options[i][reached[i] + 1]
        return (then.extra_seconds - now.extra_seconds) / (now.saved - then.saved)

    while lacking > 0:
        open_ = (i for i in reached if reached[i] + 1 < len(options[i]))
        chosen = min(open_, key=price, default=None)
        if chosen is None:
            break
        now, then = options[chosen][reached[chosen]], options[chosen][reached[chosen] + 1]
        lacking -= (now.saved - then.saved) * (times[chosen] if times else 1)
        reached[chosen] += 1
    return reached


# A stage's forward, of which the backward wants b and d. To keep d alone, b is computed again, and
# so is a, which b reads; `in`, an input of the body, is there in any case.
#
#     in -> [a] -> [b] -> [c] -> [d]        kept: storage of d        again: a, b
#                   |             |
#                   v             v         kept: b and d             again: nothing  (`none`)
#               backward      backward      kept: nothing             again: a, b, c, d
#
# Who keeps a storage has all nodes that look at it. What `again` costs is the nodes' seconds, and
# what is kept the storages' bytes: the options of a stage are the best trades of one for the other.
@attrs.frozen(eq=False, slots=False)
class _Stage:
    """What a stage's backward wants of its forward's `nodes`, and what these cost.

    `storage` has every node that may be kept and the storage it looks at, None for those that
    are there in any case. `fixed` are those that cannot be computed again, `duplicated` those
    that are computed wherever they are read. `held` storages are kept whatever is decided.
    `seconds` are those of computing a node again.
    """

    unit: int
    machine: Machine
    nodes: tuple[fx.Node, ...]
    wanted: tuple[fx.Node, ...]
    storage: dict[fx.Node, Storage | None]
    fixed: frozenset[fx.Node]
    duplicated: frozenset[fx.Node]
    held: frozenset[Storage]
    seconds: dict[fx.Node, float]

    @cached_property
    def none(self) -> RecomputeOption:
        """All that the backward wants is kept."""
        return RecomputeOption(_bytes({*self.held, *map(self.storage.get, self.wanted)}))

    @cached_property
    def fewest(self) -> RecomputeOption:
        """The fewest bytes, in the least time."""
        least = self.option(self._solved(None) or ())
        return self._better(least, least.saved)

    def fastest(self, budget: int) -> RecomputeOption:
        """The least time for so many bytes, which must be enough: to within 0.01% unless the
        search ended at its limit (SEARCH_NODES), and never slower than `fewest`."""
        return self._better(self.fewest, budget)

    def _better(self, fallback: RecomputeOption, budget: int) -> RecomputeOption:
        solved = self._solved(budget)
        option = fallback if solved is None else self.option(solved)
        # The solver ends at its limits with any solution: one that is no better does not count.
        allowed = option.saved <= budget and option.extra_seconds <= fallback.extra_seconds
        return option if allowed else fallback

    def option(self, storages: Collection[Storage]) -> RecomputeOption:
        """What is recomputed, and what is then really kept, if these storages may be."""
        again: set[fx.Node] = set()
        used: set[Storage | None] = set(self.held)
        pending = list(self.wanted)
        while pending:
            node = pending.pop()
            if self._kept(node, storages):
                used.add(self.storage[node])
            elif node not in again:
                again.add(node)
                pending += node.all_input_nodes
        return RecomputeOption(
            _bytes(used),
            sum(self.seconds[node] for node in self.nodes if node in again),
            tuple(n.name for n in self.nodes if n in again and n not in self.duplicated),
        )

    def _kept(self, node: fx.Node, storages: Collection[Storage]) -> bool:
        if node in self.fixed or is_source(node) or node not in self.storage:
            return node in self.fixed or is_source(node)
        storage = self.storage[node]
        return storage is None or storage in storages or storage in self.held

    def _solved(self, budget: int | None) -> list[Storage] | None:
        """The storages to keep for the least time, or for the fewest bytes without a budget.

            columns    again[node] from 0 to 1              keep[storage] 0 or 1
            rows       again[n] + keep[its storage] >= 1                if the backward reads n
                       again[n] + keep[its storage] >= again[reader]    if what is repeated does
            least      sum of seconds * again,  with sum of bytes * keep <= budget

        Where each `keep` is whole, the least `again` is too: that saves the solver most columns.
        """
        again = {node: i for i, node in enumerate(n for n in self.nodes if n not in self.fixed)}
        storages = [s for s in dict.fromkeys(self.storage.values()) if s and s not in self.held]
        place = {storage: len(again) + i for i, storage in enumerate(storages)}
        rows = list(self._needs(again, place))
        fixed = _bytes(self.held)
        unit = reduce(gcd, (s.bytes for s in storages), 0) or 1  # exact in the solver's floats
        sizes = np.array([0] * len(again) + [s.bytes // unit for s in storages])
        seconds = np.array([self.seconds[node] for node in again] + [0.0] * len(storages))
        if budget is None:
            cost, most = sizes, np.inf
        else:
            # In shares of their sum: a solver has absolute tolerances, too, and seconds are tiny.
            cost, most = seconds / (seconds.sum() or 1), (budget - fixed) // unit
        if not storages:
            return []
        solution = _solution(tuple(cost), tuple(sizes), tuple(rows), len(again), most)
        return None if solution is None else [s for s in storages if solution[place[s]] > 0.5]

    def _needs(self, again: dict[fx.Node, int], place: dict[Storage, int]) -> Iterator["_Row"]:
        """What must be there, kept or computed again: the columns of the ways to have it, and
        that of the node that reads it again, None for the backward itself."""
        readers: list[tuple[fx.Node, int | None]] = [(node, None) for node in self.wanted]
        readers += [(source, i) for node, i in again.items() for source in node.all_input_nodes]
        for node, reader in dict.fromkeys(readers):
            storage = self.storage.get(node)
            if node in self.storage and (storage is None or storage in self.held):
                continue
            ways = (again[node],) if node in again else ()
            yield ways + ((place[storage],) if storage else ()), reader


# Columns of which one is needed if the reader's is, or in any case.
_Row = tuple[tuple[int, ...], int | None]


@lru_cache(maxsize=64)
def _solution(
    cost: tuple[float, ...],
    sizes: tuple[int, ...],
    rows: tuple[_Row, ...],
    free: int,
    most: float,
) -> Sequence[float] | None:
    """The cheapest columns of which all but the first `free` are whole, and whose sizes add up to
    `most` at most. Stages of the same layers ask the same, and so do plans that are made again."""
    limit = scipy.optimize.LinearConstraint(np.array(sizes), -np.inf, most)
    solution = scipy.optimize.milp(
        np.array(cost),
        integrality=[0] * free + [1] * (len(cost) - free),
        bounds=scipy.optimize.Bounds(0, 1),
        constraints=[*_at_least_one(rows, len(cost)), limit],
        options={"node_limit": SEARCH_NODES, "mip_rel_gap": 1e-4},
    )
    return None if solution.x is None else tuple(solution.x)


def _at_least_one(rows: Sequence[_Row], columns: int) -> "list[scipy.optimize.LinearConstraint]":
    """Of each row's columns at least one, if the reader's column is one (None: in any case)."""
    if not rows:
        return []
    entries = [(i, way, 1) for i, (ways, _) in enumerate(rows) for way in ways]
    entries += [(i, reader, -1) for i, (_, reader) in enumerate(rows) if reader is not None]
    at_row, at_column, values = zip(*entries, strict=True)
    matrix = scipy.sparse.coo_array((values, (at_row, at_column)), shape=(len(rows), columns))
    least = [int(reader is None) for _, reader in rows]
    return [scipy.optimize.LinearConstraint(matrix.tocsr(), least, np.inf)]


def _bytes(storages: Iterable[Storage | None]) -> int:
    return sum(storage.bytes for storage in storages if storage)


def _stages(program: Program, machine: Machine, duplicated: Collection[str]) -> Iterator[_Stage]:
    kinds = {call.kind for call in program.calls}
    if kinds - {Kind.FORWARD, Kind.BACKWARD} or not kinds:
        raise ValueError(
            "what to recompute is decided for a partitioned program before its backward is split"
        )
    for unit in range(program.units):
        yield _stage(program, unit, machine, duplicated)


def _stage(program: Program, unit: int, machine: Machine, duplicated: Collection[str]) -> _Stage:
    forward = program.call(Kind.FORWARD, unit)
    body, at = program.body(forward), find_node(program.module, forward.node)
    wanted, held, made = _read_by_backward(program, unit, at)
    nodes = _cone(wanted)
    computed_anyhow = {*duplicated, *numbers_of_sizes(program, body.graph)}
    twice = frozenset(node for node in nodes if node.name in computed_anyhow)
    candidates = dict.fromkeys(source for node in nodes for source in (*node.all_input_nodes, node))
    storage = {
        node: storage_in(program, at, body, node)
        for node in candidates
        if node not in twice and (is_source(node) or isinstance(node.meta.get("val"), Tensor))
    }
    every = {node: node_seconds(node, machine) for node in body.graph.nodes}
    # Estimates say how nodes compare, the call's own seconds what they take together.
    scale = forward.seconds / sum(every.values()) if forward.seconds and any(every.values()) else 1
    return _Stage(
        unit,
        machine,
        tuple(nodes),
        tuple(wanted),
        storage,
        _fixed(program, body, at, nodes),
        twice,
        held,
        # what the backward computes anyhow, under the same name, costs nothing more
        {node: 0.0 if node.name in made else scale * every[node] for node in nodes},
    )


def _read_by_backward(
    program: Program, unit: int, forward: fx.Node
) -> tuple[list[fx.Node], frozenset[Storage], set[str]]:
    """The nodes of a forward's body that the stage's backward reads, the storages of other
    forwards that it reads, and the names of what it computes itself."""
    calls = {call.node: call for call in program.calls}
    results = returned(program.body(calls[forward.name]))
    backwards = [call for call in calls.values() if (call.kind, call.unit) == (Kind.BACKWARD, unit)]
    made = {
        n.name for call in backwards for n in program.body(call).graph.nodes if not is_source(n)
    }
    read = [v for call in backwards for v in find_node(program.module, call.node).all_input_nodes]
    wanted = [results[value.args[1]] for value in read if call_of(value) is forward]
    forwards = {node for node, call in calls.items() if call.kind == Kind.FORWARD} - {forward.name}
    held = {storage_of(program, value) for value in read if call_of(value).name in forwards}
    return wanted, frozenset(storage for storage in held if storage), made


def _cone(wanted: Iterable[fx.Node]) -> list[fx.Node]:
    """The computing nodes that values depend on, in the graph's order."""
    nodes: set[fx.Node] = set()
    pending = list(wanted)
    while pending:
        node = pending.pop()
        if node not in nodes and not is_source(node):
            nodes.add(node)
            pending += node.all_input_nodes
    # fx sorts nodes by their places in the graph.
    return sorted(nodes)


def _fixed(
    program: Program, body: fx.GraphModule, forward: fx.Node, nodes: list[fx.Node]
) -> frozenset[fx.Node]:
    """The nodes that must not be computed again: those with effects, and those that read an
    updated buffer which the forward might then not read any more (see passes.recompute)."""
    updates = {port.fqn: port.name for port in program.ports(Role.BUFFER_UPDATE)}
    buffers = {port.name: updates.get(port.fqn) for port in program.ports(Role.BUFFER)}
    results, made = returned(program.module), returned(body)
    unsafe = set()
    for placeholder, value in zip(inputs(body), forward.all_input_nodes, strict=True):
        update = results.get(buffers.get(value.name))
        if update is not None:
            cone = _cone([made[update.args[1]]]) if call_of(update) is forward else []
            if not any(placeholder in node.all_input_nodes for node in cone):
                unsafe.add(placeholder)
    fixed = {
        node for node in nodes if has_effects(node) or not unsafe.isdisjoint(node.all_input_nodes)
    }
    return _with_parts(fixed, nodes)


def _with_parts(makers: Collection[fx.Node], nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The nodes and, of those that make tuples, the parts."""
    makers_and_parts = set(makers)
    for node in nodes:
        if node.target is operator.getitem and node.all_input_nodes[0] in makers_and_parts:
            makers_and_parts.add(node)
    return frozenset(makers_and_parts)
