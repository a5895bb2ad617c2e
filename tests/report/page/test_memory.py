"""Memory: rows with scales of their own, their figures, the limit, and the fullest rank."""

import pytest

from pfeife import report, sched
from pfeife.data.schedule import Do
from pfeife.data.timeline import MemoryCurve, MemoryPoint
from pfeife.lowering.lower import chain, insert_actions
from pfeife.report.page.memory import memory_figure, memory_rows

MIB = 2**20


@pytest.fixture(scope="module")
def run():
    """16 ranks that hold much all the time and little beside it: each a microbatch less."""
    order = sched.families.one_f_one_b(16, 16)
    full = insert_actions(order, chain(order))
    timeline = sched.simulate(full, lambda action: 1.0 if action.do.kind else 0.0)
    curves = []
    for rank in range(16):
        beside, points = 0, []
        for action in order.ranks[rank]:
            beside += MIB if action.do == Do.FORWARD else -MIB
            points.append(MemoryPoint(action, beside, beside))
        curves.append(MemoryCurve(rank, {"parameters": 1000 * MIB}, tuple(points)))
    return report.Run(timeline, tuple(curves))


def traces(run, limit):
    """What is drawn, by its names, and its axis."""
    figure = memory_figure([("predicted", run)], limit)
    return {one["name"].split(",")[0]: one for one in figure.data}, figure.layout["yaxis"]


def test_no_rank_is_a_flat_line(run):
    """Each has two thirds of its row, from what it holds all the time to its peak; both stand
    there in bytes."""
    drawn, axis = traces(run, None)
    assert drawn.keys() == {"predicted", "peak"}
    rows: dict[int, list] = {}
    for height in drawn["predicted"]["y"]:
        if height is not None:
            rows.setdefault(round(height), []).append(height)
    for row in range(16):
        assert (min(rows[row]), max(rows[row])) == pytest.approx((row - 0.33, row + 0.33))
    figures = dict(zip(axis["ticktext"], axis["tickvals"], strict=True))
    for rank, curve in enumerate(run.memory):
        said = f"rank {rank}  {report.size(curve.peak)}"
        assert figures[said] == pytest.approx(rank - 0.33)
    assert axis["ticktext"].count("1000.0 MiB") == 16
    assert list(drawn["peak"]["text"]) == ["fullest rank"] + [""] * 15


def test_a_limit_is_a_line_where_it_is_near(run):
    """In the rows of those ranks whose peak is not far below, and else in a word; over its rank's
    peak, or below it."""
    peak = run.memory[0].peak
    (near, _), (far, _), (broken, _) = (
        traces(run, limit) for limit in (peak + MIB, 80 * 1024 * MIB, peak - 8 * MIB)
    )
    assert near["limit"]["y"][:2] == pytest.approx([-0.33, -0.33])
    assert near["peak"]["y"][0] > near["limit"]["y"][0]
    assert far["predicted"]["y"] == traces(run, None)[0]["predicted"]["y"]
    assert far["limit"]["name"] == "limit, 80.0 GiB (above all rows)" and list(
        far["limit"]["y"]
    ) == [None]
    assert broken["peak"]["y"][0] < broken["limit"]["y"][0] < 0.33


def test_all_peaks_stand_beside_one_limit(run):
    peak = run.memory[0].peak
    near, far = (str(memory_rows([("predicted", run)], limit)) for limit in (peak, 100 * peak))
    assert near.count('class="bar"') == 16 and near.count("fullest") == 1
    assert '<i style="left:100.00%">' in near and "100.0 %" in near
    assert f"limit {report.size(peak)}<" in near and near.startswith("<details open>")
    assert '<i class="far" style="left:100.00%">' in far and "beyond this scale" in far
