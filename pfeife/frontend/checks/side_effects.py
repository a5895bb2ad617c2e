"""Whether a step does the same once its Python has run: what it assigns in its first microbatch, a
flag or a first value, the later ones of a call would read, but they run the first one's graph."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife._torch import is_absent
from pfeife.frontend.arguments import Given, Inputs
from pfeife.frontend.batch import Arguments, Leaf
from pfeife.frontend.deferred.tensors import check_values
from pfeife.frontend.describe import describe
from pfeife.frontend.dynamo import dynamo_graph
from pfeife.frontend.watch.restore import alike, torchs_generators
from pfeife.ir.nodes import returned


@attrs.frozen(eq=False)
class _Run:
    """What one microbatch gave: the results by their paths, the state that it changed by the
    identity of its tensors, and what it `left` behind: an object, an attribute of it and its value,
    or a container, None and its entries."""

    values: Mapping[Any, torch.Tensor]
    left: Sequence[tuple[Any, str | None, Any]]


def check_again(step: Callable[..., Any], call: Arguments) -> None:
    """Raises ValueError if a step computes something else of the second microbatch of a call after
    what it assigns in the first one: numbers, flags and first values of attributes.

        first       if not self.ready: ...; self.ready = True      what it assigns
        once        self.ready is False                            values of the second microbatch
        again       self.ready is True                             the same values of it, or else
    """
    args, kwargs = call.made(_second(leaf) for leaf in call.leaves)
    first = dynamo_graph(step, call.args, call.kwargs, _ran)
    # The second microbatch twice: before what the first one assigns, and after it.
    once = dynamo_graph(step, args, kwargs, _ran)
    try:
        with _left_behind(first):
            again = dynamo_graph(step, args, kwargs, _ran)
    except ValueError as error:  # what it reads is not as before, or nobody knows it
        raise _otherwise(once) from error
    # Of both: what only one of the runs has given differs from the None of the other.
    for key in {*once.values, *again.values}:
        if not alike(once.values.get(key), again.values.get(key)):
            raise _otherwise(once)


def _otherwise(run: _Run) -> ValueError:
    """What to say of a step whose next microbatch would compute something else."""
    kinds = ((type(holder).__name__, name) for holder, name, _ in run.left)
    names = sorted({f"{kind}.{name}" if name else f"an entry of a {kind}" for kind, name in kinds})
    return ValueError(
        f"the step assigns {', '.join(names)} and then computes something else, but all "
        "microbatches of a call run what the first one does. Where that makes something ready, "
        "call the model once before it is compiled; keep a count in a buffer, and tensors that go "
        "from call to call in attributes of their own, not in tuples"
    )


def check_settled(
    step: Callable[..., Any],
    call: Arguments,
    caller_tensors: Mapping[int, Given],
    graph: str,
    inputs: Inputs,
) -> None:
    """Raises ValueError if a step, which has just set numbers in lists, dicts or cells for the
    first time, would set others or compute something else in its next microbatch: all have had the
    same. `graph` is Dynamo's from before, as a text, and `inputs` are those of it."""
    # Dynamo puts such numbers into its graph as constants: another graph has computed with others.
    names = list(inputs.numbers)

    def read(module: fx.GraphModule, examples: list[Any]) -> tuple[str, Inputs]:
        return str(module.graph), describe(module, examples, caller_tensors=caller_tensors)

    with _torch.opened([*_open_sizes(call, inputs)]):  # else it is another graph for its sizes
        other, then = dynamo_graph(step, call.args, call.kwargs, read, dynamic=None)
    moving = [n for n in names if n in then.numbers and then.numbers[n] != inputs.numbers[n]]
    if moving or other != graph:
        name = (moving or names)[0]
        raise ValueError(
            f"the step sets {name} (to {inputs.numbers[name]!r} in a first microbatch), and the "
            "next microbatch would see that, but all have computed with what was there before: "
            "keep it in a tensor, such as a buffer, or set it outside of the step (for what is "
            "set once, run the step once without pfeife)"
        )


def _open_sizes(call: Arguments, inputs: Inputs) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """The tensors of a call with the dimensions that Dynamo has left open."""
    for argument in inputs.arguments:
        if argument.given and isinstance(argument.example, torch.Tensor):
            shape = enumerate(argument.example.shape)
            yield (
                call.leaves[argument.position].first,
                [dim for dim, size in shape if type(size) is not int],
            )


