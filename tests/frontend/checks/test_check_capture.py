"""The comparison of a first call with the captured program."""

import torch
from torch import nn

import pfeife


def test_a_backward_that_counts_as_random_is_no_part_of_the_forward():
    """As that of attention in float32 on a GPU does, also where nothing is dropped."""
    random, name = torch.Tag.nondeterministic_seeded, "pfeife_random::twice"
    with torch.library._scoped_library("pfeife_random", "FRAGMENT") as library:
        for kernel in ("twice", "twice_backward"):
            library.define(f"{kernel}(Tensor x, float dropout_p=0.0) -> Tensor", tags=random)
            for key in ("CPU", "Meta"):
                library.impl(kernel, lambda x, dropout_p=0.0: 2 * x, key)
        backward = torch.ops.pfeife_random.twice_backward
        torch.library.register_autograd(name, lambda ctx, g: (backward(g), None), lib=library)
        net, twice = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ops.pfeife_random.twice

        def step(x):
            return twice(net(x)).square().mean()

        x = torch.randn(8, 4)
        loss = pfeife.compile(step, microbatches=2, stages=2)(x)
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in net.parameters()]
        net.zero_grad()
        wanted = step(x)
        wanted.backward()
        torch.testing.assert_close(loss, wanted)
        for mine, parameter in zip(gradients, net.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad)
