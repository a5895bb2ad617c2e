"""State that one member of a group keeps, where a program reads and gives parts.

            member 0               member 1
weight      [8, 4], the keeper     absent             the user's
in a step   rows 0 to 3 <--------> rows 4 to 7        `own_parts`: the keeper tells them
gradient    of rows 0 to 3         of rows 4 to 7
.grad       [8, 4] <-------------- absent             `whole_gradients`: the keeper is told
"""

from collections.abc import Iterable, Mapping

import torch

from pfeife.ir.evaluate import State
from pfeife.ir.parts import Port
from pfeife.runtime.distributed.links.collectives import Group


def own_parts(ports: Iterable[Port], state: State, group: Group, device: torch.device) -> State:
    """The state with a member's own parts of what one of them keeps (collective among them)."""
    own = dict(state)
    for port in ports:
        if port.split is not None and port.keeper is not None:
            own[port.fqn] = _told(port, state[port.fqn], group, device)
    return own


def _told(port: Port, value: torch.Tensor, group: Group, device: torch.device) -> torch.Tensor:
    """A member's part of a value of which its keeper has the whole."""
    connection = group.group
    assert connection is not None and port.split is not None and port.keeper is not None
    part = torch.empty(port.shape, dtype=port.given_dtype, device=device)
    is_keeper = connection.place == port.keeper
    if is_keeper and value.shape != port.given_shape:  # the others would wait for other parts
        raise ValueError(
            f"{port.fqn} has the shape {list(value.shape)}, the program was captured for "
            f"{list(port.given_shape)}"
        )
    parts = port.split.parts(value) if is_keeper else []
    group.wait(connection.group.scatter(part, parts, port.keeper))
    return part


def whole_gradients(
    ports: Iterable[Port], gradients: Mapping[str, torch.Tensor], group: Group
) -> dict[str, torch.Tensor]:
    """A member's gradients: of what one of them keeps, that has the whole, made of all parts
    (collective among the members)."""
    kept = {p.fqn: (p.split, p.keeper) for p in ports if p.split and p.keeper is not None}
    whole = {}
    for name, gradient in gradients.items():
        if name not in kept:
            whole[name] = gradient
            continue
        split, keeper = kept[name]
        parts = _gathered(gradient, keeper, group)
        if parts:
            whole[name] = split.join(parts)
    return whole


def _gathered(value: torch.Tensor, keeper: int, group: Group) -> list[torch.Tensor]:
    """On its keeper a tensor of each member, in their order, elsewhere nothing."""
    connection, value = group.group, value.contiguous()
    assert connection is not None
    is_keeper = connection.place == keeper
    values = [torch.empty_like(value) for _ in connection.ranks] if is_keeper else []
    group.wait(connection.group.gather(values, value, keeper))
    return values
