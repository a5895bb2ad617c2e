"""What the code blocks of these pages begin with: a small model, its step and a batch."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 100))


def loss_fn(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of a batch: (rows, length) tokens and targets."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


tokens, targets = torch.randint(100, (8, 16)), torch.randint(100, (8, 16))
