"""A step's figures in one line."""

from collections.abc import Sequence

from pfeife.data.figures import StepFigures
from pfeife.report.tables import size

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def step_line(figures: StepFigures) -> str:
    """Such as

        step 21: 2 s (0.5 s of it between calls), 2.05k tokens/s, 1.5 TFLOP/s (15 % of 2 x
        h100-sxm), rank 1 waits 0.4 s, 1.0 GiB + 1.1 GiB at the peak (account 0.9 GiB + 1.0 GiB)

    What is not known is left out.
    """
    # Of many ranks one is named: a line has no room for all, and the others wait less.
    step, most = figures, figures.waits_most
    what = "tokens" if step.tokens else "samples"
    rate = step.tokens_per_second if step.tokens else step.samples_per_second
    parts = [
        f"{step.whole_seconds:.3g} s ({step.outside_seconds:.2g} s of it between calls)",
        f"{_short(rate).replace(' ', '')} {what}/s",
    ]
    # Without a machine of known peak there is no share.
    if step.flops:
        share = f"{100 * step.utilization:.3g} % of {len(step.account_bytes)} x {step.machine}"
        parts.append(f"{_short(step.flops_per_second)}FLOP/s ({share})")
    if most is not None and len(step.waiting_seconds) > 1:
        parts.append(f"rank {most} waits {step.waiting_seconds[most]:.2g} s")
    if step.peak_bytes:
        account = f" (account {_sizes(step.account_bytes)})" if step.account_bytes else ""
        parts.append(f"{_sizes(step.peak_bytes)} at the peak{account}")
    return f"step {step.step}: {', '.join(parts)}"


def _short(count: float) -> str:
    """A number with three digits and its unit, before a word."""
    for value, unit in _UNITS:
        if count >= value:
            return f"{count / value:.3g} {unit}"
    return f"{count:.3g} "


def _sizes(sizes: Sequence[int]) -> str:
    return " + ".join(map(size, sizes))
