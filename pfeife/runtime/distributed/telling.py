"""What ranks tell one another of state before each step, and what they agree on."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pfeife._torch import is_absent
from pfeife.runtime.distributed.foreign import Borrowed, digest, version_of
from pfeife.runtime.distributed.owned import Owned
from pfeife.runtime.failure import Refusal

if TYPE_CHECKING:
    from pfeife.runtime.distributed.ownership import Ownership
    from pfeife.runtime.distributed.world import World

# News, a line each: the kind, and
#
#     stepped   DIGEST                which optimizers have stepped, and to what they are set
#     set       NUMBER DIGEST         and to what, of groups with the parameters of several ranks
#     steps     COUNT                 how often optimizers have stepped since the last call
#     loaded    state                 an optimizer has been given some
#     changed   NUMBER                what is absent here has been written to, as by a checkpoint
#     absent    NAME                  what nobody trains and this rank reads has become absent
#     lost      NAME                  so has a frozen parameter that this rank keeps
#     behind    copies                not all copies of what other replicas train are theirs
#     shared    RANKS DIGEST          what these ranks train has been written to, how often
#     borrowed  DIGEST                what nobody trains has been written to, how often
#     copied    DIGEST                which deep copies of modules were made
#     wrote     NUMBER:COUNT ...      what the script has written to by hand, here or not, how often
_KINDS = (
    *("stepped", "set", "steps", "loaded", "changed", "absent", "lost"),
    *("behind", "shared", "borrowed", "copied", "wrote"),
)


def news_of(ownership: "Ownership", borrowed: Borrowed | None, args: Sequence[Any]) -> str:
    """What this rank tells the others before it uses `args`, "" if all is as it was: what of
    them has been written to, what has become absent."""
    lines = [*ownership.gradients.news(), *ownership.optimizers.news(), *ownership.copies.news()]
    lines += ownership.deep_copies.news()
    written = ownership.asking.writes.told(ownership.among(args))
    wrote = [f"{number}:{count}" for number, count in written.items()]
    lines += [f"wrote {' '.join(wrote)}"] if wrote else []
    if ownership.foreign.found:
        lines += [f"changed {number}" for number in ownership.foreign.changed(args)]
        lines += [f"lost {name}" for name in _lost(ownership, args)]
    lines += [f"shared {ranks} {writes}" for ranks, writes in _writes(ownership, args).items()]
    if borrowed:
        lines += borrowed.news(args, ownership.known)
    return "\n".join(lines)


def _lost(ownership: "Ownership", args: Sequence[Any]) -> list[str]:
    """The frozen parameters that this rank keeps, and that have become absent here."""
    return [
        ownership.owned[number].name
        for number, tensor in ownership.among(args).items()
        if number in ownership.frozen and not tensor.requires_grad and is_absent(tensor)
    ]


def _writes(ownership: "Ownership", args: Sequence[Any]) -> dict[str, str]:
    """How often what other ranks train as well has been written to since the ranks have last
    agreed, by those ranks."""
    groups: dict[str, list[int]] = {}
    for number, tensor in ownership.among(args).items() if ownership.shared else ():
        if number in ownership.shared:
            writes = version_of(tensor) - ownership.shared[number]
            groups.setdefault(_named(ownership.owned[number]), []).append(writes)
    return {ranks: digest(writes) for ranks, writes in groups.items() if any(writes)}


def agree_on(
    ownership: "Ownership",
    world: "World",
    news: Sequence[str],
    borrowed: Borrowed | None = None,
    args: Sequence[Any] = (),
) -> None:
    """Takes what every rank has told: a checkpoint that all have loaded becomes the state that
    is trained on (collective if there is one). Raises Refusal on all ranks for what would go
    on with wrong numbers."""
    ownership.asking.service.uneven = ""
    if not any(news):
        return
    if borrowed:
        borrowed.forget(args, ownership.known)
    told: dict[str, dict[int, list[list[str]]]] = {kind: {} for kind in _KINDS}
    for rank, text in enumerate(news):
        for line in text.splitlines():
            kind, _, rest = line.partition(" ")
            told[kind].setdefault(rank, []).append(rest.split(" "))
    ownership.number_copies([line for ((line,),) in told.pop("copied").values()], world.size)
    stepped = {rank: one for rank, ((one,),) in told.pop("stepped").items()}
    ownership.gradients.compare_steps(stepped, world.rank, world.size)
    try:
        ownership.gradients.check_settings(told.pop("set"))
    finally:
        ownership.gradients.forget()
    steps = {rank: int(one) for rank, ((one,),) in told.pop("steps").items()}
    ownership.optimizers.compare(steps, told.pop("loaded"), world.size)
    if not any(told.values()):
        return
    if told["absent"] and borrowed:
        state = {n: args[at] for n, at in zip(borrowed.names, borrowed.at, strict=True)}
        ownership.adopt_derived(state, world)
        borrowed.forget(args, ownership.known)
    left = set(borrowed.names) if borrowed else set()
    for rank, names in told["absent"].items():
        told["lost"].setdefault(rank, []).extend(name for name in names if " ".join(name) in left)
    wrong = _spoiled(told["lost"]) or _one_sided(ownership, told.pop("wrote"))
    if wrong:
        raise Refusal(wrong)
    mine = ownership.among(args)
    if told["changed"]:
        changed = {r: {int(n) for (n,) in them} for r, them in told["changed"].items()}
        _take(ownership, changed, mine, world)
    _compare_shared(ownership, told["shared"], mine, world)
    if told["behind"] or _copied(ownership, told["shared"]):
        ownership.copies.renew(world, mine.values())
    writes = {rank: line for rank, (line,) in told["borrowed"].items()}
    if borrowed and len({str(writes.get(rank)) for rank in range(world.size)}) > 1:
        _check_alike(borrowed.names, [args[place] for place in borrowed.at], world)
    ownership.shared |= {
        n: version_of(tensor) for n, tensor in mine.items() if n in ownership.shared
    }
    if borrowed:
        borrowed.agreed(args)


def _compare_shared(
    ownership: "Ownership",
    told: Mapping[int, Sequence[Sequence[str]]],
    mine: Mapping[int, torch.Tensor],
    world: "World",
) -> None:
    """Compares what several ranks train and have not written to as often as one another: one
    of them has loaded a checkpoint alone. `mine` are this rank's tensors by their numbers."""
    writes = {(ranks, rank): one for rank, lines in told.items() for ranks, one in lines}
    for ranks in sorted({ranks for ranks, _ in writes}):
        having = [int(rank) for rank in ranks.split("-")]
        if len({writes.get((ranks, rank)) for rank in having}) > 1:
            theirs = [ownership.owned[number] for number in mine]
            theirs = [owned for owned in theirs if owned.alike and _named(owned) == ranks]
            tensors = [mine[owned.number] for owned in theirs]
            _check_alike([owned.name for owned in theirs], tensors, world, having)


