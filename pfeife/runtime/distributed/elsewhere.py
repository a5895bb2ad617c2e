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

from pfeife.runtime.distributed.heartbeat import Doing

if TYPE_CHECKING:
    from pfeife.runtime.distributed.world import World

aten = torch.ops.aten
_PLACE = "a norm of gradients (torch.nn.utils.clip_grad_norm_)"


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
    """The gradient of a parameter that other ranks train. Norms of it are theirs; what changes each
    of its elements in place is done there; all else raises ValueError."""

    owned: Any  # its parameter's `Owned`
    norms: Norms
    overflow: bool  # whether any rank has a gradient that is not finite

    @staticmethod
    def __new__(cls, like: torch.Tensor, owned: Any, norms: Norms) -> "Elsewhere":
        """The gradient of a parameter, by its `owned` the same on every rank."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.owned, made.norms, made.overflow = owned, norms, False
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if isinstance(args[0], list | tuple) else args[:1]
        elsewhere = any(isinstance(one, Elsewhere) for one in first)
        changed = _changed if elsewhere and _changes_in_place(func) else _refused
        return _RULES.get(func, changed)(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"the gradient of {self.owned.name}, which another rank has"


def is_here(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether there is a gradient with values."""
    return gradient is not None and not isinstance(gradient, Elsewhere)


def arrived(parameters: Iterable[torch.Tensor], norms: Norms, overflow: bool) -> None:
    """After a backward: what other ranks have got for some parameters has its shapes here."""
    norms.forget()
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = Elsewhere(parameter, norms.known[parameter], norms)
        if isinstance(parameter.grad, Elsewhere):
            parameter.grad.overflow |= overflow


def _vector_norm(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    one, order, dims = (*args, *(2, None)[len(args) - 1 :])[:3]
    if dims or kwargs.get("dim"):
        return _refused(func, args, kwargs)
    norm = one.norms.take(one.owned.number, float(order))
    return torch.tensor(norm, dtype=kwargs.get("dtype") or _real(one.dtype), device=one.device)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _norms(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(one, *args[1:], **kwargs) for one in args[0]]


def _itself(func: Any, args: tuple, kwargs: dict[str, Any]) -> Elsewhere:
    one: Elsewhere = args[0]
    return one


def _changed(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operation that changes elements of one tensor, or of each of a list."""
    several = isinstance(args[0], list | tuple)
    if not several:
        args[0].norms.forget(args[0].owned.number)
        return args[0]
    kept = [index for index, one in enumerate(args[0]) if is_here(one)]
    for one in args[0]:
        if isinstance(one, Elsewhere):
            one.norms.forget(one.owned.number)
    count = len(args[0])
    rest = [
        [arg[index] for index in kept]
        if isinstance(arg, list | tuple) and len(arg) == count
        else arg
        for arg in args
    ]
    if kept:
        func(*rest, **kwargs)
    return None


def _unscaled(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """What GradScaler does: all ranks find out if any gradient is not finite."""
    _changed(func, args, kwargs)
    if any(one.overflow for one in args[0] if isinstance(one, Elsewhere)):
        args[1].fill_(1.0)


def _refused(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    listed = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
    name = next(one.owned.name for one in listed if isinstance(one, Elsewhere))
    raise ValueError(
        f"{func} reads the gradient of {name}, which another rank trains: of such a gradient there "
        "are norms here (torch.linalg.vector_norm, clip_grad_norm_), and what changes it in place "
        "is done where it is; compute other things of gradients where parameter.grad has values"
    )


def _changes_in_place(func: Any) -> bool:
    """Whether an operation changes its first argument, element by element and not at random."""
    written = func._schema.arguments[0].alias_info
    random = torch.Tag.nondeterministic_seeded in func.tags
    return written is not None and written.is_write and not random


_RULES: Mapping[Any, Callable[[Any, tuple, dict[str, Any]], Any]] = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _norms,
    aten.detach.default: _itself,
    aten.alias.default: _itself,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
}
