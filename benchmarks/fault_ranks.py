"""What a rank does in the trials of faults: it suffers one, or reports how it heard of it."""

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from faulty import SWITCH, Case, Injected, strikes, suffer
from forked import Report

import pfeife
from pfeife.plan import Action
from pfeife.runtime.distributed import DistributedPipeline, DistributedStep
from pfeife.runtime.failure import PipelineError
from pfeife.runtime.meeting import join_world

CPU = torch.device("cpu")
OPERATIONS = ("exception", "out of memory", "wrong shape inside", "wrong shape sent")
BATCHES = ("batch of another shape", "batch of another dtype", "too few microbatches")
PATIENT, SHORT = 20.0, 3.0  # seconds of silence


@attrs.frozen
class Trial:
    """A fault that befalls a rank after (or in) the `at`th of its actions; -1 is before them."""

    fault: str
    victim: int
    at: int = -1


def told(error: BaseException) -> dict[str, Any]:
    """What a report says of an exception."""
    failure = error.failure if isinstance(error, PipelineError) else None
    found = {"event": "error", "type": type(error).__name__, "text": str(error)}
    found["notes"] = " ".join(getattr(error, "__notes__", []))
    return found | ({"failure": attrs.asdict(failure)} if failure else {})


class Ill:
    """One rank's part in a trial."""

    def __init__(self, case: Case, rank: int, trial: Trial, number: int, report: Report):
        self.case, self.rank, self.trial = case, rank, trial
        self.number, self.report = number, report
        self.mine = rank == trial.victim
        self.actions = case.actions(rank)

    def strike(self) -> None:
        """The fault itself, where it is not an operation's."""
        self.report(event="fault", trial=self.number)
        if self.trial.fault in OPERATIONS:
            raise Injected("injected")
        suffer(self.trial.fault)

    def arm(self, after: int) -> None:
        """Called when the action `after` has run."""
        if not self.mine:
            return
        at, fault = self.trial.at, self.trial.fault
        if fault in OPERATIONS and self.actions[at].do.kind:
            if after == at - 1:
                self.report(event="fault", trial=self.number)
                SWITCH.arm(strikes(fault), skip=self.last(at) if fault.endswith("sent") else 0)
        elif after == at:
            self.strike()

    def last(self, at: int) -> int:
        """How many operations an action has before the one that gives a value to be sent."""
        calls = self.case.program.calls
        stage, kind = self.actions[at].stage, self.actions[at].do.kind
        body = next(self.case.program.body(c) for c in calls if c.unit == stage and c.kind == kind)
        nodes = [
            n for n in body.graph.nodes if "pass_on" in str(n.target) and n.op != "placeholder"
        ]
        return len(nodes) - 1

    def watch(self, _: int) -> Callable[[Action], None]:
        index = iter(range(len(self.actions)))
        return lambda action: self.arm(next(index))

    def batch(self) -> Sequence[Any]:
        batch, fault = self.case.batch, self.trial.fault
        if self.mine and fault in BATCHES:
            self.report(event="fault", trial=self.number)
            if fault == "too few microbatches":
                return batch[:-1]
            return [(x.double() if "dtype" in fault else x[:1],) for (x,) in batch]
        return batch

    def step(self, pipeline: DistributedPipeline) -> tuple[DistributedStep | None, bool]:
        """A step in which the fault strikes, and whether it has failed, which is reported."""
        step = None
        try:
            step = pipeline.start(self.case.state, self.batch())
            self.arm(-1)
            step.run(watch=self.watch)
            step.result()
        except BaseException as error:
            self.report(trial=self.number, **told(error))
            if not isinstance(error, Exception):
                raise
            return step, True
        return step, False


def recover(case: Case, trials: Sequence[Trial]) -> Callable[[int, Report], None]:
    """All ranks catch what they hear of, and do the next step; then comes the next trial."""

    def main(rank: int, report: Report) -> None:
        pipeline = DistributedPipeline(case.program, case.schedule, timeout=PATIENT)
        expected = pipeline(case.state, case.batch)
        before = {name: value.clone() for name, value in case.state.items()}
        for number, trial in enumerate(trials):
            ill = Ill(case, rank, trial, number, report)
            step, failed = ill.step(pipeline)
            SWITCH.arm(None)
            if not failed:
                report(trial=number, event="nothing happened")
            if step is not None:
                refused = refuses(step)
                report(trial=number, event="asked again", refused=refused)
            del step
            again = pipeline(case.state, case.batch)
            clean = all(torch.equal(before[n], v) for n, v in case.state.items())
            report(trial=number, event="again", same=same(expected, again), clean=clean, **held())

    return main


def refuses(step: DistributedStep) -> str:
    """Why a failed step gives no result, "" if it gives one."""
    try:
        step.result()
    except RuntimeError as error:
        return str(error)
    return ""


def same(one: pfeife.Result, other: pfeife.Result) -> bool:
    """Whether two results are the same, bit for bit."""
    pairs = [(one.gradients, other.gradients), (one.buffers, other.buffers)]
    pairs.append(({"loss": one.loss}, {"loss": other.loss}))
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )


def held() -> dict[str, int]:
    """What a process holds of the system's."""
    gc.collect()
    lifelines = [t for t in threading.enumerate() if t.name.startswith("pfeife")]
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "lifelines": len(lifelines),
    }


def end(case: Case, trial: Trial, timeout: float) -> Callable[[int, Report], None]:
    """Nobody catches anything. Who finishes the ill step finds out in one of the next."""

    def main(rank: int, report: Report) -> None:
        pipeline = DistributedPipeline(case.program, case.schedule, timeout=timeout)
        pipeline(case.state, case.batch)
        report(event="ready")
        ill = Ill(case, rank, trial, 0, report)
        try:
            for _ in range(3):
                step = pipeline.start(case.state, case.batch)
                ill.arm(-1)
                step.run(watch=ill.watch)
                step.result()
        except BaseException as error:
            report(trial=0, **told(error))
            raise

    return main


def idle(case: Case, trial: Trial, timeout: float) -> Callable[[int, Report], None]:
    """The victim does something else when the others come to their step: it ends its program
    ("left"), or it comes much too late ("away")."""

    def main(rank: int, report: Report) -> None:
        pipeline = DistributedPipeline(case.program, case.schedule, timeout=timeout)
        pipeline(case.state, case.batch)
        try:
            if rank == trial.victim:
                report(event="fault", trial=0)
                if trial.fault == "left":
                    return
                time.sleep(timeout + 4)
            for _ in range(3):
                pipeline(case.state, case.batch)
        except BaseException as error:
            report(trial=0, **told(error))
            raise

    return main


def arrive(timeout: float) -> Callable[[int, Report], None]:
    """All that come wait for all."""

    def main(rank: int, report: Report) -> None:
        report(event="fault", trial=0)
        try:
            join_world(CPU, timeout)
        except BaseException as error:
            report(trial=0, **told(error))
            raise

    return main
