"""The table of edges: a row each, in one process, on 2 or 3 ranks; the rows stand in `edges/`."""

import pytest
from edges import ABOUT_RANKS, TOPICS
from rows import Item, check, items, verdict


@pytest.mark.parametrize("item", items("edges", TOPICS, 1))
def test_in_one_process(item):
    assert not verdict(item.row)


def is_about_one(item: Item) -> bool:
    """Whether a row is about what happens in one process, where it runs too."""
    return 1 in item.row.ranks and item.module.partition(".")[2] not in ABOUT_RANKS


@pytest.mark.parametrize("item", items("edges", TOPICS, 2, 3, whole=is_about_one))
def test_on_ranks(item, found_on_ranks):
    check(item, found_on_ranks)
