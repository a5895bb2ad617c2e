"""Models of the rows, each with its step and how to draw a batch, on the device of a setting."""

import copy
from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from models import GPT, SkipNet
from torch import nn

from gpu.rows import Setting

ROWS = 8  # of a batch


@attrs.frozen(eq=False)
class Case:
    """A model, its step as a function of the model and a batch, and a batch's rows by a seed."""

    model: nn.Module
    loss: Callable[..., torch.Tensor]
    draw: Callable[[int], tuple[torch.Tensor, ...]]
    device: str
    tied: tuple[str, ...] = ()  # parameters whose gradient is a sum over stages

    def batch(self, rows: int = ROWS, seed: int = 1) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        return tuple(one.to(self.device) for one in self.draw(rows))

    def step(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model, *batch)

    def copy(self) -> "Case":
        return attrs.evolve(self, model=copy.deepcopy(self.model))


class Tied(GPT):
    """The head's weight is the embedding's."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.head.weight = self.embed.weight


class BatchNorms(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for before in (3, width, width, width)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Dropouts(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x).tanh(), 0.3)
        return x


def words_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _language(kind: type[GPT], setting: Setting, tied: tuple[str, ...] = ()) -> Case:
    width, depth, words, length = (32, 3, 50, 16) if setting.small else (256, 4, 1000, 128)

    def draw(rows: int) -> tuple[torch.Tensor, ...]:
        return torch.randint(words, (rows, length)), torch.randint(words, (rows, length))

    return Case(kind(width, depth, words, length), words_loss, draw, setting.device, tied)


def gpt(setting: Setting) -> Case:
    return _language(GPT, setting)


def tied(setting: Setting) -> Case:
    return _language(Tied, setting, ("embed.weight",))


def skip_net(setting: Setting) -> Case:
    width, levels, size = (4, 2, 16) if setting.small else (16, 3, 64)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), x)

    model = SkipNet(width, levels)
    return Case(model, loss, lambda rows: (torch.randn(rows, 3, size, size),), setting.device)


def channels_last(setting: Setting) -> Case:
    """The same in the layout that convolutions are fastest in."""
    one = batch_norms(setting)

    def draw(rows: int) -> tuple[torch.Tensor, ...]:
        images, kinds = one.draw(rows)
        return images.contiguous(memory_format=torch.channels_last), kinds

    one.model.to(memory_format=torch.channels_last)
    return attrs.evolve(one, draw=draw)


def batch_norms(setting: Setting) -> Case:
    def loss(model: nn.Module, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), kinds)

    def draw(rows: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 3, 16, 16), torch.randint(10, (rows,))

    return Case(BatchNorms(8 if setting.small else 32), loss, draw, setting.device)


def dropouts(setting: Setting) -> Case:
    width = 16 if setting.small else 256

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    return Case(Dropouts(width), loss, lambda rows: (torch.randn(rows, width),), setting.device)


CASES = {
    "GPT": gpt,
    "UNet": skip_net,
    "tied": tied,
    "BatchNorm": batch_norms,
    "channels_last": channels_last,
    "dropout": dropouts,
}


def case(name: str, setting: Setting) -> Case:
    """One of them, always with the same parameters."""
    torch.manual_seed(0)
    made = CASES[name](setting)
    made.model.to(setting.device)
    return made
