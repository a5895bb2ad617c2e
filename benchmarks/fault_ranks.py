"""What a rank does in the trials of faults: it suffers one, or reports how it heard of it."""

import contextlib
import gc
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import attrs
import torch
from faulty import SWITCH, Case, Injected, strikes, suffer
from forked import Report

import pfeife
from pfeife.data.schedule import Action
from pfeife.runtime.distributed.links import reducing
from pfeife.runtime.distributed.links.connection import finished
from pfeife.runtime.distributed.pipeline import DistributedPipeline, DistributedStep
from pfeife.runtime.distributed.process_group import join_world
from pfeife.runtime.distributed.state import whole_state
from pfeife.runtime.distributed.transport import DistributedTransport
from pfeife.runtime.failure import PipelineError
from pfeife.testing import own_gradients

CPU = torch.device("cpu")
OPERATIONS = ("exception", "out of memory", "wrong shape inside", "wrong shape sent")
SKIPPED, SKIPPED_CALL = "skipped a backward", "skipped a call"
BUILDING, ROWS = "exception while a step is built", "other rows in a later call"
WAITING = "SIGSTOP in a wait"  # for the last message of another rank, which comes after it
LATE = "SIGSTOP before others come"  # but the next one, which waits for it, and finds out why
ELSEWHERE = "while others are outside of a step"
BATCHES = (ELSEWHERE, "batch of another shape", "batch of another dtype", "too few microbatches")
PATIENT, SHORT = 20.0, 3.0  # seconds of silence


@attrs.frozen
class Trial:
    """A fault that befalls a rank after (or in) the `at`th of its actions; -1 is before them.

    `second` is another victim at the same time; after a trial that is `chained` comes the next
    one at once, without a good step between them. Among `members` it strikes in the `at`th of the
    step's collectives of the victim's group: parts of parameters, of activations, of gradients.
    """

    fault: str
    victim: int
    at: int = -1
    second: int = -1
    chained: bool = False
    members: bool = False

    @property
    def name(self) -> str:
        return f"{self.fault} among members" if self.members else self.fault


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
        self.mine = rank in (trial.victim, trial.second)
        self.actions = case.actions(rank)

    def strike(self) -> None:
        """The fault itself, where it is not an operation's."""
        self.report(event="fault", trial=self.number)
        if self.trial.fault in OPERATIONS:
            raise Injected("injected")
        suffer(self.trial.fault)

    def arm(self, after: int) -> None:
        """Called when the action `after` has run."""
        at, fault = self.trial.at, self.trial.fault
        if self.trial.members:
            return
        if not self.mine:
            next_one = self.rank == self.trial.victim + 1
            late = not next_one and fault == LATE and after == -1
            if late or (next_one and fault == WAITING and after == len(self.actions) - 2):
                time.sleep(2.0)
            return
        if fault == WAITING:
            if after == at:
                timer = threading.Timer(1.0, self.strike)
                timer.daemon = True
                timer.start()
            return
        operations = self.case.operations(self.actions[at]) if fault in OPERATIONS else 0
        if operations:
            if after == at - 1:
                self.report(event="fault", trial=self.number)
                # The last one gives a value that is sent.
                SWITCH.arm(strikes(fault), skip=operations - 1 if fault.endswith("sent") else 0)
        elif after == at:
            self.strike()

    @contextlib.contextmanager
    def among_members(self) -> Iterator[None]:
        """While the fault strikes in a collective of members, if it is one that does: once the
        victim has begun to give its part, and before it has those of others."""
        waits, wait = itertools.count(), DistributedTransport.wait

        def counted(wait: Callable) -> Callable:
            def struck(*args: Any) -> None:
                if self.mine and self.trial.members and next(waits) == self.trial.at:
                    self.strike()
                wait(*args)

            return struck

        with (
            mock.patch.object(DistributedTransport, "wait", counted(wait)),
            mock.patch.object(whole_state, "finished", counted(finished)),
            mock.patch.object(reducing, "finished", counted(finished)),
        ):
            yield

    def watch(self, _: int) -> Callable[[Action], None]:
        index = iter(range(len(self.actions)))
        return lambda action: self.arm(next(index))

    def batch(self) -> Sequence[Any]:
        batch, fault = self.case.batch, self.trial.fault
        if self.mine and fault in BATCHES:
            self.report(event="fault", trial=self.number)
            if fault == "too few microbatches":
                return batch[:-1]
            if fault == ELSEWHERE:
                return []
            return [(x.double() if "dtype" in fault else x[:1],) for (x,) in batch]
        return batch

    def step(self, pipeline: DistributedPipeline) -> tuple[DistributedStep | None, bool]:
        """A step in which the fault strikes, and whether it has failed, which is reported."""
        step = None
        try:
            if self.trial.fault == ELSEWHERE and not self.mine:
                time.sleep(1)
            with self.among_members():
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
        first = None
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
            if trial.chained:
                continue
            again = pipeline(case.state, case.batch)
            clean = all(torch.equal(before[n], v) for n, v in case.state.items())
            now = held(first)
            first = first or now
            report(trial=number, event="again", same=same(expected, again), clean=clean, **now)

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


