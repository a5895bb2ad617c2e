"""What the figures of a step cost: calls with and without `log_every=1`, in turn.

    python benchmarks/step_line.py                                          # one process
    torchrun --nproc-per-node 2 benchmarks/step_line.py                     # two ranks

`again` is another step without, which tells the noise. Tiny stages compute next to nothing: what
remains is what a call itself takes.
"""

import logging
import os
import statistics
import time

import torch

import pfeife

ROUNDS, CALLS = 60, 5


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
    log = logging.getLogger("pfeife")
    log.setLevel(logging.INFO)
    log.addHandler(logging.NullHandler())
    log.propagate = False

    def compiled(**options):
        step = pfeife.compile(lambda x: net(x).square().mean(), microbatches=4, stages=2, **options)
        step(torch.ones(8, 16)).backward()
        return step

    steps = {"without": compiled(), "again": compiled(), "log_every=1": compiled(log_every=1)}
    batch, seconds = torch.ones(8, 16), {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                step(batch).backward()
            seconds[name].append((time.perf_counter() - start) / CALLS)
    if os.environ.get("RANK", "0") == "0":
        for name, taken in seconds.items():
            print(f"{name:12} {1e6 * statistics.median(taken):7.0f} us a call (median)")
        for name in ("again", "log_every=1"):
            pairs = zip(seconds[name], seconds["without"], strict=True)
            more = statistics.median(one - other for one, other in pairs)
            print(f"{name:12} {1e6 * more:7.0f} us more (median of the differences)")


if __name__ == "__main__":
    main()
