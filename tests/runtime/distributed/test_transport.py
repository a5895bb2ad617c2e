"""The order of streams and events of a rank under NCCL, by a model of them (see `happens`)."""

import gc
import re
from functools import partial
from unittest import mock

import pytest
import torch
from alone import AloneWorld
from happens import Recorder
from hypothesis import given
from hypothesis import strategies as st
from orders import on_several
from seeded import seed
from share import random_cases
from strict.programs import on_ranks

import pfeife
from pfeife.data.schedule import Do
from pfeife.lowering import envelope
from pfeife.runtime import buffered
from pfeife.runtime.distributed.links import buffers, connection, reducing
from pfeife.runtime.distributed.transport import DistributedTransport
from pfeife.runtime.interpret import RankRunner
from pfeife.runtime.step import Part
from pfeife.sched import families


class Broken(Exception):
    """What a rank's own code raises."""


def two_steps(schedule, rank, replicas=1, *, broken=False, pool=32, packed=64, **made) -> Recorder:
    """Two steps of a rank of the world in a row, with nothing between them that waits. The first
    may be `broken` off as soon as it has begun to reduce gradients. Values of more than `packed`
    bytes have buffers of their own."""
    program, lowered = on_ranks(schedule, replicas, **made)
    program = pfeife.move_to_device("cuda:0")(program)
    mesh = pfeife.Mesh(len(schedule.ranks), replicas)

    def breaks(action):
        if action.do == Do.REDUCE_GRAD:
            raise Broken

    with Recorder(pool) as recorder, mock.patch.object(envelope, "PACKED", packed):
        world = AloneWorld(recorder, rank, mesh.size, keeps=broken)
        transport = DistributedTransport(world, mesh, program)
        runner = RankRunner(program, lowered, transport.rank)
        given = recorder.on(
            "cuda:0",
            {p: torch.zeros(p.shape, dtype=p.dtype) for p in program.inputs},
        )
        state = {p.fqn: value for p, value in given.items()}
        inputs = {p.name: value for p, value in given.items() if p not in runner.state}
        step = partial(one_step, runner, transport, state, inputs)
        if broken:
            with pytest.raises(Broken):
                step(breaks)
            gc.collect()  # its frames
        else:
            step()
        for gradient in step().gradients.values():
            gradient.neg()
    return recorder


def one_step(runner, transport, state, inputs, observe=None):
    own = transport.for_step()
    microbatches = runner.schedule.microbatches
    part = Part(0, [inputs] * microbatches, [None] * microbatches)
    step = runner.run(runner.start(state, part, own), observe=observe)
    own.finish()
    return step


@random_cases(100, derandomize=True)
@given(st.data())
def test_every_memory_is_read_when_it_is_written_and_free_when_it_is_read(data):
    schedule = data.draw(on_several())
    replicas = data.draw(st.integers(1, 2))
    rank = data.draw(st.integers(0, len(schedule.ranks) * replicas - 1))
    shard = replicas > 1 and data.draw(st.booleans())
    pool, packed = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([64, 999]))
    recorder = two_steps(schedule, rank, replicas, shard=shard, pool=pool, packed=packed)
    assert recorder.taken
    assert not recorder.found, recorder.found[0]


@pytest.mark.parametrize("shard", [False, True])
def test_a_step_that_breaks_off_leaves_its_reductions_their_memory(shard):
    recorder = two_steps(families.one_f_one_b(2, 4), 1, 2, broken=True, shard=shard)
    assert not recorder.found, recorder.found[0]


HALVES = families.one_f_one_b(2, 4)
SEEDED = {
    "a step that breaks off takes memory from its reductions": (
        reducing,
        "tensor.record_stream(self.stream)",
        "pass",
        "freed: .* before its (read|write) by",
    ),
    "reductions do not wait for what they add up": (
        reducing,
        "self.stream.wait_stream(torch.cuda.current_stream(self.device))",
        "pass",
        "read: by aten.clone",
    ),
    "sums are added before they have arrived": (
        connection,
        "    if like.is_cuda:\n        work.wait()\n",
        "    if like.is_cuda:\n        pass\n",
        "written: by aten.add_",
    ),
    "nobody waits for the sums": (
        reducing,
        "self.event.wait(torch.cuda.current_stream(self.event.device))",
        "pass",
        "read: by aten.neg",
    ),
    "what is sent is let go before it has been sent": (
        buffered,
        "works, pieces = self.leaving[destination].popleft()",
        "works, pieces = self.leaving[destination].popleft()[0], None",
        "freed: .* before its read by aten.clone",
    ),
    "what is received is read before it has arrived": (
        buffered,
        "self._wait(source, works)",
        "pass",
        "read: by",
    ),
    "a buffer is used again while it is read": (
        buffers,
        "if not is_shared(buffer)), None)",
        "), None)",
        "read: by",
    ),
}


@pytest.mark.parametrize("bug", SEEDED)
def test_seeded(monkeypatch, bug):
    module, right, wrong, found = SEEDED[bug]
    seed(monkeypatch, module, right, wrong)
    broken = module in (
        reducing,
        connection,
    )  # which then shows what a step that breaks off leaves behind
    races = [race for rank in range(2) for race in two_steps(HALVES, rank, 2, broken=broken).found]
    assert any(re.search(found, race) for race in races), set(races)
