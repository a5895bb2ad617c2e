"""A traced step beside eager, on other rows than those that it was traced with.

What a trace froze (a length that was read from data, a choice among kernels) shows in other rows. A
whole microbatch is computed twice on this rank, with its gradients.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from pfeife.frontend.captured import Captured
from pfeife.frontend.checks.runs import Runs
from pfeife.frontend.forward import Forward
from pfeife.frontend.watch.deterministic import Draws, close

log = logging.getLogger("pfeife")


def check_traced(step: Forward, captured: Captured, args: Sequence[Any]) -> None:
    """Raises ValueError if the program gives other results, gradients or buffers than the step
    itself, beyond rounding, on the last microbatch of a call with these arguments.

    Left out is a step that draws what has no expected value.
    """
    runs = Runs(step, captured, args)
    counts = [args[i].shape[runs.dim(i)] // runs.port(i).shape[runs.dim(i)] for i in runs.cut]
    values = runs.part(min(counts, default=1) - 1)
    try:
        results = runs.by_program(values, forward=False)
        # Before eager: the line that decides otherwise says more than a result that is another.
        wrong = [at for at, name in enumerate(captured.flags) if results[name]]
        if wrong:
            raise ValueError(
                "the step was traced on the first microbatch of a call, and does something else on "
                f"the last one: {step.asked[wrong[0]]} asks for the value of a tensor; compute it "
                "with tensors (torch.where)"
            )
        expected = runs.with_gradients(values)
    except Draws as draws:
        log.debug("a traced step is not checked, since it draws by %s", draws)
        return
    for name, value in expected.items():
        if not _same(results[name], value):
            raise ValueError(
                "the step was traced on the first microbatch of a call, and what was traced gives "
                f"another {name} on the last one than the step itself: it depends on the values "
                "of its arguments in a way that no trace has (a length, a branch, a number that "
                f"is read from a tensor{_at(step.asked)})"
            )


def _at(lines: Sequence[str]) -> str:
    return f": {', '.join(dict.fromkeys(lines))}" if lines else ""


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two values agree, whole numbers exactly; what is not finite says nothing."""
    if first.shape != second.shape:
        return False
    if not first.is_floating_point():
        return bool(torch.equal(first, second)) if not first.is_complex() else True
    finite = first.isfinite() & second.isfinite()
    return close(first[finite], second[finite])
