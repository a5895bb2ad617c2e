"""The tensors of what a step returns, by where they stand in it: which of them is the loss."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.frontend.batch import fields_of, key_of
from pfeife.frontend.watch.reachable_state import SIMPLE
from pfeife.ir.nodes import returned

Key = int | str | tuple[int | str, ...]
# Which result is the loss: a name, a path, an index, none of them, or the only one that can be.
Loss = Key | Literal["outside"] | None


@attrs.frozen
class Leaf:
    """A tensor of the step's own result: the keys, fields and indices that lead to it, and its
    index among the results of Dynamo's graph."""

    path: tuple[int | str, ...]
    index: int


def index_of(key: Key, leaves: Sequence[Leaf] | None, option: str) -> int:
    """The graph's result that is meant by a name, a path, or an index into the step's tensors.

    Without `leaves` only an index can be meant, of the graph's results. Raises ValueError for
    what the step does not return.
    """
    if leaves is None:
        if type(key) is int:
            return key
        raise ValueError(
            f"{option}={key!r}: the step returns an object whose tensors have no names for Pfeife; "
            "return a tuple, a dict or a dataclass"
        )
    path = (key,) if isinstance(key, str) else key
    for number, leaf in enumerate(leaves):
        if path in (number, leaf.path):
            return leaf.index
    raise ValueError(
        f"{option}={key!r}: there are no results {[key]}; the step returns "
        f"{[label(leaf.index, leaves) for leaf in leaves]}"
    )


def label(index: int, leaves: Sequence[Leaf] | None) -> Key:
    """How an option names one of the graph's results: by its only key, its path, or its number."""
    for number, leaf in enumerate(leaves or ()):
        if leaf.index == index:
            named = any(isinstance(key, str) for key in leaf.path)
            return number if not named else leaf.path if len(leaf.path) > 1 else leaf.path[0]
    return index


def leaves_of(module: fx.GraphModule) -> tuple[Leaf, ...] | None:
    """Where the tensors that the step returns stand in it, and which of the graph's results they
    are; None where that cannot be seen. Called while Dynamo compiles."""
    paths = _torch.result_paths()
    results = [node.name for node in returned(module)]
    if paths is None or any(node.name not in results for _, node in paths):
        return None
    return tuple(Leaf(path, results.index(node.name)) for path, node in paths)


def find_loss(
    results: Sequence[Any],
    loss: Loss,
    leaves: Sequence[Leaf] | None = None,
) -> int | None:
    """The index of the loss among examples of the graph's results, None when the loss is outside.

    Raises ValueError when several results could be the loss and `loss` does not say which.
    Where nothing trains, only `loss` makes a scalar the loss.
    """
    for index, value in enumerate(results):
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"result {index} of the step is {value!r}, which is not a tensor that the graph "
                "computes; return tensors only"
            )
    trains = any(value.requires_grad for value in results)
    scalars = [i for i, v in enumerate(results) if v.dim() == 0 and v.dtype.is_floating_point]
    # What the step only assigns to attributes is no loss, even if it is a differentiable scalar.
    own = range(len(results)) if leaves is None else {leaf.index for leaf in leaves}
    losses = [i for i in scalars if i in own and (results[i].requires_grad or not trains)]
    named = [label(index, leaves) for index in losses]
    if loss == "outside":
        return None
    if loss is not None:
        index = index_of(loss, leaves, "loss") if type(loss) is not int or leaves else loss
        if index not in losses:
            raise ValueError(
                f"loss={loss!r}: result {loss!r} is no differentiable scalar; those are {named}"
            )
        return index
    # No gradient tells the loss from a metric then.
    if not trains:
        return None  # nobody has said that this is a loss
    if len(losses) > 1:
        raise ValueError(
            f"results {named} are all differentiable scalars; say which is the loss with "
            f'loss={named[0]!r} and detach or add up the others, or loss="outside" if none is'
        )
    return losses[0] if len(losses) == 1 else None


def tensors_in(
    value: Any,
    path: tuple[int | str, ...] = (),
    above: tuple[int, ...] = (),
    kind: type | tuple[type, ...] = torch.Tensor,
) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """The tensors in what a step returns, or what else there is of a `kind`, and where they
    are."""
    # `above` has the objects on the way here: one may lead back to itself.
    for keys, leaf in pytree.tree_flatten_with_path(value)[0]:
        here = (*path, *map(key_of, keys))
        if isinstance(leaf, kind):
            yield here, leaf
        elif (
            not isinstance(leaf, (torch.Tensor, *SIMPLE, nn.Module, type)) and id(leaf) not in above
        ):
            inside = fields_of(leaf)
            if inside is None:
                inside = dict(getattr(leaf, "__dict__", {}))
            for name, field in inside.items():
                yield from tensors_in(field, (*here, name), (*above, id(leaf)), kind)
