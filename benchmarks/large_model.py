"""A model larger than a rank: made without memory, then each rank holds its share.

    python benchmarks/large_model.py --gib 2 --ranks 4
    python benchmarks/large_model.py --gib 2 --ranks 4 --adapters    trained beside frozen layers

Starts the ranks, trains with AdamW, and prints what each rank had at its peak beside its share of
parameters, gradients and optimizer state and what the account says of activations.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import pfeife
from pfeife import report
from pfeife._torch import is_absent
from pfeife.cost import memory_curves

WIDTH = 4096
LAYER = 4 * WIDTH * WIDTH  # bytes of a weight
INNER = 16  # width of an adapter


class Adapted(torch.nn.Linear):
    """A frozen layer, and beside it a product of two small matrices that are trained."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(INNER, WIDTH) / WIDTH**0.5)
        self.up = torch.nn.Parameter(torch.zeros(WIDTH, INNER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.down.t() @ self.up.t()


def layer(adapted: bool) -> torch.nn.Module:
    return Adapted() if adapted else torch.nn.Linear(WIDTH, WIDTH, bias=False)


def peak() -> int:
    """Bytes of memory that this process had at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def train(layers: int, steps: int, adapted: bool) -> None:
    """One rank: prints a line of JSON."""
    torch.set_num_threads(1)
    started = peak()
    torch.manual_seed(0)
    with pfeife.deferred_init():
        model = torch.nn.Sequential(*(layer(adapted) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    options = {"microbatches": 4, "optimizer": "adamw", "progress": False}
    step = pfeife.compile(lambda x: model(x).square().mean(), **options)
    made = peak()
    losses = []
    for seed in range(steps):
        loss = step(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    (compiled,) = step.backend.compiled
    rank = dist.get_rank()
    curve = memory_curves(compiled.program, compiled.schedule, optimizer="adamw")[rank]
    mine = sum(state["exp_avg"].nbytes for state in optimizer.state.values())
    frozen = sum(p.nbytes for p in model.parameters() if not (p.requires_grad or is_absent(p)))
    found = {"rank": rank, "losses": losses, "started": started, "made": made, "peak": peak()}
    line = json.dumps(found | {"share": 4 * mine + frozen, "said": curve.peak})
    os.write(1, f"{line}\n".encode())  # ranks share the pipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=2.0, help="of parameters")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--adapters", action="store_true", help="train these, not the layers")
    given = parser.parse_args()
    layers = round(given.gib * 2**30 / LAYER)
    if "RANK" in os.environ:
        train(layers, given.steps, given.adapters)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(given.ranks), __file__]
    command += ["--gib", str(given.gib), "--steps", str(given.steps)]
    command += ["--adapters"] if given.adapters else []
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    rows.sort(key=lambda row: row["rank"])
    assert len(rows) == given.ranks and len({str(row["losses"]) for row in rows}) == 1
    size = report.size(layers * LAYER)
    print(f"{layers} layers, {size} of parameters, AdamW, {given.steps} steps: {rows[0]['losses']}")
    print("rank  at start  model made  at its peak  share of all state  by the account  beyond")
    for row in rows:
        beyond = row["peak"] - row["said"]
        figures = [row[key] for key in ("started", "made", "peak", "share", "said")]
        print(row["rank"], *map(report.size, figures), report.size(beyond), sep="  ")


if __name__ == "__main__":
    main()
