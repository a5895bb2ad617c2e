"""What an optimizer keeps beside the parameters, in bytes."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

# An optimizer, its class, the name of torch's class, or bytes for each element of a parameter.
Optimizer = torch.optim.Optimizer | type[torch.optim.Optimizer] | str | float | int


def optimizer_of(optimizer: Any) -> Any:
    """The same with a name's class in its place. Raises ValueError for what is no optimizer."""
    classes = {name.lower(): kind for name, kind in vars(torch.optim).items() if _is_class(kind)}
    resolved = classes.get(optimizer.lower()) if isinstance(optimizer, str) else optimizer
    is_number = (
        isinstance(resolved, int | float)
        and type(resolved) is not bool
        and 0 <= resolved < math.inf
    )
    if is_number or isinstance(resolved, torch.optim.Optimizer) or _is_class(resolved):
        return resolved
    raise ValueError(
        f"optimizer={optimizer!r}: must be an optimizer, its class, the name of one in torch.optim "
        "such as 'adamw', or the bytes that it keeps for each element of a parameter"
    )


def _is_class(kind: Any) -> bool:
    base = torch.optim.Optimizer
    return isinstance(kind, type) and issubclass(kind, base) and kind is not base


def optimizer_name(optimizer: Optimizer | None) -> str:
    """The same text on every rank."""
    if isinstance(optimizer, str | int | float | None):
        return repr(optimizer)
    return (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__


def optimizer_bytes(optimizer: Optimizer) -> Callable[[Iterable[int], torch.dtype], int]:
    """A function from a parameter's shape and dtype to the bytes of its optimizer state.

    The real one's class is asked: it steps tiny parameters with the same defaults, and what it
    then keeps is scaled up. The function raises ValueError where that fails.
    """
    resolved = optimizer_of(optimizer)
    if isinstance(resolved, int | float):
        return lambda shape, dtype: math.ceil(resolved * math.prod(shape))
    kind = resolved if isinstance(resolved, type) else type(resolved)
    options = {} if isinstance(resolved, type) else resolved.defaults

    # A model has a few shapes up to the number of dimensions: each is stepped once.
    @functools.cache
    def kept(small: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        parameter = torch.zeros(small, dtype=dtype, requires_grad=True)
        parameter.grad = torch.zeros_like(parameter)
        accepted = inspect.signature(kind).parameters  # AdamW has defaults that it does not take
        try:
            trial: Any = kind([parameter], **{n: options[n] for n in options if n in accepted})
            trial.step()
        except Exception as error:
            raise ValueError(
                f"optimizer={kind.__name__}: what it keeps for a parameter of {len(small)} "
                f"dimensions cannot be seen ({type(error).__name__}: {error}); pass the bytes for "
                "each element of a parameter, such as optimizer=8"
            ) from error
        return [v for v in trial.state[parameter].values() if isinstance(v, torch.Tensor)]

    def state(shape: Iterable[int], dtype: torch.dtype) -> int:
        whole = tuple(shape)
        # A size of 2 tells a dimension that the state has from one that it has factored out (1).
        small = tuple(min(size, 2) for size in whole)
        return sum(_scaled(value, small, whole) for value in kept(small, dtype))

    return state


def _scaled(value: torch.Tensor, small: tuple[int, ...], whole: tuple[int, ...]) -> int:
    """Bytes of a tensor of the state, for the whole parameter; factored ones have sizes of 1."""
    if value.dim() != len(small):  # such as a counter of steps
        return value.nbytes
    pairs = zip(value.shape, small, whole, strict=True)
    sizes = [full if size == small_size else size for size, small_size, full in pairs]
    return math.prod(sizes) * value.itemsize
