"""What benchmarks/runtime.py prints: a table a part."""

import statistics
from collections.abc import Sequence

from comparing import Record

from pfeife import report


def seconds(record: Record, side: str, which: int = 0) -> list[float]:
    """Of every step: the slowest rank's (0), or the CPU's of all ranks (1)."""
    return [taken[which] for taken in record.times.get(side, ())]


def spread(values: Sequence[float], scale: float = 1e3, digits: int = 1) -> str:
    """The median and the quartiles, a dash if there is nothing."""
    if len(values) < 2:
        return "-"
    low, middle, high = (value * scale for value in statistics.quantiles(values, n=4))
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """Of the medians."""
    if not above or not below:
        return "-"
    return f"{statistics.median(above) / statistics.median(below):.2f}"


def overhead(records: Sequence[Record]) -> str:
    """Microseconds a compute action, beside the computing itself and with it."""
    rows = []
    for one in records:
        for word, which, times in (("wall", 0, one.ranks), ("CPU", 1, 1)):
            computing = statistics.median(seconds(one, "alone", which)) / one.actions
            bare = times * statistics.median(seconds(one, "bare", which)) / one.actions
            whole = {
                side: [times * taken / one.actions for taken in seconds(one, side, which)]
                for side in ("ours", "peer")
            }
            beside = {side: [s - computing for s in found] for side, found in whole.items()}
            rows.append(
                (
                    one.ranks,
                    f"{one.stages} stages, {one.schedule}",
                    one.actions,
                    word,
                    *(spread(beside[side], 1e6, 0) for side in ("ours", "peer")),
                    ratio(beside["ours"], beside["peer"]),
                    f"{1e6 * bare:.0f}",
                    f"{1e6 * computing:.0f}",
                    *(spread(whole[side], 1e6, 0) for side in ("ours", "peer")),
                )
            )
    head = ("ranks", "schedule", "actions", "time", "ours", "theirs", "ratio", "bare")
    return (
        "Overhead a compute action, microseconds, median (quartiles): a step's time on all ranks "
        "together\nless `computing`, the same by eager autograd in one process, over the number "
        "of actions; and as a whole.\n`bare` is the schedule's messages alone, by Gloo itself.\n"
        + report.table(rows, (*head, "computing", "ours whole", "theirs whole"))
    )


def throughput(records: Sequence[Record]) -> str:
    """Times of a step, and how many times as fast ours is."""
    rows = [
        (
            one.ranks,
            f"{one.stages} stages, {one.schedule}, {one.microbatches} microbatches",
            spread(seconds(one, "ours")),
            spread(seconds(one, "peer")),
            ratio(seconds(one, "peer"), seconds(one, "ours")),
            one.note or "the same split and schedule",
        )
        for one in records
    ]
    head = ("ranks", "their stages", "our ms", "their ms", "throughput", "ours")
    return "Milliseconds of a step, median (quartiles).\n" + report.table(rows, head)


def efficiency(records: Sequence[Record]) -> str:
    """The schedule's own time over what was measured."""
    rows = []
    for one in records:
        assert one.ideal is not None
        ideal, carried = one.ideal
        ours, theirs = (
            [ideal / taken for taken in seconds(one, side)] for side in ("ours", "peer")
        )
        rows.append(
            (
                one.ranks,
                f"{one.stages} stages, {one.schedule}",
                one.microbatches,
                one.note,
                f"{1e3 * ideal:.1f} ms",
                f"{ideal / carried:.3f}",
                spread(ours, 1.0, 3),
                spread(theirs, 1.0, 3),
                *(
                    f"{statistics.median(seconds(one, s, 1) or [0]):.2f} s"
                    for s in ("ours", "peer")
                ),
            )
        )
    head = ("ranks", "schedule", "microbatches", "values", "ideal", "bound", "ours", "theirs")
    return (
        "Sleeping ranks: the schedule's own time with free messages over the time of a step, "
        "median (quartiles);\nthe bound is what it would be if a message took what it does at "
        "rest, and nothing of its ranks' time;\nand the CPU time of all ranks.\n"
        + report.table(rows, (*head, "our CPU", "their CPU"))
    )


def speed_up(records: Sequence[Record]) -> str:
    """Against eager accumulation with one thread, and with as many."""
    rows = []
    for one in records:
        ours, single, threads, apart = (
            seconds(one, side) for side in ("ours", "a thread", "threads", "apart")
        )
        gain = statistics.median(single) / statistics.median(ours)
        ceiling = one.ranks * statistics.median(single) / statistics.median(apart)
        bubble = one.microbatches / (one.microbatches + one.ranks - 1)
        rows.append(
            (
                one.ranks,
                *map(spread, (ours, single, threads)),
                f"{gain:.2f}",
                f"{gain / one.ranks:.2f}",
                f"{bubble:.2f}",
                f"{ceiling:.2f}",
                f"{gain / ceiling:.2f}",
                f"{gain / ceiling / bubble:.2f}",
            )
        )
    head = ("ranks", "our ms", "1 thread ms", "threads ms", "speed-up", "of ideal", "1F1B's own")
    return (
        "Against eager accumulation in one process, with one thread and with a thread for every "
        "rank, median (quartiles).\nThe ceiling is the throughput of independent processes, one "
        "a rank, over that of one.\n"
        + report.table(rows, (*head, "ceiling", "of ceiling", "of that and 1F1B's"))
    )
