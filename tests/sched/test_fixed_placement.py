"""Programs that find their state trained somewhere: they compute there, in any schedule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import CPU_CORE, captured, clusters, lowered
from share import crossed, random_cases

import pfeife
from pfeife import sched
from pfeife.cost import estimate
from pfeife.ir.messages import holders
from pfeife.ir.parts import Role
from pfeife.runtime import LocalPipeline
from pfeife.runtime.distributed.state.owned import ranks_of
from pfeife.sched.families.policies import POLICIES
from pfeife.testing import assert_same, nets, tied_across


def planned(fused, owners, ranks, schedule="1f1b"):
    """The plan of clusters that follow their state, and the program of the ranks."""
    plan = sched.plan(
        fused,
        machine=CPU_CORE,
        microbatches=4,
        ranks=ranks,
        owners=owners,
        schedule=schedule,
        search_seconds=0.1,
    )
    passes = [pfeife.partition(plan), pfeife.insert_send_recv(owners=owners)]
    return plan, pfeife.compose(*passes, pfeife.dp_wrap(pfeife.Mesh(ranks)))(fused)


def check(fused, state, microbatches, owners, ranks, schedule="1f1b"):
    if sched.by_family.splits(schedule):
        split = pfeife.split_backward()(fused)
        fused = pfeife.annotate(estimate(split, CPU_CORE))(split)
    plan, program = planned(fused, owners, ranks, schedule)
    assert len(plan.schedule.ranks) == ranks
    found = ranks_of(program)
    for name, allowed in owners.items():
        assert found.get(name, frozenset()) <= allowed, f"{name} is used on {found[name]}"
    expected = pfeife.evaluate(fused, state, microbatches)
    local = LocalPipeline(program, lowered(plan, program))
    assert_same(expected, local(state, microbatches), tied_across(plan, fused))


@random_cases(16)
@given(st.data())
def test_random_owners(data):
    """Each cluster has a rank, and some of what it uses is owned there."""
    torch._dynamo.reset()
    net = data.draw(nets(linear=3))
    generator = torch.Generator().manual_seed(0)
    microbatches = [(torch.randn(3, 4, generator=generator),) for _ in range(4)]
    program = pfeife.capture(lambda x: net(x).square().mean(), *microbatches[0])
    state, fused = pfeife.state_of(program, net), clusters(program)
    ranks = data.draw(st.integers(1, 3))
    rank_of = data.draw(st.lists(st.integers(0, ranks - 1), min_size=12, max_size=12))
    owners: dict[str, frozenset[int]] = {}
    for name, users in sorted(holders(fused, Role.PARAMETER, Role.BUFFER).items()):
        if data.draw(st.booleans()):
            owners[name] = frozenset(rank_of[call.unit % 12] for call in users)
    try:
        sched.fixed_placement.follow(fused, owners, ranks)
    except ValueError as error:
        assert "is trained on ranks" in str(error)
        return
    check(fused, state, microbatches, owners, ranks, data.draw(st.sampled_from(sorted(POLICIES))))


@pytest.mark.parametrize(
    ("schedule", "ranks"), crossed([*POLICIES, "search"], [(2, 0), (0, 0), (1, 2)])
)
def test_any_schedule_on_any_placement(schedule, ranks):
    """The first block is owned by the last rank, the head by the first, and the other way."""
    _, program, state, microbatches = captured("GPT")
    first, last = (frozenset({rank}) for rank in ranks)
    owners = {"blocks.0.qkv.weight": first, "head.weight": last}
    check(clusters(program), state, microbatches, owners, 3, schedule)


def test_what_is_new_is_shared_by_the_ranks():
    """One trained layer does not draw the rest of a model to its rank."""
    _, program, *_ = captured("GPT")
    plan, sent = planned(clusters(program), {"head.weight": frozenset({0})}, 3)
    used = {rank for ranks in ranks_of(sent).values() for rank in ranks}
    assert used == {0, 1, 2}, plan.stage_ranks


def test_a_gradient_reaches_all_owners_of_its_parameter():
    """A weight that two ranks train, used by one of them: both add up the whole gradient."""
    _, program, state, microbatches = captured("GPT")
    owners = {name: frozenset({0}) for name in ranks_of(clusters(program))}
    owners["head.weight"] = frozenset({0, 1})
    plan, sent = planned(clusters(program), owners, 2)
    (reduction,) = sent.reductions
    assert (reduction.name, reduction.ranks) == ("head.weight", (0, 1))
    found = LocalPipeline(sent, lowered(plan, sent))(state, microbatches)
    assert_same(pfeife.evaluate(program, state, microbatches), found)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "loops", "search"])
def test_ranks_without_anything_to_do(schedule, lines):
    """Of three ranks the middle one trains all that a program uses."""
    _, program, state, microbatches = captured("UNet")
    fused = clusters(program)
    owners = dict.fromkeys(ranks_of(fused), frozenset({1}))
    check(fused, state, microbatches, owners, 3, schedule)
    said = " ".join(record.getMessage() for record in lines.records)
    assert ("ranks [0, 2] have nothing to do): it runs with 1f1b" in said) == (schedule == "search")


def test_what_nobody_owns_is_shared_by_its_seconds():
    """The first of four layers takes as long as the three others."""
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    program = pfeife.fuse()(pfeife.capture(lambda x: net(x).square().mean(), torch.randn(2, 4)))
    seconds = {call.node: 1e-6 if call.unit else 3e-6 for call in program.calls}
    program = pfeife.annotate(pfeife.Costs("by hand", seconds))(program)
    cuts, stage_ranks = sched.fixed_placement.follow(program, {}, 2)
    assert [stage_ranks[stage] for stage in cuts] == [0, 1, 1, 1]
