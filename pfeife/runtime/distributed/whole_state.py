"""State that every member of a group is given whole, where a program reads and gives parts.

            member 0             member 1
weight      [8, 4]               [8, 4]             the user's, alike
in a step   rows 0 to 3          rows 4 to 7        `own_parts`
gradient    of rows 0 to 3       of rows 4 to 7
.grad       [8, 4]               [8, 4]             `whole_gradients`, alike
"""

from collections.abc import Iterable, Mapping

import torch

from pfeife.ir.evaluate import State
from pfeife.ir.parts import Port
from pfeife.runtime.distributed.links.collectives import Group, gathered


def own_parts(ports: Iterable[Port], state: State, member: int) -> State:
    """The state with a member's own parts of what some ports are given whole."""
    whole = {port.fqn: port.split for port in ports if port.split and port.whole}
    return {**state, **{name: whole[name].part(state[name], member) for name in whole}}


def whole_gradients(
    ports: Iterable[Port], gradients: Mapping[str, torch.Tensor], group: Group
) -> dict[str, torch.Tensor]:
    """The gradients of whole parameters, of those of parts (collective among the members)."""
    cut = {p.fqn: p.split for p in ports if p.split and p.whole and p.fqn in gradients}
    return {
        name: cut[name].join(gathered(group, gradient)) if name in cut else gradient
        for name, gradient in gradients.items()
    }
