"""Models made without memory: each rank makes what its stages use."""

import os

import torch
from rows import row
from torch import nn

import pfeife
from pfeife.frontend.deferred.init_replay import Tape
from pfeife.frontend.deferred.tensors import deferred_tensors

RANK = int(os.environ.get("RANK", "0"))


class Net(nn.Module):
    """Blocks, statistics, a frozen head, a plain tensor, and a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.norm, self.unused = nn.BatchNorm1d(8), nn.Linear(3, 3)
        self.head = nn.Linear(8, 8).requires_grad_(False)
        self.shift = torch.randn(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(x) + self.shift)).square().mean()


def trained(model: nn.Module) -> tuple[list[float], dict]:
    """The losses of some steps, and the whole state behind them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = pfeife.compile(lambda x: model(x), microbatches=2, stages=4)
    losses = []
    for seed in range(3):
        loss = step(torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, pfeife.full_state_dict(model)


def made(seed: int, later: bool) -> nn.Module:
    torch.manual_seed(seed)
    if not later:
        return Net()
    with pfeife.deferred_init():
        return Net()


@row(ranks=(2,))
def the_same_training() -> None:
    losses, state = trained(made(0, later=False))
    model = made(0, later=True)
    asked, original = list[int](), Tape.values

    def values(self: Tape, wanted: set[int], before: int | None = None) -> dict:
        asked.append(len(wanted))
        return original(self, wanted, before)

    Tape.values = values  # type: ignore[method-assign, assignment]
    try:
        others, found = trained(model)
    finally:
        Tape.values = original  # type: ignore[method-assign]
    assert others == losses and found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert not deferred_tensors(model)
    assert sum(asked) <= 5 + 2 + 4 + 2 + 2 * 2 + 2, asked  # of 18: two blocks or more are others'


@row("['0.weight', '0.bias', '1.weight'] (4 in all) are not the same on all ranks.", ranks=(2,))
def another_seed_on_another_rank() -> None:
    torch.manual_seed(RANK)
    with pfeife.deferred_init():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)(torch.ones(4, 8))


@row(
    "the arguments of this call: ranks [1] have another one than rank 0: rank 1 has "
    "'blocks.0.weight: torch.float32 [8, 8] on cpu' where rank 0 has "
    "'blocks.0.weight: torch.float32 [8, 8] on cpu, of a model from deferred_init'",
    ranks=(2,),
)
def one_rank_alone() -> None:
    trained(made(0, later=RANK == 0))
