"""The option `mesh`, in all the ways in which people write one."""

import itertools
import re

from torch.distributed.device_mesh import DeviceMesh

from pfeife.data.machine import Mesh

MeshLike = Mesh | DeviceMesh | str
_PIPELINE, _REPLICAS = ("pp", "pipeline", "stage"), ("dp", "replicate", "data")
_MEMBERS = ("tp", "tensor", "ep", "expert", "cp", "context")  # of one axis, whatever it cuts


def mesh_of(mesh: MeshLike | None) -> Mesh | None:
    """A mesh from its short form, a DeviceMesh or itself. Raises ValueError for all else.

    >>> mesh_of("-2,4")
    Mesh(ranks=4, replicas=2, order=(0, 1, 2, 3, 4, 5, 6, 7))
    >>> mesh_of("4,-2")
    Mesh(ranks=4, replicas=2, order=(0, 2, 4, 6, 1, 3, 5, 7))
    """
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return _of_device_mesh(mesh)
    if isinstance(mesh, str) and re.fullmatch(r"\s*-?\d{1,6}(\s*,\s*-?\d{1,6})*\s*", mesh):
        return _of_sizes([int(size) for size in mesh.split(",")], mesh)
    raise ValueError(
        f"option mesh={mesh!r}: must be row-major sizes of which the negative one is that of the "
        "replicas ('-2,4'), a DeviceMesh with dimensions named 'pp' and 'dp', or a Mesh"
    )


def _of_sizes(sizes: list[int], text: str) -> Mesh:
    """All but the negative axis, if there is one, are those of a pipeline."""
    replicas = [at for at, size in enumerate(sizes) if size < 0]
    if 0 in sizes or len(replicas) > 1:
        raise ValueError(f"option mesh={text!r}: sizes of at least 1, and one negative at most")
    axes = [range(abs(size)) for size in sizes]
    every = {place: rank for rank, place in enumerate(itertools.product(*axes))}

    def key(place: tuple[int, ...]) -> tuple[int, ...]:
        return (*(place[at] for at in replicas), *place)

    # Ranks of one pipeline are to follow one another, replica after replica.
    count = -sizes[replicas[0]] if replicas else 1
    order = tuple(every[place] for place in sorted(every, key=key))
    return Mesh(len(order) // count, count, order)


def _of_device_mesh(mesh: DeviceMesh) -> Mesh:
    names = list(mesh.mesh_dim_names or ())
    kinds = (_REPLICAS, _PIPELINE, _MEMBERS)
    places = [[at for at, name in enumerate(names) if name in kind] for kind in kinds]
    dims = [at for each in places for at in each]
    _, pipeline, members = places
    if not pipeline + members or len(dims) != len(names) or any(len(each) > 1 for each in places):
        raise ValueError(
            f"option mesh: a DeviceMesh with the dimensions {names}, of which one must be named "
            f"for the pipeline {_PIPELINE} or for the ranks that share a stage {_MEMBERS}, and one "
            f"may be for its replicas {_REPLICAS}"
        )
    # Members of a group beside one another, within a pipeline, replica after replica.
    order = tuple(mesh.mesh.permute(*dims).flatten().tolist())
    replicas, ranks, size = (mesh.mesh.shape[at[0]] if at else 1 for at in places)
    return Mesh(ranks, replicas, order, size)
