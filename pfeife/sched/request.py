"""A plan that is asked for, and made again where it needs more memory than there is."""

import math
from collections.abc import Callable

import attrs

from pfeife.data.plan import Plan
from pfeife.data.schedule import Schedule
from pfeife.data.timeline import MemoryCurve
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.sched.by_family import Scheduling, of_family, saved_is_open
from pfeife.sched.cutting.account import Account
from pfeife.sched.cutting.constraints import Constraints
from pfeife.sched.cutting.memory_limit import kept_within
from pfeife.sched.cutting.recompute_policy import RecomputePolicy, with_recompute
from pfeife.sched.cutting.stages import bytes_of
from pfeife.sched.families.family import Family
from pfeife.sched.joint import Effort


@attrs.frozen
class PlanRequest:
    """A plan that is asked for: what stays the same when it is made again with less memory.

    `search` makes one of an account, within constraints and a budget.
    """

    program: Program
    account: Account
    constraints: Constraints
    schedule: Scheduling
    recompute: RecomputePolicy | None
    curves: Callable[[Plan], tuple[MemoryCurve, ...]]
    search: Callable[..., Plan]
    effort: Effort
    limits: tuple[int, ...]

    @property
    def searches(self) -> bool:
        """Whether there is something to search."""
        return self.schedule == "search" and bool(self.program.ports(Role.TANGENT))

    def planned(self, limited_by: str, batch_bytes: int) -> Plan:
        """A plan that keeps to the limits (see `kept_within`), of ranks that have so many bytes of
        a batch."""
        # There is one limit, the largest: what another rank has less counts as taken there.
        limit = max(self.limits)
        reserved = tuple(limit - rank_limit for rank_limit in self.limits)
        left_out = (batch_bytes,) * self.constraints.ranks
        return kept_within(
            limit, limited_by, self.make, self.curves, self.bytes_of, left_out, reserved
        )

    def make(self, left_out: tuple[int, ...], again: bool) -> Plan:
        """A plan where so many bytes of every rank are in no sum. A search that is made again is a
        quarter as long; the first plan of a family keeps to no limit, since it may well fit."""
        less = attrs.evolve(self.constraints, left_out=left_out)
        if not self.searches:
            if not again and isinstance(self.schedule, str | Family | Schedule):
                less = attrs.evolve(less, memory_limit=math.inf)
            how = self.recompute
            return of_family(self.program, self.account, self.schedule, less, how, self.recomputed)
        effort = self.effort.shared(4) if again else self.effort
        return self.search(self.account, less, effort)

    def recomputed(self, plan: Plan, how: RecomputePolicy) -> Plan:
        """The plan with what its stages recompute, by the limit as it was given."""
        machine = self.constraints.machine
        return with_recompute(
            plan, self.program, how, machine=machine, limit=self.limits, curves=self.curves
        )

    def bytes_of(self, plan: Plan) -> list[int]:
        """Bytes of every rank, as the sums have them by which the plan was made."""
        # Cuts that left out what microbatches save counted only what is there all the time.
        if saved_is_open(self.recompute) and not self.searches:
            m = plan.schedule.microbatches
            return self.account.always(plan.stage_of_cluster, plan.stage_ranks, m)
        return bytes_of(self.account, plan, self.constraints.machines)
