"""Decisions about cuts and schedules: functions from programs or bare numbers to plain data.

`planner` is the door, `manual_cuts` checks what it is given, `request` has what stays when a plan
is made again, `by_family` and `joint` decide cuts and schedule together, `replicated` adds what
replicas reduce; read these first, then `families/` (schedules by a formula), `cutting/` (where to
cut), `search/` (schedules that are looked for). `microbatches` chooses how many, `fixed_placement`
cuts a program where another one has its state, `adopt_plan` checks a plan that somebody brings,
`sharing` says which way to share parameters among members is planned first, `simulation` runs a
schedule in simulated time. The names below are what most people need; the
folders have the rest.
"""

from pfeife.lowering.critical import critical_path
from pfeife.lowering.lower import lower
from pfeife.lowering.predict import predict
from pfeife.lowering.problem import Problem
from pfeife.lowering.verify import verify_schedule
from pfeife.sched import cutting, families, search
from pfeife.sched.families import POLICIES, policy
from pfeife.sched.microbatches import choose_microbatches
from pfeife.sched.planner import plan
from pfeife.sched.search import lower_bound, search_schedule
from pfeife.sched.simulation import simulate

__all__ = [
    "POLICIES",
    "Problem",
    "choose_microbatches",
    "critical_path",
    "cutting",
    "families",
    "lower",
    "lower_bound",
    "plan",
    "policy",
    "predict",
    "search",
    "search_schedule",
    "simulate",
    "verify_schedule",
]
