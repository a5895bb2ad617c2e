"""A call's arguments: which of their tensors are the batch, and their cut into microbatches."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pfeife import _torch


@attrs.frozen(eq=False)
class Leaf:
    """A tensor among the arguments. `dim` is where the batch is in it, None if it has none and
    goes whole to every microbatch; `first` is what the first microbatch has of it."""

    name: str
    whole: torch.Tensor
    dim: int | None
    first: torch.Tensor


@attrs.frozen(eq=False)
class Arguments:
    """The arguments of one call: `args` and `kwargs` are those of the first microbatch, and `made`
    makes such ones of other tensors. `others` has what is no tensor, by its name."""

    leaves: tuple[Leaf, ...]
    others: Mapping[str, Any]
    microbatches: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Callable[[Iterable[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """The index of the leaf that a tensor of the first microbatch belongs to, by identity."""
        return {id(leaf.first): index for index, leaf in enumerate(self.leaves)}

    def whole(self, value: Any) -> Any:
        """The caller's own tensor for one of the first microbatch; other values as they are."""
        index = self.places.get(id(value)) if isinstance(value, torch.Tensor) else None
        return value if index is None else self.leaves[index].whole

    def widen(self) -> None:
        """Gives the whole values to who has kept a tensor of the first microbatch: an object that
        the step returns, or a list or an attribute of the step's own."""
        for leaf in self.leaves:
            leaf.first.data = leaf.whole

    def grown(self, times: int) -> tuple["Leaf", ...]:
        """The leaves of a first microbatch that has so many times as many rows."""
        grown_tensors = {id(leaf.first): _grown(leaf, times) for leaf in self.leaves}
        return tuple(
            attrs.evolve(leaf, first=grown_tensors[id(leaf.first)]) for leaf in self.leaves
        )

    @property
    def rows(self) -> int:
        """Rows of a microbatch; 0 if nothing is cut."""
        cut = [leaf.first.shape[leaf.dim] for leaf in self.leaves if leaf.dim is not None]
        return min(cut, default=0)

    @property
    def cut(self) -> str:
        """What a microbatch has of the tensors, in words; "" where that is the whole batch."""
        if self.microbatches == 1:
            return ""
        parts = (
            f"{leaf.name} {list(leaf.first.shape)} of {list(leaf.whole.shape)}"
            for leaf in self.leaves
        )
        return f"A microbatch has {', '.join(parts)}"


class Indivisible(ValueError):
    """A batch that does not divide into the microbatches that were asked for; into `fits` it does,
    or into none (0) that are as many for each of several replicas."""

    def __init__(self, message: str, fits: int, note: str = ""):
        pass_these = f"pass microbatches={fits}, or " if fits else "pad it, or pass "
        super().__init__(f"{message}; {pass_these}drop_last=True in the loader{note}")
        self.said, self.fits = message.removeprefix("microbatch: "), fits


