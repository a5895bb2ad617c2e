"""A script that two processes run, of which one ends before the other has saved the state.

    python staying.py FOLDER HOW     with the environment of torchrun

Rank 0 writes what it was told instead of state, if anything, to FOLDER/told, and else compares the
state with that of one device and writes FOLDER/right.
"""

import copy
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import pfeife

FOLDER, HOW, RANK = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.01)


def of_one_device(model: nn.Module) -> tuple[dict, dict]:
    """The state after the same step."""
    optimizer = torch.optim.AdamW(model.parameters())
    for part in torch.ones(4, 4).chunk(2):
        (model(part).square().mean() / 2).backward()
    optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def same(found: dict, expected: dict) -> bool:
    pairs = [(found[key], expected[key]) for key in expected]
    return found.keys() == expected.keys() and all(
        same(one, other) if isinstance(one, dict) else bool(torch.as_tensor(one == other).all())
        for one, other in pairs
    )


def go_on(step) -> None:
    """What rank 1 does while rank 0 saves."""
    if HOW == "destroys":
        dist.destroy_process_group()
    if HOW == "exits":
        sys.exit(3)
    if HOW == "raises":
        wait_for("asked")
        time.sleep(1)
        raise OSError("no more memory")
    if HOW == "is killed":
        wait_for("asked")
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)


def save(model, optimizer, step, expected) -> None:
    if HOW != "is killed":
        time.sleep(2)  # rank 1 has ended
    if HOW == "destroys":
        dist.destroy_process_group()
    if HOW == "goes on":
        step(torch.ones(4, 4))
    (FOLDER / "asked").touch()
    assert same(model.state_dict(), expected[0])
    assert same(optimizer.state_dict(), expected[1])
    (FOLDER / "right").touch()


def main() -> None:
    """Its model is gone when it ends."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = of_one_device(copy.deepcopy(model))
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2, timeout=60)
    optimizer = torch.optim.AdamW(model.parameters())
    step(torch.ones(4, 4)).backward()
    if RANK == 1 and HOW in ("raises", "is killed"):
        go_on(step)  # before it comes to where rank 0 asks
    optimizer.step()
    if RANK == 1:
        go_on(step)
        return
    try:
        save(model, optimizer, step, expected)
    except pfeife.PipelineError as error:
        (FOLDER / "told").write_text(str(error))
        raise


main()
(FOLDER / f"over {RANK}").touch()
