"""Costs by running the bodies themselves on the target device."""

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import fx

from pfeife.cost.cache import Measured, find, keep
from pfeife.plan import Costs
from pfeife.program import Program
from pfeife.seeding import seeded

Progress = Callable[[int, int], None]


def measure(
    program: Program,
    *,
    repeats: int = 5,
    device: torch.device | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Costs:
    """Seconds of every call: the median of `repeats` runs after one warm-up, with their spread.

    Bodies run one at a time with tensors made for them (zeros for integers, ones for floats) on
    `device` (where they were captured unless given), so the user's state and random generators
    are not touched, and the whole model need not fit. Bodies that print the same, with inputs
    alike, are measured once; with a `cache` folder once for all programs, of this device, torch
    and number of threads. `progress` is called with how many of how many bodies are done.
    """
    keys = {call.node: _key(program.body(call), device) for call in program.calls}
    bodies = {keys[call.node]: program.body(call) for call in program.calls}
    known: dict[str, Measured] = {}
    for done, (key, body) in enumerate(bodies.items()):
        found = find(cache, key) if cache else None
        if found is None or found.repeats < repeats:
            found = _run(key, body, repeats, device)
            if cache:
                keep(cache, found)
        known[key] = found
        if progress:
            progress(done + 1, len(bodies))
    return Costs(
        "measured",
        {node: known[key].seconds for node, key in keys.items()},
        {node: known[key].spread for node, key in keys.items()},
    )


def _key(body: fx.GraphModule, device: torch.device | None) -> str:
    """All that a body's time depends on."""
    devices = {str(device or node.meta["val"].device) for node in _inputs(body)}
    names = [
        torch.cuda.get_device_name(name) if name.startswith("cuda") else platform.processor()
        for name in sorted(devices)
    ]
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, eager, {names}, {threads} threads\n{fingerprint(body)}"


def _inputs(body: fx.GraphModule) -> list[fx.Node]:
    return [node for node in body.graph.nodes if node.op == "placeholder"]


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


def _run(key: str, body: fx.GraphModule, repeats: int, device: torch.device | None) -> Measured:
    inputs = [_example(node.meta["val"], device) for node in _inputs(body)]
    times = []
    with torch.no_grad():
        for _ in range(repeats + 1):
            _wait(inputs)
            start = time.perf_counter()
            body(*inputs)
            _wait(inputs)
            times.append(time.perf_counter() - start)
    runs = times[1:]
    lower, _, upper = statistics.quantiles(runs, n=4) if len(runs) > 1 else (0.0, 0.0, 0.0)
    return Measured(key, max(statistics.median(runs), 1e-9), max(upper - lower, 0.0), repeats)


def _example(value: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    place = device or value.device
    fill = torch.ones if value.dtype.is_floating_point else torch.zeros
    return fill(value.shape, dtype=value.dtype, device=place)


def _wait(tensors: list[torch.Tensor]) -> None:
    for index in {t.device.index for t in tensors if t.device.type == "cuda"}:
        torch.cuda.synchronize(index)
