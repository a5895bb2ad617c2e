"""Every private name of torch that Pfeife uses, each with the reason and the way out.

Tried on torch 2.11, 2.13 and 2.15. When one of these moves, only this file changes.
"""

import ast
import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch._functorch.config
from torch._C import DispatchKey

# The joint graph with a descriptor on every input and output. The public export APIs give
# either no backward or positional argument lists. If it moves: torch._functorch.aot_autograd.
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

# Roles of the joint graph's inputs and outputs, in node.meta["desc"].
from torch._functorch._aot_autograd.descriptors import (  # isort: skip
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

# A mode in which tensors have shapes and no storage, and what it raises where a value is asked for;
# there are no public names for them.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)

# Sees every operation of a thread; documented in torch's tutorials, yet in a private module.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BufferAOTInput",
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "TorchDispatchMode",
    "assigned",
    "assigned_constants",
    "broken_guard",
    "compilation",
    "flop_formulas",
    "frame",
    "frame_arguments",
    "frame_name",
    "gloo_device",
    "gloo_group",
    "graph_break",
    "hooks_of",
    "inductor",
    "is_dynamo_error",
    "is_last_compilation",
    "is_limit_of_compilations",
    "is_shared",
    "joint_graph",
    "leaf_dims",
    "many_programs",
    "marked_dims",
    "no_autocast",
    "placeholder_source",
    "result_paths",
    "source_value",
    "source_words",
    "trace_artifact",
    "whole_graph",
]


@contextlib.contextmanager
def _whole_interpolation() -> Iterator[None]:
    """While tracing leaves interpolation whole. Else it becomes indexing, which is slower than
    PyTorch's kernels and rounds otherwise (it is meant for shapes that are not known). If
    `py_kernels` moves: torch._ops.OpOverload.py_impl."""
    aten = torch.ops.aten
    packets = [getattr(aten, n) for n in dir(aten) if n.startswith(("upsample_", "_upsample_"))]
    operators = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    before = [(operator, dict(operator.py_kernels)) for operator in operators]
    try:
        for operator, _ in before:
            for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
                operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in before:
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def no_autocast() -> Any:
    """While captured operations run, which have their casts in the graph. torch's own compiled
    functions run so; if it moves: `torch.autocast(type, enabled=False)` for each device type."""
    return torch._C._DisableAutocast()


def joint_graph(module: torch.nn.Module, args: tuple) -> torch.fx.GraphModule:
    """The flat joint graph of a module; without gradients the forward graph alone.

    The forward is traced under the autocast of the caller, the backward outside of it, as eager
    runs it. If `backward_pass_autocast` moves: the backward of float32 islands is cast.
    """
    outside = torch._functorch.config.patch(backward_pass_autocast="off")
    with contextlib.ExitStack() as stack, _whole_interpolation(), outside:
        return aot_export_joint_with_descriptors(stack, module, args).graph_module


def gloo_device() -> Any:
    """A thread that looks after connections, which several groups can share: every one wakes up a
    hundred times a second. If `create_default_device` moves: leave the device out, and each group
    has its own."""
    return torch.distributed.ProcessGroupGloo.create_default_device()


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta, device: Any) -> Any:
    """A process group over a device. If its options move: their public form is the timeout."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._devices = timeout, [device]
    return gloo(store, rank, size, options)


def placeholder_source(node: torch.fx.Node) -> str:
    """How Dynamo writes down where a placeholder's value lives: `L['model']._parameters['w']`.

    Read inside the backend call: Dynamo clears it afterwards.
    """
    argument = node.meta.get("grapharg")
    name = getattr(getattr(argument, "source", None), "name", "")
    return str(name() if callable(name) else name)


def _dynamo_roots() -> tuple[dict[str, Any], dict[str, Any]]:
    """The local and global variables of the frame that Dynamo compiles right now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    return dict(output.local_scope), dict(output.global_scope)


