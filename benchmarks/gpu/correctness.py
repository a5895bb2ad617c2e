"""The toolkit by its levels: capture, every pass, `evaluate`, every family of schedules."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch

import pfeife
from gpu.beside_eager import (
    BITWISE,
    SUMMED,
    Rounding,
    Values,
    accumulated,
    alike,
    deterministic,
    of_gradients,
    values_of,
)
from gpu.cases import CASES, Case, case
from gpu.rows import Row, Setting, Skipped
from pfeife import sched
from pfeife.cost import default_machine, estimate
from pfeife.passes import join_backward
from pfeife.runtime.local import LocalPipeline
from pfeife.sched.families import placement

MICROBATCHES = 4
REPLICATED = "replicas add up the microbatches in another order"


@attrs.frozen(eq=False)
class Fused:
    """A case that is captured and fused, its microbatches, and what eager gives for them, twice."""

    case: Case
    flat: pfeife.Program
    clusters: pfeife.Program
    microbatches: Sequence[tuple[torch.Tensor, ...]]
    wanted: Values
    again: Values

    @property
    def state(self) -> Any:
        return pfeife.state_of(self.flat, self.case.model)

    def alike(self, found: pfeife.Result, rounding: Rounding = BITWISE) -> dict[str, Any]:
        return alike(values_of(found), self.wanted, rounding, self.again)


@functools.cache
def fused(name: str, setting: Setting) -> Fused:
    deterministic()
    one = case(name, setting)
    parts = zip(*(tensor.chunk(MICROBATCHES) for tensor in one.batch()), strict=True)
    microbatches = list(parts)
    flat = pfeife.capture(one.step, *microbatches[0])
    clusters = priced(pfeife.fuse()(flat), setting)
    if name == "dropout":  # which draws its own numbers: what `capture` gives is what is wanted
        wanted = values_of(pfeife.evaluate(flat, pfeife.state_of(flat, one.model), microbatches))
        return Fused(one, flat, clusters, microbatches, wanted, wanted)
    wanted, again = (accumulated(one, microbatches) for _ in range(2))
    return Fused(one, flat, clusters, microbatches, wanted, again)


def priced(program: pfeife.Program, setting: Setting) -> pfeife.Program:
    """With estimated costs."""
    machine = default_machine(torch.device(setting.device))
    return pfeife.annotate(estimate(program, machine))(program)


def passes(name: str, setting: Setting) -> dict[str, Any]:
    """Every pass in the order of the way, each evaluated."""
    one = fused(name, setting)
    device = torch.device(setting.device)
    program, told = one.flat, {}

    def check(what: str, rounding: Rounding = BITWISE) -> None:
        found = pfeife.evaluate(program, one.state, one.microbatches)
        told[what] = one.alike(found, rounding)["bitwise"]

    check("capture")
    program = one.clusters
    check("fuse")
    program = pfeife.split_backward()(program)
    check("split_backward")
    program = join_backward()(program)
    check("join_backward")
    plan = _plan(one.clusters, device, "1f1b", 3, 3)
    summed = Rounding(1e-5, SUMMED, of_gradients(one.case.tied)) if one.case.tied else BITWISE
    program = pfeife.partition(plan)(one.clusters)
    check("partition", summed)
    program = pfeife.insert_send_recv()(program)
    check("insert_send_recv", summed)
    if name not in ("BatchNorm", "channels_last"):  # whose statistics are those of each replica
        before, mesh = program, pfeife.Mesh(3, 2)
        program = pfeife.dp_wrap(mesh, pfeife.Replicas(2))(program)
        check("dp_wrap", Rounding(1e-5, REPLICATED))
        program = before
    program = pfeife.place([device] * 3)(program)
    check("place", summed)
    return {"bitwise": ", ".join(what for what, same in told.items() if same), "passes": len(told)}


def _plan(
    clusters: pfeife.Program, device: torch.device, family: str, stages: int, ranks: int
) -> pfeife.Plan:
    return sched.plan(
        clusters,
        machine=default_machine(device),
        microbatches=MICROBATCHES,
        stages=stages,
        ranks=ranks,
        schedule=family,
    )


def _stages(family: str, ranks: int) -> int:
    """Two a rank where the family can, else one."""
    for stages in (2 * ranks, ranks):
        try:
            sched.POLICIES[family](stages, MICROBATCHES, placement(family, stages, ranks))
            return stages
        except ValueError as error:
            refused = str(error)
    raise Skipped(refused)


def ranks_of(
    one: Fused, setting: Setting, family: str, devices: Sequence[str]
) -> tuple[pfeife.Program, pfeife.Schedule]:
    """The ranks' program, each on its device."""
    clusters, stages = one.clusters, _stages(family, len(devices))
    if sched.policy(family).splits:
        clusters = priced(pfeife.split_backward()(clusters), setting)
    plan = _plan(clusters, torch.device(setting.device), family, stages, len(devices))
    steps = pfeife.partition(plan), pfeife.insert_send_recv(), pfeife.place(devices)
    program = pfeife.compose(*steps)(clusters)
    return program, sched.verify_schedule(sched.lower(plan.schedule, program))


def threads(setting: Setting, name: str, family: str, devices: Sequence[str]) -> dict[str, Any]:
    """Two steps of a pipeline of threads: the second one finds memory as the first has left it."""
    one = fused(name, setting)
    program, schedule = ranks_of(one, setting, family, devices)
    pipeline = LocalPipeline(program, schedule, [torch.device(place) for place in devices])
    rounding = Rounding(1e-5, SUMMED, of_gradients(one.case.tied)) if one.case.tied else BITWISE
    for _ in range(2):
        figures = one.alike(pipeline(one.state, one.microbatches), rounding)
    return {"stages": len({c.unit for c in program.calls}), **figures}


def by(name: str, family: str) -> Row:
    def run(setting: Setting) -> dict[str, Any]:
        return threads(setting, name, family, setting.twice)

    return Row(f"{name} by {family} on one device twice", run)


def everywhere(setting: Setting, name: str) -> dict[str, Any]:
    """Every family, a rank a device."""
    done = []
    for family in sched.POLICIES:
        with contextlib.suppress(Skipped):
            threads(setting, name, family, setting.devices)
            done.append(family)
    return {"families": ", ".join(done)}


FAMILIES = sorted(sched.POLICIES, key=lambda name: name not in ("1f1b", "zb-h1", "zb-v"))
ROWS = [
    *(Row(f"every pass of {name}", functools.partial(passes, name)) for name in CASES),
    *(by(name, "zb-h1") for name in CASES),
    *(by("GPT", family) for family in FAMILIES if family != "zb-h1"),
    *(
        Row(
            f"{name} by every family on all devices",
            functools.partial(everywhere, name=name),
            200,
            devices=2,
        )
        for name in CASES
    ),
]
