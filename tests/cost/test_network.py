"""Links: measured figures that make sense, and the line through them."""

import json
import math

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfeife.cost.network import piecewise_fit
from pfeife.data import plain
from pfeife.data.link import Link
from pfeife.data.network import Network

LINK = {
    **{"source": 0, "destination": 1, "sizes": (0, 1000), "seconds": (1e-6, 2e-6)},
    **{"sending": (1e-6, 1e-6), "receiving": (0.0, 1e-6), "residual": 0.0},
}


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("seconds", (1e-6,), "Link 0 -> 1: figures for"),
        ("sending", (1e-6, 1e-6, 1e-6), "Link 0 -> 1: figures for"),
        ("receiving", (), "Link 0 -> 1: figures for"),
        ("sizes", (0, 1000, 2000), "Link 0 -> 1: figures for"),
        ("sizes", (1000, 0), r"Link.sizes must ascend from 0, not \(1000, 0\)"),
        ("sizes", (1000, 1000), "must ascend"),
        ("seconds", (-1e-6, 2e-6), "are negative or fall"),
        ("sending", (0.0, -1.0), "are negative or fall"),
        ("receiving", (0.0, -1.0), "are negative or fall"),
        ("seconds", (math.nan, 1.0), "are negative or fall"),
    ],
)
def test_refused_links(field, value, problem):
    good = Link(**LINK)
    assert plain.from_json(Network, plain.to_json(Network((good,)))).link(0, 1) == good
    with pytest.raises(ValueError, match=problem):
        attrs.evolve(good, **{field: value})
    data = json.loads(plain.to_json(Network((good,))))
    data["links"][0][field] = list(value)
    with pytest.raises(ValueError, match="finite" if math.nan in value else problem):
        plain.from_json(Network, json.dumps(data))


def test_a_link_needs_two_sizes():
    one = {name: LINK[name][:1] for name in ("sizes", "seconds", "sending", "receiving")}
    with pytest.raises(ValueError, match="figures for"):
        Link(**{**LINK, **one})


def test_links_are_fitted():
    """Through the points where they rise, between and beyond them in straight lines."""
    sizes = (1000, 10_000)
    values, residual = piecewise_fit(sizes, (2e-6, 11e-6))
    link = Link(0, 1, (0, *sizes), values, values, (0.0,) * 3, residual)
    assert residual < 1e-6 and link.send_seconds(1000) == link.transfer_seconds(1000)
    for size, seconds in ((1000, 2e-6), (5500, 6.5e-6), (10_000, 11e-6), (20_000, 21e-6)):
        assert math.isclose(link.transfer_seconds(size), seconds, rel_tol=1e-6)
    rising, residual = piecewise_fit((1000, 10_000, 100_000), (2e-6, 1e-6, 11e-6))
    assert list(rising) == sorted(rising) and 0.2 < residual < 1
    with pytest.raises(ValueError, match="no link from rank 1 to rank 0"):
        Network((link,)).link(1, 0)


measured = st.floats(1e-9, 1e3)


@given(st.lists(measured, min_size=1, max_size=8), st.sampled_from([2, 4]))
def test_no_link_is_infinitely_fast(seconds, times):
    """Whatever noise has measured, what is larger takes longer beyond the largest size too."""
    sizes = tuple(64 * times**power for power in range(len(seconds)))
    values, residual = piecewise_fit(sizes, seconds)
    link = Link(0, 1, (0, *sizes), values, values, values, residual)
    one, two, nine = (link.transfer_seconds(times * sizes[-1]) for times in (1, 2, 9))
    assert one < two < nine and math.isfinite(residual)


@given(measured, measured, st.integers(1, 8))
def test_a_straight_line_is_found_again(latency, rate, count):
    sizes = tuple(4**power for power in range(5, 5 + count))
    _, residual = piecewise_fit(sizes, [latency + rate * size for size in sizes])
    assert residual < 1e-6
