"""Ranks that are killed while they save: the last complete checkpoint always loads.

    python benchmarks/interrupted_saves.py --trials 20

Each trial starts two ranks, which load the last checkpoint, and train and save step by step, every
other trial on a thread. One of them is killed (SIGKILL) at a random moment of a save. Then the last
checkpoint is read, in this process, and compared with plain training on one device, bit for bit.
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import pfeife

RANKS, WIDTH = 2, 512
Loaded = tuple[int, bool, str]


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def train(folder: Path, wait: bool) -> None:
    """A rank."""
    model, optimizer = made()
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2, progress=False)
    checkpoints = pfeife.Checkpoints(folder, model, optimizer)
    index = checkpoints.load()
    while True:
        step(batch(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
        index += 1
        checkpoints.save(index, wait=wait)


def start(folder: Path, trial: int) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    told = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    command = [sys.executable, __file__, "--folder", str(folder), "--trial", str(trial)]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **told, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(RANKS)
    ]


def kill_one(
    folder: Path, ranks: list[subprocess.Popen], chance: random.Random, seconds: float
) -> tuple[int, float, str]:
    """Kills a rank at a random moment within so many seconds of the begin of a save, the third one
    or a later one; who, when, and what there was of that save."""
    before = set(folder.glob("step-*"))
    while len(set(folder.glob("step-*")) - before) < 2 or not any(folder.glob(".step-*.new")):
        if any(rank.poll() is not None for rank in ranks):
            raise RuntimeError("a rank has ended before it was killed")
        time.sleep(0.0005)
    delay, rank = chance.uniform(0, seconds), chance.randrange(RANKS)
    time.sleep(delay)
    ranks[rank].send_signal(signal.SIGKILL)
    for one in ranks:
        one.wait(120)
    left = sorted(one.name for one in folder.glob(".step-*/*"))
    return rank, delay, " ".join(left)


class Plain:
    """Training on one device, as far as it has come."""

    def __init__(self) -> None:
        self.model, self.optimizer = made()
        self.steps = 0

    def at(self, steps: int) -> None:
        while self.steps < steps:
            for rows in batch(self.steps).chunk(2):
                (self.model(rows).square().mean() / 2).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1

    def same(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all parameters and all momenta have the same bits."""
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        return all(
            torch.equal(mine, its)
            and torch.equal(
                self.optimizer.state[mine]["momentum_buffer"],
                optimizer.state[its]["momentum_buffer"],
            )
            for mine, its in pairs
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--within", type=float, default=0.06, help="seconds of a save's begin")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--trial", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.folder:
        train(given.folder, wait=given.trial % 2 == 0)
        return
    chance = random.Random(0)  # not Python's own numbers, which a checkpoint has
    folder, plain, right = Path(tempfile.mkdtemp()), Plain(), 0
    for trial in range(given.trials):
        rank, delay, left = kill_one(folder, start(folder, trial), chance, given.within)
        model, optimizer = made()
        steps = pfeife.Checkpoints(folder, model, optimizer).load()
        plain.at(steps)
        same = plain.same(model, optimizer)
        right += same
        print(
            f"trial {trial + 1}: rank {rank} killed {1000 * delay:.0f} ms into a save "
            f"({'on a thread' if trial % 2 else 'at once'}), which left [{left}]; "
            f"step {steps} loads, {'the same bits' if same else 'OTHER BITS'}",
            flush=True,
        )
    print(f"{right} of {given.trials} load what one device has")
    raise SystemExit(right != given.trials)


if __name__ == "__main__":
    main()
