"""Messages between ranks, and what they leave behind."""

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from unittest import mock

import attrs
import torch
import torch.distributed as dist
from models import case
from rows import row
from share import WHOLE

import pfeife
from pfeife import report, sched
from pfeife.cost import estimate, machine
from pfeife.cost.network import bench_network
from pfeife.lowering.channel import Channel
from pfeife.lowering.envelope import APART, PACKED, Envelope, Layout
from pfeife.runtime.distributed.links import mapped
from pfeife.runtime.distributed.links.buffers import Buffers
from pfeife.runtime.distributed.links.channels import Ends
from pfeife.runtime.distributed.links.connection import Connection
from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.process_group import join_world
from pfeife.testing import assert_same

CPU_CORE = machine("cpu-core")


@row(ranks=(2,))
def a_connection_a_direction() -> None:
    """Every direction between two ranks has a process group of its own, which all pipelines of a
    world share."""
    transports = [interleaved()[0].transport for _ in range(2)]
    for one in transports:
        ends = [*one.out.values(), *one.into.values()]
        groups = [end.connection.group for end in ends]
        assert len({id(group) for group in (*groups, one.world.connection.group)}) == 3
    assert transports[0].out == transports[1].out and transports[0].into == transports[1].into


def interleaved(
    widths: tuple[int, ...] = (4,) * 5,
    rows: int = 2,
    schedule: pfeife.Schedule | None = None,
    some: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> tuple:
    """A pipeline of two linear stages a rank, with its state and microbatches, of which it reads
    `some`."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(*pair) for pair in pairwise(widths)])
    microbatches = [(torch.randn(rows, widths[0]),) for _ in range(4)]
    program = pfeife.capture(lambda x: net(some(x)).square().mean(), *microbatches[0])
    clusters = pfeife.fuse()(program)
    owners = {f"{i}.{name}": frozenset({i}) for i in range(4) for name in ("weight", "bias")}
    schedule = schedule or sched.families.interleaved(4, 4, (0, 1, 0, 1))
    plan = pfeife.Plan(sched.fixed_placement.follow(clusters, owners)[0], schedule)
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    pipeline = DistributedPipeline(sent, sched.verify_schedule(sched.lower(plan.schedule, sent)))
    return pipeline, pfeife.state_of(program, net), microbatches


@row(ranks=(2,))
def large_and_small_messages() -> None:
    """They keep their order on one channel though another thread sends them from the first large
    one on; what fails there fails the step, and the next one works."""
    pipeline, state, microbatches = interleaved((2, 4, 4, 2**15, 2), rows=8)
    sizes = [one.bytes for one in pipeline.runner.envelopes.values()]
    assert min(sizes) < APART <= max(sizes)
    for _ in range(3):
        expected = as_evaluated(pipeline, state, microbatches)
    world = pipeline.transport.world
    for end in pipeline.transport.out.values():
        if end.thread is not None:
            end.connection.cut()
    try:
        pipeline(state, microbatches)
    except pfeife.PipelineError as error:
        assert "its connection is closed" in str(error), error
    else:
        raise AssertionError("what was not sent has arrived")
    assert torch.equal(pipeline(state, microbatches).loss, expected.loss)
    assert pipeline.transport.world is not world


@row(ranks=(2,))
def large_values_with_and_without_common_memory() -> None:
    """Some through it, some not, in one message, many times; without it for who has none."""
    world = join_world(torch.device("cpu"))
    small, large = torch.zeros(PACKED // 4), torch.zeros(APART // 4 + 3)
    envelope = Envelope(tuple(map(Layout.of, (*[small] * 9, large, large, large[:-3].view(2, -1)))))
    assert envelope.apart == {1, 2, 3} and envelope.piece_bytes(envelope.pieces[0]) > APART
    for purpose, maps in (("mapped", True), ("not mapped", False)):
        own = dist.PrefixStore(purpose, world.store)
        connection = Connection((0, 1), world.device, 60.0, own, "", world.gloo)
        ends = Ends(world)
        with mock.patch.object(mapped, "can_be_mapped", lambda maps=maps: maps):
            end = (ends.outgoing if world.rank else ends.incoming)(connection)
        assert bool(end.others if world.rank else end.blocks) == maps
        buffers = Buffers(world.device, ends.memory)
        for count in range(20):
            values = [
                torch.full(one.shape, float(count + at)) for at, one in enumerate(envelope.layouts)
            ]
            if world.rank:
                works = end.send(tuple(values), envelope)[0]
            else:
                found, pieces = envelope.empty(world.device, buffers.take)
                works = end.post(pieces)
            for work in works:
                work.wait(timedelta(seconds=60))
            if not world.rank:
                assert all(map(torch.equal, found, values)), count
        assert len(buffers.tensors) <= 6
        end.close() if world.rank else None
        connection.close()


def as_evaluated(
    pipeline: DistributedPipeline, state: Mapping[str, torch.Tensor], microbatches: Sequence
) -> pfeife.Result:
    """What a step must give, and gives."""
    found = pipeline(state, microbatches)
    expected = pfeife.evaluate(pipeline.program, state, microbatches)
    mine = {name: expected.gradients[name] for name in found.gradients}
    assert_same(attrs.evolve(expected, gradients=mine), found)
    return expected


@row(ranks=(2,))
def messages_of_which_data_decide_the_sizes() -> None:
    """Every microbatch has another number of rows; the values of one layer are large."""
    pipeline, state, microbatches = interleaved(
        (2, 4, 4, 2**15, 2), rows=8, some=lambda x: x[x.sum(1) > 0.5]
    )
    counts = [int((x.sum(1) > 0.5).sum()) for (x,) in microbatches]
    assert len(set(counts)) > 1
    assert any(one.opening is not one for one in pipeline.runner.envelopes.values())
    as_evaluated(pipeline, state, microbatches)
    buffers = len(pipeline.transport.buffers.tensors)
    as_evaluated(pipeline, state, microbatches[::-1])
    assert len(pipeline.transport.buffers.tensors) == buffers


@row(ranks=(2,), whole=(2,))
def many_steps() -> None:
    """Nothing grows: tensors, file descriptors, threads. Gloo's thread may hold the tensors of the
    last operation a moment longer than who waited for it."""
    pipeline, state, microbatches = interleaved()

    def resources() -> tuple[int, int, int]:
        gc.collect()
        tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
        return tensors, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    first = pipeline(state, microbatches)
    last = pipeline(state, microbatches)
    before = resources()
    for _ in range(998 if WHOLE else 298):
        last = pipeline(state, microbatches)
    after, end = resources(), time.monotonic() + 5
    while any(now > then for now, then in zip(after, before, strict=True)):
        assert time.monotonic() < end, (before, after)
        time.sleep(0.05)
        after = resources()
    assert torch.equal(first.loss, last.loss)


@row(ranks=(2,))
def receive_buffers() -> None:
    """Buffers that are used again hold nothing that anybody still has: every step's results stay
    what they were, and there are no more buffers than before."""
    one = case("WideNet")
    program = pfeife.capture(one.step, *one.batch(4))
    state = pfeife.state_of(program, one.model)
    fused = pfeife.fuse()(program)
    fused = pfeife.annotate(estimate(fused, CPU_CORE))(fused)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=4, stages=4, ranks=2, schedule="1f1b")
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
    sent = pfeife.dp_wrap(pfeife.Mesh(2))(sent)
    pipeline = DistributedPipeline(sent, sched.verify_schedule(sched.lower(plan.schedule, sent)))
    batches = [[one.batch(4, 10 * step + seed) for seed in range(4)] for step in range(4)]
    found, counts = [], []
    for microbatches in batches:
        found.append(pipeline(state, microbatches))
        counts.append(len(pipeline.transport.buffers.tensors))
    for microbatches, result in zip(batches, found, strict=True):
        expected = pfeife.evaluate(program, state, microbatches)
        mine = {name: expected.gradients[name] for name in result.gradients}
        assert_same(attrs.evolve(expected, gradients=mine), result)
    pipeline(state, batches[0])
    counts.append(len(pipeline.transport.buffers.tensors))
    assert max(counts) == counts[0] > 0, counts


@row(ranks=(2,))
def the_links_are_measured() -> None:
    """In both directions, on every rank; the progress is that of pairs of ranks."""
    join_world(torch.device("cpu"))
    told = []
    found = bench_network(sizes=(8, 4096), repeats=1, progress=lambda *done: told.append(done))
    assert told == [(1, 2), (2, 2)]
    assert [(link.source, link.destination) for link in found.links] == [(0, 1), (1, 0)]
    assert all(link.sizes == (0, 8, 4096) for link in found.links)
    assert "0 -> 1" in report.network_table(found)


@row(ranks=(4,))
def a_cut_after_others() -> None:
    """It ends the wait for a rank that is silent and keeps its connections, also when the others
    have gone already."""
    world = join_world(torch.device("cpu"))
    world.check_agreement("a new connection", "this row")  # a rank that connects answers nobody
    own = dist.PrefixStore("cut", world.store)
    connection = Connection(range(world.size), world.device, 60.0, own, "", world.gloo)
    silent = world.size // 2
    work = None if world.rank == silent else connection.group.recv([torch.empty(1)], silent, 0)
    world.gather(torch.zeros(1))  # all are connected
    for rank in range(world.size):
        if rank == world.rank and work is not None:
            connection.cut()
            start = time.monotonic()
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=5))
            assert time.monotonic() - start < 4, "nothing has ended the wait"
        world.gather(torch.zeros(1))
        time.sleep(0.1)  # until the others have noticed what this rank has closed
    connection.close()


@row(ranks=(2,), whole=(2,))
def a_connection_that_is_lost() -> None:
    """Where a message is posted, sent or waited for: the loss of the other rank, not an error of
    this one, and no message."""
    envelope = Envelope((Layout.of(torch.zeros(4)),))
    for fails in ("expect", "send", "receive"):
        transport = interleaved()[0].transport.for_step()
        other = 1 - transport.world.rank
        run = {
            "expect": partial(transport.expect, other, Channel((envelope,))),
            "send": partial(transport.send, other, (torch.zeros(4),), envelope),
            "receive": partial(transport.receive, other),
        }
        if fails == "receive":
            run["expect"]()
        transport.world.gather(torch.zeros(1))
        (transport.out if fails == "send" else transport.into)[other].connection.cut()
        try:
            run[fails]()
        except pfeife.PipelineError as error:
            assert "its connection is closed" in str(error), (fails, error)
        else:
            raise AssertionError(f"{fails}: the connection is cut")


@row(ranks=(2,))
def an_operation_of_all_that_is_lost() -> None:
    """The same where all ranks are waited for; no rank has announced a failure before, and nothing
    begins after it."""
    world = interleaved()[0].transport.world
    connection, other = world.connection, 1 - world.rank
    work = connection.group.recv([torch.empty(1)], connection.index(other), 7)  # nobody sends it
    dist.barrier()
    connection.cut()
    try:
        world.wait(work)
    except pfeife.PipelineError as error:
        assert "its connection is closed" in str(error), error
    else:
        raise AssertionError("the connection is cut")
    assert not world.diagnosing.locked(), "what has happened is known"
    try:
        with world.building("a step"):
            raise AssertionError("a rank has failed")
    except pfeife.PipelineError as again:
        assert again.failure == world.failure


@row(ranks=(2,))
def a_world_that_has_failed_leaves_no_threads() -> None:
    """The next one has its own."""
    for _ in range(2):
        world = join_world(torch.device("cpu"))
        world.gather(torch.zeros(1))
        with (
            contextlib.suppress(RuntimeError),
            world.busy(lambda: Activity("a test")),
        ):
            raise RuntimeError("a failure")
    join_world(torch.device("cpu"))
    names = [one.name for one in threading.enumerate() if one.name.startswith("pfeife")]
    assert sorted(names) == sorted(set(names)), names


class Overtaken:
    """An operation that completes after a wait for it has timed out, before one looks again."""

    def __init__(self, work: dist.Work):
        self.work, self.is_completed = work, work.is_completed

    def wait(self, *limit):
        try:
            self.work.wait(*limit)
        except RuntimeError:
            while not self.is_completed():
                time.sleep(0.01)
            raise


@row(ranks=(2,))
def a_late_collective() -> None:
    """What comes just when a part of the wait is over has come."""
    world = join_world(torch.device("cpu"))
    if world.rank == 1:
        time.sleep(0.8)
    total = torch.ones(1)
    world.wait(Overtaken(world.connection.group.allreduce(total)))
    assert total.item() == world.size and world.failure is None


def same_as_evaluated(pipeline, state, microbatches, found) -> None:
    """Loss and outputs, and this rank's gradients."""
    expected = pfeife.evaluate(pipeline.program, state, microbatches)
    mine = {name: expected.gradients[name] for name in found.gradients}
    assert_same(attrs.evolve(expected, gradients=mine), found)


@row(ranks=(2,))
def a_step_that_is_over_has_sent_all() -> None:
    """Nothing of what it sent is waited for later."""
    pipeline, state, microbatches = interleaved()
    for _ in range(3):
        step = pipeline.start(state, microbatches)
        step.run()
        assert step.transport.leaving, "a rank that sends"
        assert not any(step.transport.leaving.values())


@row(ranks=(2,))
def a_large_message_with_a_late_receiver() -> None:
    """It is what was sent, though the sender has gone on in the meantime."""
    pipeline, state, _ = interleaved((2, 4, 4, 2**15, 2), rows=8)
    for late in (0, 1):
        batch = [(torch.randn(8, 2, generator=torch.Generator().manual_seed(late)),)] * 4
        step = pipeline.start(state, batch)
        if dist.get_rank() == late:
            time.sleep(0.5)
        step.run()
        same_as_evaluated(pipeline, state, batch, step.result())


@row(ranks=(2,))
def a_pipeline_run_whole_and_in_parts() -> None:
    """In any order, and two steps at once, also with stages that fold back."""
    for placement in ((0, 1, 1, 0), (0, 1, 0, 1)):
        pipeline, state, microbatches = interleaved(schedule=sched.families.gpipe(4, 4, placement))
        for _ in range(2):
            same_as_evaluated(pipeline, state, microbatches, pipeline(state, microbatches))
            steps = [pipeline.start(state, microbatches) for _ in range(2)]
            for one in steps:
                one.run(backward=False)
            for one in reversed(steps):
                one.run(forward=False)
            for one in steps:
                same_as_evaluated(pipeline, state, microbatches, one.result())


@row("the forward cannot be run alone: the schedule has forwards after backwards", ranks=(2,))
def parts_of_a_schedule_that_has_none() -> None:
    """Messages of two steps would meet on one channel, in another order than was agreed."""
    pipeline, state, microbatches = interleaved()
    pipeline.start(state, microbatches).run(backward=False)


@row(ranks=(2,))
def received_values_that_are_kept() -> None:
    """A result that is what a rank has received stays what it is, and no buffer is kept for it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    step = pfeife.compile(
        lambda x: (net(x).square().mean(), net[0](x).detach()), microbatches=2, stages=2
    )
    kept, expected, counts = [], [], []
    for seed in range(6):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        loss, hidden = step(x)
        loss.backward()
        kept.append(hidden)
        expected.append(torch.cat([net[0](part).detach() for part in x.chunk(2)]))
        counts.append(len(step.backend.compiled[0].pipeline.transport.buffers.tensors))
    for one, other in zip(kept, expected, strict=True):
        assert torch.equal(one, other)
    assert max(counts) == counts[1], counts


@row(ranks=(4,))
def two_ranks_that_fail_at_once() -> None:
    """They raise their own, and the others all blame one of them."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    microbatches = [(torch.randn(2, 4),) for _ in range(4)]
    program = pfeife.capture(lambda x: net(x).square().mean(), *microbatches[0])
    clusters, plan = pfeife.fuse()(program), pfeife.Plan((0, 1, 2, 3), sched.families.gpipe(4, 4))
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    rank, start = int(os.environ["RANK"]), time.monotonic()

    def fails(*args):
        time.sleep(max(0.0, start + 3.0 - time.monotonic()))
        raise KeyError(f"of rank {rank}")

    calls = [call.node for call in sent.calls if call.rank == rank in (1, 2) and call.kind == "B"]
    schedule = sched.verify_schedule(sched.lower(plan.schedule, sent))
    pipeline = DistributedPipeline(sent, schedule, bodies=dict.fromkeys(calls, fails))
    blamed = -1
    try:
        pipeline(pfeife.state_of(program, net), microbatches)
    except KeyError as error:
        assert rank in (1, 2) and f"of rank {rank}" in str(error)
    except pfeife.PipelineError as error:
        blamed = error.failure.rank
        assert f"of rank {blamed}" in error.failure.cause, error
    world = join_world(torch.device("cpu"))
    everyone = [int(one) for one in world.gather(torch.tensor([blamed]))]
    said = {one for one in everyone if one >= 0}
    assert len(said) == 1 and said <= {1, 2}, everyone
