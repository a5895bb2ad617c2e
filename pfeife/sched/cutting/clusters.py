"""A workload as cuts see it: seconds of clusters and stages, and what crosses borders."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import attrs
import numpy as np

from pfeife.ir.parts import Kind
from pfeife.lowering.envelope import travel
from pfeife.sched.cutting.border_links import NO_TRAVEL, Border
from pfeife.sched.cutting.borders import between
from pfeife.sched.cutting.workload import Workload


@attrs.frozen
class Clusters:
    """A workload per cluster and per border.

    `seconds` are of one microbatch, forward and backward; `ahead[c]` and `back[c]` are the bytes
    of activations and of gradients that a cut before cluster c sends for each microbatch;
    `blocked` has the borders at which there may be no cut.
    """

    seconds: tuple[float, ...]
    ahead: tuple[int, ...]
    back: tuple[int, ...]
    blocked: frozenset[int] = frozenset()


def clusters_of(work: Workload, rank: int = 0) -> Clusters:
    """A workload as `balanced` looks at it: per cluster its seconds on a rank, summed over forward
    and backward, and per border the bytes that a cut there would send."""
    kinds = tuple(work.seconds)
    seconds = tuple(sum(work.of(kind, unit, rank) for kind in kinds) for unit in range(work.units))
    ahead, back = [0] * work.units, [0] * work.units
    for flow in work.flows:
        forward = flow.kind == Kind.FORWARD
        readers = (unit for unit, kind in flow.readers if (kind == Kind.FORWARD) == forward)
        ends = [flow.unit, *readers]
        # It crosses all borders between its ends: a step up and one down, which are added up below.
        change = ahead if forward else back
        change[min(ends)] += flow.bytes
        change[max(ends)] -= flow.bytes
    ahead, back = ([0, *accumulate(change[:-1])] for change in (ahead, back))
    return Clusters(seconds, tuple(ahead), tuple(back), work.blocked)


@attrs.frozen
class _Taken:
    """Seconds of the messages over a border, for every place where it may be: what they take of
    the rank `before` it, of the one `after` it, the longer way to `arrive`, and both ways."""

    before: np.ndarray
    after: np.ndarray
    arriving: np.ndarray
    both: np.ndarray


@attrs.frozen(slots=False)
class StageTimes:
    """Seconds of stages between two edges, each on its rank and with the links of its borders
    (`borders[stage]` with the stage before it)."""

    work: Workload
    edges: Sequence[int]
    stage_ranks: Sequence[int]
    borders: Sequence[Border | None]

    def of(self, stage: int) -> np.ndarray:
        """Of a stage between every two edges, endless unless the second comes after the first."""
        return self._by_stage[stage]

    def messages(self, stage: int) -> np.ndarray:
        """Of the messages over a stage's first border, both ways, by the edge where it is."""
        return self._taken[self.borders[stage]].both

    @cached_property
    def _by_stage(self) -> list[np.ndarray]:
        # Equal links are one border (see `borders_of`), so stages alike are summed up once.
        ranks = (rank if rank in self.work.elsewhere else 0 for rank in self.stage_ranks)
        keys = list(zip(ranks, self.borders, (*self.borders[1:], None), strict=True))
        seconds = {key: self._between(*key) for key in dict.fromkeys(keys)}
        return [seconds[key] for key in keys]

    @cached_property
    def _taken(self) -> dict[Border | None, _Taken]:
        clusters = clusters_of(self.work)
        borders = dict.fromkeys((None, *self.borders))
        return {border: self._of_messages(border, clusters) for border in borders}

    def _between(self, rank: int, first: Border | None, second: Border | None) -> np.ndarray:
        seconds = clusters_of(self.work, rank).seconds
        time = np.array([0.0, *accumulate(seconds)])[list(self.edges)]
        taken = self._taken[first]
        needed = between(time) + (taken.after[:, None] + self._taken[second].before)
        return np.maximum(needed, taken.arriving[:, None])

    def _of_messages(self, border: Border | None, clusters: Clusters) -> _Taken:
        inner = range(1, self.work.units)
        rows = []
        for at in self.edges:
            there = here = NO_TRAVEL
            if border is not None and at in inner:
                # Ahead a message's latency counts even where nothing goes: too much, but the cut's
                # step, which decides in the end, is without it (see `best_cut`).
                there = travel([clusters.ahead[at]], border.ahead)
                here = travel([back], border.back) if (back := clusters.back[at]) else NO_TRAVEL
            rows.append(
                (
                    there.sending + here.receiving,
                    there.receiving + here.sending,
                    max(there.arriving, here.arriving),
                    there.arriving + here.arriving,
                )
            )
        return _Taken(*np.array(rows).T)
