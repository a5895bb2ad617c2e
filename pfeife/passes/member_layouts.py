"""How values lie in memory on one device, which members have parts of."""

from collections.abc import Sequence

import torch
from torch import fx

from pfeife.ir.nodes import source_line, value_of


def order_in_memory(node: fx.Node) -> list[int]:
    """The dimensions of a value, the outermost in memory first."""
    value = value_of(node)
    assert value is not None
    return order_of(value)


def order_of(value: torch.Tensor) -> list[int]:
    """The dimensions of a tensor, the outermost in memory first."""
    return sorted(range(value.dim()), key=value.stride, reverse=True)


def back(order: Sequence[int]) -> list[int]:
    """The permutation that undoes another one."""
    return sorted(range(len(order)), key=order.__getitem__)


def fills_memory(node: fx.Node, order: Sequence[int]) -> bool:
    """Whether a value's elements lie in an order of its dimensions, and there are no others in its
    memory."""
    value = value_of(node)
    if value is None:
        return False
    own = value.untyped_storage().nbytes() == value.numel() * value.dtype.itemsize
    return own and value.permute([*order]).is_contiguous()


def lies_in_order(node: fx.Node) -> bool:
    """Whether a value fills its memory in the order of its dimensions; a sparse one has none."""
    value = value_of(node)
    if value is not None and value.layout != torch.strided:
        return True
    return value is not None and fills_memory(node, range(value.dim()))


def check_whole(node: fx.Node, reader: fx.Node) -> None:
    """Raises ValueError if a value is a part of another one's memory, which a reader takes as it
    lies there."""
    if not fills_memory(node, order_in_memory(node)):
        raise ValueError(
            f"shard: {reader.target} reads memory as it lies there, and what it reads is put "
            f"together of parts, in another order ({source_line(reader)}); leave the "
            "parameters whole that it is computed of"
        )
