"""A script that torchrun starts again: python -m torch.distributed.run --max-restarts 1 ...

    restart.py FOLDER FAULT

Trains a small net for five steps; every rank writes what it trains after each of them, and reads
what all have written when it is started. In the first attempt rank 1 comes to grief at step 3.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import pfeife
from pfeife.testing import own_gradients

STEPS = 5


def load(model: torch.nn.Module, folder: Path) -> int:
    """The next step, after those that all ranks have written."""
    size, done = int(os.environ["WORLD_SIZE"]), 0
    while all((folder / f"{done} {rank}.pt").exists() for rank in range(size)):
        done += 1
    for rank in range(size) if done else ():
        trained = torch.load(folder / f"{done - 1} {rank}.pt", weights_only=True)
        model.load_state_dict(trained, strict=False)
    return done


def save(model: torch.nn.Module, path: Path) -> None:
    mine = {name: model.get_parameter(name).detach() for name in own_gradients(model)}
    torch.save(mine, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def main(folder: Path, fault: str) -> None:
    torch.set_num_threads(1)
    model, rank = net(), int(os.environ["RANK"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2, timeout=20)
    for number in range(load(model, folder), STEPS):
        if number == 3 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if fault == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "exception":
                raise RuntimeError("rank 1 comes to grief")
        optimizer.zero_grad()
        loss = step(batch(number))
        loss.backward()
        optimizer.step()
        save(model, folder / f"{number} {rank}.pt")
    (folder / f"loss {rank}").write_text(float(loss.detach()).hex())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
