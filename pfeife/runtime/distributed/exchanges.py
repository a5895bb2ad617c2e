"""State that one rank was given by another, which both may write to by hand afterwards."""

import threading
from collections.abc import Mapping, Sequence

import torch

from pfeife.runtime.distributed.by_hand import ByHand
from pfeife.runtime.distributed.foreign import digest


class Exchanges:
    """The tensors that this rank has asked for or given since the last change of state, and how
    often they were written to `by_hand` before.

    What both ranks write later comes later in both scripts. Where one has written and the other has
    not, nobody knows whether what was given is of the moment of the question.
    """

    def __init__(self, by_hand: ByHand):
        self.by_hand, self.lock = by_hand, threading.Lock()
        self.open: dict[tuple[int, int], dict[int, tuple[torch.Tensor, int]]] = {}
        self.over: list[str] = []

    def note(
        self, asker: int, owner: int, tensors: Mapping[int, torch.Tensor], counts: Sequence[int]
    ) -> None:
        """Notes tensors by their numbers, with how often they had been written to."""
        with self.lock:
            mine = self.open.setdefault((asker, owner), {})
            for (number, one), count in zip(tensors.items(), counts, strict=True):
                mine.setdefault(number, (one, count))

    def close(self, moment: str) -> None:
        """Before the next change, with what tells this moment of the script from others."""
        with self.lock:
            done, self.open = self.open, {}
            for (asker, owner), noted in sorted(done.items()):
                pairs = [noted[number] for number in sorted(noted)]
                counts = self.by_hand.counts(one for one, _ in pairs)
                later = [now - count for now, (_, count) in zip(counts, pairs, strict=True)]
                if any(later):
                    self.over.append(f"{asker} {owner} {moment} {digest(later)}")

    def told(self) -> list[str]:
        """A line for each rank and moment where there were such writes, once: who asked, who gave,
        when, and a digest of the counts."""
        with self.lock:
            over, self.over = self.over, []
        return over


def differing(told: Mapping[int, Sequence[str]]) -> str:
    """What is wrong with what ranks have `told`, "" if nothing."""
    for rank, lines in sorted(told.items()):
        for line in lines:
            asker, owner, *_ = line.split(" ")
            other = int(owner) if rank == int(asker) else int(asker)
            if line not in told.get(other, ()):
                return (
                    f"rank {asker} has asked for state that rank {owner} trains, and after that "
                    f"rank {rank} has written to it by hand, and rank {other} has not, or at "
                    "another moment: what was given may be too old. Write to parameters on every "
                    "rank alike, or save pfeife.full_state_dict(model), which every rank calls"
                )
    return ""
