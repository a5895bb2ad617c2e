"""The batch dimension: what is cut, and what is refused."""

import torch
from torch import nn

import pfeife
from edges import edge
from pfeife.testing import eager_accumulation


@edge(ranks=(1, 2))
def a_batch_of_one_tensor():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def step(x):
        return model(x).square().mean()

    expected = eager_accumulation(step, model, [(part,) for part in x.chunk(2)])
    assert torch.equal(pfeife.compile(step, microbatches=2)(x), expected.loss)
