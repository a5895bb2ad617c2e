"""CUDA graphs of compiled pieces. Not yet run on a GPU."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pfeife import _torch
from pfeife.compilers.draws import draws
from pfeife.ir.nodes import value_of
from pfeife.ir.parts import Call
from pfeife.ir.program import Program

WARM_UPS = 3  # as in torch's documentation: lazy initialisation, then two that are like the capture
MOST = 8  # sizes of a piece for which a graph is kept: each has memory of its own


def check_devices(program: Program, calls: Sequence[Call]) -> None:
    """Raises ValueError unless all values of all calls are on CUDA devices, but for the seeds of
    draws, which run apart. (A number on the CPU would be captured as it was.)"""
    for call in calls:
        body = program.body(call)
        seeds = {node.args[2] for node in draws(body)}
        for node in body.graph.nodes:
            value = value_of(node)
            if value is not None and value.device.type != "cuda" and node not in seeds:
                raise ValueError(
                    f"cuda_graphs=True: {node.name} of stage {call.unit} is on {value.device}; "
                    "CUDA graphs are for stages on CUDA devices, leave it out for others"
                )


def as_cuda_graph(run: Callable, slots: list[torch.Tensor]) -> Callable:
    """A function as a CUDA graph that reads its arguments from `slots` and returns copies.

    Arguments, parameters too, are copied into the slots at every call, so they may be anywhere;
    that costs their bytes once more, in memory and in traffic. Calls of one capture follow one
    another on the device, from whatever stream and thread they come.
    """
    device = slots[0].device
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.no_grad(), _torch.no_autocast(), torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run(*slots)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with (
        torch.no_grad(),
        _torch.no_autocast(),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        outputs = run(*slots)
    # The slots and outputs are the same memory at every replay: a call waits for the one before it,
    # and hands out copies.
    done, turn = torch.cuda.Event(), threading.Lock()
    done.record(stream)

    def replay(*values: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with turn, torch.cuda.device(device):
            done.wait()
            for slot, value in zip(slots, values, strict=True):
                slot.copy_(value)
            graph.replay()
            results = tuple(None if value is None else value.clone() for value in outputs)
            done.record()
        return results

    return replay


def graphs_by_size(
    run: Callable, record: Callable[[Callable, list[torch.Tensor]], Callable] = as_cuda_graph
) -> Callable:
    """A function of tensors and sizes, of any shapes: shapes that come again are recorded as a
    graph. What has not come for longest of more than `MOST` is forgotten."""
    graphs: OrderedDict[tuple, Callable | None] = OrderedDict()  # None for what came once
    turn = threading.Lock()

    def replay(*values: Any) -> Sequence[torch.Tensor | None]:
        sizes = tuple(value.shape if isinstance(value, torch.Tensor) else value for value in values)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        with turn:
            # A size that comes once is not worth a capture, which takes as long as several runs.
            comes_again = sizes in graphs
            graph = graphs.pop(sizes, None)
            if comes_again and not graph and tensors:
                graph = record(_of_tensors(run, values), [tensor.clone() for tensor in tensors])
            graphs[sizes] = graph
            if len(graphs) > MOST:
                graphs.popitem(last=False)
        return graph(*tensors) if graph else run(*values)

    return replay


def _of_tensors(run: Callable, values: Sequence[Any]) -> Callable:
    """A function of the tensors among its arguments, with the sizes among them as they are."""
    numbers = [None if isinstance(value, torch.Tensor) else value for value in values]

    def run_with(*tensors: torch.Tensor) -> Sequence[torch.Tensor | None]:
        rest = iter(tensors)
        return run(*(next(rest) if number is None else number for number in numbers))

    return run_with
