"""What ranks tell one another of state."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pfeife.data import plain
from pfeife.runtime.distributed.questions import Answer, Kind, Shaped, as_bytes, heard, shaped, told
from pfeife.runtime.failure import Refusal

SIMPLE = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
VALUES = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one, other):
    """Also the types, and the signs of zeros."""
    return repr(one) == repr(other)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_state_of_an_optimizer_is_heard_as_it_was_told(state):
    """With its types, through JSON."""
    answer = Answer(states=(told(state, []), None))
    text = plain.to_json(answer)
    found = plain.from_json(Answer, text)
    assert same(heard(found.states[0], []), state) and found.states[1] is None


def test_tensors_of_a_state_come_behind_it():
    tensors = []
    state = {"step": torch.tensor(2.0), "moments": [torch.ones(2), None], "beta": float("inf")}
    value = told(state, tensors)
    assert [one.shape for one in tensors] == [(), (2,)]
    found = heard(value, [torch.tensor(3.0), torch.zeros(2)])
    assert found["step"] == 3 and found["moments"][0].tolist() == [0, 0]
    assert found["moments"][1] is None and found["beta"] == float("inf")


@pytest.mark.parametrize("state", [{1: {2}}, {"a": {3}}, object()])
def test_what_is_not_told(state):
    with pytest.raises(Refusal, match="only tensors, numbers, texts"):
        told(state, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_a_tensor_comes_as_bytes_and_is_laid_out_as_it_was(dtype):
    for one in (
        torch.ones(2, 3, 4).transpose(0, 2),
        torch.ones(()),
        torch.ones(0, 2),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(6)[::2],
        torch.ones(1).expand(3),
    ):
        one = one.to(dtype)
        kind = shaped(one)
        dense = kind.empty()
        if one.numel():
            as_bytes(dense).copy_(as_bytes(one.contiguous()))
        found = kind.laid_out(dense)
        assert found.dtype == dtype and found.shape == one.shape and torch.equal(found, one)
        if one.untyped_storage().nbytes() == one.nbytes:
            assert found.stride() == one.stride()


def test_what_is_no_tensor():
    for wrong in (Shaped("torch.no", (1,), (1,)), Shaped("torch.int8", (-1,), (1,))):
        with pytest.raises(ValueError, match="is no kind of tensor"):
            wrong.empty()
    with pytest.raises(Refusal, match="layout"):
        shaped(torch.ones(2, 2).to_sparse())
    with pytest.raises(ValueError, match="is none of"):
        plain.from_json(Answer, '{"states": [{"kind": "set"}]}')
    assert {one.value for one in Kind} >= {"Tensor", "dict"}
