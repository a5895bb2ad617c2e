"""A plan that is searched once, and used by every run from then on.

python examples/plan_once.py --record plan.json                    searches, in one process
torchrun --nproc-per-node 2 examples/plan_once.py --use plan.json  trains with it, no search
"""

import argparse
import os
import sys

import torch
import torch.nn.functional as F
from gpt import GPT

import pfeife
from pfeife import report
from pfeife.data import plain

MICROBATCHES = 4


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--record", help="where to write the plan")
    arguments.add_argument("--use", help="the plan to train with")
    given = arguments.parse_args()
    if bool(given.record) == bool(given.use):
        arguments.error("either --record or --use")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(context=16, width=32, depth=2)

    def loss_fn(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    searched = {"schedule": "search", "search_seconds": 0.5, "devices": ["cpu", "cpu"]}
    request = searched if given.record else {"plan": given.use}
    step = pfeife.compile(loss_fn, microbatches=MICROBATCHES, **request)
    tokens, targets = torch.randint(256, (2, 8, 16))
    parts = zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
    expected = sum(loss_fn(*part) / MICROBATCHES for part in parts)
    loss = step(tokens, targets)
    loss.backward()
    plan = step.backend.compiled[0].plan
    if os.environ.get("RANK", "0") == "0":
        print(report.summary(plan, step.backend.compiled[0].program))
    if given.record:
        plain.save(plan, given.record)
    elif plan != plain.load(pfeife.Plan, given.use):
        sys.exit("this is not the recorded plan")
    if not torch.equal(loss, expected):
        sys.exit(f"the loss is {loss}, expected {expected}")
    print("the same loss, bit for bit")


if __name__ == "__main__":
    main()
