"""Dynamo: how a step is handed to it, which frame it compiles, and what it says that went wrong."""

import contextlib
import functools
import inspect
import itertools
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import torch

from pfeife._torch.kernel_numbers import known_to_dynamo, numbers_for_kernels
from pfeife._torch.tensors import quiet_fakes

P = ParamSpec("P")
R = TypeVar("R")


def translator() -> Any:
    """Dynamo's account of the frame that it compiles right now, valid in the call of a backend.
    Nothing public tells of frames. If it moves: it is a local variable of the backend's callers."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx()


_NUMBERS = itertools.count()  # of the steps that were handed to Dynamo
# What a step of ours is called in the frame that hands it to Dynamo; not part of anyone's names.
STEP = "_pfeife_step"


def whole_graph(
    step: Callable[..., Any], backend: Callable[..., Any], dynamic: bool | None = False
) -> Callable[..., Any]:
    """The step compiled by Dynamo as one graph: at the shapes that it is called with, or, if it is
    `dynamic`, for all sizes; None is for those that have changed from call to call.

    Dynamo keeps what it compiles with the code object, and counts its recompilations there; which
    sizes have changed it notes by the code's file, line and name: code of its own for each step
    keeps them apart. (torch.compile has `isolate_recompiles` for that
    from 2.13 on.) A frame of ours around the step is never skipped, as the step itself may be.
    """

    def whole(*args: Any, **kwargs: Any) -> Any:
        return _pfeife_step(*args, **kwargs)

    _pfeife_step = step
    # `sources` leaves this name out of what a person reads: the variable must be called so.
    assert STEP in whole.__code__.co_freevars
    name = f"whole_{next(_NUMBERS)}"
    whole.__code__ = whole.__code__.replace(co_name=name)

    def unnumbered(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        for graph in module.modules():
            for node in graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ():
                trace = node.meta.get("stack_trace")
                if trace:  # ranks compare it
                    node.meta["stack_trace"] = re.sub(rf"\b{name}\b", "whole", trace)
        return backend(module, examples)

    return torch.compile(whole, backend=unnumbered, fullgraph=True, dynamic=dynamic)


def named_graphs(step: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """The step compiled as `torch.compile(step, backend=..., dynamic=True)` does, apart from what
    else is compiled of it where torch can (from 2.13 on)."""
    apart: dict[str, Any] = {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        apart["isolate_recompiles"] = True
    made: Callable[..., Any] = torch.compile(step, backend=backend, dynamic=True, **apart)
    return made


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which threads of this process call one after another: what captures a step
    changes parts of torch for a while, which other captures would find changed, and leave so.
    Dynamo's own lock, so that nobody waits for both in two orders. If it moves: a lock of ours,
    where steps are captured within backends of torch.compile as well."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        from torch._dynamo.convert_frame import compile_lock

        with compile_lock:
            return function(*args, **kwargs)

    return alone


def said_to_compile() -> contextlib.AbstractContextManager[Any]:
    """While `torch.compiler.is_compiling()` says so, as it does for Dynamo and torch.export: models
    ask it before they branch on values. If the flag moves: torch.export's tracing sets it."""
    return patch.object(torch.compiler, "_is_compiling_flag", True)


def eager_stance() -> contextlib.AbstractContextManager[None]:
    """While functions that are compiled run as they are. The setter is public; that it is a
    context as well is not in its type."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def is_drawn(placeholder: torch.fx.Node) -> bool:
    """Whether a placeholder of Dynamo's graph is a number that Python draws at every call. Such a
    one has a source of its own. If it moves: False, and the microbatches of a call share it."""
    argument = placeholder.meta.get("grapharg")
    return type(getattr(argument, "source", None)).__name__ == "RandomValueSource"


def assumed_values() -> set[str]:
    """The sources of numbers in tensors of which the frame that Dynamo compiles right now assumes
    something: `if self.calls.item() == 0`. Dynamo has symbols for the numbers in int64 and float64
    scalars on the CPU, and guards what is asked of them. If these fields move: an empty set, and a
    branch that one microbatch takes is taken by all of a call."""
    environment: Any = translator().output.shape_env
    guarded = {symbol for guard in environment.guards for symbol in guard.expr.free_symbols}
    guarded |= set(environment.replacements)
    names = set()
    for symbol, sources in environment.var_to_sources.items():
        for source in sources if symbol in guarded else ():
            if type(source).__name__ == "CallMethodItemSource":
                names.add(name_of(source.base))
    return names


def guards() -> list[tuple[str, str]]:
    """What the frame that Dynamo compiles right now is compiled for: kinds of guards, and what is
    guarded. The account of guards has no public form; if it moves: an empty list, and
    `pfeife.explain` does not name them."""
    frame_guards = translator().output.guards
    return sorted({(guard.create_fn_name(), name_of(guard)) for guard in frame_guards})


def name_of(source: Any) -> str:
    """What a source of Dynamo's, or a guard of one, is called, "" of None: an attribute of late, a
    method before."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def sets_data(target: Any, args: Sequence[Any]) -> bool:
    """Whether a call in Dynamo's graph is `args[0].data = args[1]`: an operator of its own since
    torch 2.15, before that `set_`. If it has another form: such a step is refused without its
    line."""
    own = getattr(torch.ops.aten, "shallow_copy_data_", None)
    kinds = (torch.Tensor.set_, own, getattr(own, "default", None))
    return len(args) == 2 and any(target is kind for kind in kinds if kind is not None)


