"""Programs of the tests' models, at every level."""

import functools

from models import case

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine

CPU_CORE = machine("cpu-core")


def clusters(program: pfeife.Program) -> pfeife.Program:
    fused = pfeife.fuse()(program)
    return pfeife.annotate(estimate(fused, CPU_CORE))(fused)


@functools.cache
def captured(name: str):
    one = case(name)
    microbatches = [one.batch(2, seed) for seed in range(4)]
    program = pfeife.capture(one.step, *microbatches[0])
    state = {n: v.clone() for n, v in pfeife.state_of(program, one.model).items()}
    return one, program, state, microbatches


def lowered(plan: pfeife.Plan, program: pfeife.Program) -> pfeife.Schedule:
    return sched.verify_schedule(sched.lower(plan.schedule, program))


@functools.cache
def fused(name: str) -> pfeife.Program:
    one = case(name)
    return pfeife.fuse()(pfeife.capture(one.step, *one.batch(2)))
