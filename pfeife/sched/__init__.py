"""Decisions about cuts and schedules: functions from programs or bare numbers to plain data."""

from pfeife.sched.cuts import balanced, cheap_to_recompute, clusters_of, follow, marked, split_at
from pfeife.sched.lower import Transfer, chain, insert_actions, lower
from pfeife.sched.planner import in_flight, plan
from pfeife.sched.policies import forward_only, gpipe, one_f_one_b, policy
from pfeife.sched.predict import predict
from pfeife.sched.simulate import simulate
from pfeife.sched.verify import verify_schedule

__all__ = [
    "Transfer",
    "balanced",
    "chain",
    "cheap_to_recompute",
    "clusters_of",
    "follow",
    "forward_only",
    "gpipe",
    "in_flight",
    "insert_actions",
    "lower",
    "marked",
    "one_f_one_b",
    "plan",
    "policy",
    "predict",
    "simulate",
    "split_at",
    "verify_schedule",
]
