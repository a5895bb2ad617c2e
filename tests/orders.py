"""Schedules that tests draw, and the actions between their stages."""

from itertools import pairwise

import attrs
import networkx as nx
from hypothesis import assume
from hypothesis import strategies as st

from pfeife.data.schedule import Action, Do, Schedule
from pfeife.ir.parts import Reduction
from pfeife.lowering.lower import chain, insert_actions
from pfeife.lowering.telling import Kept
from pfeife.lowering.verify import verify_schedule
from pfeife.sched.families import forward_only, gpipe, one_f_one_b


@st.composite
def placed(draw: st.DrawFn, policies=(gpipe, one_f_one_b, forward_only)) -> Schedule:
    """A policy's schedule of up to 8 stages on ranks in any way, with ranks that have none."""
    ranks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    if draw(st.booleans()):
        ranks = [stage % (1 + max(ranks)) for stage in range(len(ranks))]
    return draw(st.sampled_from(policies))(len(ranks), draw(st.integers(1, 6)), ranks)


@st.composite
def shuffled(draw: st.DrawFn) -> Schedule:
    """A small schedule in which some backwards are split and some neighbours swapped."""
    order = draw(placed((gpipe, one_f_one_b)))
    assume(order.stages * order.microbatches <= 12)
    ranks = []
    for rank in order.ranks:
        actions: list[Action] = []
        for action in rank:
            if action.do == Do.BACKWARD and draw(st.booleans()):
                do = attrs.evolve(action, do=Do.INPUT_BACKWARD)
                actions += [do, attrs.evolve(action, do=Do.WEIGHT_BACKWARD)]
            else:
                actions.append(action)
        for at in draw(st.lists(st.integers(0, 100), max_size=3)):
            if len(actions) > 1:
                at %= len(actions) - 1
                actions[at : at + 2] = reversed(actions[at : at + 2])
        ranks.append(tuple(actions))
    return Schedule(tuple(ranks))


@st.composite
def on_several(draw: st.DrawFn, policies=(gpipe, one_f_one_b)) -> Schedule:
    """One that can run, of up to six stages on two ranks or more."""
    schedule = draw(st.one_of(placed(policies), shuffled()))
    assume(1 < schedule.stages <= 6 and len(schedule.ranks) > 1)
    try:
        return verify_schedule(schedule)
    except ValueError:
        assume(False)
        raise


@st.composite
def reductions(draw: st.DrawFn, schedule: Schedule) -> list[Reduction]:
    """Gradients of parameters that one or several stages use."""
    stage_ranks, found = schedule.stage_ranks, []
    for index in range(draw(st.integers(0, 4))):
        stages = sorted(draw(st.sets(st.integers(0, schedule.stages - 1), min_size=1)))
        ranks = tuple(sorted({stage_ranks[stage] for stage in stages}))
        found.append(Reduction(f"w{index}", ranks, tuple(stages), 2))
    return found


def lowered(order: Schedule) -> Schedule:
    return insert_actions(order, chain(order))


TWO = "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n"
CHAIN = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Lowered ones, with reductions and parameters that members keep, of any placement; some with
    neighbours swapped."""
    if draw(st.booleans()):
        whole = draw(placed())
    else:
        whole = draw(shuffled())
        try:
            verify_schedule(whole)
        except ValueError:
            assume(False)
    told = draw(st.sets(st.integers(0, whole.stages - 1)))
    kept = [Kept(s, whole.stage_ranks[s], (), frozenset({s})) for s in sorted(told)]
    full = insert_actions(whole, chain(whole), draw(reductions(whole)), kept)
    return verify_schedule(full)


def unit(action: Action) -> float:
    return 1.0 if action.do.kind else 0.0


def flow(order: Schedule) -> nx.DiGraph:
    """What must come before what, written down a second time: an independent oracle."""
    graph = nx.DiGraph()
    for rank in order.ranks:
        graph.add_nodes_from(rank)
        graph.add_edges_from(pairwise(rank))
    for action in list(graph):
        stage, k = action.stage, action.microbatch
        if action.do == Do.FORWARD:
            graph.add_edges_from([(Action(stage - 1, Do.FORWARD, k), action)] if stage else [])
        elif action.do == Do.WEIGHT_BACKWARD:
            graph.add_edge(Action(stage, Do.INPUT_BACKWARD, k), action)
        else:
            graph.add_edge(Action(stage, Do.FORWARD, k), action)
            for do in (Do.BACKWARD, Do.INPUT_BACKWARD):
                if (later := Action(stage + 1, do, k)) in graph:
                    graph.add_edge(later, action)
    return graph


def seconds(transfer: float, reduction: float = 0.0):
    """Seconds of actions: one of each that computes, those given of the others."""

    def of(action: Action) -> float:
        return 1.0 if action.do.kind else reduction if action.do == Do.REDUCE_GRAD else transfer

    return of
