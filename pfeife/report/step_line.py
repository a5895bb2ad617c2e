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
    one, most = figures, figures.waits_most
    what = "tokens" if one.tokens else "samples"
    rate = one.tokens_per_second if one.tokens else one.samples_per_second
    parts = [
        f"{one.whole_seconds:.3g} s ({one.outside_seconds:.2g} s of it between calls)",
        f"{_short(rate).replace(' ', '')} {what}/s",
    ]
    if one.flops:
        share = f"{100 * one.utilization:.3g} % of {len(one.account_bytes)} x {one.machine}"
        parts.append(f"{_short(one.flops_per_second)}FLOP/s ({share})")
    if most is not None and len(one.waiting_seconds) > 1:
        parts.append(f"rank {most} waits {one.waiting_seconds[most]:.2g} s")
    if one.peak_bytes:
        account = f" (account {_sizes(one.account_bytes)})" if one.account_bytes else ""
        parts.append(f"{_sizes(one.peak_bytes)} at the peak{account}")
    return f"step {one.step}: {', '.join(parts)}"


def _short(count: float) -> str:
    """A number with three digits and its unit, before a word."""
    for value, unit in _UNITS:
        if count >= value:
            return f"{count / value:.3g} {unit}"
    return f"{count:.3g} "


def _sizes(sizes: Sequence[int]) -> str:
    return " + ".join(map(size, sizes))
