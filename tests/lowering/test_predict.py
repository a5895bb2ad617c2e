"""Predicted time by hand: who waits for whom, and what a transfer takes from its ranks."""

import functools

import attrs
import pytest
import torch
from models import case
from orders import TWO, seconds
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine
from pfeife.data.link import Link
from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.data.plan import Costs
from pfeife.data.schedule import RECEIVES, SENDS, Do, Schedule
from pfeife.ir.messages import messages
from pfeife.ir.nodes import find_node, node_bytes
from pfeife.lowering.buckets import buckets_of, reducing_seconds
from pfeife.lowering.envelope import PACKED, Travel, travel
from pfeife.lowering.lower import transfer_of
from pfeife.lowering.predict import action_seconds, occupied_seconds, predict
from pfeife.lowering.problem import seconds_of
from pfeife.lowering.simulate import simulate

CPU_CORE = machine("cpu-core")


def busy(sending: float, receiving: float):
    return lambda action: sending if action.do in SENDS else receiving


def times(text: str, *args, **options) -> dict[str, tuple[float, float]]:
    timeline = simulate(Schedule.from_csv(text), *args, **options)
    return {f"{e.rank}: {e.action}": (e.start, e.end) for e in timeline.events}


def test_a_transfer_takes_the_time_of_its_ranks():
    """Sends delay what comes after them; a receive that waits anyway costs nothing more."""
    free = times(TWO, seconds(3.0))
    assert free["0: 0F1"] == (1, 2) and free["1: 1F1"] == (7, 8)
    taken = times(TWO, seconds(3.0), occupied=busy(0.5, 1.5))
    assert taken["0: 0SEND_F0"] == (1, 1.5) and taken["0: 0F1"] == (1.5, 2.5)
    assert taken["1: 1RECV_F0"] == (0, 4), "the rank has waited longer than it takes"
    assert taken["1: 1RECV_F1"] == (5, 7), "the channel was free at 4 only"
    late = times(TWO, seconds(3.0), occupied=busy(0.5, 2.5))
    assert late["1: 1RECV_F0"] == (0, 4) and late["1: 1RECV_F1"] == (5, 7.5)
    fast = times(TWO, seconds(0.0), occupied=busy(0.0, 2.5))
    assert fast["1: 1RECV_F0"] == (0, 2.5) and fast["1: 1RECV_F1"] == (3.5, 6)


def test_directions_are_channels_of_their_own():
    both = times("0F0,0SEND_F0,0RECV_B0\n1F0,1SEND_B0,1RECV_F0\n", seconds(3.0))
    assert both["0: 0RECV_B0"] == both["1: 1RECV_F0"] == (1, 4)
    one = times("0F0,0SEND_F0,0SEND_F1\n1F0,1RECV_F0,1RECV_F1\n", seconds(3.0))
    assert one["1: 1RECV_F0"] == (1, 4) and one["1: 1RECV_F1"] == (4, 7)
    third = "0F0,0SEND_F0@1,0SEND_F0@2\n1F0,1RECV_F0\n2F0,2RECV_F0@0\n"
    assert times(third, seconds(3.0))["2: 2RECV_F0@0"] == (1, 4), "another pair of ranks"


def test_a_reduction_waits_for_all_its_ranks():
    """Its ranks go on meanwhile; each does one after another."""
    text = "0F0,1REDUCE_GRAD,0REDUCE_GRAD,0B0\n1F0,1B0,1F1,0REDUCE_GRAD\n2F0,2REDUCE_GRAD\n"
    found = times(text, seconds(0.0, reduction=2.0), 0.0, lambda a: 0.5 * (a.do.kind is None))
    assert found["0: 1REDUCE_GRAD"] == (1, 3)
    assert found["0: 0REDUCE_GRAD"] == (1.5, 5) and found["1: 0REDUCE_GRAD"] == (3, 5)
    assert found["0: 0B0"] == (2, 3)
    assert found["2: 2REDUCE_GRAD"] == (1, 3), "its own alone"


