"""Clusters into stages: the bodies that a pipeline runs."""

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs
import torch
from torch import fx

from pfeife.data.plan import Plan
from pfeife.ir.editing.copying import copied
from pfeife.ir.nodes import has_effects, is_number, is_source, returned, source_line
from pfeife.ir.outline import Group, inline, outline, viewed
from pfeife.ir.parts import Call, Kind, Port, Role
from pfeife.ir.program import Program
from pfeife.passes.recompute import recomputed


def partition(plan: Plan) -> Callable[[Program], Program]:
    """A pass from cluster calls to stage calls, each placed on its rank.

    Any value may cross any stages. Values that the plan names as duplicated, and views of
    inputs, are computed by every stage that reads them; what it has a stage recompute, by the
    stage's backward (see `recomputed`), whose seconds become more. A gradient that several
    stages add to becomes one gradient port a stage, so that the parts are summed once a step
    (this re-associates that sum). Raises ValueError if the plan is for another program, if a
    value would flow backwards, or if a buffer that is updated is used by two stages.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    >>> plan = pfeife.Plan((0, 1), sched.families.one_f_one_b(2, 4))
    >>> staged = pfeife.partition(plan)(pfeife.fuse()(flat))
    >>> [(call.node, call.rank) for call in staged.calls if call.unit == 1]
    [('stage_1_forward', 1), ('stage_1_backward', 1)]
    """

    def run(program: Program) -> Program:
        if plan.recompute and any(call.kind in _PARTS for call in program.calls):
            raise ValueError(
                "the plan recomputes, and the program's backwards are split already; partition the "
                "program as it was before, then split_backward()"
            )
        if len(plan.stage_of_cluster) != program.units:
            raise ValueError(
                f"the plan is for {len(plan.stage_of_cluster)} clusters, "
                f"this program has {program.units}"
            )
        flat, clusters = inline(program)
        # A name that is gone would be sent after all: another plan than the one that was timed.
        unknown = sorted(set(plan.duplicated) - {node.name for node in flat.module.graph.nodes})
        if unknown:
            raise ValueError(
                f"the plan duplicates {unknown[:3]}, which are no values of the program"
            )
        groups = {
            name: Group(plan.stage_of_cluster[group.unit], group.kind)
            for name, group in clusters.items()
        }
        exported = {node.name for node in returned(flat.module).values()}
        numbers = {node.name for node in flat.module.graph.nodes if is_number(node)}
        free = {*plan.duplicated, *views_of_inputs(flat), *numbers} - exported
        # The order counts: sums are separated by the stages of their terms, which recomputation
        # leaves as they are; what it adds are new nodes, that belong to backwards, and new views.
        _check_buffers(flat, groups, free)
        flat, groups = _separate_sums(flat, groups)
        flat, groups = recomputed(flat, groups, plan)
        # views anew: what a backward recomputes may be views of inputs too, under new names
        staged = outline(flat, groups, {*plan.duplicated, *views_of_inputs(flat)})
        within: dict[tuple[Kind, int], list[Call]] = {}
        for call in program.calls:
            within.setdefault((call.kind, plan.stage_of_cluster[call.unit]), []).append(call)
        placed = [_placed(call, within, plan) for call in staged.calls]
        return attrs.evolve(staged, calls=tuple(placed))

    return run


_PARTS = (Kind.INPUT_BACKWARD, Kind.WEIGHT_BACKWARD)


def _placed(call: Call, made_of: Mapping[tuple[Kind, int], Sequence[Call]], plan: Plan) -> Call:
    """A stage's call on its rank, with the costs of the clusters' calls that it is made of."""
    within = made_of.get((call.kind, call.unit), ())
    seconds = [c.seconds for c in within if c.seconds is not None]
    again = plan.recompute and call.kind == Kind.BACKWARD
    extra = plan.recompute[call.unit].extra_seconds if again else 0.0
    computed = [*within, *(made_of.get((Kind.FORWARD, call.unit), ()) if again else ())]
    return attrs.evolve(
        call,
        rank=plan.stage_ranks[call.unit],
        # One call without costs makes the sum no time at all: None, not less.
        seconds=sum(seconds) + extra if len(seconds) == len(within) else None,
        accumulate_seconds=sum(c.accumulate_seconds for c in within),
        inside_bytes=max((c.inside_bytes for c in computed), default=0),
    )


def views_of_inputs(flat: Program) -> set[str]:
    """Nodes that only look at an input: nothing is gained by passing them on."""
    return {
        node.name
        for node in flat.module.graph.nodes
        if not is_source(node) and is_source(viewed(node))
    }


