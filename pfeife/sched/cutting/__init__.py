"""Where to cut, on which ranks, and what to compute again where memory is short.

`workload` has the figures of clusters, `account` sums up their bytes, and `stages` has the problem
that cuts make of them; read these first, then `constraints` (what a plan is to keep to), `borders`,
`border_links` (the link of each border), `clusters` (what stages take), `balanced` (the best stages
of a chain), `judged` (by the step that they make), `blocks` (at whose borders to cut), `cuts` (by
hand), `partitions` (as DeepSpeed says it), `heterogeneous` (ranks whose machines differ) and
`layouts` (stages on ranks). `duplicated` finds what stages compute for themselves,
`recompute_choice` what a stage computes again for a number of bytes, `recompute_policy` what people
ask for by a word, `recompute_greedy` what ranks without room do; `memory_limit` keeps plans to the
memory, by the account of every byte; `unevenness` is what cuts lose at other sizes.
"""

from pfeife.sched.cutting.account import Account
from pfeife.sched.cutting.balanced import balanced
from pfeife.sched.cutting.blocks import CutAt, blocks_of, check_cut_at
from pfeife.sched.cutting.clusters import clusters_of
from pfeife.sched.cutting.cuts import marked, split_at
from pfeife.sched.cutting.duplicated import cheap_to_recompute
from pfeife.sched.cutting.judged import MESSAGE_TOLERANCE, checked_tolerance
from pfeife.sched.cutting.partitions import Partition, partitioned
from pfeife.sched.cutting.recompute_choice import choose_recompute, recompute_options
from pfeife.sched.cutting.recompute_policy import RecomputePolicy, with_recompute
from pfeife.sched.cutting.stages import stage_problem
from pfeife.sched.cutting.workload import workload_of

__all__ = [
    "MESSAGE_TOLERANCE",
    "Account",
    "CutAt",
    "Partition",
    "RecomputePolicy",
    "balanced",
    "blocks_of",
    "cheap_to_recompute",
    "check_cut_at",
    "checked_tolerance",
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