def test_a_stage_waits_for_its_parameters():
    """They are told one after another, and gradients after them, beside what a rank computes."""
    text = "0UNSHARD,1UNSHARD,0F0,1F0,1B0,1REDUCE_GRAD,1RESHARD,0B0\n"

    def taken(action):
        return {"UNSHARD": 2.0, "REDUCE_GRAD": 5.0, "RESHARD": 0.0}.get(action.do, 1.5)

    found = times(text, taken, 0.0, lambda a: 0.5 * (a.do.kind is None))
    assert found["0: 0UNSHARD"] == (0, 2) and found["0: 1UNSHARD"] == (0.5, 4)
    assert found["0: 0F0"] == (2, 3.5) and found["0: 1F0"] == (4, 5.5)
    assert found["0: 1REDUCE_GRAD"] == (7, 12) and found["0: 1RESHARD"] == (7.5, 7.5)
    assert found["0: 0B0"] == (7.5, 9)


def test_every_action_has_an_overhead():
    found = times(TWO, seconds(3.0), 0.25, busy(0.5, 0.0))
    assert found["0: 0F0"] == (0, 1.25) and found["0: 0SEND_F0"] == (1.25, 2.0)
    assert found["1: 1RECV_F0"] == (0, 4.5), "sent at 1.25, there at 4.25"
    reduced = times("0F0,0REDUCE_GRAD\n1F0,0REDUCE_GRAD\n", seconds(0.0, 2.0), 0.25)
    assert reduced["0: 0REDUCE_GRAD"] == (1.25, 3.25)


@functools.cache
def two_matrices() -> pfeife.Program:
    first, second = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(7, 2))

    def step(x):
        return (pfeife.stage_boundary(x @ first) @ second).square().sum()

    return pfeife.fuse()(pfeife.capture(step, torch.randn(3, 5)))


def sent(microbatches: int, adding: float = 0.0, order=sched.families.gpipe):
    """Two stages, a second a call, `adding` for the gradients; 84 bytes go each way."""
    fused = two_matrices()
    plan = pfeife.Plan((0, 1), order(2, microbatches))
    program = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
    names = {call.node: call.kind for call in program.calls}
    accumulate = {name: adding for name, kind in names.items() if kind == "B"}
    program = pfeife.annotate(Costs("by hand", dict.fromkeys(names, 1.0), {}, accumulate))(program)
    return program, sched.verify_schedule(sched.lower(plan.schedule, program))


SLOW = Machine("slow", 1.0, 1.0, 10**9, link_bandwidth=84.0, link_latency=1.0)  # 2 s a message


@pytest.mark.parametrize(("overlap", "share"), [(1.0, 0.0), (0.0, 2.0), (0.75, 0.5)])
def test_overlap(overlap, share):
    """What is not hidden comes to the time of both ends."""
    program, schedule = sent(2)
    link = attrs.evolve(SLOW, overlap=overlap)
    occupied = occupied_seconds(program, link)
    transfers = [a for r in schedule.ranks for a in r if a.do in SENDS or a.do in RECEIVES]
    assert len(transfers) == 8 and all(occupied(action) == share for action in transfers)
    events = {str(e.action): e for e in predict(program, schedule, link).events}
    assert events["0SEND_F0"].end - events["0SEND_F0"].start == share
    assert events["0F1"].start == 1 + share
    assert events["1RECV_F0"].end == 3, "it has waited from the start"
    # The second is under way from 3 on (the channel) or from when the rank comes to it.
    assert events["1RECV_F1"].end == max(max(3, 2 + share) + 2, 4 + share)