def draws_by_numpy(target: Any) -> bool:
    """Whether a function in Dynamo's graph stands for one of numpy.random. If the wrapper moves:
    False, and such numbers come from torch's generator."""
    return getattr(getattr(target, "f", None), "__module__", "") == "torch._numpy.random"


# With this torch takes a tensor for what it was as long as the dict of its module is: up to 2.11
# also if `requires_grad`, its dtype or its strides have changed.
_FULL_GUARDS = {"skip_tensor_guards_with_matching_dict_tags": False}


def guard_tensors() -> None:
    """Has torch guard the tensors of modules themselves in the frame that Dynamo compiles right
    now, and then puts the setting back. A backend is called before guards are made, by a caller
    that nobody but torch tells of the end. If the callbacks move: the setting may stay as it is
    here, which costs others microseconds a call."""
    if all(getattr(torch._dynamo.config, name) == value for name, value in _FULL_GUARDS.items()):
        return
    settings, handler = torch._dynamo.config.patch(_FULL_GUARDS), torch._dynamo.callback_handler

    def ended(_: Any) -> None:
        handler.end_callbacks = [
            callback for callback in handler.end_callbacks if callback is not ended
        ]
        settings.__exit__(None, None, None)

    settings.__enter__()
    handler.register_end_callback(ended)


@contextlib.contextmanager
def willing(programs: int | None = None) -> Iterator[None]:
    """While Dynamo takes more of a step than it does by default, in this thread alone (from 2.13
    on): recurrent layers, and calls of loggers, of warnings and of print, which it leaves out; and
    while it leaves operations as they are: `a.add_(b, alpha=2)` rounds otherwise than two. Of
    numbers and sizes that depend on data it makes symbols anyway where it is asked for one graph;
    other floats it takes as they are, whatever it does of sizes.
    It compiles a step up to `programs` times before it refuses to. The settings have no public
    form; if one moves, leave it out."""
    config = torch._dynamo.config
    wanted: dict[str, Any] = {
        **_FULL_GUARDS,
        "enable_dynamo_decompositions": False,
        "specialize_float": True,
        "allow_rnn": True,
        "ignore_logging_functions": _Told({*config.ignore_logging_functions, *_that_only_tell()}),
    }
    if programs is not None:
        wanted["recompile_limit"] = programs
    known_to_dynamo()
    with config.patch(wanted), numbers_for_kernels(), quiet_fakes():
        yield


class _Told(set[Callable[..., Any]]):
    """Functions in a setting. torch 2.11 writes a copy of all settings into its log, as JSON, and
    sorts sets for that: the copy has their names."""

    def __deepcopy__(self, memo: dict[int, Any]) -> list[str]:
        return sorted(function.__qualname__ for function in self)


def _that_only_tell() -> set[Callable[..., Any]]:
    """Functions that print, warn or log, and return nothing: those of logging and warnings, and
    what libraries have added to loggers (`Logger.warning_once`)."""
    names = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log")
    functions: set[Callable[..., Any]] = {print, warnings.warn, warnings.warn_explicit}
    functions |= {getattr(logging, name) for name in names if hasattr(logging, name)}
    # The list grows while it is read, by the subclasses of what is in it.
    kinds = [logging.Logger]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name, value in vars(kind).items():
            added = callable(value) and getattr(value, "__module__", "") != "logging"
            if name in names or (added and name.startswith(names)):
                functions.add(value)
    return functions


def frame() -> Any:
    """The code of the frame that Dynamo compiles right now."""
    return translator().f_code


def frame_name() -> str:
    """The name of the function that Dynamo compiles right now."""
    return str(translator().f_code.co_name)


def frame_arguments() -> list[str]:
    """The names of the arguments of the frame that Dynamo compiles right now, in their order."""
    code = translator().f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return list(code.co_varnames[:count])