def held(first: dict[str, int] | None = None) -> dict[str, int]:
    """What a process holds of the system's: if something is left over since `first`, a moment
    later, since the thread that told of a failure holds the connections before until then."""
    now, end = _held(), time.monotonic() + 5
    while first and left_over(now, first) and time.monotonic() < end:
        time.sleep(0.05)
        now = _held()
    return now


def left_over(now: dict[str, int], first: dict[str, int]) -> bool:
    """Whether something of the connections before is held (a Gloo group has three threads)."""
    return any(now[key] > first[key] + 2 for key in ("files", "threads")) or now["alike"] > 1


def _held() -> dict[str, int]:
    gc.collect()
    ours = Counter(t.name for t in threading.enumerate() if t.name.startswith("pfeife"))
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "alike": max(ours.values(), default=0),
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
                with ill.among_members():
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
    ("left"), or it comes later than the timeout ("away")."""

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


def compiled(case: Case, trials: Sequence[Trial]) -> Callable[[int, Report], None]:
    """The same through pfeife.compile: a fault while a step is built, other rows on one rank."""

    def main(rank: int, report: Report) -> None:
        whole = torch.cat([x for (x,) in case.batch])
        expected, first = accumulated(case), None
        for number, trial in enumerate(trials):
            torch._dynamo.reset()
            case.net.seen.zero_()  # the part that another compiled step has trained
            mine = rank == trial.victim
            step = pfeife.compile(  # the check of the first call would run into the fault alone
                case.step,
                microbatches=len(case.batch),
                costs="measure",
                timeout=PATIENT,
                check=False,
            )
            building = trial.fault == BUILDING
            if not building:
                step(whole)
            elif mine:
                SWITCH.arm(strikes("exception"))
            if mine:
                report(event="fault", trial=number)
            try:
                step(whole if building or not mine else whole[:-2])
            except Exception as error:
                report(trial=number, **told(error))
            case.net.zero_grad()
            loss = step(whole)
            loss.backward()
            found = own_gradients(case.net)
            right = torch.equal(loss, expected[0]) and all(
                torch.equal(value, expected[1][name]) for name, value in found.items()
            )
            now = held(first)
            first = first or now
            report(trial=number, event="again", same=right, clean=True, **now)

    return main


def accumulated(case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of plain accumulation."""
    total = torch.zeros(())
    for (x,) in case.batch:
        loss = case.step(x) / len(case.batch)
        loss.backward()
        total = total + loss.detach()
    return total, {n: p.grad.clone() for n, p in case.net.named_parameters()}


def planning(case: Case, trial: Trial, timeout: float) -> Callable[[int, Report], None]:
    """The victim is struck by a signal while it, or rank 0 for it, plans: `at` tenths of a second
    after the start."""

    def main(rank: int, report: Report) -> None:
        whole = torch.cat([x for (x,) in case.batch])
        join_world(CPU, timeout)
        step = pfeife.compile(
            case.step,
            microbatches=len(case.batch),
            schedule="search",
            search_seconds=6,
            timeout=timeout,
        )

        def strike() -> None:
            report(event="fault", trial=0)
            while True:  # Dynamo loses an interrupt that comes while it times its guards
                suffer(trial.fault)
                time.sleep(3.0)

        if rank == trial.victim:
            timer = threading.Timer(trial.at / 10, strike)
            timer.daemon = True
            timer.start()
        try:
            while True:
                step(whole)
        except BaseException as error:
            report(trial=0, **told(error))
            raise

    return main


def skipping(case: Case, trial: Trial, timeout: float) -> Callable[[int, Report], None]:
    """The victim never runs the backward of a call, and calls again; or it skips the call, too."""

    def main(rank: int, report: Report) -> None:
        whole = torch.cat([x for (x,) in case.batch])
        options = {"microbatches": len(case.batch), "timeout": timeout, **case.options}
        model = pfeife.compile(case.net, **options)
        model(whole).sum().backward()
        try:
            mine = rank == trial.victim
            if not mine:
                model(whole).sum().backward()
            elif trial.fault == SKIPPED:
                model(whole)
            if mine:
                report(event="fault", trial=0)
            for _ in range(2):
                model(whole).sum().backward()
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
