"""What ranks tell one another of state before each step, and what they agree on."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from pfeife._torch import is_absent
from pfeife.data import plain
from pfeife.runtime.distributed.state.remote_parameters import UntrainedState, digest
from pfeife.runtime.distributed.world.ownership import Ownership
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.failure import CollectiveError


@attrs.frozen
class News:
    """What one rank tells the others of its state before a call: how each field differs from its
    default. Tensors are told by their numbers or names, counts of writes by a digest."""

    # Of optimizers and copies:
    stepped: str = ""  # which optimizers have stepped, and to what they are set: a digest
    settings: tuple[tuple[int, str], ...] = ()  # the same of each group that several ranks train
    steps: int = 0  # how often optimizers have stepped since the last call
    loaded: bool = False  # whether an optimizer has been given state
    copied: str = ""  # which deep copies of modules were made: a digest
    factors: tuple[str, ...] = ()  # gradients that losses were given, one for each backward
    # Of tensors:
    wrote: tuple[tuple[int, int], ...] = ()  # how often the script has by hand, here or not
    changed: tuple[int, ...] = ()  # what is absent here has been written to, as by a checkpoint
    lost: tuple[str, ...] = ()  # frozen parameters that this rank keeps have become absent
    absent: tuple[str, ...] = ()  # so has what nobody trains and this rank reads
    behind: bool = False  # whether copies of what other replicas train have not all come
    shared: tuple[tuple[tuple[int, ...], str], ...] = ()  # writes to what these ranks have
    borrowed: str = ""  # writes to what nobody trains: a digest

    @property
    def text(self) -> str:
        """The news as JSON without what is as it was, "" if all is."""
        changes = attrs.asdict(self, filter=lambda field, value: value != field.default)
        return json.dumps(changes, separators=(",", ":")) if changes else ""

    @property
    def is_of_tensors(self) -> bool:
        """Whether there is any of tensors."""
        lists = (self.wrote, self.changed, self.lost, self.absent, self.shared)
        return any(lists) or self.behind or self.borrowed != ""


def _read(texts: Sequence[str]) -> list[News]:
    """Every rank's news. Most ranks tell the same."""
    by_text = {text: plain.from_json(News, text) if text else News() for text in {*texts}}
    return [by_text[text] for text in texts]


def news_of(ownership: Ownership, borrowed: UntrainedState | None, args: Sequence[Any]) -> str:
    """What this rank tells the others before it uses `args`, "" if all is as it was: what of
    them has been written to, what has become absent."""
    gradients, optimizers = ownership.gradients, ownership.optimizers
    tensors = ownership.among(args)
    absent, writes = (borrowed or UntrainedState()).news(args, ownership.known)
    return News(
        stepped=digest(sorted(gradients.stepped)),
        settings=tuple(
            (number, digest(settings)) for number, settings in gradients.settings.items()
        ),
        steps=optimizers.steps(),
        loaded=len(optimizers.loaded) > 0,
        copied=digest(sorted(ownership.deep_copies.new)),
        factors=tuple(f"{float(factor):.9g}" for factor in ownership.factors),
        wrote=tuple(ownership.asking.writes.told(tensors).items()),
        changed=tuple(ownership.foreign.changed(args)),
        lost=tuple(_lost(ownership, tensors)),
        absent=tuple(absent),
        behind=ownership.copies.behind,
        shared=tuple(_writes(ownership, tensors).items()),
        borrowed=writes,
    ).text


def _lost(ownership: Ownership, tensors: Mapping[int, torch.Tensor]) -> list[str]:
    """The frozen parameters that this rank keeps, and that have become absent here."""
    return [
        ownership.owned[number].name
        for number, tensor in tensors.items()
        if number in ownership.frozen and not tensor.requires_grad and is_absent(tensor)
    ]


