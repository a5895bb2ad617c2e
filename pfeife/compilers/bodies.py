"""The bodies of a program's calls, compiled before the first step."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.compilers.cuda_graphs import as_cuda_graph, check_devices, graphs_by_size
from pfeife.compilers.draws import around_draws, draws, tells
from pfeife.compilers.open_sizes import is_open
from pfeife.compilers.piece import COMPILERS, Compiler, Run, compile_piece, example, fingerprint
from pfeife.compilers.piece import inputs as inputs_of
from pfeife.data.progress import Progress
from pfeife.ir.editing.absorb import absorb
from pfeife.ir.editing.copying import Copy, copied
from pfeife.ir.nodes import (
    find_node,
    has_effects,
    is_number,
    returned,
    source_line,
    value_of,
)
from pfeife.ir.outline import KIND_WORDS, own_results
from pfeife.ir.parts import Call
from pfeife.ir.program import Program

log = logging.getLogger("pfeife")


def compile_bodies(
    program: Program,
    compiler: str | Compiler = "aot_eager",
    *,
    rank: int | None = None,
    cuda_graphs: bool = False,
    progress: Progress | None = None,
) -> dict[str, Callable]:
    """The compiled bodies of the calls of a rank (of all ranks if None), by their call nodes; a
    call that is left out runs as its graph.

    `compiler` is "aot_eager" (the graphs as they are: nothing is compiled), "inductor", or a
    function of (a graph module of aten operations that returns a tuple, a list of example
    tensors) that gives a function of such tensors, or of one list of them if it is marked
    `_boxed_call`. That returns as many tensors as the graph, and does not write to them later.

    Bodies that differ in names only are compiled once. They are compiled one after another,
    because Inductor promises nothing for several threads; what runs in parallel are Inductor's
    own workers for the kernels of one body, and under torchrun the ranks, each of which
    compiles its own stages. What is kept on disk is torch's own cache.

    Random operations and what members tell one another run as without a compiler, between the
    compiled pieces of their body; a body with effects (a node that prints, say) or with numbers or
    sizes that data decide runs as its graph. With `cuda_graphs` every piece of every call is
    captured once, see `as_cuda_graph`, one with open sizes for each that comes again, see
    `graphs_by_size`.

    Raises ValueError for a compiler that fails, naming the stage and the line of the model, and
    for `cuda_graphs` where a value is not on a CUDA device. `progress` is called with how many of
    how many calls are done.
    """
    checked(compiler)
    program = absorb(program)
    calls = [call for call in program.calls if rank is None or call.rank == rank]
    if cuda_graphs:
        check_devices(program, calls)
    elif compiler == "aot_eager":
        return {}
    name = compiler_name(compiler)
    pieces: dict[str, Run] = {}
    compiled: dict[str, Callable] = {}
    for index, call in enumerate(calls):
        body = program.body(call)
        try:
            run = _compiled(body, compiler, pieces, cuda_graphs)
        except Exception as error:
            raise ValueError(_failure(call, body, compiler, error)) from error
        compiled[call.node] = _runnable(_separated(run, _exported(program, call)), body)
        if run is body:
            log.debug(
                "compiler %s: %s: it has effects, so it runs as its graph",
                name,
                _words(call),
            )
        elif draws(body):
            log.debug("compiler %s: %s: its draws run as they are", name, _words(call))
        if progress:
            progress(index + 1, len(calls))
    log.debug("compiler %s: %d bodies, %d distinct pieces", name, len(calls), len(pieces))
    return compiled


def _runnable(run: Run, body: fx.GraphModule) -> Run:
    """A graph as its function, but for what members tell one another in it, which the pipeline
    binds."""
    return run.forward if isinstance(run, fx.GraphModule) and not tells(body) else run


def checked(compiler: object) -> None:
    """Raises ValueError unless this is a name of a compiler or a function."""
    if compiler not in COMPILERS and not callable(compiler):
        raise ValueError(
            f"compiler={compiler!r}: must be 'aot_eager', 'inductor' or a function of "
            "(fx.GraphModule, example tensors)"
        )


def compiler_name(compiler: object) -> str:
    """A compiler's name, the same in every process."""
    if isinstance(compiler, str):
        return compiler
    named = compiler if hasattr(compiler, "__qualname__") else type(compiler)
    return f"{named.__module__}.{named.__qualname__}"


