"""Models of the benchmarks: steps of some milliseconds an action on one core."""

from collections.abc import Callable
from itertools import pairwise

import attrs
import torch
import torch.nn.functional as F
from torch import nn


@attrs.frozen(eq=False)
class Case:
    """A model with its step, and how to draw a microbatch."""

    name: str
    model: nn.Module
    step: Callable[..., torch.Tensor]
    draw: Callable[[], tuple[torch.Tensor, ...]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).transpose(1, 3)
        q, k, v = parts.unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, words: int, length: int, heads: int = 4):
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SkipNet(nn.Module):
    """Convolutions whose every result on the way down is read again on the way up."""

    def __init__(self, width: int, levels: int):
        super().__init__()
        wide = [width * 2**level for level in range(levels + 1)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Conv2d(low, high, 3, stride=2, padding=1) for low, high in pairwise(wide)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(high + low, low, 3, padding=1) for low, high in reversed(list(pairwise(wide)))
        )
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        skips = []
        for layer in self.down:
            skips.append(x)
            x = layer(x).relu()
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1)).relu()
        return self.last(x)


def language(name: str, model: nn.Module, words: int, rows: int, length: int) -> Case:
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    def draw() -> tuple[torch.Tensor, ...]:
        return torch.randint(words, (rows, length)), torch.randint(words, (rows, length))

    return Case(name, model, step, draw)


def gpt(depth: int = 6, width: int = 192, words: int = 1000) -> Case:
    return language("GPT", GPT(width, depth, words, 64), words, 4, 64)


def large_head(words: int = 8000, depth: int = 6) -> Case:
    """A few blocks and a head that takes longer than all of them."""
    return language("large head", GPT(128, depth, words, 64), words, 4, 64)


def skip_net(width: int = 16, levels: int = 3) -> Case:
    model = SkipNet(width, levels)

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), x)

    return Case("skip net", model, step, lambda: (torch.randn(8, 3, 64, 64),))
