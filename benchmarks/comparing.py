"""Two sides of one case in one world: made alike, checked against each other, timed in turn."""

import cProfile
import pstats
import sys
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import harness
import models
import pipelining
import splits
import torch
import torch.distributed as dist

import pfeife
from pfeife import sched
from pfeife.data.schedule import RECEIVES, SENDS

# Seconds of the slowest rank and CPU seconds of all ranks, of every step, by side.
Times = dict[str, list[tuple[float, float]]]

# Steps before the first that counts: so many it takes until malloc has all that it will ever
# need for large values that arrive at other times in every step.
WARM_UP = 6


@attrs.frozen
class Options:
    """How often each side runs, whether rank 0 of ours is profiled, whether the peer is timed."""

    repeats: int
    profile: bool = False
    peer: bool = True


@attrs.frozen(eq=False)
class Side:
    """Something whose steps are timed; `reset` comes before each, untimed."""

    step: Callable[[], object]
    reset: Callable[[], object] = lambda: None


@attrs.frozen
class Record:
    """What was measured of one case. Where it is known, `ideal` has the seconds of a step with
    free messages, and with messages that take their time but none of the ranks'."""

    ranks: int
    schedule: str
    stages: int
    microbatches: int
    actions: int
    times: Times
    ideal: tuple[float, float] | None = None
    note: str = ""


def in_turn(sides: dict[str, Side], options: Options) -> Times:
    """Every side's step after the other's, again and again, after some that nobody counts."""
    times: Times = {name: [] for name in sides}
    profiler = cProfile.Profile()
    for repeat in range(WARM_UP + options.repeats):
        for name, side in sides.items():
            side.reset()
            step = side.step
            if options.profile and name == "ours" and repeat >= WARM_UP and dist.get_rank() == 0:
                step = _profiled(profiler, step)
            times[name].append(harness.timed(step))
    if options.profile and dist.get_rank() == 0:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(40)
    return {name: taken[WARM_UP:] for name, taken in times.items()}


def _profiled(profiler: cProfile.Profile, step: Callable[[], object]) -> Callable[[], object]:
    return lambda: profiler.runcall(step)


def cut_as(
    split: splits.Split, order: pfeife.Schedule, compiler: str = "aot_eager"
) -> harness.Ready:
    """Pfeife's pipeline with the peer's cut and order."""
    case = split.case
    clusters = pfeife.fuse()(pfeife.capture(case.step, *case.draw()))
    if any(action.do == "W" for actions in order.ranks for action in actions):
        clusters = pfeife.split_backward()(clusters)
    plan = pfeife.Plan(sched.fixed_placement.follow(clusters, split.owners)[0], order)
    one = harness.ready(harness.of_rank_zero(plan), clusters, case, compiler)
    assert one.schedule.computing() == order
    return one


def steps_of(one: harness.Ready) -> Side:
    return Side(lambda: one.pipeline.start(one.state, one.batch).run())


def check(one: harness.Ready, peer: pipelining.Peer, same_split: bool) -> None:
    """Raises AssertionError unless both compute the same (collective); gradients are compared
    where a rank has them on both sides, with the same split all of them."""
    step = one.pipeline.start(one.state, one.batch)
    step.run()
    found = step.result(outputs=False)
    peer.reset()
    peer.step()
    theirs, loss = peer.gradients(), peer.loss()
    assert not same_split or theirs.keys() == found.gradients.keys()
    for name in theirs.keys() & found.gradients.keys():
        torch.testing.assert_close(found.gradients[name], theirs[name], rtol=1e-3, atol=1e-5)
    if loss is not None:
        torch.testing.assert_close(found.loss, loss, rtol=1e-4, atol=1e-6)


def accumulate(case: models.Case, batch: Sequence[Any]) -> None:
    """A step's forwards and backwards by autograd alone."""
    for microbatch in batch:
        (case.step(*microbatch) / len(batch)).backward()


def eager(case: models.Case, batch: Sequence[Any], *, threads: int = 1, all_ranks=False) -> Side:
    """The whole model's step in one process, rank 0, while the other ranks sleep; or in every
    one of them at the same time."""

    def step() -> None:
        if all_ranks or dist.get_rank() == 0:
            torch.set_num_threads(threads)
            accumulate(case, batch)
            torch.set_num_threads(1)

    def reset() -> None:
        for parameter in case.model.parameters():
            parameter.grad = None

    return Side(step, reset)


def bare(one: harness.Ready) -> Side:
    """The schedule's messages by the process group's own calls, with nothing computed: no runtime
    over this group can take less."""
    transport, runner = one.pipeline.transport, one.pipeline.runner
    messages = [
        (action, runner.wiring.message(action))
        for action in runner.actions
        if action.do in SENDS or action.do in RECEIVES
    ]
    data = {m.node: runner.wiring.envelope(m).empty(None)[1] for _, m in messages}

    def step() -> None:
        arriving: list[dist.Work] = []
        for action, message in messages:
            if action.do in RECEIVES:
                end = transport.into[message.source]
                group = end.connection.group
                arriving += [group.recv([piece], end.peer, 0) for piece in data[message.node]]
        leaving: list[dist.Work] = []
        come = iter(arriving)
        for action, message in messages:
            for piece in data[message.node]:
                if action.do in RECEIVES:
                    next(come).wait()
                else:
                    end = transport.out[message.destination]
                    leaving.append(end.connection.group.send([piece], end.peer, 0))
        for work in leaving:
            work.wait()

    return Side(step)


def side_by_side(
    make: Callable[[], splits.Split],
    schedule: str,
    microbatches: int,
    options: Options,
    *,
    plan: Callable[[splits.Split], harness.Ready] | None = None,
    alone: bool = False,
    ideal: Callable[[harness.Ready], tuple[float, float]] | None = None,
    inductor: bool = False,
    note: str = "",
) -> Record:
    """Both sides on the peer's split and schedule, unless `plan` makes ours another way; with
    `alone`, also all that they compute without a pipeline, and the messages alone;
    with `inductor`, the stages of both sides compiled by it."""
    torch.manual_seed(0)
    split = make()
    batch = [split.case.draw() for _ in range(microbatches)]
    peer = pipelining.peer(split, schedule, batch, inductor)
    order = pipelining.order(peer, schedule, len(split.stages), microbatches)
    compiler = "inductor" if inductor else "aot_eager"
    one = plan(split) if plan else cut_as(split, order, compiler)
    one = attrs.evolve(one, batch=batch)
    check(one, peer, same_split=plan is None)
    sides = {"ours": steps_of(one)}
    if options.peer:
        sides["peer"] = Side(peer.step, peer.reset)
    if alone:
        sides["alone"], sides["bare"] = eager(split.case, batch), bare(one)
    mine = one.schedule.computing()
    return Record(
        ranks=dist.get_world_size(),
        schedule=schedule,
        stages=len(split.stages),
        microbatches=microbatches,
        actions=sum(len(actions) for actions in order.ranks),
        times=in_turn(sides, options),
        ideal=ideal(one) if ideal else None,
        note=f"{mine.stages} stages on {mine.stage_ranks}" if plan else note,
    )
