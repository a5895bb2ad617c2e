"""Gradients that other ranks have: here they are shapes, of which norms can be asked for.

                 rank 0                rank 1
    weight.grad  values                Elsewhere       after a backward
    bias.grad    Elsewhere             values
    norms        |w|, |bias| told      |w| told, |b|   torch.nn.utils.clip_grad_norm_ is that of all
    mul_         values                nothing         each rank scales its own

Whatever reads a norm does so on every rank, in one order. The first norm that a rank asks for makes
all ranks tell one another those of their own gradients; each of the others is then known until
somebody changes it, or reads it again.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils import _pytree as pytree

from pfeife.runtime.distributed.heartbeat import Doing
from pfeife.runtime.distributed.nan_memory import nan_of

if TYPE_CHECKING:
    from pfeife.runtime.distributed.world import World

aten = torch.ops.aten
_PLACE = (
    "a norm of gradients (torch.nn.utils.clip_grad_norm_; where one rank trains all of these "
    "parameters: pfeife.clip_grad_norm_)"
)


class Norms:
    """The norms of the gradients of all ranks. `known` are the tensors that some rank trains with
    their owners, `owned` these by their numbers, the same on every rank."""

    def __init__(self, known: Mapping[torch.Tensor, Any], owned: Mapping[int, Any]):
        self.known, self.owned = known, owned
        self.world: World | None = None  # the latest
        self.told: dict[float, dict[int, float]] = {}  # by order and number

    def take(self, number: int, order: float) -> float:
        """The norm of a gradient that another rank has, 0.0 if it has none; it is told once
        (collective if it is not told)."""
        if number not in self.told.get(order, {}):
            self.told[order] = self._asked(order)
        return self.told[order].pop(number)

    def forget(self, number: int | None = None) -> None:
        """A gradient has been changed, on every rank; all of them without its number."""
        for norms in self.told.values():
            norms.clear() if number is None else norms.pop(number, None)

    def _asked(self, order: float) -> dict[int, float]:
        world = self.world
        assert world is not None
        with world.busy(lambda: Doing(_PLACE)):
            world.agreed(f"the norm of order {order}", _PLACE)
            mine = torch.zeros(len(self.owned), dtype=torch.float64, device=world.device)
            for tensor, owned in self.known.items():
                if is_here(tensor.grad):
                    mine[owned.number] = _norm(tensor.grad, order)
            found = world.gather(mine)
        return {n: float(found[owned.first][n]) for n, owned in self.owned.items()}


def _norm(gradient: torch.Tensor, order: float) -> torch.Tensor:
    values = gradient.detach()
    if values.layout != torch.strided:
        values = values.coalesce().values()
    found: torch.Tensor = torch.linalg.vector_norm(values, order)
    return found


class Elsewhere(torch.Tensor):
    """The gradient of a parameter that other ranks train, or what was computed of it.

    Norms of the gradient are those of its owner. What changes each of its elements in place is done
    there; what is computed of each, or along some dimensions, is elsewhere too; a tensor of this
    rank that it is written into becomes NaN. Random numbers of its shape are drawn here as there.
    All else raises ValueError.
    """

    owned: Any  # its parameter's `Owned`
    norms: Norms
    computed: bool  # of the gradient, which may be a view of it: then nobody knows its norm
    overflow: bool  # whether any rank has a gradient that is not finite

    @staticmethod
    def __new__(
        cls, behind: torch.Tensor, owned: Any, norms: Norms, computed: bool = False
    ) -> "Elsewhere":
        """One with the shape and dtype of another tensor, which is NaN: torch assigns a tensor to
        the `data` of a parameter without asking its class, and then looks at its memory. `owned` is
        the same on every rank."""
        own = behind.data  # with a version of its own
        made: Any = torch.Tensor._make_subclass(cls, own)
        made.owned, made.norms, made.computed, made.overflow = owned, norms, computed, False
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = _RULES.get(func) or (_written if _writes(func) else _computed)
        return rule(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"the gradient of {self.owned.name}, which another rank has"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(f"{self!r}: it can be saved there")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def share_memory_(self) -> Any:
        """Raises ValueError: torch would look for the memory, and crash."""
        raise _refused("share_memory_", (self,), {})

    def change(self) -> None:
        """It has been changed in place, on every rank, and so may be what it is a view of."""
        self.norms.forget(self.owned.number)


def is_here(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether there is a gradient with values."""
    return gradient is not None and not isinstance(gradient, Elsewhere)


def arrived(parameters: Iterable[torch.Tensor], norms: Norms, overflow: bool) -> None:
    """After a backward: what other ranks have got for some parameters has its shapes here."""
    norms.forget()
    for parameter in parameters:
        if parameter.grad is None:
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # of newer torch
            same = dtype == parameter.dtype  # then the parameter has NaN
            behind = parameter.detach() if same else _nothing(parameter, dtype, parameter.device)
            parameter.grad = Elsewhere(behind, norms.known[parameter], norms)
        if isinstance(parameter.grad, Elsewhere):
            parameter.grad.overflow |= overflow


