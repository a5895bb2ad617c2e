"""Real processes over Gloo on loopback; the rows stand in `distributed/`."""

import pytest
from distributed import TOPICS
from rows import check, items


@pytest.mark.parametrize("item", items("distributed", TOPICS, 2, 4))
def test_on_ranks(item, found_on_ranks):
    check(item, found_on_ranks)
