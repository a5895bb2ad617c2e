"""A graph of the whole batch holds for batches of any size, or it is refused."""

import pytest
import torch
from models import case

import pfeife
from pfeife.testing import eager_accumulation


def test_a_specialised_graph_is_refused():
    one = case("GPT")
    with pytest.raises(ValueError, match="specialised to this batch"):
        torch.compile(one.step, backend="pfeife", options={"microbatches": 2}, dynamic=False)(
            *one.batch(4)
        )

    def odd(x):
        return one.model(x).mean() if x.shape[0] > 3 else one.model(x).sum()

    tokens, _ = one.batch(4)
    with pytest.raises(ValueError, match="depends on the batch size"):
        torch.compile(odd, backend="pfeife", options={"microbatches": 2}, dynamic=True)(tokens)
    # Captured on a microbatch, it is the step of a microbatch.
    parts = [(part,) for part in tokens.chunk(2)]
    assert torch.equal(
        pfeife.compile(odd, microbatches=2, loss_reduction="mean")(tokens),
        eager_accumulation(odd, one.model, parts).loss,
    )
