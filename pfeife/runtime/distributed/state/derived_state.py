"""What a script computes of all that ranks train: each rank has the values of its part.

                      rank 0     rank 1
blocks.0              trained    absent
average.blocks.0      values     absent     made of it outside of a step: it is rank 0's, too
"""

from collections.abc import Mapping

import torch

from pfeife._torch import is_absent
from pfeife.data.machine import Mesh
from pfeife.runtime.distributed.control.peers import Peers


def holders_of(
    tensors: Mapping[str, torch.Tensor], mesh: Mesh, world: Peers
) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """The ranks of a pipeline that have tensors which the others lack, and the member of their
    groups that does (None: all of them): of those where these are the same in each pipeline
    (collective)."""
    nothing = " ".join(str(at) for at, tensor in enumerate(tensors.values()) if is_absent(tensor))
    lacking = [{int(at) for at in text.split()} for text in world.from_all_ranks(nothing)]
    holders = {}
    for at, name in enumerate(tensors):
        having = [rank for rank, lacks in enumerate(lacking) if at not in lacks]
        places = sorted({mesh.place(rank)[1] for rank in having})
        members = sorted({mesh.of_member(rank).member for rank in having})
        everywhere = len(having) == mesh.replicas * len(places) * len(members)
        if 0 < len(having) < len(lacking) and everywhere and len(members) in (1, mesh.members):
            holders[name] = tuple(places), None if len(members) == mesh.members else members[0]
    return holders
