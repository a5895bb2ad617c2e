"""Schedules by a formula, each with its paper.

`policies` has those whose backward is whole; read it first, then `zero_bubble` for those that split
it. `orders` makes schedules of actions with their times, and `family` says what a family is, for
one of your own.
"""

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

__all__ = [
    "POLICIES",
    "Family",
    "dual_pipe_v",
    "eager_one_f_one_b",
    "folded",
    "forward_only",
    "gpipe",
    "interleaved",
    "looped",
    "loops",
    "naive",
    "one_f_one_b",
    "placement",
    "policy",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
