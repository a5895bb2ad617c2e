"""Where sends, receives and reductions come in a schedule."""

from itertools import pairwise

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import placed, reductions
from torch import nn

import pfeife
from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, Schedule, parse_action
from pfeife.ir.parts import Kind, Reduction
from pfeife.lowering.coverage import check_coverage
from pfeife.lowering.lower import Transfer, chain, insert_actions, lower
from pfeife.lowering.telling import Kept, kept_by_stage
from pfeife.lowering.verify import verify_schedule
from pfeife.lowering.wiring import Wiring
from pfeife.sched.families import gpipe, one_f_one_b


@settings(max_examples=100)
@given(placed((gpipe, one_f_one_b)), st.data())
def test_inserted_actions(order, data):
    """Sends follow at once what they send, receives come as late as the order of the channel
    lets them, and a reduction comes after the gradients, in one order on all ranks."""
    wanted = data.draw(reductions(order))
    full = verify_schedule(insert_actions(order, chain(order), wanted))
    stage_ranks = full.stage_ranks
    orders = []
    for rank, actions in enumerate(full.ranks):
        for before, action in pairwise(actions):
            if action.do in SENDS:
                maker = Do.FORWARD if action.do == Do.SEND_F else Do.BACKWARD
                assert before == Action(action.stage, maker, action.microbatch)
            if before.do in RECEIVES:
                assert action.do in RECEIVES or action.stage == before.stage
        reduced = [a.stage for a in actions if a.do == Do.REDUCE_GRAD]
        orders.append(reduced)
        assert sorted(set(reduced)) == sorted({r.stages[0] for r in wanted if rank in r.ranks})
        for reduction in wanted:
            for stage in reduction.stages:
                if rank in reduction.ranks and stage_ranks[stage] == rank:
                    at = actions.index(Action(reduction.stages[0], Do.REDUCE_GRAD))
                    last = Action(stage, Do.BACKWARD, full.microbatches - 1)
                    assert actions.index(last) < at
    graph = nx.DiGraph(edge for reduced in orders for edge in pairwise(reduced))
    assert nx.is_directed_acyclic_graph(graph), "ranks reduce in different orders"


def test_tied_weights_on_looped_stages_do_not_deadlock():
    """Each rank reduces after its own last gradient, and all that it owes others has been sent."""
    order = gpipe(4, 2, (0, 1, 0, 1))
    full = insert_actions(order, chain(order), [Reduction("embed", (0, 1), (0, 3))])
    assert str(full.ranks[0][-1]) == "0REDUCE_GRAD"
    assert "3B1,3SEND_B1,0REDUCE_GRAD,1RECV_B0,1B0" in full.to_csv()
    verify_schedule(full)
    late = insert_actions(order, chain(order), [Reduction("w", (1,), (3,), 2)], overlap=False)
    assert str(verify_schedule(late).ranks[1][-1]) == "3REDUCE_GRAD"


def test_reductions_of_one_rank_overlap():
    """The last stage of a rank reduces while the others still compute."""
    order = gpipe(4, 1, (0, 1, 0, 1))
    full = insert_actions(
        order, chain(order), [Reduction(str(s), (s % 2,), (s,)) for s in range(4)]
    )
    assert " ".join(map(str, full.ranks[1])).endswith(
        "3B0 3SEND_B0 3REDUCE_GRAD 1RECV_B0 1B0 1SEND_B0 1REDUCE_GRAD"
    )


def test_parameters_are_told_from_the_beginning_and_dropped_after_the_last_use():
    """In the order of their first uses; what two stages of a rank read is that of the first."""
    order = gpipe(4, 1, (0, 1, 0, 1))
    kept = [Kept(0, 0, (), frozenset({0, 2})), Kept(3, 1, (), frozenset({3})), Kept(1, 1, (), {1})]
    full = verify_schedule(insert_actions(order, chain(order), [Reduction("w", (1,), (3,))], kept))
    assert full.to_csv() == (
        "0UNSHARD,0F0,0SEND_F0,2RECV_F0,2F0,2SEND_F0,2RECV_B0,2B0,2SEND_B0,0RECV_B0,0B0,0RESHARD\n"
        "1UNSHARD,3UNSHARD,1RECV_F0,1F0,1SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,3REDUCE_GRAD,3RESHARD,"
        "1RECV_B0,1B0,1RESHARD,1SEND_B0\n"
    )


def test_members_are_told_before_they_compute():
    """A schedule that does not say so is refused."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    clusters = pfeife.fuse()(pfeife.shard("cut", 2, keepers={})(flat))
    plan = pfeife.Plan((0,) * clusters.units, gpipe(1, 2))
    ranks = pfeife.apply(plan)(clusters)
    wiring, full = Wiring(ranks), lower(plan.schedule, ranks)
    assert full.to_csv() == "0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0RESHARD\n"
    check_coverage(full, wiring, kept_by_stage(ranks))
    for moved in ("0UNSHARD", "0RESHARD"):
        cells = full.to_csv().strip().split(",")
        cells.remove(moved)
        cells.insert(2, moved)
        wrong = Schedule.from_csv(",".join(cells))
        with pytest.raises(ValueError, match=r"do not have 0\.weight, outside of 0UNSHARD"):
            check_coverage(wrong, wiring, kept_by_stage(ranks))


def test_skip_connections_are_received_in_the_order_of_the_sends():
    """A message that is needed late but sent early is received early, or the channel blocks."""
    skip = Transfer(0, Kind.FORWARD, 2, ((2, Kind.FORWARD),))
    order = gpipe(3, 1, (0, 1, 1))
    near, back = chain(order)
    full = insert_actions(order, [skip, near, back])
    assert full.to_csv() == (
        "0F0,0SEND_F0@2,0SEND_F0,0RECV_B0,0B0\n2RECV_F0@0,1RECV_F0,1F0,2F0,2B0,1B0,1SEND_B0\n"
    )
    assert parse_action("2RECV_F0@0") in verify_schedule(full).ranks[1]
