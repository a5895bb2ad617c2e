"""Measured timelines have the actions of predicted ones."""

import attrs
import torch
from programs import CPU_CORE, clusters, for_ranks
from torch import nn

import pfeife
from pfeife.data.schedule import Action, Do
from pfeife.runtime import LocalPipeline
from pfeife.runtime.profile import LiveTensors, profile


def test_predicted_and_profiled_steps_have_the_same_actions():
    """One type of timeline: what was to run, and what ran, on the same ranks in the same order."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    microbatches = [(torch.randn(2, 3),) for _ in range(3)]
    program = pfeife.capture(lambda x: model(x).square().sum(), *microbatches[0])
    fused = clusters(program)
    plan = pfeife.sched.plan(fused, machine=CPU_CORE, microbatches=3, stages=2)
    sent, schedule = for_ranks(fused, plan)
    predicted = pfeife.sched.predict(sent, schedule, CPU_CORE)
    slow = attrs.evolve(CPU_CORE, action_seconds=1.0, link_latency=10.0)
    assert pfeife.sched.predict(sent, schedule, slow).seconds > predicted.seconds + 10
    pipeline = LocalPipeline(sent, schedule)
    measured = profile(pipeline, pfeife.state_of(program, model), microbatches)
    for timeline in (predicted, measured):
        for rank, actions in enumerate(schedule.ranks):
            events = [event for event in timeline.events if event.rank == rank]
            assert tuple(event.action for event in events) == actions
            assert all(event.start <= event.end for event in events)
    assert 0 < measured.bubble < 1


def test_what_lives_on_another_device_is_not_counted():
    known = torch.zeros(4)
    with LiveTensors([known], torch.device("cpu")) as live:
        kept = [torch.zeros(8), torch.zeros(100, device="meta"), known.view(2, 2)]
        live(0)(Action(0, Do.FORWARD, 0))
        del kept
        live(0)(Action(0, Do.FORWARD, 1))
    assert [(point.peak, point.after) for point in live.points] == [(32, 32), (32, 0)]


def test_torchs_profiler_sees_the_actions():
    """By their names, with the operations inside; a profiler of all threads sees those of ranks
    that are threads."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    step = pfeife.compile(lambda x: model(x).square().sum(), microbatches=2, stages=2)
    step(torch.randn(4, 3))
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=every) as found:
        step(torch.randn(4, 3)).backward()
    schedule = step.backend.compiled[0].schedule
    named = sorted(e.name for e in found.events() if e.name.startswith("pfeife "))
    assert named == sorted(f"pfeife {action}" for rank in schedule.ranks for action in rank)
    forward = next(e for e in found.events() if e.name == "pfeife 0F0")
    assert any(e.name == "aten::addmm" for e in forward.cpu_children)
