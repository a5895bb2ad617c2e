"""Dynamo's graph of a step, and its errors in plain words."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from pfeife import _torch
from pfeife.frontend.forward import Forward
from pfeife.frontend.results import leaves_of
from pfeife.frontend.watch.data_writes import WritingData, check_writes
from pfeife.ir.nodes import returned

T = TypeVar("T")


def dynamo_graph(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    read: Callable[[fx.GraphModule, list[Any]], T],
    dynamic: bool | None = False,
) -> T:
    """What is `read` from Dynamo's graph of a call and its inputs, while Dynamo compiles it (it
    may empty the graph afterwards); nothing is run. It is for the sizes of the call alone, or
    open in those that are marked if `dynamic` is None. Raises ValueError when there is no single
    graph."""
    results: list[T] = []

    def backend(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        # Now or never: what the placeholders are (`_torch.placeholder_source`) only Dynamo knows.
        results.append(read(module, examples))
        raise _Enough

    try:
        with _torch.willing():
            _torch.whole_graph(step, backend, dynamic)(*args, **kwargs)
    except Exception as error:
        # Once the graph has been read, this is `_Enough`, in whatever Dynamo has wrapped it.
        if not results:
            raise plain_error(error) from error
    if not results:
        raise ValueError("the step computes nothing with tensors, so there is no graph to capture")
    return results[0]


def dynamo_forward(module: fx.GraphModule) -> Forward:
    """Dynamo's graph as the forward of a step. Called while Dynamo compiles."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    arguments = tuple(node.meta.get("example_value") for node in nodes)
    results = tuple(node.meta.get("example_value") for node in returned(module))
    check_writes(module)
    return Forward(
        lambda *values: _Run(module).run(*values),
        arguments,
        results,
        leaves_of(module),
        graph=module,
    )


class _Run(WritingData):
    """A run of Dynamo's graph. In it modes are switched on and off by calls, so where it ends in
    between (a draw that has no expected value), they are put back as they were."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.entered: list[Any] = []

    def run(self, *values: Any, **options: Any) -> Any:
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                return super().run(*values, **options)
        finally:
            while self.entered:
                _torch.exit_autocast(self.entered.pop())

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if target is _torch.enter_autocast:
            self.entered.append(result)
        elif target is _torch.exit_autocast:
            self.entered.remove(args[0])
        return result


def copied(module: fx.GraphModule, device: torch.device | None = None) -> fx.GraphModule:
    """A copy of Dynamo's graph, which outlives Dynamo's compilation, with another `device`
    wherever it names the meta device. What counts integers there counts floats on a CPU, which has
    no kernel for them."""
    graph = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}

    def moved(argument: Any) -> Any:
        meta = device and isinstance(argument, torch.device) and argument.type == "meta"
        return device if meta else argument

    for node in module.graph.nodes:
        copied = here[node] = graph.node_copy(node, here.__getitem__)
        copied.args = fx.node.map_aggregate(copied.args, moved)
        copied.kwargs = fx.node.map_aggregate(copied.kwargs, moved)
        if node.target is torch.histc and device is not None and device.type == "cpu":
            with graph.inserting_before(copied):
                copied.args = (graph.call_method("float", copied.args[:1]), *copied.args[1:])
    return _torch.graph_module(module, graph)


class _Enough(Exception):
    """Ends Dynamo's compilation once its graph has been read, so that nothing is run."""


_RAISED = "Developer debug context: raised exception "  # of the step's own


def plain_error(error: Exception) -> Exception:
    """Our own ValueError from inside Dynamo's wrapping, or one that names Dynamo's reason and
    the line of the user's code."""
    # A ValueError within is ours, or the user's: it says more than that Dynamo has stopped.
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and cause not in seen:  # Dynamo's may be causes of one another
        if isinstance(cause, ValueError):
            return cause
        seen.append(cause)
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    if _torch.is_limit_of_compilations(error):
        return compiled_too_often()
    if not _torch.is_dynamo_error(error):
        return error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    places = [line for line in lines if line.startswith('File "')]
    where = f" ({places[-1]})" if places else ""
    why = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation:")]
    raised = [line.removeprefix(_RAISED) for line in lines if line.startswith(_RAISED)]
    reason = f"it raises {raised[0]}" if raised else " ".join([f"{lines[0]}.", *why[:1]])
    return ValueError(f"the step could not be captured as one graph: {reason}{where}")


def compiled_too_often() -> ValueError:
    """What to say of a step that Dynamo would not compile once more."""
    return ValueError(
        "this step has been compiled so often that torch would run it eagerly from now on: "
        "something in it changes with every call (a counter, a float, a mode; "
        'TORCH_LOGS="recompiles" says what). Keep it in a tensor, such as a buffer of a module'
    )
