"""Which lines and modules of the user's a traced operation comes from."""

import contextlib
import linecache
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import fx, nn

from pfeife.frontend.watch.modes import Calls

OURS = (
    *(f"{Path(file).parent}/" for file in (torch.__file__, Path(__file__).parents[1])),
    contextlib.__file__,  # between torch and torch
)


def user_line(trace: TracebackType | None) -> str:
    """The last line of a traceback that is neither torch's nor Pfeife's."""
    innermost = ""
    for frame, line in traceback.walk_tb(trace):
        if not frame.f_code.co_filename.startswith(OURS):
            innermost = place(frame.f_code, line)
    return innermost


def is_torchs(error: BaseException | None) -> bool:
    """Whether one of torch's operations has failed, rather than that a step raises an error."""
    trace = error.__traceback__ if isinstance(error, RuntimeError) else None
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return bool(files) and files[-1].startswith(OURS)


def place(code: CodeType, line: int) -> str:
    """A line as Python's tracebacks say it."""
    return f'File "{code.co_filename}", line {line}, in {code.co_name}'


def _users(frame: FrameType | None, others: tuple[str, ...] = OURS) -> FrameType | None:
    """The innermost frame from one on that is not in the files of others."""
    while frame is not None and frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType | None, others: tuple[str, ...] = OURS) -> str:
    """The user's line that a frame belongs to, which is not in the files of `others`."""
    frame = _users(frame, others)
    return "" if frame is None else place(frame.f_code, frame.f_lineno)


def calling_line() -> str:
    """The user's line that is running."""
    return line_of(sys._getframe(1))


def _noting_line(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Notes for an operation the user's line that calls it."""
    frame = _users(sys._getframe(1))
    if frame is not None:
        code = frame.f_code
        text = linecache.getline(code.co_filename, frame.f_lineno).strip()
        fx.traceback.get_current_meta()["stack_trace"] = (
            f"  {place(code, frame.f_lineno)}\n    {text}\n"
        )
    return func(*args, **kwargs)


@contextlib.contextmanager
def noted(paths: Mapping[int, str]) -> Iterator[None]:
    """While this thread traces, operations get the lines that they come from, and the modules:
    `paths` has these by their identity. Nothing where it runs on values."""
    if not fx.traceback.has_preserved_node_meta():
        yield
        return
    thread, stack = threading.get_ident(), list[tuple[str, tuple[str, type]]]()

    def note() -> None:
        fx.traceback.get_current_meta()["nn_module_stack"] = dict(stack)

    def enter(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == thread and id(module) in paths:
            path = paths[id(module)]
            stack.append((path, (path, type(module))))
            note()

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        if threading.get_ident() == thread and id(module) in paths:
            stack.pop()
            note()

    # These hooks run in all threads, hence the looks at `thread`. A module whose forward fails is
    # left as well (`always_call`), or the stack would keep it.
    hooks: list[Callable[[], None]] = [
        nn.modules.module.register_module_forward_pre_hook(enter).remove,
        nn.modules.module.register_module_forward_hook(leave, always_call=True).remove,
    ]
    try:
        with Calls(_noting_line):
            yield
    finally:
        for remove in hooks:
            remove()
        for name in ("stack_trace", "nn_module_stack"):  # not those of the backward
            fx.traceback.get_current_meta().pop(name, None)
