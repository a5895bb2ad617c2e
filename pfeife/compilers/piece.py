"""One piece of a body through a compiler, and what both of them may rely on at its border."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx

from pfeife import _torch
from pfeife.compilers.open_sizes import compile_open, is_open
from pfeife.ir.editing.copying import copied
from pfeife.ir.nodes import attribute, returned
from pfeife.ir.seeding import seeded

Compiler = Callable[[fx.GraphModule, list[torch.Tensor]], Callable]
COMPILERS = ("aot_eager", "inductor")
Run = Callable[..., Sequence[torch.Tensor]]


def compile_piece(piece: fx.GraphModule, compiler: str | Compiler) -> Run:
    """A graph of tensors as the compiler's function of as many tensors.

    The compiler is given a copy and examples. Its function is called with the layouts of the
    examples, whatever layouts the values arrive in. Raises what the compiler raises, TypeError if
    it returns no function, and when it is called, if the function returns no list or tuple of as
    many tensors as the graph.
    """
    if compiler == "aot_eager":
        return _torch.function_of(piece)
    with torch.no_grad(), _torch.no_autocast():
        if any(map(is_open, piece.graph.nodes)):
            return compile_open(piece, inputs(piece), partial(_compiled, compiler))
        values = [node.meta["val"] for node in inputs(piece)]
        # Inductor asks for shapes alone; a compiler of somebody else's may run its examples
        with nullcontext() if callable(compiler) else _torch.FakeTensorMode():
            examples = [example(value) for value in values]
        run = _compiled(compiler, piece, examples)
    return _laid_out(run, [strides(value) for value in values], len(returned(piece)))


def _compiled(compiler: str | Compiler, piece: fx.GraphModule, examples: list[Any]) -> Run:
    """What a compiler makes of a piece, as a function of its tensors one by one."""
    own = fx.GraphModule(piece, copied(piece).graph)  # compilers may edit what they are given
    compiled = compiler(own, examples) if callable(compiler) else _torch.inductor(own, examples)
    if not callable(compiled):
        raise TypeError(f"the compiler returned {type(compiled).__name__}, not a function")
    return _unboxed(compiled)


def _unboxed(compiled: Callable) -> Run:
    """Inductor's functions may take one list, which they are marked for; torch copies the mark to
    wrappers that take the tensors one by one."""
    if not getattr(compiled, "_boxed_call", False):
        return compiled
    parameters = inspect.signature(compiled, follow_wrapped=False).parameters.values()
    if any(parameter.kind == inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return compiled
    return lambda *values: compiled(list(values))


def _laid_out(run: Run, expected: list[tuple[int, ...]], count: int) -> Run:
    """The compiled code may read memory by the strides that it was compiled for."""

    def laid_out(*values: torch.Tensor) -> Sequence[torch.Tensor]:
        results = run(
            *[
                value if value.stride() == wanted else _with_strides(value, wanted)
                for value, wanted in zip(values, expected, strict=True)
            ]
        )
        if not isinstance(results, list | tuple) or len(results) != count:
            raise TypeError(
                f"the compiled function returned {type(results).__name__}, not the graph's "
                f"{count} tensors in a tuple or list"
            )
        return results

    return laid_out


def _with_strides(value: torch.Tensor, wanted: tuple[int, ...]) -> torch.Tensor:
    empty = torch.empty_strided(value.shape, wanted, dtype=value.dtype, device=value.device)
    return empty.copy_(value)


def strides(value: torch.Tensor) -> tuple[int, ...]:
    """The strides as captured; dense ones where elements share memory, because nobody says that
    those of another run are equal."""
    # Dense or with gaps is fine; an element that several indices reach (expand) is not.
    extent = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride < extent:
            return torch.empty(value.shape, device="meta").stride()
        extent += (size - 1) * stride
    return value.stride()


def example(value: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A tensor like a (fake) one, of zeros for integers and of ones for floats and booleans."""
    fill = int(value.dtype.is_floating_point or value.dtype == torch.bool)
    place = device or value.device
    return torch.empty_strided(value.shape, strides(value), dtype=value.dtype, device=place).fill_(
        fill
    )


def inputs(body: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of a body, in their order."""
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
            f"{value.dtype} {node.meta.get('sizes', (tuple(value.shape), value.stride()))} "
            f"{tuple(value.shape)} {value.device}"
            if isinstance(value, torch.Tensor)
            else ""
        )
        lines.append(f"{names[node]} {node.op} {_target(body, node)} {arguments} {kind}")
    return "\n".join(lines)


def _target(body: fx.GraphModule, node: fx.Node) -> str:
    """What a node computes: for the graph of a higher-order operation its own text."""
    # a constant is not looked at: two are the same where they are one object
    if node.op == "get_attr":
        held = attribute(body, node.target)
        return f"[{fingerprint(held)}]" if isinstance(held, fx.GraphModule) else f"id {id(held)}"
    return "" if node.op == "placeholder" else str(node.target)
