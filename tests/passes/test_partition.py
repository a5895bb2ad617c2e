"""Plans that are good data: right for their program, or refused."""

import functools
import re

import attrs
import pytest
import torch
from damage import damaged
from hypothesis import assume, given
from hypothesis import strategies as st
from programs import CPU_CORE, Updating, captured, clusters
from share import random_cases

import pfeife
from pfeife import sched
from pfeife.data import plain
from pfeife.data.plan import Plan, RecomputeOption
from pfeife.data.schedule import Do, Schedule
from pfeife.ir.outline import inline
from pfeife.runtime import LocalPipeline
from pfeife.testing import assert_same, tied_across


@functools.cache
def planned(name: str, order: str):
    """A fused program, a plan of it on two or three ranks, and what a step gives."""
    one, program, state, microbatches = captured(name)
    base = clusters(program)
    if sched.by_family.splits(order):
        base = pfeife.split_backward()(base)
        costs = pfeife.cost.estimate(base, CPU_CORE)
        base = pfeife.annotate(costs)(base)
    folded = order in ("interleaved", "zb-v")
    plan = sched.plan(
        base,
        machine=CPU_CORE,
        microbatches=4,
        stages=4 if folded else 3,
        ranks=2 if folded else None,
        schedule=order,
    )
    if order == "1f1b":
        staged = pfeife.partition(plan)(base)
        choice = sched.cutting.choose_recompute(staged, "full", machine=CPU_CORE)
        plan = attrs.evolve(plan, recompute=choice)
    nodes = inline(base)[0].module.graph.nodes
    names = tuple(node.name for node in nodes if node.op != "output")
    return base, plan, names, state, microbatches, pfeife.evaluate(base, state, microbatches), one


def outcome(name: str, order: str, plan: Plan) -> str:
    """Applies a plan: "refused", or "right"; anything else fails."""
    base, _, _, state, microbatches, expected, one = planned(name, order)
    try:
        ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(base)
        lowered = sched.verify_schedule(sched.lower(plan.schedule, ranks))
        step = LocalPipeline(ranks, lowered).start(state, microbatches)
    except ValueError:
        return "refused"
    step.run()
    assert_same(expected, step.result(), one.tied or tied_across(plan, base))
    return "right"


CHANGES = (
    *("cut", "drop", "double", "swap", "near", "move", "microbatch", "stage", "do", "permute"),
    *("merge", "empty", "without", "duplicated", "recompute", "csv"),
)


@st.composite
def edited(draw: st.DrawFn, plan: Plan, names: tuple[str, ...]) -> Plan:
    """A plan with one thing changed; what the data itself refuses is not drawn."""
    ranks = [list(actions) for actions in plan.schedule.ranks]
    rank = draw(st.sampled_from([i for i, actions in enumerate(ranks) if actions] or [0]))
    assume(ranks and ranks[rank])
    index, other = draw(st.tuples(*[st.integers(0, len(ranks[rank]) - 1)] * 2))
    stage = st.integers(0, plan.stages)
    some = st.lists(st.sampled_from(names), max_size=3).map(tuple)
    changes: dict = {}
    match draw(st.sampled_from(CHANGES)):
        case "cut":
            cuts = list(plan.stage_of_cluster)
            cuts[draw(st.integers(0, len(cuts) - 1))] = draw(stage)
            changes["stage_of_cluster"] = tuple(cuts)
        case "drop":
            del ranks[rank][index]
        case "double":
            ranks[rank].insert(other, ranks[rank][index])
        case "swap":
            row = ranks[rank]
            row[index], row[other] = row[other], row[index]
        case "near":
            row, after = ranks[rank], min(index + 1, len(ranks[rank]) - 1)
            row[index], row[after] = row[after], row[index]
        case "move":
            ranks[draw(st.integers(0, len(ranks) - 1))].insert(other, ranks[rank].pop(index))
        case "microbatch":
            number = draw(st.sampled_from([None, 0, 1, 4, 10**18]))
            ranks[rank][index] = attrs.evolve(ranks[rank][index], microbatch=number)
        case "stage":
            number = draw(stage | st.just(10**18))
            ranks[rank][index] = attrs.evolve(ranks[rank][index], stage=number)
        case "do":
            do = draw(st.sampled_from([do for do in Do if do.kind] + [Do.REDUCE_GRAD]))
            ranks[rank][index] = attrs.evolve(ranks[rank][index], do=do)
        case "permute":
            ranks = draw(st.permutations(ranks))
        case "merge" if len(ranks) > 1:
            taken = ranks.pop(rank)
            ranks[draw(st.integers(0, len(ranks) - 1))] += taken
        case "empty":
            ranks.insert(draw(st.integers(0, len(ranks))), [])
        case "without":
            do, of = draw(st.sampled_from("FBIW")), draw(st.none() | stage)
            ranks = [[a for a in row if a.do != do or of not in (None, a.stage)] for row in ranks]
        case "duplicated":
            changes["duplicated"] = draw(some) + draw(st.sampled_from([(), ("nothing",)]))
        case "recompute":
            options = list(plan.recompute or [RecomputeOption()] * plan.stages)
            one = draw(st.integers(0, len(options) - 1))
            options[one] = attrs.evolve(options[one], names=draw(some))
            changes["recompute"] = tuple(options)
        case "csv":
            text = draw(damaged(plan.schedule.to_csv()))
            ranks = Schedule.from_csv(text).ranks
    changes.setdefault("schedule", Schedule(tuple(map(tuple, ranks))))
    return attrs.evolve(plan, **changes)


