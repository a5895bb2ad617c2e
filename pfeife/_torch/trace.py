"""What watches: torch's structured trace, which tlparse shows, and its profilers."""

from collections.abc import Callable
from typing import Any

from torch.autograd import profiler


def compilation() -> Any:
    """Which compilation Dynamo is in, for `trace_artifact`; None outside of one."""
    from torch._guards import CompileContext

    current = CompileContext.try_get()
    if current is None:
        return None
    context = CompileContext(current.compile_id)  # alone: torch goes on with its own
    context.attempt = current.attempt
    return context


def trace_artifact(name: str, encoding: str, text: Callable[[], str], compilation: Any) -> None:
    """Adds a text to torch's structured trace, which TORCH_TRACE turns on and tlparse shows.

    `encoding` is "string" or "json"; tlparse lists it under the `compilation`. Where nothing is
    traced, `text` is not called. There is no public way into that trace; without it these
    artifacts alone would be missing.
    """
    from torch._guards import compile_context
    from torch._logging._internal import trace_structured_artifact

    with compile_context(compilation):
        trace_structured_artifact(name, encoding, text)


def is_profiled() -> bool:
    """Whether a profiler of torch's runs, in any thread of this process.

    `torch.autograd._profiler_enabled` tells that of this thread alone, and not of a profiler of
    all threads. Without this module's flag every action would always be recorded, at a microsecond
    each.
    """
    return bool(profiler._is_profiler_enabled)
