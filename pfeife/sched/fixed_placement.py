"""Later programs of a model: every cluster runs on a rank that trains its state."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise

from pfeife.ir.messages import holders
from pfeife.ir.nodes import source_line
from pfeife.ir.parts import Kind, Role
from pfeife.ir.program import Program
from pfeife.sched.cutting.workload import blocked_borders

Owners = Mapping[str, frozenset[int]]  # ranks by canonical names


def follow(
    program: Program, owners: Owners, ranks: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The stage of every cluster and the rank of every stage, such that each cluster finds its
    state where it is owned.

    `owners` has the ranks that hold a parameter or buffer. Other clusters stay with the one before
    them; where as many of these as there are `ranks` follow one another and are trained, the
    ranks share them evenly. Raises ValueError if one cluster needs state of different owners.
    """
    groups = _together(program)
    wanted = _wanted(program, owners)
    allowed = [_common(program, group, wanted, owners) for group in groups]
    if ranks is not None:
        allowed = _shared(program, groups, allowed, owners, ranks)
    # What comes before any owned state goes to where the first of it is: nothing else binds it.
    at = min(next((common for common in allowed if common), {0}))
    rank_of: list[int] = []
    for group, common in zip(groups, allowed, strict=True):
        if common and at not in common:
            # Of several owners the next one down the pipeline: stages go back only if they must.
            at = min((rank for rank in common if rank > at), default=min(common))
        rank_of += [at] * len(group)
    stage_of = accumulate((int(a != b) for a, b in pairwise(rank_of)), initial=0)
    return tuple(stage_of), tuple(rank for rank, _ in groupby(rank_of))


def _together(program: Program) -> list[range]:
    """Runs of clusters that must be in one stage, since they update and read one buffer."""
    closed = blocked_borders(program)
    starts = [unit for unit in range(program.units) if unit not in closed]
    return [range(a, b) for a, b in pairwise([*starts, program.units])]


def _wanted(program: Program, owners: Owners) -> dict[int, list[str]]:
    """By cluster the owned state that it uses."""
    names_of: dict[int, list[str]] = {}
    for name, users in holders(program, Role.PARAMETER, Role.BUFFER).items():
        for unit in {call.unit for call in users} if name in owners else ():
            names_of.setdefault(unit, []).append(name)
    return names_of


def _common(
    program: Program, group: range, wanted: Mapping[int, list[str]], owners: Owners
) -> frozenset[int]:
    """The ranks that hold all that a group of clusters uses, none if that is nothing."""
    names = [name for unit in group for name in wanted.get(unit, ())]
    common = frozenset[int]().union(*(owners[name] for name in names[:1]))
    for name in names[1:]:
        if not common & owners[name]:
            first = next(earlier for earlier in names if not owners[earlier] & owners[name])
            body = program.body(program.call(Kind.FORWARD, group[0])).graph
            node = next(node for node in body.nodes if node.op == "call_function")
            raise ValueError(
                f"{first} is trained on ranks {sorted(owners[first])} and {name} on ranks "
                f"{sorted(owners[name])}, but this step uses them in one cluster of operations "
                f"({source_line(node)}): call the step that uses both before any that trains one "
                "of them alone, or put pfeife.stage_boundary between the operations"
            )
        common &= owners[name]
    return common


def _shared(
    program: Program,
    groups: Sequence[range],
    allowed: Sequence[frozenset[int]],
    owners: Owners,
    ranks: int,
) -> list[frozenset[int]]:
    """The same with the ranks of groups that this program is the first to train."""
    seconds = [0.0] * program.units
    for call in program.calls:
        seconds[call.unit] += call.seconds or 0.0
    trained = {port.fqn for port in program.ports(Role.GRADIENT)} - set(owners)
    users = holders(program)
    new = {call.unit for name in trained for call in users.get(name, ())}
    shared: list[frozenset[int]] = []
    for is_owned, run in groupby(zip(groups, allowed, strict=True), lambda pair: bool(pair[1])):
        pairs = list(run)
        units = [unit for group, _ in pairs for unit in group]
        if is_owned or len(pairs) < ranks or not new & set(units):
            shared += [common for _, common in pairs]
            continue
        costs = [sum(seconds[unit] for unit in group) or 1.0 for group, _ in pairs]
        ends = list(accumulate(costs))
        # A group goes to the rank in whose even share of all seconds its middle lies.
        middles = [end - cost / 2 for end, cost in zip(ends, costs, strict=True)]
        shared += [frozenset({int(ranks * middle / ends[-1])}) for middle in middles]
    return shared
