"""What keeps a step from being pipelined, found out before it is trained.

python examples/explain.py
"""

import random

import torch
import torch.nn.functional as F
from gpt import GPT

import pfeife

OPTIONS = {"microbatches": 4, "stages": 2}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(context=16, width=32, depth=2)
    tokens, targets = torch.randint(256, (2, 8, 16))

    def shaken(tokens, targets):  # draws a number that no graph has
        logits = model(tokens) * (1 + 0.01 * random.random())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def mended(tokens, targets):  # draws it by torch
        logits = model(tokens) * (1 + 0.01 * torch.rand(()))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    for step in (shaken, mended):
        print(pfeife.explain(step, tokens, targets, options=OPTIONS))
        print()
    assert all(parameter.grad is None for parameter in model.parameters())


if __name__ == "__main__":
    main()
