"""Models of the tests: small, each with one property that pipelines find hard."""

import copy
from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import nn


@attrs.frozen(eq=False)
class Case:
    """A model, its step, and how to draw a microbatch; `tied` gradients differ by rounding."""

    model: nn.Module
    step: Callable[..., torch.Tensor]
    draw: Callable[[int], tuple[torch.Tensor, ...]]
    tied: tuple[str, ...] = ()

    def batch(self, rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        return self.draw(rows)

    def copy(self) -> "Case":
        """The same case around a copy of the model."""
        return CASES[self.name](copy.deepcopy(self.model))

    @property
    def name(self) -> str:
        return type(self.model).__name__


class Wrapped(nn.Module):
    """A model around another one: Dynamo compiles no `forward` of torch's own modules."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU())
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + mask).softmax(-1)
        x = x + self.proj(weights @ v)
        return x + self.out(self.mlp(x))


class GPT(nn.Module):
    """A mask that every block reads; `tied` shares the embedding with the head."""

    def __init__(self, width: int = 16, depth: int = 2, words: int = 23, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.place(torch.arange(length, device=tokens.device))
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class TiedGPT(GPT):
    def __init__(self) -> None:
        super().__init__(tied=True)


class UNet(nn.Module):
    """Skip connections from every level down to the same level up."""

    def __init__(self, width: int = 4, levels: int = 3):
        super().__init__()
        wide = [width * 2**level for level in range(levels + 1)]
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Conv2d(wide[i], wide[i + 1], 3, stride=2, padding=1) for i in range(levels)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(wide[i + 1] + wide[i], wide[i], 3, padding=1) for i in reversed(range(levels))
        )
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        skips = []
        for conv in self.down:
            skips.append(x)
            x = conv(x).relu()
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = conv(torch.cat([x, skips.pop()], 1)).relu()
        return self.last(x)


class BatchNormNet(nn.Module):
    """Buffers that every microbatch updates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in ((1, 4), (4, 4), (4, 4), (4, 2))
        )
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class DropoutNet(nn.Module):
    """Random numbers in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x).tanh(), 0.3)
        return x


class WideNet(nn.Module):
    """Values that travel by themselves, views of them, and a small one beside them."""

    WIDTH = 2**14

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(self.WIDTH, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        level = x.mean()
        for scale in self.scales:
            last = x.flatten()
            x = torch.sin(last.view_as(x).t() * scale).t() + level
        return x, last


def _words(model: nn.Module, tied: tuple[str, ...] = ()) -> Case:
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    def draw(rows: int) -> tuple[torch.Tensor, ...]:
        return torch.randint(23, (rows, 8)), torch.randint(23, (rows, 8))

    return Case(model, step, draw, tied)


def gpt(model: nn.Module | None = None) -> Case:
    return _words(model or GPT())


def tied_gpt(model: nn.Module | None = None) -> Case:
    return _words(model or TiedGPT(), ("embed.weight",))


def unet(model: nn.Module | None = None) -> Case:
    model = model or UNet()

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), x)

    return Case(model, step, lambda rows: (torch.randn(rows, 1, 8, 8),))


def batch_norm(model: nn.Module | None = None) -> Case:
    model = model or BatchNormNet()

    def step(x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), kinds)

    return Case(model, step, lambda rows: (torch.randn(rows, 1, 5, 5), torch.randint(3, (rows,))))


def dropout(model: nn.Module | None = None) -> Case:
    model = model or DropoutNet()

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    return Case(model, step, lambda rows: (torch.randn(rows, 6),))


def wide(model: nn.Module | None = None) -> Case:
    model = model or WideNet()

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, last = model(x)
        return y.square().mean(), last

    return Case(model, step, lambda rows: (torch.randn(rows, WideNet.WIDTH),))


CASES = {
    "GPT": gpt,
    "TiedGPT": tied_gpt,
    "UNet": unet,
    "BatchNormNet": batch_norm,
    "DropoutNet": dropout,
    "WideNet": wide,
}
LARGER = {"GPT, 3 blocks": lambda: gpt(GPT(depth=3))}
EQUAL_TO_EAGER = ("GPT", "TiedGPT", "UNet", "BatchNormNet")  # dropout draws its own numbers


def case(name: str, seed: int = 0) -> Case:
    """One case with its parameters drawn from a seed."""
    torch.manual_seed(seed)
    return (CASES | LARGER)[name]()