class Cutter:
    """Cuts the arguments of a step's calls into microbatches.

    `in_dims` is a prefix of the positional arguments, as in torch.vmap, or has the dimension of
    some arguments by name, None for those that go whole to every microbatch; what it leaves out is
    cut along dimension 0. `fit_smaller` says whether a smaller batch that does not divide as the
    first one did runs with as many microbatches as it needs to have no more rows in each; so does
    any batch without gradients.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        in_dims: Any,
        microbatches: int,
        replicas: int = 1,
        fit_smaller: bool = True,
    ):
        self.in_dims, self.microbatches = in_dims, microbatches
        self.replicas, self.fit_smaller = replicas, fit_smaller
        self.said = isinstance(in_dims, Mapping) or in_dims != 0
        self.name = getattr(step, "__qualname__", type(step).__name__)
        self.signature = _signature(step)
        self.most = 0  # rows of the largest microbatch so far

    def __call__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], apart: int = 1
    ) -> Arguments:
        """Raises ValueError for arguments that cannot be cut; they are those of one of so many
        batches that are `apart`."""
        arguments, names = (args, dict(kwargs)), self._names(args)
        opened = _opened(arguments)
        pairs, structure = pytree.tree_flatten_with_path(opened)
        dims = _torch.leaf_dims(self._dims(args, kwargs), opened)
        named = [
            (_named(path, names), value, dim)
            for (path, value), dim in zip(pairs, dims, strict=True)
        ]
        for name, value, _ in named:
            _check_kind(name, value)
        tensors = [(n, v, _dim(n, v, d)) for n, v, d in named if _is_tensor(v)]
        rows = self._rows({n: v.shape[d] for n, v, d in tensors if d is not None})
        count = self._count(rows, self.microbatches // apart, self.replicas // apart)
        # By identity: one tensor that comes twice stays one.
        firsts = {(id(value), dim): _first(value, dim, count) for _, value, dim in tensors}
        leaves = [Leaf(name, value, dim, firsts[id(value), dim]) for name, value, dim in tensors]

        def made(tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            rest = iter(tensors)
            values = [next(rest) if _is_tensor(value) else value for _, value, _ in named]
            remade: tuple[tuple[Any, ...], dict[str, Any]] = _closed(
                arguments, pytree.tree_unflatten(values, structure)
            )
            return remade

        plain_values = {name: value for name, value, _ in named if not _is_tensor(value)}
        call = Arguments(
            tuple(leaves), plain_values, count, *made(leaf.first for leaf in leaves), made
        )
        self.most = max(self.most, call.rows)
        return call

    def mismatch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TypeError | None:
        """What is wrong with arguments that the step does not take."""
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            return TypeError(f"{self.name}(): {error}")
        return None

    def _dims(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not isinstance(self.in_dims, Mapping):
            # As in torch.vmap, a prefix is about positional arguments alone.
            return self.in_dims, dict.fromkeys(kwargs, 0)
        names = self._names(args)
        unknown = sorted(map(str, set(self.in_dims) - {*names, *kwargs}))
        if unknown:
            raise ValueError(f"in_dims: the step has no arguments {unknown}; it has {names}")
        return (
            tuple(self.in_dims.get(name, 0) for name in names),
            {name: self.in_dims.get(name, 0) for name in kwargs},
        )

    def _names(self, args: tuple[Any, ...]) -> list[str]:
        """A name for every positional argument."""
        names: list[str] = []
        for parameter in self.signature.parameters.values():
            if parameter.kind == parameter.VAR_POSITIONAL:
                names += [f"{parameter.name}.{i}" for i in range(len(args) - len(names))]
            elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
        return [*names, *(f"args.{i}" for i in range(len(names), len(args)))][: len(args)]

    def _rows(self, sizes: Mapping[str, int]) -> int:
        """The rows of the batch. Raises ValueError if the arguments do not agree on them."""
        # What has the fewest rows is the batch: others may have several rows for each of its rows.
        fewest = min(sizes.values(), default=0)
        several = {name: size for name, size in sizes.items() if size != fewest}
        # Who says where the batch is may have several rows of an input for each of its rows.
        wrong = {n: s for n, s in several.items() if not fewest or not self.said or s % fewest}
        if wrong:
            raise ValueError(
                f"microbatch: the inputs have {dict(sizes)} rows, which do not belong together: "
                "every tensor argument is cut along dimension 0. Say with in_dims where the batch "
                f"is: in_dims={{{next(iter(wrong))!r}: None}} hands an argument over whole"
            )
        if sizes and not fewest:
            empty = min(sizes, key=sizes.__getitem__)
            raise ValueError(f"microbatch: the batch is empty: {empty} has no rows")
        return fewest

    def _count(self, rows: int, wanted: int, replicas: int) -> int:
        """Into how many microbatches so many rows are cut, for so many replicas."""
        if not rows or rows % wanted == 0:
            return wanted
        # A batch with gradients takes another count only if it is smaller than one before: with 0,
        # none fits.
        most = self.most if rows < self.most * wanted else 0
        if not torch.is_grad_enabled():  # an evaluation, whose first batch may be its only one
            most = max(most, rows // wanted, 1)
        for count in range(1, rows + 1):
            # No microbatch may be larger than one that has fitted into memory before.
            small = rows // count <= most
            if self.fit_smaller and small and rows % count == 0 and count % replicas == 0:
                return count
        fitting = (n for n in range(wanted, 0, -1) if rows % n == 0 and n % replicas == 0)
        divides = next(fitting, 0)
        times = self.replicas // replicas
        each = f", {wanted} for each of {times} replicas" if times > 1 else ""
        if replicas > 1 and not divides:
            each = f", nor into any number that gives each of {replicas} replicas as many"
        message = (
            f"microbatch: a batch of {rows} rows does not divide into {wanted} microbatches{each}"
        )
        first = not self.most and torch.is_grad_enabled()
        note = " (the first batch that trains must; later smaller ones may take other numbers)"
        raise Indivisible(message, divides * times, note if first else "")


def function_of(step: Callable[..., Any]) -> Callable[..., Any]:
    """What a call of a step runs: a module's forward."""
    return step.forward if isinstance(step, nn.Module) else step


def _signature(step: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function_of(step))
    except (TypeError, ValueError):  # a builtin
        return inspect.signature(lambda *args, **kwargs: None)