@attrs.frozen
class BodyCompiler:
    """A compiler of lone bodies, with a Dynamo backend's signature, which treats them as
    `compile_bodies` does; for `cost.measure`, whose cache knows it by its text."""

    compiler: str | Compiler = attrs.field(
        repr=lambda compiler: (
            compiler_name(compiler) if hasattr(compiler, "__qualname__") else repr(compiler)
        )
    )

    def __call__(self, body: fx.GraphModule, examples: list[torch.Tensor]) -> Callable:
        return _compiled(body, self.compiler, {}, False)


def _compiled(
    body: fx.GraphModule, compiler: str | Compiler, pieces: dict[str, Run], cuda_graphs: bool
) -> Run:
    """A compiled body; `pieces` has those that were compiled so far, by fingerprints."""

    def compiled(piece: fx.GraphModule) -> Run:
        # The layers of a transformer are one piece: compiled once, not once a layer.
        key = fingerprint(piece)
        if key not in pieces:
            pieces[key] = compile_piece(piece, compiler)
        if not cuda_graphs:
            return pieces[key]
        if any(map(is_open, piece.graph.nodes)):
            return graphs_by_size(pieces[key])
        slots = [example(node.meta["val"]) for node in inputs_of(piece)]
        return as_cuda_graph(pieces[key], slots) if slots else pieces[key]

    nodes = list(body.graph.nodes)
    effects = any(has_effects(n) or _is_of_data(n) for n in nodes if n.op == "call_function")
    if effects:  # compilers may drop or move one
        return body
    return around_draws(body, compiled)


def _is_of_data(node: fx.Node) -> bool:
    """Whether a node computes a number that data tell, not sizes."""
    return is_number(node) and any(value_of(source) is not None for source in node.all_input_nodes)


def _exported(program: Program, call: Call) -> tuple[int, ...]:
    """Which results of a call are results of the program, in a storage of their own: the runtime
    adds to gradients in place, and users write to what they are given."""
    results = set(returned(program.module).values())
    body = program.body(call)
    users = [user for user in find_node(program.module, call.node).users if user in results]
    indices = [int(user.args[1]) for user in users]  # type: ignore[arg-type]
    own = own_results(body)
    return tuple(index for index in indices if index in own)


def _separated(run: Run, exported: tuple[int, ...]) -> Run:
    """Compiled code may return an input, or one storage twice, where the graph makes a new one
    (Inductor of torch 2.15 does so for `x + 0`)."""
    if not exported:
        return run
    if isinstance(run, fx.GraphModule):
        return copied(run, partial(_separate_output, exported)).module()
    return lambda *values: _own(run(*values), exported)


def _separate_output(exported: tuple[int, ...], node: fx.Node, copy: Copy) -> fx.Node | None:
    if node.op != "output":
        return None
    results = copy.read(node.args[0])
    return copy.graph.output(copy.graph.call_function(_own, (results, exported)))


def _own(values: Sequence[torch.Tensor], exported: tuple[int, ...]) -> list[torch.Tensor]:
    """Results of which some have a storage that nobody else has."""
    results = list(values)
    for index in exported:
        # If somebody else has the tensor itself, this view is a second one of its storage.
        results[index] = results[index].detach()
        if _torch.is_shared(results[index]):
            results[index] = results[index].clone()
    return results


def _words(call: Call) -> str:
    return f"stage {call.unit} {KIND_WORDS[call.kind].replace('_', ' ')}"


def _failure(call: Call, body: fx.GraphModule, compiler: str | Compiler, error: Exception) -> str:
    """What the user is told: the line of the operation that the error speaks of, or the first."""
    nodes = [node for node in body.graph.nodes if node.op == "call_function"]
    text = str(error)
    guilty = next((node for node in nodes if str(node.target) in text), nodes[0])
    first = next(iter(text.strip().splitlines()), "")
    return (
        f"compiler={compiler_name(compiler)}: {_words(call)}, from {source_line(guilty)}: "
        f"{type(error).__name__}: {first}; the same runs with compiler='aot_eager'"
    )
