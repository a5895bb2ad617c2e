"""Models with a cut by hand: the same blocks a stage for Pfeife and for its peer.

Pfeife takes the model as it is and is told the cut. The peer's stages are a chain of modules,
each of which takes what the one before returns: they are written out here, with the same
parameters.
"""

from collections.abc import Callable
from itertools import pairwise

import attrs
import models
import torch
import torch.nn.functional as F
import virtual
from torch import nn


@attrs.frozen(eq=False)
class Split:
    """A model, the peer's stages of it, and the loss of the last one's result and the target.

    The first tensor of a microbatch is the input, the last one the target.
    """

    case: models.Case
    stages: tuple[nn.Module, ...]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @property
    def owners(self) -> dict[str, frozenset[int]]:
        """The stages that hold a parameter, by its name in the whole model."""
        at: dict[int, set[int]] = {}
        for index, stage in enumerate(self.stages):
            for parameter in stage.parameters():
                at.setdefault(id(parameter), set()).add(index)
        return {name: frozenset(at[id(p)]) for name, p in self.case.model.named_parameters()}


def parts(count: int, stages: int) -> list[range]:
    """`count` units, evenly to the stages."""
    ends = [count * stage // stages for stage in range(stages + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def tiny(stages: int, width: int = 8) -> Split:
    """A linear layer and a tanh a stage: next to nothing to compute."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(stages)]
    model = nn.Sequential(*layers)

    def draw() -> tuple[torch.Tensor, ...]:
        return torch.randn(2, width), torch.randn(2, width)

    case = models.Case("tiny", model, lambda x, y: F.mse_loss(model(x), y), draw)
    return Split(case, tuple(layers), F.mse_loss)


def _sleeping(units: list[int], stages: list[range], rows: int) -> Split:
    layers = [virtual.Layer(count) for count in units]
    model = nn.Sequential(*layers)

    def draw() -> tuple[torch.Tensor, ...]:
        return (torch.rand(rows, virtual.WIDTH),)

    case = models.Case("sleeping", model, lambda x: virtual.OPS.mean_square(model(x)), draw)
    cut = tuple(nn.Sequential(*(layers[i] for i in part)) for part in stages)
    return Split(case, cut, lambda x, _: virtual.OPS.mean_square(x))


def sleeping(stages: int, rows: int) -> Split:
    """A virtual accelerator's layer a stage; the values between stages have `rows` KB."""
    return _sleeping([1] * stages, parts(stages, stages), rows)


def sleeping_gpt(stages: int, blocks: int = 8, head: int = 4) -> Split:
    """An embedding, blocks and a head that takes as long as some blocks, on virtual accelerators:
    the same number of blocks in every stage."""
    assigned = [range(part.start + 1, part.stop + 1) for part in parts(blocks, stages)]
    assigned[0], assigned[-1] = range(assigned[0].stop), range(assigned[-1].start, blocks + 2)
    return _sleeping([1] * (blocks + 1) + [head], assigned, 64)


class GPTPart(nn.Module):
    """Some blocks of a GPT, with the embedding before the first and the head after the last."""

    def __init__(self, model: models.GPT, blocks: range):
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[i] for i in blocks)
        self.embed = self.place = self.norm = self.head = None
        if blocks.start == 0:
            self.embed, self.place = model.embed, model.place
        if blocks.stop == len(model.blocks):
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def _words_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def language(case: models.Case, stages: int) -> Split:
    """A GPT with the same number of blocks in every stage."""
    model = case.model
    cut = tuple(GPTPart(model, blocks) for blocks in parts(len(model.blocks), stages))
    return Split(case, cut, _words_loss)


class SkipPart(nn.Module):
    """Some layers of a SkipNet. What later stages read passes through all between as a further
    input and result."""

    def __init__(self, model: models.SkipNet, units: range):
        super().__init__()
        layers = [model.first, *model.down, *model.up, model.last]
        self.layers = nn.ModuleList(layers[i] for i in units)
        self.units, self.top = units, len(model.down)

    def forward(self, x: torch.Tensor, *skips: torch.Tensor):
        for value in (x, *skips):
            if value.requires_grad:  # else Gloo refuses what the gradient of a cat looks like
                value.register_hook(torch.Tensor.contiguous)
        waiting = list(skips)
        for unit, layer in zip(self.units, self.layers, strict=True):
            if unit == 0:
                x = layer(x).relu()
            elif unit <= self.top:
                waiting.append(x)
                x = layer(x).relu()
            elif unit <= 2 * self.top:
                x = torch.cat([F.interpolate(x, scale_factor=2.0), waiting.pop()], 1)
                x = layer(x).relu()
            else:
                x = layer(x)
        return (x, *waiting) if waiting else x


def skips(stages: int) -> Split:
    case = models.skip_net()
    units = 2 * len(case.model.down) + 2
    cut = tuple(SkipPart(case.model, part) for part in parts(units, stages))
    return Split(case, cut, F.mse_loss)