PROGRAMS = (("UNet", "interleaved"), ("UNet", "1f1b"), ("GPT", "zb-v"), ("BatchNormNet", "gpipe"))


@random_cases(200)
@given(st.sampled_from(PROGRAMS), st.data())
def test_a_plan_that_is_accepted_is_right(program, data):
    plan, names = planned(*program)[1:3]
    try:
        for _ in range(data.draw(st.sampled_from((1, 1, 2)))):
            plan = data.draw(edited(plan, names))
    except ValueError:
        return  # it is no plan at all
    assert plain.from_json(Plan, plain.to_json(plan)) == plan
    outcome(*program, plan)


@pytest.mark.parametrize("program", PROGRAMS)
def test_plans_of_ours_are_accepted(program):
    assert outcome(*program, planned(*program)[1]) == "right"


def without(plan: Plan, do: str) -> Plan:
    ranks = (tuple(a for a in actions if a.do != do) for actions in plan.schedule.ranks)
    return attrs.evolve(plan, schedule=Schedule(tuple(ranks)))


def refusal(name: str, order: str, plan: Plan) -> str:
    base = planned(name, order)[0]
    with pytest.raises(ValueError) as error:
        ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(base)
        sched.lower(plan.schedule, ranks)
    return str(error.value)


def test_forwards_alone_are_no_training_step():
    """A schedule that could run, but leaves all gradients out."""
    plan = without(planned("UNet", "interleaved")[1], "B")
    assert sched.verify_schedule(plan.schedule)
    assert "no action runs stage_2_backward for microbatch 0" in refusal(
        "UNet", "interleaved", plan
    )


def test_whole_backwards_are_not_run_in_parts():
    plan = planned("UNet", "interleaved")[1]
    parts = tuple(
        tuple(
            part
            for a in actions
            for part in (
                [attrs.evolve(a, do=Do.INPUT_BACKWARD), attrs.evolve(a, do=Do.WEIGHT_BACKWARD)]
                if a.do == "B"
                else [a]
            )
        )
        for actions in plan.schedule.ranks
    )
    plan = attrs.evolve(plan, schedule=Schedule(parts))
    assert "no action runs stage_" in refusal("UNet", "interleaved", plan)


def test_stages_of_one_rank_wait_for_one_another():
    """Stage 2 before stage 0, which it reads, on the same rank."""
    plan = planned("UNet", "interleaved")[1]
    first = list(plan.schedule.ranks[0])
    late = next(i for i, a in enumerate(first) if (a.stage, a.do) == (2, "F"))
    first.insert(0, first.pop(late))
    cuts = (0, 0, 1, 1, 2, 2, 3, 3)
    order = Schedule((tuple(first), *plan.schedule.ranks[1:]))
    plan = attrs.evolve(plan, stage_of_cluster=cuts, schedule=order, stage_seconds=None)
    assert re.search(r"rank 0: 2(F|RECV_F)0\S* comes before", refusal("UNet", "interleaved", plan))


def test_duplicated_parts_of_a_tuple_stay_with_it():
    """What is sent is tensors."""
    program = ("BatchNormNet", "gpipe")
    base, plan, *_ = planned(*program)
    parts = [n.name for n in inline(base)[0].module.graph.nodes if n.name.startswith("getitem")]
    assert parts and outcome(*program, attrs.evolve(plan, duplicated=tuple(parts))) == "right"


def test_names_of_nothing_are_refused():
    plan = attrs.evolve(planned("UNet", "interleaved")[1], duplicated=("conv", "nothing"))
    assert "duplicates ['conv', 'nothing'], which are no values" in refusal(
        "UNet", "interleaved", plan
    )


class Scaled(Updating):
    """Both layers read what is made from a buffer, which is then updated."""

    def forward(self, x):
        scale = self.scale + 1
        self.update(x)
        return (self.last(self.first(x + scale).tanh()) + scale).tanh()


def test_what_reads_an_updated_buffer_is_not_duplicated():
    """The other rank does not see the updates: it would compute with the first value."""
    model, x = Scaled(), torch.randn(3, 4)
    fused = clusters(pfeife.capture(lambda x: model(x).square().mean(), x))
    plan = Plan((0,) * (fused.units - 1) + (1,), sched.families.gpipe(2, 3))
    pfeife.partition(plan)(fused)
    with pytest.raises(ValueError, match="scale is updated and used by several stages"):
        pfeife.partition(attrs.evolve(plan, duplicated=("add",)))(fused)
