"""Tensors of a batch that another rank has: here they have shapes, and no values."""

from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree


class Absent(torch.Tensor):
    """A tensor with the shape, dtype and device of one on rank 0.

    What a script does to a batch between its loader and the step gives other such tensors: slices,
    `to(device)`, a mask of them. What would read values is a ValueError.
    """

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device) -> "Absent":
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        leaves = pytree.tree_leaves((args, named))
        place = named.get("device") or next(one.device for one in leaves if isinstance(one, Absent))
        if "device" in named:
            named["device"] = "meta"
        args, named = pytree.tree_map_only(torch.Tensor, _shape, (args, named))
        try:
            found = func(*args, **named)
        except (NotImplementedError, RuntimeError) as error:  # data would decide the shape
            raise _refused(func) from error
        if not all(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(found)):
            raise _refused(func)
        made = pytree.tree_map_only(torch.Tensor, lambda o: cls(o, torch.device(place)), found)
        return made

    def pin_memory(self, *args: Any) -> "Absent":
        """Itself: there is nothing to pin."""
        return self

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise _refused("numpy()")

    def tolist(self) -> NoReturn:
        raise _refused("tolist()")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({self.dtype} {list(self.shape)} on {self.device}: rank 0 has the values)"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refused("saving it")


def _shape(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _refused(what: Any) -> ValueError:
    return ValueError(
        f"{what} reads values of a batch that rank 0 alone has: do it in the loader, or in a step "
        'that is compiled with batch="rank0", or pass values=True to from_rank0'
    )
