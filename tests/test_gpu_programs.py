"""What is decided for GPUs, by programs that were captured on the CPU and moved there: nothing of
it needs a GPU."""

import functools

import attrs
import pytest
import torch
from models import CASES
from programs import captured
from torch import fx, nn
from torch.utils import _pytree as pytree

import pfeife
from pfeife import cost, sched
from pfeife.compilers.cuda_graphs import check_devices
from pfeife.compilers.draws import draws
from pfeife.frontend.cache.program_json import restore, store
from pfeife.ir.digest import program_digest
from pfeife.ir.editing.infer_values import settle
from pfeife.ir.seeding import seeded
from pfeife.lowering.channel import MOST, MOST_QUEUED
from pfeife.passes.apply import passes_of
from pfeife.runtime.interpret import RankRunner
from pfeife.runtime.step import Step

H100 = cost.machine("h100-sxm")
EVERY = [*CASES, "autocast"]
PLACES = [torch.device("cuda:1"), torch.device("cuda:0")]


def mixed() -> pfeife.Program:
    """Autocast makes copies, and a layer norm whose mean has another dtype on a GPU."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(4)))

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float().square().mean()

    return pfeife.capture(step, torch.randn(2, 4))


@functools.cache
def planned(name: str, device: str):
    """A model's clusters for a device, a plan of them, and the programs on the way to its ranks."""
    flat = mixed() if name == "autocast" else captured(name)[1]
    clusters = pfeife.fuse()(pfeife.move_to_device(device)(flat))
    clusters = pfeife.annotate(cost.estimate(clusters, H100))(clusters)
    plan = sched.plan(
        clusters, machine=H100, microbatches=4, stages=4, ranks=2, schedule="interleaved"
    )
    passes = [*passes_of(plan, clusters), pfeife.split_backward()]
    return clusters, plan, pfeife.record(clusters, *passes)


def moved(name: str):
    clusters, plan, history = planned(name, "cuda:0")
    program = history[-2].program
    return clusters, plan, program, sched.verify_schedule(sched.lower(plan.schedule, program))


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gets_the_plan_that_was_made_on_a_laptop(name):
    """Nothing that is planned by figures of a machine asks where the program is."""
    here, there = planned(name, "cpu"), planned(name, "cuda:0")
    assert there[1] == here[1] and program_digest(there[0]) == program_digest(here[0])
    for one, other in zip(here[2], there[2], strict=True):
        assert one.totals == other.totals
        assert str(pfeife.move_to_device("cuda:0")(one.program)) == str(other.program)
        assert settle(other.program) is other.program


class Told(fx.Interpreter):
    """Torch's rules for what a body makes, on fake tensors."""

    def call_function(self, target, args, kwargs):
        if target is seeded:
            target, args = args[0], args[3:]
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("name", EVERY)
def test_a_rank_computes_on_its_own_gpu(name):
    """Torch's rules refuse tensors of two devices: each operation makes its own on its rank's."""
    *_, program, _ = moved(name)
    placed = pfeife.place(PLACES)(program)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for call in placed.calls:
            body, place = placed.body(call), PLACES[call.rank]
            ends = [node for node in body.graph.nodes if node.op == "placeholder"]
            seeds = {node.args[2] for node in draws(body)}
            given = [
                torch.empty_strided(
                    one.shape,
                    one.stride(),
                    dtype=one.dtype,
                    device="cpu" if node in seeds else place,
                )
                for node in ends
                for one in [node.meta["val"]]
            ]
            results = Told(body).run(*given)
            assert {one.device for one in results} == {place}


@pytest.mark.parametrize("name", EVERY)
def test_the_account_is_that_of_torchs_cuda_allocator(name):
    *_, program, schedule = moved(name)
    curves = cost.memory_curves(program, schedule, optimizer=8)
    bare = cost.memory_curves(program, schedule, optimizer=8, rounding=1)
    for one, other in zip(curves, bare, strict=True):
        assert one.peak >= other.peak
        for point in one.points:
            assert point.peak % 512 == 0 and point.after % 512 == 0
        assert one.held["parameters"] % 512 == 0


def test_fewer_receives_are_posted_ahead_on_a_gpu():
    """They stand in hardware queues, where they keep others waiting."""
    for device, most in (("cpu", MOST), ("cuda:0", MOST_QUEUED)):
        _, plan, history = planned("GPT", device)
        program = history[-2].program
        schedule = sched.lower(plan.schedule, program)
        runner = RankRunner(program, schedule, 1, {})
        step = Step(None, None, {}, runner.envelopes, [], {})
        expected = runner._expected(step, 0, len(runner.actions))
        assert {one.most for one in expected.values()} == {most}


@pytest.mark.parametrize("name", EVERY)
def test_cuda_graphs_take_what_is_on_a_gpu(name):
    *_, program, _ = moved(name)
    check_devices(program, program.calls)
    (*_, here) = planned(name, "cpu")
    with pytest.raises(ValueError, match="is on cpu"):
        check_devices(here[-2].program, here[-2].program.calls)


def test_a_program_of_a_gpu_is_kept_and_found():
    flat = pfeife.move_to_device("cuda:0")(captured("GPT")[1])
    outputs = tuple(attrs.evolve(port, reduction=None, counts=()) for port in flat.outputs)
    flat = attrs.evolve(flat, outputs=outputs, counts=())
    again = restore(store(flat, "a key"))
    assert str(again) == str(flat) and again.inputs == flat.inputs
    values = pytree.tree_leaves([node.meta.get("val") for node in again.module.graph.nodes])
    assert {one.device for one in values if one is not None} == {PLACES[1]}
