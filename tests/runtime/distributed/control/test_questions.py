"""What ranks tell one another of state."""

from collections import OrderedDict

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from pfeife.data import plain
from pfeife.runtime.distributed.control.questions import (
    Answer,
    Shaped,
    as_bytes,
    decoded,
    encoded,
    shaped,
)
from pfeife.runtime.failure import CollectiveError


def test_state_of_an_optimizer_comes_as_it_was_sent():
    """With its types, in the JSON of an answer."""
    state = {"step": 3, "betas": (0.9, -0.0), "of": OrderedDict(a=[None, True]), 7: "ß\ud800"}
    answer = Answer(states=(encoded(state, []), None))
    received = plain.from_json(Answer, plain.to_json(answer))
    assert decoded(received.states[0], []) == state and received.states[1] is None


def test_tensors_of_a_state_come_behind_it():
    tensors = []
    state = {"step": torch.tensor(2.0), "moments": [torch.ones(2), None], "beta": float("inf")}
    text = encoded(state, tensors)
    assert [one.shape for one in tensors] == [(), (2,)]
    found = decoded(text, [torch.tensor(3.0), torch.zeros(2)])
    assert found["step"] == 3 and found["moments"][0].tolist() == [0, 0]
    assert found["moments"][1] is None and found["beta"] == float("inf")


def test_a_tensor_that_is_made_of_others_comes_in_its_parts():
    """By the name of a class that this process has; no other is looked for. By itself, as a
    parameter, it is not sent: it has no bytes."""
    made, parts = TwoTensor(torch.ones(2), torch.zeros(2)), []
    text = encoded({"moment": made}, parts)
    found = decoded(text, [one.clone() for one in parts])["moment"]
    assert type(found) is TwoTensor and found.a.tolist() == [1, 1] and found.b.tolist() == [0, 0]
    with pytest.raises(ValueError, match="no value"):
        decoded(text.replace("TwoTensor", "ThreeTensor"), parts)
    with pytest.raises(CollectiveError, match="a TwoTensor, made of other tensors"):
        shaped(made)


@pytest.mark.parametrize("state", [{1: {2}}, {"a": {3}}, object()])
def test_what_is_not_sent(state):
    with pytest.raises(CollectiveError, match="only tensors, numbers, texts"):
        encoded(state, [])


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
    with pytest.raises(CollectiveError, match="layout"):
        shaped(torch.ones(2, 2).to_sparse())
    for text in ('{"set": []}', '{"Tensor": 0}', '{"Tensor": "0"}'):
        with pytest.raises(ValueError, match=r"is no (kind of )?value"):
            decoded(text, [])