def _writes(
    ownership: Ownership, tensors: Mapping[int, torch.Tensor]
) -> dict[tuple[int, ...], str]:
    """How often what other ranks train as well has been written to since the ranks have last
    agreed, by those ranks."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, tensor in tensors.items():
        if tensor in ownership.shared:
            writes = ownership.shared.since(tensor)
            groups.setdefault(ownership.owned[number].holders, []).append(writes)
    return {ranks: digest(writes) for ranks, writes in groups.items() if any(writes)}


def agree_on(
    ownership: Ownership,
    world: World,
    texts: Sequence[str],
    borrowed: UntrainedState | None = None,
    args: Sequence[Any] = (),
) -> None:
    """Takes what every rank has told: a checkpoint that all have loaded becomes the state that is
    trained on (collective if there is one). Raises CollectiveError on all ranks for what would go
    on with wrong numbers."""
    ownership.asking.service.uneven = ""
    if not any(texts):
        return
    ownership.factors.clear()  # on all ranks, which have come to this
    borrowed = borrowed or UntrainedState()
    every = _read(texts)
    # What a rank has told, who compares it, and what comes of a difference:
    #
    #   copied             all ranks              those of some ranks alone are no state
    #   factors            all ranks              CollectiveError: other gradients
    #   stepped            all ranks              a warning
    #   settings           ranks of a group       CollectiveError: another learning rate
    #   steps, loaded      all ranks              nobody is asked for state, CollectiveError
    #   lost, absent       nobody                 CollectiveError: nobody has the values any more
    #   wrote              those who have it      CollectiveError: written by who lacks it alone
    #   changed            those who have it      values are compared, then let go of
    #   shared, borrowed   those who have it      values are compared
    #   behind             replicas               copies are made anew
    # Copies first: what follows goes by the numbers of tensors, and then they have some.
    ownership.number_copies([news.copied for news in every])
    _compare_backwards(every)
    _compare_steps(ownership, world, every)
    if not any(news.is_of_tensors for news in every):
        return
    if any(news.absent for news in every):
        # What is absent and was computed of trained state gets owners: only what is left is lost.
        untrained = borrowed.among(args, ownership.known)
        ownership.adopt_derived({place.name: tensor for place, tensor in untrained}, world)
    untrained = borrowed.among(args, ownership.known)
    named = [(place.name, tensor) for place, tensor in untrained]
    _check_lost(every, [name for name, _ in named])
    _check_by_hand(ownership, every)
    tensors = ownership.among(args)
    _compare_changed(ownership, every, tensors, world)
    _compare_shared(ownership, every, tensors, world)
    # After all checks: what goes to other replicas is what ranks agree on.
    if any(news.behind for news in every) or _copied(ownership, every):
        ownership.copies.renew(world, tensors.values())
    if len({news.borrowed for news in every}) > 1:
        _check_alike(named, world, range(world.size))
    ownership.shared.mark(t for t in tensors.values() if t in ownership.shared)
    borrowed.versions.mark(tensor for _, tensor in named)


def _compare_backwards(every: Sequence[News]) -> None:
    """Raises CollectiveError unless the backwards since the last call are the same ones on all
    ranks. None waits for others: its gradients were there with the loss."""
    first, *others = (news.factors for news in every)
    for rank, factors in enumerate(others, 1):
        if len(factors) != len(first):
            raise CollectiveError(
                f"since the last call of a step rank 0 has called backward {len(first)} times, and "
                f"rank {rank} {len(factors)} times: each rank has the gradients of its own stages, "
                "so every rank calls loss.backward(), without inputs=; begin again from the last "
                "checkpoint"
            )
        for here, there in zip(first, factors, strict=True):
            if here != there and not math.isclose(float(here), float(there), rel_tol=1e-5):
                raise CollectiveError(
                    f"the loss of the last call was given the gradient {here} on rank 0 and "
                    f"{there} on rank {rank}: each rank has the gradients of its own stages, so "
                    "what the loss is multiplied by (a count, a weight) is the same on every rank"
                )


def _compare_steps(ownership: Ownership, world: World, every: Sequence[News]) -> None:
    gradients = ownership.gradients
    gradients.compare_steps([news.stepped for news in every], world.rank)
    try:
        gradients.check_settings([news.settings for news in every])
    finally:
        gradients.forget()
    loaded = [rank for rank, news in enumerate(every) if news.loaded]
    ownership.optimizers.compare([news.steps for news in every], loaded)


def _check_lost(every: Sequence[News], borrowed: Sequence[str]) -> None:
    """Raises CollectiveError for what has become absent where it is read, and is computed of
    nothing that ranks train: parameters that are kept, and what is `borrowed` still."""
    lost = [(rank, name) for rank, news in enumerate(every) for name in news.lost]
    absent = [(rank, name) for rank, news in enumerate(every) for name in news.absent]
    lost += [pair for pair in absent if pair[1] in borrowed]
    if lost:
        rank, name = lost[0]
        raise CollectiveError(
            f"{name} has no values any more on rank {rank}: the step reads it and no rank trains "
            "it. A copy of parameters that other ranks train, such as their moving average, can "
            "only be made from pfeife.full_state_dict(model), which every rank calls, or is read "
            "by a step of its own, that trains nothing"
        )


def _check_by_hand(ownership: Ownership, every: Sequence[News]) -> None:
    """Raises CollectiveError for writes of ranks to what they do not have, which those who have it
    have not made. (That these make more is no harm: what they have counts.)"""
    counts = [dict(news.wrote) for news in every]
    for number in sorted({n for wrote in counts for n in wrote} & ownership.owned.keys()):
        owned = ownership.owned[number]
        wanted = counts[owned.first].get(number, 0)
        for rank, wrote in enumerate(counts):
            if wrote.get(number, 0) > wanted and not owned.holds(rank):
                raise CollectiveError(
                    f"{owned.name} was written to by hand {wrote[number]} times on rank {rank}, "
                    f"and {wanted} times on rank {owned.first}, which trains it: write to "
                    "parameters on every rank alike, and begin again from the last checkpoint"
                )


def _compare_changed(
    ownership: Ownership,
    every: Sequence[News],
    tensors: Mapping[int, torch.Tensor],
    world: World,
) -> None:
    """Compares what ranks have written to state of others with what these have. `tensors` are
    this rank's by their numbers."""
    # Values travel as checksums: a whole checkpoint may have been loaded on each rank.
    changed = {rank: {*news.changed} for rank, news in enumerate(every) if news.changed}
    numbers = sorted(set().union(*changed.values()))
    sums = world.checksums([tensors.get(number) for number in numbers]) if numbers else []
    for at, number in enumerate(numbers):
        owned = ownership.owned[number]
        having = {rank for rank, written in changed.items() if number in written}
        having |= {*owned.holders} if owned.alike else set()
        # Statistics of replicas differ: each is compared with that of its own pipeline.
        of = {rank: owned.first if owned.alike else owned.nearest(rank) for rank in having}
        differing = [rank for rank in having if int(sums[rank][at]) != int(sums[of[rank]][at])]
        if differing:
            raise CollectiveError(
                f"{owned.name} has been written to on ranks {[*changed]} since the last step, but "
                f"ranks {sorted(differing)} have other values than rank {of[min(differing)]}, "
                "which trains it: load a checkpoint on every rank, or on none"
            )
    ownership.foreign.forget(every[world.rank].changed)


