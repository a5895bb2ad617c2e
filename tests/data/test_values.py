"""Values of Python as JSON: exactly, or not at all."""

import math
from collections import Counter, OrderedDict, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfeife.data import values

NUMBERS = (
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
)
KEYS = NUMBERS | st.none() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    KEYS | st.just(...) | st.just(b"a leaf"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.tuples(inner, inner, inner).map(lambda three: slice(*three))
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=8,
)


def leaf(value):
    if type(value) is not bytes:
        raise ValueError(f"it has a {type(value).__name__}")
    return {"bytes": value.hex()}


LEAVES = {"bytes": bytes.fromhex}


@given(VALUES)
def test_values_come_back_as_they_were(value):
    """With their types, the order of keys, and the signs of zeros."""
    text = values.to_text(value, leaf)
    assert repr(values.from_text(text, LEAVES)) == repr(value)


def test_a_nan_comes_back():
    assert math.isnan(values.from_text(values.to_text(math.nan, leaf), {}))


@pytest.mark.parametrize(
    "value",
    [{1}, object, range(2), OrderedDict(a=1), namedtuple("Two", "a b")(1, 2), [frozenset()]],
)
def test_what_is_like_a_value_is_none(value):
    with pytest.raises(ValueError, match="it has a"):
        values.to_text(value, leaf)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "1.5", "NaN", "{}", '{"tuple": 1}', '{"tuple": [], "dict": {}}', '{"set": []}'),
        *('{"float": "x"}', '{"float": 1}', '{"float": "0x1p9999"}', '{"complex": ["0x1p+0"]}'),
        *('{"slice": [1, 2]}', '{"pairs": [[1]]}', '{"pairs": ["ab"]}', '{"pairs": [[[], 1]]}'),
        *('{"Counter": 3}', '{"dict": []}', '{"bytes": 3}', '{"bytes": "0"}', "[" * 100_000),
        '{"tuple": [], "tuple": []}',
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError):
        values.from_text(text, LEAVES)
