"""Costs by running the bodies themselves on the target device."""

import statistics
import time

import torch
from torch import fx

from pfeife.plan import Costs
from pfeife.program import Program
from pfeife.seeding import seeded


def measure(program: Program, *, repeats: int = 5, device: torch.device | None = None) -> Costs:
    """Seconds of every call: the median of `repeats` runs after one warm-up.

    Bodies run one at a time with tensors made for them (zeros for integers, ones for floats),
    so the user's state and random generators are not touched. Bodies that print the same, with
    inputs alike, are measured once.
    """
    known: dict[str, float] = {}
    seconds = {}
    for call in program.calls:
        body = program.body(call)
        key = fingerprint(body)
        if key not in known:
            known[key] = _body_seconds(body, repeats, device)
        seconds[call.node] = known[key]
    return Costs("measured", seconds)


def fingerprint(body: fx.GraphModule) -> str:
    """What a body computes on which shapes, the same for bodies that differ in names only."""
    names: dict[fx.Node, str] = {}
    lines = []
    for index, node in enumerate(body.graph.nodes):
        names[node] = f"%{index}"
        # Which draw of the graph a random operation is makes no difference to its cost.
        args = (node.args[0], *node.args[2:]) if node.target is seeded else node.args
        arguments = fx.node.map_arg((args, node.kwargs), names.__getitem__)
        value = node.meta.get("val")
        kind = (
            f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
            if isinstance(value, torch.Tensor)
            else ""
        )
        target = "" if node.op == "placeholder" else node.target
        lines.append(f"{names[node]} {node.op} {target} {arguments} {kind}")
    return "\n".join(lines)


def _body_seconds(body: fx.GraphModule, repeats: int, device: torch.device | None) -> float:
    nodes = [node for node in body.graph.nodes if node.op == "placeholder"]
    inputs = [_example(node.meta["val"], device) for node in nodes]
    times = []
    with torch.no_grad():
        for _ in range(repeats + 1):
            _wait(inputs)
            start = time.perf_counter()
            body(*inputs)
            _wait(inputs)
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _example(value: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    place = device or value.device
    fill = torch.ones if value.dtype.is_floating_point else torch.zeros
    return fill(value.shape, dtype=value.dtype, device=place)


def _wait(tensors: list[torch.Tensor]) -> None:
    for index in {t.device.index for t in tensors if t.device.type == "cuda"}:
        torch.cuda.synchronize(index)
