"""Batches of many lengths: how many programs, seconds and bytes they take, beside aot_eager.

    python benchmarks/lengths.py                     300 calls with lengths of 16 to 528
    python benchmarks/lengths.py --table             the first seven lengths alone
    MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 \\
        python benchmarks/lengths.py --side pfeife                       memory

A GPT of 4 small layers is trained on batches of random lengths, by `pfeife.compile` (2 microbatches
in 2 stages) and by `torch.compile(backend="aot_eager")` of the same accumulation, call by call in
turn. Each call is compared with eager accumulation, bit for bit. Printed: seconds of the CPU of the
first calls; how many programs there are; a call with a new length beside one with a known length;
the memory of the process after call 30 and after the last one, which tells something where one side
runs alone and glibc gives back what is freed (else that of eager grows as much as ours). Exits
non-zero if a bit differs.
"""

import argparse
import copy
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from models import GPT
from torch.nn import functional as F

import pfeife
from pfeife import report

FIRST = (16, 17, 18, 24, 33, 40, 16)
WORDS, ROWS, MICROBATCHES, LONGEST = 256, 8, 2, 528
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def accumulated(step: Step) -> Step:
    """What one device does with the microbatches of a call."""

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for part in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = step(*part) / MICROBATCHES
            loss.backward()
            total = total + loss.detach()
        return total

    return run


def whole(step: Step) -> Step:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = step(x, y)
        loss.backward()
        return loss.detach()

    return run


def memory() -> int:
    """Bytes of this process, in its memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="the first lengths alone")
    parser.add_argument("--side", action="append", help="what runs (all): pfeife, aot_eager, eager")
    parser.add_argument("--rows", type=int, default=ROWS, help="the most rows of a batch")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    models = [GPT(64, 4, WORDS, LONGEST)]
    models += [copy.deepcopy(models[0]) for _ in range(2)]

    def loss_of(model: torch.nn.Module) -> Step:
        return lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    ours = pfeife.compile(loss_of(models[0]), microbatches=MICROBATCHES, stages=2, progress=False)
    torchs = torch.compile(loss_of(models[1]), backend="aot_eager")
    sides = {
        "pfeife": whole(ours),
        "aot_eager": accumulated(torchs),
        "eager": accumulated(loss_of(models[2])),
    }
    sides = {name: run for name, run in sides.items() if name in (args.side or sides)}
    draws = random.Random(args.seed)
    more = [
        (draws.randrange(ROWS, args.rows + 1, MICROBATCHES), draws.randint(16, LONGEST))
        for _ in range(0 if args.table else args.calls - len(FIRST))
    ]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    resident, known, wrong = list[int](), list[bool](), []
    seen: set[tuple[int, int]] = set()
    for at, shape in enumerate((*((ROWS, length) for length in FIRST), *more)):
        x, y = (torch.randint(WORDS, shape) for _ in range(2))
        losses = {}
        for name, run in sides.items():
            begun = time.process_time()
            losses[name] = run(x, y)
            seconds[name].append(time.process_time() - begun)
        pairs = zip(models[0].parameters(), models[2].parameters(), strict=True)
        if {"pfeife", "eager"} <= sides.keys() and not (
            all(torch.equal(one.grad, other.grad) for one, other in pairs)
            and torch.equal(losses["pfeife"], losses["eager"])
        ):
            wrong.append((at, shape))
        for model in models:
            model.zero_grad()
        known.append(shape in seen)
        seen.add(shape)
        resident.append(memory())
        if not args.table:
            print(f"\r{at + 1} of {args.calls}", end="", file=sys.stderr)
    print(file=sys.stderr)
    first = [[name, *(f"{one:.2f}" for one in seconds[name][: len(FIRST)])] for name in sides]
    print(report.table(first, ["", *map(str, FIRST)]))
    print(f"programs: {len(ours.backend.compiled)}; wrong: {wrong}")
    if not args.table:
        if not args.side:
            tell(seconds, known)
        sizes = [report.size(resident[at]) for at in (29, -1)]
        print(f"{len(seen)} shapes; memory after call 30: {sizes[0]}, after all: {sizes[1]}")
    sys.exit(bool(wrong))


def tell(seconds: dict[str, list[float]], known: Sequence[bool]) -> None:
    """What the calls after the first ones took, over that of eager, which grows with the length."""
    for name in ("pfeife", "aot_eager"):
        over = [a - b for a, b in zip(seconds[name], seconds["eager"], strict=True)]
        later = list(zip(over, known, strict=True))[len(FIRST) :]
        new, old = ([1e3 * one for one, is_known in later if is_known is k] for k in (False, True))
        words = f"over eager, with a new length {statistics.median(new):.1f} ms"
        print(f"a call of {name} {words}, with a known one {statistics.median(old):.1f} ms")


if __name__ == "__main__":
    main()
