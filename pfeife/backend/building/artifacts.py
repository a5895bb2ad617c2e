"""Every stop on the way in torch's structured trace: TORCH_TRACE writes it, tlparse shows it."""

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import attrs

from pfeife import _torch, report
from pfeife.data import plain
from pfeife.data.plan import Plan
from pfeife.data.schedule import Schedule
from pfeife.data.timeline import Timeline
from pfeife.ir.parts import Assumption
from pfeife.ir.program import Program
from pfeife.passes.compose import Recorded


@attrs.frozen
class Artifacts:
    """Writes the artifacts of one compilation (see `_torch.compilation`).

    Their names start with "pfeife_"; texts are made only where torch writes a trace.
    """

    compilation: Any

    def program(self, name: str, program: Program) -> None:
        """A program of any level: its calls with ranks and seconds, its ports, graph and bodies."""
        self._add(name, functools.partial(_text, program))

    def premises(self, premises: Sequence[Assumption]) -> None:
        """What a traced step takes for granted, a line each."""
        if premises:
            self._add("premises", lambda: "\n".join(map(str, premises)))

    def history(self, history: Sequence[Recorded]) -> None:
        """What every pass that changed something has made, by the pass's name."""
        for before, after in pairwise(history):
            # A pass that found nothing to do has no artifact.
            if after.program is not before.program:
                self.program(after.maker, after.program)

    def decisions(self, plan: Plan, schedule: Schedule, predicted: Callable[[], Timeline]) -> None:
        """The plan, the lowered schedule, and the timeline that is expected of it."""
        self._add("plan", lambda: plain.to_json(plan), "json")
        self._add("schedule", schedule.to_csv)
        self._add("timeline", lambda: report.chrome_trace(predicted()), "json")

    def ranks(self, program: Program, ranks: Iterable[int]) -> None:
        """What some ranks do of a program with sends and receives."""
        for rank in ranks:
            self._add(f"rank_{rank}", functools.partial(report.rank_part, program, rank))

    def _add(self, name: str, text: Callable[[], str], encoding: str = "string") -> None:
        _torch.trace_artifact(f"pfeife_{name}", encoding, text, self.compilation)


def _text(program: Program) -> str:
    return f"{report.calls_table(program)}\n\n{program}" if program.calls else str(program)
