"""Room for what a planner's figures leave out."""

import logging

import pytest
from programs import annotated, for_ranks

import pfeife
from pfeife import sched
from pfeife.cost import machine, memory_curves
from pfeife.data.timeline import MemoryCurve
from pfeife.sched.cutting.memory_limit import OutOfMemory, kept_within

CPU_CORE = machine("cpu-core")


def test_what_was_left_out_is_left_room_for(lines):
    """A planner whose figures leave out 50 bytes is asked once more, and adds them."""
    logging.getLogger("pfeife").setLevel(logging.DEBUG)
    asked = []

    def make(left_out: tuple[int, ...], again: bool) -> pfeife.Plan:
        asked.append(left_out)
        return pfeife.Plan((0,), sched.families.gpipe(1, (108 - sum(left_out)) // 10))

    def curves(plan: pfeife.Plan) -> list[MemoryCurve]:
        return [MemoryCurve(0, {"all": 10 * plan.schedule.microbatches + 50}, ())]

    def counted(plan: pfeife.Plan) -> tuple[int, ...]:
        return (10 * plan.schedule.microbatches,)

    plan = kept_within(108, "memory_limit=108", make, curves, counted, (0,))
    assert asked == [(0,), (50,)] and plan.schedule.microbatches == 5
    said = [record.getMessage() for record in lines.records]
    assert said == ["a plan needs 150 bytes, counted as 100"]


def test_a_plan_that_sums_kept_back_is_made_again():
    """They say 50 bytes too much, so that the first plan is slower than it need be."""

    def make(left_out: tuple[int, ...], again: bool) -> pfeife.Plan:
        order = sched.families.gpipe(1, (110 - 50 - sum(left_out)) // 10)
        return pfeife.Plan((0,), order, step_seconds=1 / order.microbatches)

    def curves(plan: pfeife.Plan) -> list[MemoryCurve]:
        return [MemoryCurve(0, {"all": 10 * plan.schedule.microbatches}, ())]

    def counted(plan: pfeife.Plan) -> tuple[int, ...]:
        return (10 * plan.schedule.microbatches + 50,)

    plan = kept_within(110, "memory_limit=110", make, curves, counted, (0,))
    assert plan.schedule.microbatches == 11


def test_a_planner_that_sees_no_room_says_what_it_lacks():
    """Its figures may be above the account's, so with that much it is asked once more."""
    asked = []

    def make(left_out: tuple[int, ...], again: bool) -> pfeife.Plan:
        assert not again, "there was no plan before"
        asked.append(left_out)
        room = 100 - sum(left_out)
        if room < 300:
            raise OutOfMemory(f"no room in {room} bytes", 300 - room)
        return pfeife.Plan((0,), sched.families.gpipe(1, 1))

    def curves(plan: pfeife.Plan) -> list[MemoryCurve]:
        return [MemoryCurve(0, {"all": 90}, ())]

    kept_within(100, "memory_limit=100", make, curves, lambda plan: (290,), (0,))
    assert asked == [(0,), (-200,)]


@pytest.mark.parametrize("share", [0.98, 0.9])
def test_other_cuts_are_found_below_a_limit(share):
    """The planner's figures are far below the account's, and so is what it must be asked for."""
    fused = annotated("UNet")

    def planned(**limit) -> tuple[pfeife.Plan, int]:
        plan = sched.plan(
            fused, machine=CPU_CORE, microbatches=8, stages=2, schedule="1f1b", **limit
        )
        return plan, max(curve.peak for curve in memory_curves(*for_ranks(fused, plan)))

    limit = int(share * planned()[1])
    assert planned(memory_limit=limit)[1] <= limit