def _named(path: Sequence[Any], names: Sequence[str]) -> str:
    """`[0]["1"]["x"]` is the x of the second positional argument, `[1]["y"]` the argument y."""
    kind, first, *rest = (str(key_of(key)) for key in path)
    return ".".join([names[int(first)] if kind == "0" else first, *rest])


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor that is not trained."""
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def _dim(name: str, value: torch.Tensor, dim: Any) -> int | None:
    """Where a tensor is cut, counted from the front; None if it goes whole to every microbatch."""
    if dim is None or not value.dim():
        return None
    if type(dim) is not int:
        raise ValueError(f"in_dims: {name} has {dim!r}, which is no number of a dimension or None")
    if not -value.dim() <= dim < value.dim():
        raise ValueError(
            f"in_dims: {name}, a tensor of {value.dim()} dimensions, has no dimension {dim}"
        )
    return dim % value.dim()


def _grown(leaf: Leaf, times: int) -> torch.Tensor:
    if leaf.dim is None:
        return leaf.first
    several = _laid_as(leaf.first, torch.cat([leaf.first] * times, leaf.dim).detach(), leaf.dim)
    return several.requires_grad_(leaf.first.requires_grad)


def _laid_as(first: torch.Tensor, grown: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor that has grown along a dimension, in memory as it was: a view of it (flatten) is a
    copy where it was one. Contiguous where elements share memory."""
    # The layout decides which kernel runs, and whether a `view` fails: more rows have the same.
    at = first.stride(dim)
    # What lies outside of the grown dimension is so many times as far apart.
    strides = [s * grown.shape[dim] // first.shape[dim] if s > at else s for s in first.stride()]
    end = 1
    for stride, size in sorted(zip(strides, grown.shape, strict=True)):
        if size > 1 and stride < end:
            return grown
        end = stride * size if size > 1 else end
    return torch.empty_strided(grown.shape, strides, dtype=grown.dtype, device=grown.device).copy_(
        grown
    )


def _first(value: torch.Tensor, dim: int | None, count: int) -> torch.Tensor:
    """What the first microbatch has of a tensor: a leaf of its own for autograd."""
    part = value if dim is None else value.narrow(dim, 0, value.shape[dim] // count)
    # Detached: what is asked for the gradient of a microbatch must not run into the caller's graph.
    part = part.detach().requires_grad_(value.requires_grad)
    _torch.copy_marks(value, part)
    return part


def _check_kind(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout != torch.strided:
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise ValueError(
                f"input {name} is a {kind} tensor, which has no rows of equal size to cut; pass "
                "dense tensors (padded, with a mask)"
            )
    # It would be a constant of the graph: the first microbatch's for all of them.
    elif hasattr(value, "__array__") and getattr(value, "ndim", None):
        raise ValueError(
            f"input {name} is a {type(value).__name__}, not a tensor: pass torch.from_numpy(...)"
        )


def _opened(value: Any) -> Any:
    """A value in which mappings and dataclasses that torch's pytrees take for leaves are dicts."""

    def opened(leaf: Any) -> Any:
        fields = fields_of(leaf)
        return leaf if fields is None else {name: _opened(field) for name, field in fields.items()}

    return pytree.tree_map(opened, value)


def _closed(like: Any, opened: Any) -> Any:
    """A value as the one that was `_opened`, with what stands in its place now."""

    def closed(leaf: Any, part: Any) -> Any:
        fields = fields_of(leaf)
        if fields is None:
            return part
        return _remade(leaf, {name: _closed(fields[name], part[name]) for name in fields})

    leaves, structure = pytree.tree_flatten(like)
    parts = structure.flatten_up_to(opened)
    return pytree.tree_unflatten(list(map(closed, leaves, parts)), structure)


def key_of(key: Any) -> int | str:
    """An index, a name or a key of one of torch's pytrees."""
    for name in ("idx", "key", "name"):
        if hasattr(key, name):
            value = getattr(key, name)
            return value if isinstance(value, int | str) else str(value)
    return str(key)


def fields_of(leaf: Any) -> dict[str, Any] | None:
    """What is inside of a mapping or a dataclass, None for anything else; a mapping that cannot be
    written to could not be made anew of microbatches."""
    # Of these torch's pytrees know only the exact types that are registered, such as dict.
    if isinstance(leaf, MutableMapping):
        return {str(name): leaf[name] for name in leaf}
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return None


def _remade(like: Any, fields: Mapping[str, Any]) -> Any:
    """A mapping or a dataclass of the same kind with other contents."""
    remade = copy.copy(like)
    if isinstance(like, Mapping):
        for name in like:
            remade[name] = fields[str(name)]
    else:
        for name, value in fields.items():
            object.__setattr__(remade, name, value)  # a frozen one, too
    return remade