def test_accumulating_begins_with_the_second_microbatch():
    program, schedule = sent(3, adding=0.25)
    seconds_of = action_seconds(program, SLOW)
    computing = {str(a): seconds_of(a) for rank in schedule.ranks for a in rank if a.do.kind}
    assert {name: s for name, s in computing.items() if s != 1} == {
        f"{stage}B{microbatch}": 1.25 for stage in (0, 1) for microbatch in (1, 2)
    }
    plain, plain_schedule = sent(3)
    alone = simulate(plain_schedule, action_seconds(plain, SLOW)).events
    with_sums = simulate(schedule, seconds_of).events
    busy = [sum(e.end - e.start for e in es if e.action.do.kind) for es in (alone, with_sums)]
    assert busy[1] - busy[0] == 4 * 0.25


def test_large_values_are_sent_one_after_another():
    """The next when the rank is done with the one before; the last one's arrival counts, and the
    link carries no more bytes in its time than it can."""
    large, small = 2 * PACKED, PACKED // 4
    quick = Link(0, 1, (0, PACKED), (1.0, 3.0), (0.5, 0.5), (0.25, 0.25), 0.0)
    packed = travel((small, small, small), quick)
    assert packed == Travel(1.0 + 2 * 0.75, 0.5, 0.25), "as one message"
    assert travel((small, large, small), quick) == Travel(1.0 + 2 * 2.5, 1.0, 0.5), "the bytes"
    slow = attrs.evolve(quick, sending=(9.0, 9.0))
    assert travel((small, large, small), slow) == Travel(9.0 + 1.0 + 2 * 2, 18.0, 0.5)
    assert travel((large, large), attrs.evolve(SLOW, overlap=0.0)).sending == pytest.approx(
        2 * (1.0 + large / 84)
    )


def test_small_values_of_a_message_travel_together():
    """As the runtime packs them; so do those of the planner's problem."""
    one = case("UNet")
    fused = pfeife.fuse()(pfeife.capture(one.step, *one.batch(2)))
    fused = pfeife.annotate(estimate(fused, CPU_CORE))(fused)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=2, stages=2)
    program = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
    schedule = sched.lower(plan.schedule, program)
    sizes, rising = (0, 1000), (1.0, 3.0)
    links = [Link(a, b, sizes, rising, (0.5, 1.0), (0.25, 0.5), 0.0) for a, b in ((0, 1), (1, 0))]
    network = Network(tuple(links))
    transfer = action_seconds(program, CPU_CORE, network)
    occupied = occupied_seconds(program, CPU_CORE, network)
    many = [message for message in messages(program) if len(message.values) > 1]
    assert many, "skip connections cross"
    for message in messages(program):
        each = [node_bytes(find_node(program.module, name)) for name in message.values]
        action = transfer_of(message)
        size = sum(-(-size // 64) * 64 for size in each) if len(each) > 1 else each[0]
        assert transfer(action.send(0)) == pytest.approx(1.0 + size * 0.002)
        assert occupied(action.send(0)) == pytest.approx(0.5 + size * 0.0005)
        assert occupied(action.receive(0)) == pytest.approx(0.25 + size * 0.00025)
    problem = sched.cutting.stage_problem(
        sched.cutting.Account(sched.cutting.workload_of(fused, plan.duplicated)),
        plan.stage_of_cluster,
        (0, 1),
        2,
        machine=CPU_CORE,
        network=network,
    )
    planned = seconds_of(problem)
    for rank in schedule.ranks:
        for action in rank:
            if action.do in SENDS:
                assert planned(action) == pytest.approx(transfer(action)), str(action)
    timeline = predict(program, schedule, CPU_CORE, network)
    starts = {e.action: (e.start, e.end) for e in timeline.events}
    for action, (start, end) in starts.items():
        if action.do in SENDS:
            expected = occupied(action) + CPU_CORE.action_seconds
            assert end - start == pytest.approx(expected)


def test_replicas_reduce_in_predicted_time():
    """Each stage's gradients are reduced once, over all its replicas, in the ring's time; adding
    up is counted in the program of a replica as in that of one."""
    fused = two_matrices()
    plan = pfeife.Plan((0, 1), sched.families.gpipe(2, 3))
    passes = [pfeife.partition(plan), pfeife.insert_send_recv(), pfeife.dp_wrap(pfeife.Mesh(2, 3))]
    program = pfeife.compose(*passes)(fused)
    kinds = {call.node: call.kind for call in program.calls}
    adding = {name: 0.25 for name, kind in kinds.items() if kind == "B"}
    program = pfeife.annotate(Costs("by hand", dict.fromkeys(kinds, 1.0), {}, adding))(program)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, program))
    events = predict(program, schedule, SLOW).events
    reductions = [e for e in events if e.action.do == Do.REDUCE_GRAD]
    assert [(e.rank, e.action.stage) for e in sorted(reductions, key=lambda e: e.rank)] == [
        (0, 0),
        (1, 1),
    ]
    for event, bytes_ in zip(sorted(reductions, key=lambda e: e.rank), (140, 56), strict=True):
        ring = 2 * (3 - 1) / 3 * bytes_ / 84 + 2 * (3 - 1) * 1.0
        assert event.end - event.start == pytest.approx(ring)
    for rank in (0, 1):
        computing = [e.end - e.start for e in events if e.rank == rank and e.action.do.kind]
        assert sum(computing) == pytest.approx(6 * 1.0 + 2 * 0.25)


