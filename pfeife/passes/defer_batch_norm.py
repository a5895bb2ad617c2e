"""Batch norms that track the statistics of the whole batch (torchgpipe, section 3.1)."""

import math
import operator
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.ir.editing.copying import Copy, copied
from pfeife.ir.nodes import has_effects, is_sized_by_data, returned, sizes_of, source_line
from pfeife.ir.parts import Port, Role, Tracked
from pfeife.ir.program import Program
from pfeife.passes.compose import Pass

aten = torch.ops.aten
# Training batch norms with running statistics, which are their last two results.
_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update_functional.default,
)


def defer_batch_norm() -> Pass:
    """A pass of a flat program: running statistics are tracked over the batch, once a step.

        before   each microbatch updates them: running = (1 - m) running + m statistic of its own
        after    each microbatch has its statistics (m = 1); the step puts them together (`tracked`)

    A microbatch is still normalised by its own mean and variance. With replicas the batch is that
    of all. (torchgpipe's running variance is the biased one; this is torch.nn.BatchNorm's, of the
    whole batch.) Raises ValueError for a norm that a microbatch runs twice, or whose statistics go
    elsewhere too, and for a program of calls.
    """

    def run(program: Program) -> Program:
        if program.calls:
            raise ValueError("defer_batch_norm is a pass of flat programs: take it before fuse()")
        norms = {
            node: _tracked(program, node)
            for node in program.module.graph.nodes
            if node.target in _NORMS and _given(node)["training"]
        }

        def whole(node: fx.Node, copy: Copy) -> fx.Node:
            new = copy.keep(node)
            if node in norms:
                # With a momentum of 1 the running statistic of a microbatch is the microbatch's
                # own.
                arguments = {**_given(new), "momentum": 1.0}
                new.args, new.kwargs = tuple(map(arguments.get, _names(node))), {}
            return new

        copy = copied(program.module, whole)
        copy.graph.eliminate_dead_code(has_effects)  # what computed another momentum
        tracked = (*program.tracked, *norms.values())
        return attrs.evolve(program, module=copy.module(), tracked=tracked)

    return run


def _names(norm: fx.Node) -> list[str]:
    """Those of all arguments, none of which has a default."""
    target: Any = norm.target
    return [argument.name for argument in target._schema.arguments]


def _given(norm: fx.Node) -> dict[str, Any]:
    """What a norm is given, by the names of its arguments."""
    # the second of `_NORMS` has no such argument: it always trains
    return {"training": True, **dict(zip(_names(norm), norm.args, strict=False)), **norm.kwargs}


def _tracked(program: Program, norm: fx.Node) -> Tracked:
    """What a norm tracks. Raises ValueError if that cannot wait for the end of a step."""
    arguments, results = _given(norm), returned(program.module)
    buffers = {port.name: port.fqn for port in program.ports(Role.BUFFER)}
    updates = {results[p.name]: p for p in program.ports(Role.BUFFER_UPDATE)}
    count = len(norm.meta["val"])
    new = [node for node in norm.users if node.target is operator.getitem]
    new = sorted((n for n in new if n.args[1] >= count - 2), key=lambda n: n.args[1])  # type: ignore
    old = [buffers.get(arguments[name].name) for name in ("running_mean", "running_var")]
    input_ = arguments["input"]
    if (
        [updates[node].fqn if node in updates else None for node in new] != old
        or None in old
        or any(not _is_backward(user) for node in new for user in node.users if user.op != "output")
        or is_sized_by_data(input_)
    ):
        raise ValueError(
            f"the batch norm in {source_line(norm)} cannot track the whole batch: a microbatch "
            "runs it twice, something else reads its running statistics, or data decide how many "
            "rows it has; leave deferred_batch_norm out"
        )
    mean, variance = (str(name) for name in old)
    momentum = arguments["momentum"]
    rows, _, *places = sizes_of(input_)
    return Tracked(
        mean,
        variance,
        _count(mean, momentum, updates, norm),
        elements=math.prod(places, start=rows),
        momentum=None if isinstance(momentum, fx.Node) else float(momentum),
    )


def _count(mean: str, momentum: Any, updates: dict[fx.Node, Port], norm: fx.Node) -> str | None:
    """The buffer that counts the batches of a norm."""
    name = f"{mean.rpartition('.')[0]}.num_batches_tracked".lstrip(".")
    counted = any(port.fqn == name for port in updates.values())
    if isinstance(momentum, fx.Node) and not counted:
        raise ValueError(
            f"the batch norm in {source_line(norm)} cannot track the whole batch: it computes its "
            "momentum by itself; leave deferred_batch_norm out"
        )
    return name if counted else None


def _is_backward(node: fx.Node) -> bool:
    """Whether a node is a norm's backward, which is handed the running statistics, and in training
    does not look at them."""
    return "batch_norm" in str(node.target) and "backward" in str(node.target)