def _second(leaf: Leaf) -> torch.Tensor:
    """What the second microbatch has of a tensor."""
    if leaf.dim is None:
        return leaf.first
    rows = leaf.first.shape[leaf.dim]
    part = leaf.whole.detach().narrow(leaf.dim, rows, rows)
    return part.requires_grad_(leaf.first.requires_grad)


def _ran(module: fx.GraphModule, examples: list[Any]) -> _Run:
    """Runs Dynamo's graph on copies of its inputs. Called while Dynamo compiles."""
    check_values(examples, "the step sets attributes, and is run twice to see what they do")
    given = [_given(example, at) for at, example in enumerate(examples)]
    # What the graph writes to is a copy; of other ranks' parameters, which it does not write to,
    # there is none, since there may be no room for them here.
    copies = [
        value.clone() if isinstance(value, torch.Tensor) and not _is_elsewhere(example) else value
        for example, value in zip(examples, given, strict=True)
    ]
    paths = _torch.result_paths() or [
        ((index,), node) for index, node in enumerate(returned(module))
    ]
    # From one seed, so that what is drawn makes no difference between two runs.
    with torch.no_grad(), torchs_generators(seed=0):
        results = fx.Interpreter(module).run(*copies)
    # By where a result stands in what the step returns: the graphs may order theirs otherwise.
    by_name = dict(zip((node.name for node in returned(module)), results, strict=True))
    values: dict[Any, torch.Tensor] = {
        path: by_name[node.name] for path, node in paths if node.name in by_name
    }
    for own, before, value in zip(examples, given, copies, strict=True):
        if value is not before and not alike(before, value):
            values[id(own)] = value
    inputs = zip(module.graph.find_nodes(op="placeholder"), copies, strict=True)
    node_values = {node.name: value for node, value in inputs} | by_name

    def value_of(leaf: Any) -> Any:
        if leaf is _torch.OPAQUE:
            return _Unknown()
        return node_values.get(leaf.name) if isinstance(leaf, fx.Node) else leaf

    changes = [
        *((holder, name, new) for holder, name, _, new in _torch.changed_attributes()),
        *_torch.changed_containers(),
    ]
    return _Run(
        values, [(holder, name, pytree.tree_map(value_of, new)) for holder, name, new in changes]
    )


def _given(example: Any, at: int) -> Any:
    """The values of an input; of one that other ranks have, numbers in their place, the same in
    each run: what a step assigns makes a difference with these, too."""
    if not isinstance(example, torch.Tensor):
        return example
    if not is_absent(example):
        return example.detach()
    if not example.is_floating_point():
        return torch.zeros(example.shape, dtype=example.dtype, device=example.device)
    if not _is_elsewhere(example):
        return _drawn(example.shape, example, at)
    # element [i, j] is number i + j: no two rows or columns are alike, and it takes no memory
    numbers = _drawn((sum(example.shape) + 1,), example, at)
    return numbers.as_strided(example.shape, (1,) * example.dim())


def _is_elsewhere(example: Any) -> bool:
    """Whether an input is a parameter that other ranks have."""
    return isinstance(example, torch.nn.Parameter) and is_absent(example)


def _drawn(shape: Sequence[int], like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator).to(like.device, like.dtype)


class _Unknown:
    """Stands for an object that a step has made, of which nobody knows what is in it."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("the step reads an object that it has made in the microbatch before")

    def __getitem__(self, key: Any) -> Any:
        return self.entries


_MISSING = object()


@contextlib.contextmanager
def _left_behind(run: _Run) -> Iterator[None]:
    """While attributes and containers have what a run has left in them."""
    before = [
        (holder, name, copy.copy(holder) if name is None else getattr(holder, name, _MISSING))
        for holder, name, _ in run.left
    ]
    try:
        for holder, name, value in run.left:
            _put(holder, name, value)
        yield
    finally:
        for holder, name, value in before:
            _put(holder, name, value)


def _put(holder: Any, name: str | None, value: Any) -> None:
    """Sets an attribute, or takes it away, or the entries of a container."""
    if name is not None:
        if value is not _MISSING:
            setattr(holder, name, value)
        elif hasattr(holder, name):
            delattr(holder, name)
    else:
        holder.clear()
        add = holder.update if isinstance(holder, dict) else holder.extend
        add(value)