def _copied(ownership: "Ownership", told: Mapping[int, Sequence[Sequence[str]]]) -> bool:
    """Whether some of what ranks have written to is trained by one replica for all."""
    written = {ranks for lines in told.values() for ranks, _ in lines}
    return any(
        owned.replica is not None and _named(owned) in written for owned in ownership.owned.values()
    )


def _take(
    ownership: "Ownership",
    written: Mapping[int, set[int]],
    mine: Mapping[int, torch.Tensor],
    world: "World",
) -> None:
    """Compares what ranks have `written` to state of others with what these have. `mine` are
    this rank's tensors by their numbers."""
    numbers = sorted(set().union(*written.values()))
    sums = world.checksums([mine.get(number) for number in numbers])
    for at, number in enumerate(numbers):
        owned = ownership.owned[number]
        having = {rank for rank, theirs in written.items() if number in theirs}
        having |= {*owned.holders} if owned.alike else set()
        of = {rank: owned.first if owned.alike else owned.nearest(rank) for rank in having}
        others = [rank for rank in having if int(sums[rank][at]) != int(sums[of[rank]][at])]
        if others:
            raise Refusal(
                f"{owned.name} has been written to on ranks {sorted(written)} since the last "
                f"step, but ranks {sorted(others)} have other values than rank "
                f"{of[min(others)]}, "
                "which trains it: load a checkpoint on every rank, or on none"
            )
    ownership.foreign.forget(written.get(world.rank, ()))


def _named(owned: Owned) -> str:
    """Those who have a tensor's values, as news call them."""
    return "-".join(map(str, owned.holders))


def _others(sums: Sequence[torch.Tensor], ranks: Sequence[int]) -> list[int]:
    """The ranks that have other values than the first of them, by checksums."""
    first = int(sums[0])
    return sorted({rank for rank, one in zip(ranks, sums, strict=True) if int(one) != first})


def _check_alike(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    world: "World",
    ranks: Sequence[int] = (),
) -> None:
    """Raises Refusal on all ranks unless some (all if none are given) have the same values
    (collective)."""
    if not names:
        return
    sums = world.checksums(tensors)
    ranks = ranks or range(world.size)
    for at, name in enumerate(names):
        others = _others([sums[rank][at] for rank in ranks], ranks)
        if others:
            raise Refusal(
                f"{name} has been written to since the last step, and ranks {others} have other "
                f"values than rank {ranks[0]}: load a checkpoint on every rank, or on none"
            )


def _one_sided(ownership: "Ownership", told: Mapping[int, Sequence[Sequence[str]]]) -> str:
    """What is wrong with writes of ranks to what they do not have, which those who have it have not
    made, "" if nothing. (That these make more is no harm: what they have counts.)"""
    counts: dict[int, dict[int, int]] = {}
    for rank, (pairs,) in told.items():
        for pair in pairs:
            number, count = map(int, pair.split(":"))
            counts.setdefault(number, {})[rank] = count
    for number, by_rank in counts.items():
        owned = ownership.owned.get(number)
        if owned is None:
            continue
        wanted = by_rank.get(owned.first, 0)
        for rank, count in by_rank.items():
            if count > wanted and not owned.holds(rank):
                return (
                    f"{owned.name} was written to by hand {count} times on rank {rank}, and "
                    f"{wanted} times on rank {owned.first}, which trains it: write to parameters "
                    "on every rank alike, and begin again from the last checkpoint"
                )
    return ""


def _spoiled(told: Mapping[int, Sequence[Sequence[str]]]) -> str:
    """What is wrong with state that nobody trains, "" if nothing."""
    named = [(rank, " ".join(line)) for rank, lines in told.items() for line in lines]
    if not named:
        return ""
    rank, name = named[0]
    return (
        f"{name} has no values any more on rank {rank}: the step reads it and no rank trains "
        "it. A copy of parameters that other ranks train, such as their moving average, can only "
        "be made from pfeife.full_state_dict(model), which every rank calls, or is read by a step "
        "of its own, that trains nothing"
    )
