"""Where to cut, on which ranks, and what to compute again where memory is short.

`workload` has the figures of clusters, `account` sums up their bytes, and `stages` has the problem
that cuts make of them; read these first, then `borders` and `balanced` (the best stages of a
chain), `cuts` (by hand), `partitions` (as DeepSpeed says it) and `layouts` (stages on ranks).
`duplicated` finds what stages compute for themselves, `recompute_choice` what a stage computes
again for a number of bytes, `recompute_policy` what people ask for by a word; `room` keeps plans to
the memory, by the account of every byte.
"""

from pfeife.sched.cutting.account import Account
from pfeife.sched.cutting.balanced import balanced, clusters_of
from pfeife.sched.cutting.cuts import marked, split_at
from pfeife.sched.cutting.duplicated import cheap_to_recompute
from pfeife.sched.cutting.partitions import Partition, partitioned
from pfeife.sched.cutting.recompute_choice import choose_recompute, recompute_options
from pfeife.sched.cutting.recompute_policy import RecomputePolicy, with_recompute
from pfeife.sched.cutting.stages import stage_problem
from pfeife.sched.cutting.workload import workload_of

__all__ = [
    "Account",
    "Partition",
    "RecomputePolicy",
    "balanced",
    "cheap_to_recompute",
    "choose_recompute",
    "clusters_of",
    "marked",
    "partitioned",
    "recompute_options",
    "split_at",
    "stage_problem",
    "with_recompute",
    "workload_of",
]