def frame_arguments() -> list[str]:
    """The names of the arguments of the frame that Dynamo compiles right now, in their order."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    code = InstructionTranslator.current_tx().f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return list(code.co_varnames[:count])


# What a step of ours is called in the frame that hands it to Dynamo; not part of anyone's names.
STEP = "_pfeife_step"


def whole_graph(step: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """The step compiled by Dynamo as one graph at the shapes that it is called with.

    Dynamo keeps what it compiles with the code object, and counts its recompilations there: a
    code object for each step keeps them apart. (torch.compile has `isolate_recompiles` for that
    from 2.13 on.) A frame of ours around the step is never skipped, as the step itself may be.
    """

    def whole(*args: Any, **kwargs: Any) -> Any:
        return _pfeife_step(*args, **kwargs)

    _pfeife_step = step
    assert STEP in whole.__code__.co_freevars
    whole.__code__ = whole.__code__.replace()
    return torch.compile(whole, backend=backend, fullgraph=True, dynamic=False)


def many_programs(count: int) -> contextlib.AbstractContextManager[None]:
    """While Dynamo compiles a step up to so many times before it refuses to."""
    patch: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(
        recompile_limit=count
    )
    return patch


class Unresolved(LookupError):
    """A source that is no plain chain of names, attributes and items."""


def _walk(node: ast.expr) -> tuple[Any, list[str]]:
    """What part of a source names, and the words that a person would say for it."""
    scope = _dynamo_roots()
    match node:
        case ast.Subscript(value=ast.Name(id="L" | "G" as which), slice=ast.Constant(value=name)):
            return scope[which == "G"][str(name)], [] if name == STEP else [str(name)]
        case ast.Attribute(
            value=ast.Subscript(
                value=ast.Attribute(value=function, attr="__closure__"),
                slice=ast.Constant(value=int(index)),
            ),
            attr="cell_contents",
        ):
            holder, _ = _walk(function)
            return holder.__closure__[index].cell_contents, [holder.__code__.co_freevars[index]]
        case ast.Attribute(value=inner, attr=name):
            value, said = _walk(inner)
            plain = name in ("__self__", "_modules", "_parameters", "_buffers")
            return getattr(value, name), said if plain else [*said, name]
        case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
            value, said = _walk(inner)
            return value[key], [*said, str(key)]
    raise Unresolved(ast.unparse(node))


def _resolved(source: str) -> tuple[Any, list[str]]:
    try:
        return _walk(ast.parse(source, mode="eval").body)
    except (LookupError, AttributeError, TypeError, SyntaxError):
        return None, re.findall(r"\w+", re.sub(r"^[LG]\b", "", source))


def source_value(source: str) -> Any:
    """What a source such as `L['self'].model` names in the frame that Dynamo compiles right now;
    None if that cannot be told."""
    return _resolved(source)[0]


def source_words(source: str) -> list[str]:
    """The names in a source as a person would say them: `["model", "table"]`."""
    return _resolved(source)[1] or ["step"]


def graph_break() -> tuple[str, str] | None:
    """Why the graph that Dynamo compiles right now is not the whole of the frame: the reason and
    the line of the user's code; None if it is whole."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator = InstructionTranslator.current_tx()
    reason = translator.output.compile_subgraph_reason
    if reason is not None and reason.graph_break:
        place = reason.user_stack[-1] if reason.user_stack else None
        line = f'File "{place.filename}", line {place.lineno}, in {place.name}' if place else ""
        return reason.reason.strip().splitlines()[0], line
    if translator.f_code.co_name.startswith("torch_dynamo_resume_in_"):
        code = translator.f_code
        line = f'File "{code.co_filename}", line {code.co_firstlineno}'
        return "this graph goes on after another one", line
    return None


def is_dynamo_error(error: BaseException) -> bool:
    """Whether Dynamo says that it cannot compile something, or that something below it failed."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def is_limit_of_compilations(error: BaseException) -> bool:
    """Whether Dynamo says that it has compiled a step as often as it may."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def is_last_compilation() -> bool:
    """Whether torch would run the frame that Dynamo compiles right now eagerly, and say nothing,
    if it had to compile it once more."""
    from torch._guards import CompileContext

    current: Any = CompileContext.try_get()
    count = current.compile_id.frame_compile_id
    config = torch._dynamo.config
    return not config.fail_on_recompile_limit_hit and count + 1 >= config.recompile_limit


def frame_name() -> str:
    """The name of the function that Dynamo compiles right now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return str(InstructionTranslator.current_tx().f_code.co_name)


def frame() -> Any:
    """The code of the frame that Dynamo compiles right now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().f_code


def result_paths() -> list[tuple[tuple[int | str, ...], torch.fx.Node]] | None:
    """Where the tensors stand in what the frame returns that Dynamo compiles right now, with their
    nodes, in order; None where the frame ends at a graph break, or returns an object of a class
    that is no tuple, list, mapping or dataclass.

    Dynamo has what is returned on its stack. The graph's results are in an order of its own, and
    nothing public tells which is which. If it moves: return None, and an index means the graph's
    results.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator = InstructionTranslator.current_tx()
    if len(translator.stack) != 1:
        return None
    found: list[tuple[tuple[int | str, ...], torch.fx.Node]] = []
    for path, value in _leaves(translator.stack[-1].realize()):
        if hasattr(value, "proxy"):
            if "Tensor" in type(value).__name__ and isinstance(value.proxy, torch.fx.Proxy):
                found.append((path, value.proxy.node))
        elif not value.is_python_constant():
            return None
    return found


def assigned() -> dict[torch.fx.Node, list[str]]:
    """The nodes of the graph that Dynamo compiles right now, each with the attributes, entries of
    dicts and cells that will hold its value after the call, as sources.

    Dynamo does the assignments in code of its own, after the graph. Nothing public tells of them.
    If it moves: return {}, and such a value is taken for a result of the step.
    """
    found: dict[torch.fx.Node, list[str]] = {}
    for source, value in _written(dict):
        if isinstance(getattr(value, "proxy", None), torch.fx.Proxy):
            found.setdefault(value.proxy.node, []).append(source)
    return found


def assigned_constants() -> dict[str, Any]:
    """What Python alone has computed (numbers, texts) of what the frame that Dynamo compiles right
    now assigns to attributes, entries of dicts and lists, and cells, by sources. If it moves:
    return {}, and nobody sees that such a number is one microbatch's."""
    return {
        source + "".join(f"[{key!r}]" for key in path): leaf.as_python_constant()
        for source, value in _written(dict | list)
        for path, leaf in _leaves(value)
        if leaf.is_python_constant()
    }


