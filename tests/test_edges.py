"""The table of edges: a row each, in one process and on 2 ranks; the rows stand in `edges/`."""

import pytest
from edges import TOPICS
from rows import check, items, verdict


@pytest.mark.parametrize("item", items("edges", TOPICS, 1))
def test_in_one_process(item):
    assert not verdict(item.row)


@pytest.mark.parametrize("item", items("edges", TOPICS, 2))
def test_on_ranks(item, found_on_ranks):
    check(item, found_on_ranks)
