"""How far the cuts of a plan are from those that would be made for other costs."""

from collections.abc import Sequence

import numpy as np

from pfeife.ir.program import Program
from pfeife.sched.cutting.borders import between, worst_of


def unevenness(clusters: Program, stage_of_cluster: Sequence[int]) -> float:
    """How much longer the slowest stage takes than the slowest one of the evenest cuts into as many
    stages, as a factor; by the seconds that the calls of `clusters` have."""
    seconds = np.zeros(clusters.units)
    for call in clusters.calls:
        seconds[call.unit] += call.seconds or 0.0
    stages = max(stage_of_cluster) + 1
    taken = np.bincount(stage_of_cluster, weights=seconds, minlength=stages)
    spans = between(np.concatenate([[0.0], np.cumsum(seconds)]))
    evenest = worst_of(range(clusters.units + 1), stages, lambda stage: spans)
    return float(taken.max() / evenest[0]) if evenest and evenest[0] else 1.0
