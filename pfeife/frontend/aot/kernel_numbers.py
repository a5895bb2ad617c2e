"""Kernels of a joint graph read the numbers that only data tell, in whose place another one stands
while the graph is made.

    made     norm = _native_batch_norm_legit_functional(x, ..., 0.0, 1e-05), marked with 0
             return loss, scalar_tensor(truediv)
    after    norm = _native_batch_norm_legit_functional(x, ..., truediv, 1e-05)
             return loss
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pfeife import _torch
from pfeife.ir.nodes import output_node, source_line

_NAMES = ("momentum", "exponential_average_factor")  # what operations call the number


def read_numbers(joint: fx.GraphModule, results: int) -> None:
    """Gives kernels the numbers, all results of the graph after the first `results` of the step,
    which it returns no more. Raises ValueError for one that is not read by one kernel."""
    output = output_node(joint)
    returned: Any = output.args[0]
    pairs = list(zip(returned, output.meta["desc"], strict=True))
    numbers = [(desc.idx - results, node) for node, desc in pairs if _is_number(desc, results)]
    step_results = [pair for pair in pairs if not _is_number(pair[1], results)]
    output.args, output.meta["desc"] = (
        ([node for node, _ in step_results],),
        [desc for _, desc in step_results],
    )
    readers = list(_readers(joint.graph))
    for mark, tensor in numbers:
        while tensor.target is torch.ops.aten.detach.default:
            tensor = tensor.args[0]
        places = [(node, place) for at, node, place in readers if at == mark]
        # A number that two kernels read, or none, was made for something else than a momentum.
        if len(places) != 1 or tensor.target is not torch.ops.aten.scalar_tensor.default:
            raise ValueError(
                "the step computes a momentum from values of tensors, and has no operation that "
                f"takes it ({source_line(tensor)}): pass a number"
            )
        ((node, place),) = places
        node.update_arg(place, tensor.args[0])


def _is_number(desc: Any, results: int) -> bool:
    return isinstance(desc, _torch.PlainAOTOutput) and desc.idx >= results


def _readers(graph: fx.Graph) -> Iterator[tuple[int, fx.Node, int]]:
    """The operations that read numbers, each with its mark, which is taken off, and the place."""
    for node in graph.nodes:
        custom = dict(node.meta.get("custom") or {})  # which nodes share
        mark = custom.pop(_torch.MARK, None)
        if mark is None:
            continue
        node.meta["custom"] = custom
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(schema.arguments if schema else ()):
            if argument.name in _NAMES and node.args[place] == _torch.INSTEAD:
                yield mark, node, place