@pytest.mark.parametrize("width", [64, 640])
def test_what_keepers_tell_counts_once_a_step(width):
    """Each part there, one message after the other, one for all that is small; and those of
    gradients back, in one bucket."""
    net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    net[2].weight.requires_grad_(False)
    flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(8, width))
    taken = []
    for keepers in (None, {}):
        cut = pfeife.shard({"0.*": 0, "2.weight": 1}, members=4, keepers=keepers)
        local = pfeife.fuse()(cut(flat))
        local = pfeife.annotate(estimate(local, CPU_CORE))(local)
        plan = sched.plan(local, machine=CPU_CORE, microbatches=3, stages=1)
        ranks = pfeife.apply(plan)(local)
        taken.append(sched.predict(ranks, sched.lower(plan.schedule, ranks), CPU_CORE).seconds)
    weight, bias = 4 * width * width, 4 * width  # bytes of a part
    # Keepers are others for each of the three: a message is as long as what one of them tells.
    told = [weight, weight] if width == 64 else [weight, bias, weight, weight]
    seconds = sum(3 * CPU_CORE.transfer_seconds(sent) for sent in told)
    assert taken[1] - taken[0] == pytest.approx(seconds)


@pytest.mark.parametrize("replicas", [1, 2])
def test_members_tell_one_another_over_links_of_their_own(replicas):
    """Gradients of members are added up and put together over these, and over those of replicas
    where there are several."""
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(8, 8))
    cut = pfeife.shard({"0.weight": 0, "2.weight": "gathered"}, members=2, keepers={})
    local = pfeife.fuse()(cut(flat))
    local = pfeife.annotate(estimate(local, CPU_CORE))(local)
    plan = sched.plan(local, machine=CPU_CORE, microbatches=2, stages=1)
    ranks = pfeife.apply(plan, pfeife.Replicas(replicas))(local)
    inside = attrs.evolve(CPU_CORE, link_bandwidth=1e6, link_latency=1.0)
    across = attrs.evolve(inside, link_latency=10.0)
    buckets = buckets_of(ranks)
    assert {bucket.cut for bucket in buckets} == {True, False}
    for bucket in buckets:
        over = inside if replicas == 1 else across
        added = reducing_seconds(bucket.members, bucket.bytes, bucket.owned, over)
        joined = inside.transfer_seconds(bucket.kept_bytes(0, 0)) if bucket.cut else 0.0
        assert bucket.seconds(across, inside) == pytest.approx(added + joined)