def _compare_shared(
    ownership: Ownership,
    every: Sequence[News],
    tensors: Mapping[int, torch.Tensor],
    world: World,
) -> None:
    """Compares what several ranks train and have not written to as often as one another: one
    of them has loaded a checkpoint alone. `tensors` are this rank's by their numbers."""
    writes = [dict(news.shared) for news in every]
    for ranks in sorted({ranks for digests in writes for ranks in digests}):
        if len({writes[rank].get(ranks) for rank in ranks}) > 1:
            pairs = ((ownership.owned[number], tensor) for number, tensor in tensors.items())
            shared = [(o.name, tensor) for o, tensor in pairs if o.alike and o.holders == ranks]
            _check_alike(shared, world, ranks)


def _copied(ownership: Ownership, every: Sequence[News]) -> bool:
    """Whether some of what ranks have written to is trained by one replica for all."""
    written = {ranks for news in every for ranks, _ in news.shared}
    owned_tensors = ownership.owned.values() if written else ()
    return any(owned.replica is not None and owned.holders in written for owned in owned_tensors)


def _check_alike(
    named: Sequence[tuple[str, torch.Tensor]], world: World, ranks: Sequence[int]
) -> None:
    """Raises CollectiveError on all ranks unless some have the same values of tensors, given with
    names (collective)."""
    sums = world.checksums([tensor for _, tensor in named]) if named else []
    first, *rest = ranks
    for at, (name, _) in enumerate(named):
        differing = [rank for rank in rest if int(sums[rank][at]) != int(sums[first][at])]
        if differing:
            raise CollectiveError(
                f"{name} has been written to since the last step, and ranks {differing} have other "
                f"values than rank {first}: load a checkpoint on every rank, or on none"
            )