def graph_break() -> tuple[str, str] | None:
    """Why the graph that Dynamo compiles right now is one of several: the reason and the line of
    the user's code; without a reason where the break lies before it. None if it is the whole of a
    frame, which no function calls that Dynamo has broken (its code names the functions in which it
    goes on) or left to Python. If these names and fields move: `fullgraph=True` makes Dynamo itself
    refuse a break."""
    now = translator()
    reason = now.output.compile_subgraph_reason
    if reason is not None and reason.graph_break:
        place = reason.user_stack[-1] if reason.user_stack else None
        line = f'File "{place.filename}", line {place.lineno}, in {place.name}' if place else ""
        return reason.reason.strip().splitlines()[0], line
    code = now.f_code
    if code.co_name.startswith(_RESUMED):
        line = f'File "{code.co_filename}", line {code.co_firstlineno}'
        return "", line
    callers = list(_callers())
    # A user's frame inside of torch.compile's runs in Python because Dynamo has left it to that.
    # Those outside have only called what is compiled.
    entry = next((at for at, caller in enumerate(callers) if _is_entry(caller.f_code)), 0)
    for at, frame in enumerate(callers):
        around = frame.f_code
        goes_on = any(name.startswith("__resume_at_") for name in around.co_names)
        if goes_on or (at < entry and _is_users(around)):
            return "", f'File "{around.co_filename}", line {frame.f_lineno}'
    return None


def _callers() -> Iterator[FrameType]:
    """The frames that call what Dynamo compiles right now, the innermost first, after its own."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_entry(code: Any) -> bool:
    """Whether a frame is that of torch.compile. If its name moves: nobody knows of functions that
    Dynamo has left to Python."""
    return code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py")


def _is_users(code: Any) -> bool:
    """Whether a frame is not of those that Dynamo leaves to Python in any case: torch's, Python's
    library's and ours."""
    path = Path(code.co_filename)
    own = Path(__file__).parent.parent
    if any(root in path.parents for root in (Path(torch.__file__).parent, own)):
        return False
    library = Path(inspect.__file__).parent
    return library not in path.parents or "site-packages" in path.parts


_RESUMED = "torch_dynamo_resume_in_"  # what Dynamo calls the rest of a function after a break


def who_compiles() -> Any:
    """What asks Dynamo to compile: the same object for all graphs of one torch.compile. If it
    moves: any new object, and nobody knows which graphs belong together."""
    return translator().output.compiler_fn


def numbers_of(
    results: Sequence[Any], examples: Sequence[Any], values: Sequence[Any]
) -> list[int | float]:
    """The symbolic numbers `results`, where what the symbols came from (`examples`, tensors and
    numbers) has these values. Raises ValueError if they depend on more than that."""
    symbol_values: dict[Any, Any] = {}
    for example, value in zip(examples, values, strict=True):
        tensor = isinstance(example, torch.Tensor)
        pairs = zip(example.shape, value.shape, strict=True) if tensor else [(example, value)]
        symbol_values |= {size.node.expr: number for size, number in pairs if hasattr(size, "node")}
    numbers = []
    for result in results:
        number = result.node.expr.xreplace(symbol_values) if hasattr(result, "node") else result
        if getattr(number, "free_symbols", ()):
            raise ValueError(f"a number that the graph returns, {number}, is not one of its sizes")
        numbers.append(int(number) if isinstance(result, int | torch.SymInt) else float(number))
    return numbers


def is_dynamo_error(error: BaseException) -> bool:
    """Whether Dynamo says that it cannot compile something, or that something below it failed. The
    class has no public name; if it moves: look for its module in the error's class."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def is_limit_of_compilations(error: BaseException) -> bool:
    """Whether Dynamo says that it has compiled a step as often as it may. If the class moves: as
    any other of Dynamo's errors, which is said in its own words."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def is_last_compilation() -> bool:
    """Whether torch would run the frame that Dynamo compiles right now eagerly, and say nothing,
    if it had to compile it once more. If the count moves: False, and torch says nothing."""
    from torch._guards import CompileContext

    current: Any = CompileContext.try_get()
    count = current.compile_id.frame_compile_id
    config = torch._dynamo.config
    return not config.fail_on_recompile_limit_hit and count + 1 >= config.recompile_limit


def broken_guard(sizes: list[Any], values: dict[Any, int]) -> str | None:
    """Something that Dynamo assumed of symbolic sizes and that other values of them break.

    `values` go by the symbols (`size.node.expr`). Only what Python's control flow asked counts,
    which is baked into the graph; what operations ask (which kernel a convolution takes) they ask
    again when the graph is traced at other sizes. Dynamo notes who asked: if that moves, every
    guard counts, and convolutions of kernel size 1 are refused too often.
    """
    if not sizes:
        return None
    environment = sizes[0].node.shape_env
    hints = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
    for expression in _asked_of_sizes(environment):
        here = expression.xreplace(values)
        # Symbols that `values` lack are what they were when the step was compiled. An expression in
        # which symbols are left is neither true nor false, and breaks nothing.
        if here.xreplace({s: hints[s] for s in here.free_symbols if s in hints}) == False:  # noqa: E712  sympy
            return str(expression)
    return None


def _asked_of_sizes(environment: Any) -> Iterator[Any]:
    """What Dynamo has assumed of symbolic sizes for Python's control flow."""
    for guard in environment.guards:
        location = getattr(getattr(guard, "sloc", None), "framework_loc", None)
        if location is None or "_dynamo" in getattr(location, "filename", "_dynamo"):
            yield environment.replace(guard.expr)  # sizes found to be one since are one symbol
