"""Pictures of schedules: each action once, where it runs; the same file twice."""

from pathlib import Path

import pytest

from pfeife import report, sched
from pfeife.sched.families import folded, zb_v

pytest.importorskip("matplotlib")


def test_a_picture_has_every_action(tmp_path):
    """Numbers are microbatches in the row of their rank; shades tell the stages of a rank."""
    schedule = zb_v(8, 4, folded(8, 4))
    paths = tmp_path / "one.svg", tmp_path / "other.svg"
    figure = report.picture(schedule, paths[0], title="ZB-V")
    report.picture(schedule, paths[1], title="ZB-V")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    (axes,) = figure.axes
    for rank, actions in enumerate(schedule.ranks):
        drawn = [text.get_text() for text in axes.texts if text.get_position()[1] == rank]
        assert sorted(drawn) == sorted(str(action.microbatch) for action in actions)
    shades = {patch.get_facecolor() for patch in axes.patches}
    assert len(shades) == 6  # F, I and W of two stages a rank


def test_a_timeline_is_in_seconds(tmp_path):
    timeline = sched.simulate(sched.families.naive(1, 2), lambda action: 0.5)
    figure = report.picture(timeline, tmp_path / "one.png")
    assert figure.axes[0].get_xlabel() == "seconds" and figure.axes[0].get_xlim() == (0, 2.0)
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_the_docs_have_a_picture_of_every_family():
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "schedules.md").read_text()
    for name in sched.POLICIES:
        assert (docs / "pictures" / f"{name}.svg").exists() and f"(pictures/{name}.svg)" in text


def test_the_readme_shows_the_page_of_the_demo():
    root = Path(__file__).parents[2]
    assert "(docs/pictures/demo.png)" in (root / "README.md").read_text()
    assert 20_000 < (root / "docs" / "pictures" / "demo.png").stat().st_size < 200_000