def _check_buffers(flat: Program, groups: Mapping[str, Group], free: Collection[str]) -> None:
    """The nodes in `free` are computed where they are read, so those who read them count."""
    updated = {port.fqn for port in flat.ports(Role.BUFFER_UPDATE)}
    slots = {port.name: port for port in flat.ports(Role.BUFFER) if port.fqn in updated}
    results = returned(flat.module)
    updates = {p.fqn: results[p.name] for p in flat.ports(Role.BUFFER_UPDATE)}
    gradients = flat.ports(Role.GRADIENT)  # of parameters that the step changes in place
    for node in flat.module.graph.nodes:
        if node.name not in slots:
            continue
        trained = [results[p.name] for p in gradients if p.fqn == slots[node.name].fqn]
        involved = [updates[slots[node.name].fqn], *trained, *_readers(node, free)]
        stages = {groups[user.name].unit: user for user in involved if user.name in groups}
        if len(stages) > 1:
            places = ", ".join(f"stage {s} ({source_line(n)})" for s, n in sorted(stages.items()))
            raise ValueError(
                f"{slots[node.name].fqn} is updated and used by several stages: {places}; "
                "move the cut so that one stage has them all"
            )


def _readers(node: fx.Node, free: Collection[str]) -> list[fx.Node]:
    """Who reads a value, in person or through free nodes."""
    readers, pending = dict.fromkeys(node.users), list(node.users)
    while pending:
        reader = pending.pop()
        if reader.name in free:
            pending += [user for user in reader.users if user not in readers]
            readers |= dict.fromkeys(reader.users)
    return [reader for reader in readers if reader.name not in free]


def _separate_sums(flat: Program, groups: Mapping[str, Group]) -> tuple[Program, dict[str, Group]]:
    """One gradient port for each stage that adds to a gradient, and the groups of the result.

    before    grad = (a + b) + c                          a and c are of stage 1, b of stage 0
    after     grad_stage_1 = a + c, grad_stage_0 = b      a reduction adds these once a step

    Where the sum is cast (`accumulate_in`), its parts are.
    """
    sums = {
        port.name: parts
        for port, node in zip(flat.outputs, returned(flat.module).values(), strict=True)
        if port.role == Role.GRADIENT and len(parts := _parts(node, groups)) > 1
    }
    if not sums and not any(_is_dead(node) for node in flat.module.graph.nodes):
        return flat, dict(groups)  # as it nearly always is, and a copy takes long
    copy, new_groups = copied(flat.module, output=False), dict(groups)
    graph, here = copy.graph, copy.here
    outputs: list[Port] = []
    results: dict[str, fx.Node] = {}
    for port, node in zip(flat.outputs, returned(flat.module).values(), strict=True):
        if port.name not in sums:
            outputs.append(port)
            results[port.name] = here[node]
            continue
        total_of, cast = _uncast(node)
        for stage, leaves in sorted(sums[port.name].items(), reverse=True):
            total = here[leaves[0]]
            # Its terms may come of both parts of a backward: it is where the last of them is.
            latest = max((groups[x.name] for x in leaves), key=lambda group: group.order)
            for leaf in leaves[1:]:
                added = graph.call_function(torch.ops.aten.add.Tensor, (total, here[leaf]))
                added.meta = dict(total_of.meta)
                new_groups[added.name] = latest
                total = added
            if cast:
                parts_of = {total_of: total}
                total = graph.node_copy(cast, parts_of.__getitem__)
                new_groups[total.name] = latest
            part = attrs.evolve(port, name=f"{port.name}_stage_{stage}")
            outputs.append(part)
            results[part.name] = total
    graph.output(results)
    graph.eliminate_dead_code(has_effects)
    names = {node.name for node in graph.nodes}
    module = copy.module()
    remaining = {name: group for name, group in new_groups.items() if name in names}
    return attrs.evolve(flat, module=module, outputs=tuple(outputs)), remaining


def _is_dead(node: fx.Node) -> bool:
    """Whether nobody reads a node, and it does nothing else."""
    return not node.users and node.op not in ("placeholder", "output") and not has_effects(node)


def _uncast(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """What a gradient is the sum in, and the cast behind it, if there is one."""
    cast = node if node.target is torch.ops.aten._to_copy.default else None
    return (cast.all_input_nodes[0] if cast else node), cast


def _parts(node: fx.Node, groups: Mapping[str, Group]) -> dict[int, list[fx.Node]]:
    """The addends of a gradient by their stages; none if one of them comes from outside."""
    addends, parts = _addends(_uncast(node)[0]), dict[int, list[fx.Node]]()
    if all(addend.name in groups for addend in addends):
        for addend in addends:
            parts.setdefault(groups[addend.name].unit, []).append(addend)
    return parts


def _addends(node: fx.Node) -> list[fx.Node]:
    """What a gradient is the sum of, in order, where its partial sums serve nothing else."""
    addends, pending = [], [node]
    while pending:
        term = pending.pop()
        is_sum = (
            term.target is torch.ops.aten.add.Tensor and not term.kwargs and len(term.users) == 1
        )
        # a stack: reversed, so that the terms come out from left to right
        if is_sum and all(isinstance(value, fx.Node) for value in term.args):
            pending += reversed(term.args)  # type: ignore[arg-type]
        else:
            addends.append(term)
    return addends