def _vector_norm(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    one, order, dims = (*args, *(2, None)[len(args) - 1 :])[:3]
    if dims or kwargs.get("dim"):
        return _along(func, args, kwargs)
    if one.computed:
        raise _refused(func, args, kwargs)
    norm = one.norms.take(one.owned.number, float(order))
    dtype = one.dtype.to_real() if one.dtype.is_complex else one.dtype
    return torch.tensor(norm, dtype=kwargs.get("dtype") or dtype, device=one.device)


def _vector_norms(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(one, *args[1:], **kwargs) for one in args[0]]


def _itself(func: Any, args: tuple, kwargs: dict[str, Any]) -> Elsewhere:
    one: Elsewhere = args[0]
    return one


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operation that changes each element of a tensor in place, or of each of a list."""
    if not isinstance(args[0], list | tuple):
        _write(args[0])
        return args[0]
    count = len(args[0])
    beside = [arg for arg in args if isinstance(arg, list | tuple) and len(arg) == count]
    here = [i for i in range(count) if not any(isinstance(arg[i], Elsewhere) for arg in beside)]
    for index in set(range(count)) - set(here):
        _write(args[0][index])
    if here:
        rest = ([arg[i] for i in here] if any(arg is b for b in beside) else arg for arg in args)
        func(*rest, **kwargs)
    return None


def _write(target: torch.Tensor) -> None:
    """What another rank has was written into a tensor."""
    if isinstance(target, Elsewhere):
        target.change()
    else:
        target.fill_(float("nan"))


def _unscaled(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """What GradScaler does: all ranks find out if any gradient is not finite."""
    _written(func, args, kwargs)
    if any(one.overflow for one in args[0] if isinstance(one, Elsewhere)):
        args[1].fill_(1.0)


def _computed(func: Any, args: tuple, kwargs: dict[str, Any]) -> Elsewhere:
    """An operation that computes something of each element, or gives them another shape."""
    if not _keeps_elements(func):
        raise _refused(func, args, kwargs)
    return _along(func, args, kwargs)


def _along(func: Any, args: tuple, kwargs: dict[str, Any]) -> Elsewhere:
    """What an operation computes, which reads nothing of another shape, as a shape."""
    shapes = pytree.tree_map_only(torch.Tensor, _shape, (args, kwargs))
    found = func(*shapes[0], **shapes[1])
    if not isinstance(found, torch.Tensor):
        raise _refused(func, args, kwargs)
    one = _of(args, kwargs)
    behind = _nothing(found, found.dtype, one.device)
    return Elsewhere(behind, one.owned, one.norms, computed=True)


def _nothing(like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN in the shape of another tensor, without memory; zeros where there is no NaN."""
    if device.type == "cpu":
        found = nan_of(like.shape, like.stride(), dtype)
        if found is not None:
            return found
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(like.shape)


def _made(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """A new tensor of this rank with such a shape."""
    kwargs = {**kwargs, "device": kwargs.get("device") or args[0].device}
    found: torch.Tensor = func(_shape(args[0]), *args[1:], **kwargs)
    return found


def _shape(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _of(args: tuple, kwargs: dict[str, Any]) -> Elsewhere:
    """The first of an operation's arguments that other ranks have."""
    leaves = pytree.tree_leaves((args, kwargs))
    return next(one for one in leaves if isinstance(one, Elsewhere))


def _refused(func: Any, args: tuple, kwargs: dict[str, Any]) -> ValueError:
    return ValueError(
        f"{func} reads the gradient of {_of(args, kwargs).owned.name}, which another rank trains: "
        "of such a gradient there are norms here (torch.linalg.vector_norm, clip_grad_norm_), and "
        "what computes or changes each of its elements is done where it is; read other things of "
        "gradients on the ranks that have them"
    )


def _writes(func: Any) -> bool:
    """Whether an operation changes its first argument, not at random."""
    written = func._schema.arguments[0].alias_info if func._schema.arguments else None
    random = torch.Tag.nondeterministic_seeded in func.tags
    return written is not None and written.is_write and not random


def _keeps_elements(func: Any) -> bool:
    returned = [one.alias_info for one in func._schema.returns]
    views = any(one is not None and not one.is_write for one in returned)
    return torch.Tag.pointwise in func.tags or views or func in _COPIES


_COPIES = (aten.clone.default, aten._to_copy.default)
_LIKE = (
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty),
    *(aten.rand_like, aten.randn_like),
)
_ALONG = (  # some dimensions
    *(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default),
    aten.var.correction,
)
_RULES: Mapping[Any, Callable[[Any, tuple, dict[str, Any]], Any]] = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _vector_norms,
    **{operation.default: _made for operation in _LIKE},
    **dict.fromkeys(_ALONG, _along),
    aten.detach.default: _itself,
    aten.alias.default: _itself,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
}
