"""Training loops as data: nets, options and a sequence of what a script does; drawn by a seed."""

import random
from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import nn

WIDTH = 4  # of the batch and of what a net returns
COMMON = (
    *("train", "accumulate", "eval", "load", "freeze", "rows", "second model", "second step"),
    *("raise", "scale", "mode", "in place", "kept", "retained", "save all", "clip all"),
)
# What may be refused, and so ends a loop early: on ranks all that reads others' parameters.
RARE = ("save", "last", "clip", "twice", "by hand", "penalty")
ON_ONE = ("raise", "skip", "differ", "load", "eval mode", "mode", "scale", "freeze", "seed")


@attrs.frozen
class Action:
    """What a script does next; at one `rank` alone, or at all. `value` says which or how much."""

    name: str
    value: int = 0
    rank: int | None = None

    def __str__(self) -> str:
        return self.name + (f" on rank {self.rank}" if self.rank is not None else "")


@attrs.frozen
class Loop:
    """A training loop. With the loss `outside`, the model alone is compiled."""

    index: int
    net: str
    microbatches: int
    stages: int
    schedule: str
    rows: int
    optimizer: str
    outside: bool
    loss: int | None
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        said = f"{self.net}, {self.microbatches} microbatches of {self.rows} rows, {self.schedule}"
        kind = "loss outside" if self.outside else f"loss={self.loss}"
        return f"{said}, {self.stages} stages, {self.optimizer}, {kind}: " + "; ".join(
            map(str, self.actions)
        )


def drawn(seed: int, index: int, ranks: int) -> Loop:
    """Loop number `index` of a seed: the same in every process."""
    draw = random.Random(f"{seed} {ranks} {index}")
    net = draw.choice(list(NETS))
    microbatches = draw.choice((2, 2, 4))
    actions = tuple(_action(draw, ranks) for _ in range(draw.randint(2, 6)))
    return Loop(
        index,
        net,
        microbatches,
        ranks if ranks > 1 else draw.choice((1, 2, 2, 3)),
        draw.choice(("1f1b", "1f1b", "gpipe")),
        microbatches * draw.choice((2, 3)),
        # Rounding of tied weights is not to be made large by Adam's quotients.
        "sgd" if net == "tied" else draw.choice(("sgd", "momentum", "adam")),
        draw.random() < 0.15,
        draw.choice((None, 0)),
        (Action("train"), *actions, Action("train")),
    )


def _action(draw: random.Random, ranks: int) -> Action:
    if ranks > 1 and draw.random() < 0.12:
        return Action(draw.choice(ON_ONE), draw.randrange(8), draw.randrange(ranks))
    return Action(draw.choice(COMMON * 2 * ranks + RARE), draw.randrange(8))


def smaller(loop: Loop) -> Iterator[Loop]:
    """The loop with one action less, and with simpler options."""
    for at in range(len(loop.actions)):
        yield attrs.evolve(loop, actions=(*loop.actions[:at], *loop.actions[at + 1 :]))
    for change in ({"net": "mlp"}, {"optimizer": "sgd"}, {"outside": False}, {"microbatches": 2}):
        if any(getattr(loop, name) != value for name, value in change.items()):
            yield attrs.evolve(loop, **change)


def loop_from(data: dict) -> Loop:
    """A loop from what `attrs.asdict` made of it."""
    return Loop(**{**data, "actions": tuple(Action(**one) for one in data["actions"])})


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3)
        self.second, self.last = nn.Conv2d(3, 3, 1), nn.Linear(27, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = self.norm(self.first(x.view(-1, 1, 2, 2))).relu()
        return self.last(self.second(images).flatten(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.first(x).tanh()).tanh()
        return nn.functional.linear(hidden, self.first.weight.t())


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.first(x)
        return self.last(self.inner(early.tanh()).sigmoid() + early)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 6), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x).tanh()).tanh())


NETS = {"mlp": Plain, "conv": Conv, "tied": Tied, "skip": Skip, "normed": Normed}


class Second(nn.Module):
    """A model that shares the first layer of another."""

    def __init__(self, other: nn.Module):
        super().__init__()
        self.shared = other.first
        self.head = nn.LazyLinear(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = isinstance(self.shared, nn.Conv2d)
        return self.head(self.shared(x.view(-1, 1, 2, 2) if images else x).tanh().flatten(1))


def models(loop: Loop) -> tuple[nn.Module, nn.Module]:
    """The two models of a loop, the same in every process and at every call."""
    torch.manual_seed(1000 + loop.index)
    first = NETS[loop.net]()
    second = Second(first)
    second(torch.zeros(2, WIDTH))
    return first, second


def batch(loop: Loop, number: int, rows: int) -> list[torch.Tensor]:
    """The rows of batch `number`: inputs and targets."""
    generator = torch.Generator().manual_seed(7919 * loop.index + number)
    return [torch.randn(rows, WIDTH, generator=generator) for _ in range(2)]


def names(loops: Sequence[Loop]) -> list[str]:
    """Every action that is in them."""
    return sorted({str(a).split(" on ")[0] for loop in loops for a in loop.actions})