def _written(containers: Any) -> Iterator[tuple[str, Any]]:
    """What the frame that Dynamo compiles right now assigns, as Dynamo has it, and the sources of
    the places: attributes, cells, and the entries of changed containers of these types."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects = InstructionTranslator.current_tx().output.side_effects
    places = [
        (holder, f".{name}", value)
        for holder, written in effects.store_attr_mutations.items()
        for name, value in written.items()
    ]
    for one in effects.id_to_variable.values():
        inside = getattr(one, "items", None)
        if isinstance(inside, containers) and effects.is_modified(one):
            pairs = inside.items() if isinstance(inside, dict) else enumerate(inside)
            places += [(one, f"[{_plain_key(key)!r}]", value) for key, value in pairs]
    for holder, key, value in places:
        source = getattr(holder, "source", None)
        seen = value.unwrap()
        if source is not None and seen.is_realized():  # else the step has not read it
            with contextlib.suppress(NotImplementedError):  # of an object that the step has made
                name = source.name() if callable(source.name) else source.name
                yield f"{name}{key}", seen


def _leaves(value: Any, path: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple, Any]]:
    """The values that are inside of a value as Dynamo has it, and where they stand in it: those
    in tuples, lists, mappings and objects that the step has made."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if hasattr(value, "proxy") or value.is_python_constant():
        yield path, value
        return
    inside = getattr(value, "items", None)
    if not isinstance(inside, list | tuple | dict):
        held = next(filter(None, (getattr(value, n, None) for n in _HELD)), None)
        if held is not None:
            yield from _leaves(held.realize(), path)
            return
        inside = InstructionTranslator.current_tx().output.side_effects.store_attr_mutations.get(
            value
        )
    if inside is None:
        yield path, value
        return
    for key, one in inside.items() if isinstance(inside, dict) else enumerate(inside):
        yield from _leaves(one.realize(), (*path, _plain_key(key)))


_HELD = ("_base_vt", "_dict_vt", "_tuple_vt", "_list_vt")  # what a subclass of a dict or tuple has


def _plain_key(key: Any) -> int | str:
    """A key of a dict as Dynamo has it."""
    value = key.vt.as_python_constant() if hasattr(key, "vt") else key
    return value if isinstance(value, int | str) else str(value)


def inductor(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable:
    """Inductor's code for a graph of aten operations. `torch.compile` would trace the graph by
    Dynamo first; `torch._inductor.standalone_compile` writes an artifact beside the caches."""
    from torch._inductor.compile_fx import compile_fx

    made: Any = compile_fx(graph, examples)  # other types for other modes
    return made


def hooks_of(tensor: torch.Tensor) -> list[Any]:
    """Those who look at a tensor's gradients as they are made or added. torch has no public
    question for it; if these attributes move: nobody is warned."""
    several = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return [hook for hooks in several for hook in (hooks or {}).values()]


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor looks at a tensor's storage. There is no public count of those; the
    two that are always there are the tensor and the storage object that is asked."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """A FLOP formula by operation: those of torch.utils.flop_counter (whose table has no
    documented name), and the CPU's attention kernels, which that table lacks."""
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

    aten = torch.ops.aten
    extra = {
        aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
    }
    return extra | flop_registry


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
    for guard in environment.guards:
        asked = getattr(getattr(guard, "sloc", None), "framework_loc", None)
        if asked is not None and "_dynamo" not in getattr(asked, "filename", "_dynamo"):
            continue
        here = environment.replace(guard.expr).xreplace(values)
        if here.xreplace({s: hints[s] for s in here.free_symbols if s in hints}) == False:  # noqa: E712  sympy
            return str(guard.expr)
    return None


def marked_dims(tensor: torch.Tensor) -> set[int]:
    """The dimensions that `torch._dynamo.mark_dynamic` marked on a tensor."""
    return set(getattr(tensor, "_dynamo_dynamic_indices", ()))


def leaf_dims(in_dims: Any, tree: Any) -> list[int | None]:
    """`in_dims`, a prefix of the tree as in torch.vmap, as one entry a leaf.

    Raises ValueError if it is no prefix. torch.vmap itself uses this helper.
    """
    from torch.utils._pytree import _broadcast_to_and_flatten, tree_structure

    dims = _broadcast_to_and_flatten(in_dims, tree_structure(tree))
    if dims is None:
        raise ValueError(
            "in_dims does not fit the arguments of the step: it is a number, None, or a structure "
            "of them as that of the positional arguments (a tuple with an entry for each)"
        )
    return dims


def compilation() -> Any:
    """Which compilation Dynamo is in, for `trace_artifact`; None outside of one."""
    from torch._guards import CompileContext

    current = CompileContext.try_get()
    if current is None:
        return None
    kept = CompileContext(current.compile_id)  # alone: torch goes on with its own
    kept.attempt = current.attempt
    return kept


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
