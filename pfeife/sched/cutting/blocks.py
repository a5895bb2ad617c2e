"""Cuts at the borders of a model's repeated blocks, or of modules by their names."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from reprlib import repr as short

from pfeife.ir.program import Program
from pfeife.sched.cutting.clusters import Clusters
from pfeife.sched.cutting.cuts import forward_units, is_within
from pfeife.sched.cutting.partitions import module_stack

# "anywhere", "blocks", or the modules at whose borders there may be cuts, by their paths.
CutAt = str | Sequence[str]
_ELEMENT = re.compile(r"(.*\.)?\d+")


def check_cut_at(cut_at: CutAt) -> None:
    """Raises ValueError for what is no way to say where cuts may be."""
    listed = not isinstance(cut_at, str) and isinstance(cut_at, Sequence)
    named = listed and cut_at and all(isinstance(module, str) for module in cut_at)
    if cut_at not in ("anywhere", "blocks") and not named:
        raise ValueError(
            f"cut_at={cut_at!r}: must be 'anywhere', 'blocks', or a list of modules such as "
            "['layers.0', 'layers.1']"
        )


def blocks_of(program: Program) -> tuple[str, ...]:
    """The paths of the repeated blocks of a fused program's model, in the order in which they run.

    A block is an element of a list or sequence of modules (its name is a number) of whose siblings
    another one has the same class and, inside, the same modules; further siblings of that class
    are blocks too. Blocks inside of blocks do not count.
    """
    _, stacks = _forwards(program)
    return _repeated(stacks)


def cut_blocks(program: Program, stage_of_cluster: Sequence[int]) -> tuple[str, ...]:
    """Those of `blocks_of` whose forwards several stages compute."""
    units, stacks = _forwards(program)
    stages: dict[str, set[int]] = {path: set() for path in _repeated(stacks)}
    for unit, stack in zip(units, stacks, strict=True):
        for path, _ in stack:
            if path in stages:
                stages[path].add(stage_of_cluster[unit])
    return tuple(path for path, of in stages.items() if len(of) > 1)


def _repeated(stacks: Iterable[Sequence[tuple[str, str]]]) -> tuple[str, ...]:
    inside: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    for stack in stacks:
        for at, (path, kind) in enumerate(stack):
            if _ELEMENT.fullmatch(path):
                # Modules inside are compared without the block's own path, in which blocks differ.
                prefix = len(path)
                inside[path, kind] |= {(p[prefix:], k) for p, k in stack[at + 1 :]}
    alike = Counter((_parent(p), k, frozenset(inner)) for (p, k), inner in inside.items())
    repeated = {(parent, kind) for (parent, kind, _), count in alike.items() if count > 1}
    paths = [path for path, kind in inside if (_parent(path), kind) in repeated]
    # Blocks are apart: of those within others the outer ones stand for all.
    inner = {path for path in paths for block in paths if is_within(_parent(path), block)}
    return tuple(path for path in paths if path not in inner)


def closed_borders(
    program: Program, clusters: Clusters, cut_at: CutAt, stages: int
) -> frozenset[int]:
    """The borders between clusters at which there may be no cut.

    Open is one between every two blocks (or modules by name) that follow one another, one before
    the first and one after the last: of those that part no block the one over which the fewest
    bytes go. Raises ValueError for a module that computes nothing, and where there are fewer open
    borders than `stages` want.
    """
    if cut_at == "anywhere" or stages == 1:
        return frozenset()
    units, stacks = _forwards(program)
    modules = blocks_of(program) if cut_at == "blocks" else tuple(cut_at)
    paths = [[path for path, _ in stack] for stack in stacks]
    _check_modules(modules, cut_at, paths)
    where = [next((path for path in stack if path in set(modules)), "") for stack in paths]
    borders = {
        min(gap, key=lambda at: clusters.ahead[at] + clusters.back[at])
        for gap in _gaps(units, where)
    }
    open_ = borders - clusters.blocked
    if stages > len(open_) + 1:
        raise ValueError(
            f"cut_at={cut_at!r}: {stages} stages, and between clusters there are {len(open_)} "
            f"borders of the {len(modules)} modules {short(list(modules))}; ask for fewer stages, "
            "name smaller modules, or give fuse these as boundaries"
        )
    return frozenset(range(1, program.units)) - open_


def _gaps(units: Sequence[int], where: Sequence[str]) -> Iterator[range]:
    """The borders between clusters from the end of one module to the start of the next one; of the
    first module those before it, of the last one those after it."""
    inside = [(unit, module) for unit, module in zip(units, where, strict=True) if module]
    ends = [(-1, ""), *inside, (max(units) + 1, "")]
    for (last, before), (first, after) in pairwise(ends):
        gap = range(max(last + 1, 1), min(first, max(units)) + 1)
        if before != after and gap:
            yield gap


def _forwards(program: Program) -> tuple[list[int], list[tuple[tuple[str, str], ...]]]:
    """Of the operations of clusters' forwards the clusters, and the modules that they were
    captured in."""
    units = forward_units(program)
    return list(units.values()), list(map(module_stack, units))


def _check_modules(
    modules: Collection[str], cut_at: CutAt, paths: Iterable[Collection[str]]
) -> None:
    present = {path for stack in paths for path in stack}
    missing = [module for module in modules if module not in present]
    if missing:
        raise ValueError(
            f"cut_at={cut_at!r}: no module {missing[0]!r} computes anything; there are "
            f"{short(sorted(present))}"
        )
    if not modules:
        raise ValueError(
            f"cut_at={cut_at!r}: the model has no repeated blocks (elements of a ModuleList or "
            "Sequential that are alike); name the modules, or leave it out"
        )


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
