"""The table of edges: a row each, in one process and on 2 ranks; the rows stand in `edges/`."""

import pytest
from edges.table import on_ranks, rows, verdict


@pytest.mark.parametrize(
    "row", [row for _, row in rows(1)], ids=[f"{topic}-{row.name}" for topic, row in rows(1)]
)
def test_in_one_process(row):
    assert not verdict(row)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What the ranks found, by topic; each topic is run once, when its first row is asked for."""
    known = {}

    def report(topic):
        if topic not in known:
            known[topic] = on_ranks(topic, 2, tmp_path_factory.mktemp(topic))
        return known[topic]

    return report


@pytest.mark.parametrize(
    ("topic", "name"),
    [(topic, row.name) for topic, row in rows(2)],
    ids=[f"{topic}-{row.name}" for topic, row in rows(2)],
)
def test_on_two_ranks(topic, name, reports):
    found = reports(topic)
    said = found.get(name, {})
    assert sorted(said) == ["rank 0", "rank 1"], f"{said} {found.get('the processes')}"
    assert not any(said.values()), said
