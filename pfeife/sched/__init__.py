"""Decisions about cuts and schedules: functions from programs or bare numbers to plain data.

`planner` is the door, `joint` decides cuts and schedule together; read these first, then
`families/` (schedules by a formula), `cutting/` (where to cut), `search/` (schedules that are
looked for). `following` cuts a program where another one has its state.
"""

from pfeife.lowering.critical import critical_path
from pfeife.lowering.lower import Transfer, chain, insert_actions, lower
from pfeife.lowering.predict import predict
from pfeife.lowering.problem import Edge, Problem, StageCosts, chain_edges
from pfeife.lowering.simulate import simulate
from pfeife.lowering.verify import verify_schedule
from pfeife.sched.by_family import Scheduling, in_flight, splits
from pfeife.sched.cutting.cuts import balanced, cheap_to_recompute, clusters_of, marked, split_at
from pfeife.sched.cutting.partitions import Partition, partitioned
from pfeife.sched.cutting.recompute_choice import choose_recompute, recompute_options
from pfeife.sched.cutting.recompute_policy import RecomputePolicy, with_recompute
from pfeife.sched.cutting.workload import stage_problem, workload_of
from pfeife.sched.families.family import Family
from pfeife.sched.families.orders import folded, looped
from pfeife.sched.families.policies import (
    POLICIES,
    eager_one_f_one_b,
    forward_only,
    gpipe,
    interleaved,
    loops,
    naive,
    one_f_one_b,
    placement,
    policy,
)
from pfeife.sched.families.zero_bubble import dual_pipe_v, v_half, v_min, zb_h1, zb_h2, zb_v
from pfeife.sched.following import follow
from pfeife.sched.given import adopted
from pfeife.sched.planner import choose_microbatches, plan
from pfeife.sched.search.bound import lower_bound
from pfeife.sched.search.search import search_placements, search_schedule

__all__ = [
    "POLICIES",
    "Edge",
    "Family",
    "Partition",
    "Problem",
    "RecomputePolicy",
    "Scheduling",
    "StageCosts",
    "Transfer",
    "adopted",
    "balanced",
    "chain",
    "chain_edges",
    "cheap_to_recompute",
    "choose_microbatches",
    "choose_recompute",
    "clusters_of",
    "critical_path",
    "dual_pipe_v",
    "eager_one_f_one_b",
    "folded",
    "follow",
    "forward_only",
    "gpipe",
    "in_flight",
    "insert_actions",
    "interleaved",
    "looped",
    "loops",
    "lower",
    "lower_bound",
    "marked",
    "naive",
    "one_f_one_b",
    "partitioned",
    "placement",
    "plan",
    "policy",
    "predict",
    "recompute_options",
    "search_placements",
    "search_schedule",
    "simulate",
    "split_at",
    "splits",
    "stage_problem",
    "v_half",
    "v_min",
    "verify_schedule",
    "with_recompute",
    "workload_of",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
