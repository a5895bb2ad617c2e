"""Training that goes on with the machines that are left, from the last checkpoint, by a new plan.

On every machine (here two agents on one; the first keeps what the others find one another by):

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-id run --rdzv-backend c10d \\
        --rdzv-endpoint localhost:29400 examples/elastic.py runs/elastic

When ranks are gone for good, the others' steps end in a PipelineError within seconds, their agents
wait for those that come back (--rdzv-conf last_call_timeout=30), and start the script again with
the ranks that there are. It has one stage a rank, so that the plan is another one then.
"""

import argparse
import json
import os

import torch
import torch.nn.functional as F
from gpt import GPT

import pfeife


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told.add_argument("folder", help="of the checkpoints, which all machines see")
    told.add_argument("--steps", type=int, default=40)
    options = told.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(context=16, words=64, width=32, depth=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.cumsum(torch.randint(1, 4, (4096,)), 0) % 64

    def loss_fn(rows):
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def batch(index):
        at = torch.randint(4079, (8,), generator=torch.Generator().manual_seed(index))
        return torch.stack([text[i : i + 17] for i in at])

    step = pfeife.compile(loss_fn, microbatches=4, timeout=60)
    checkpoints = pfeife.Checkpoints(options.folder, model, optimizer)
    start, losses = checkpoints.load(), []
    rank, ranks = (int(os.environ.get(name, at)) for name, at in (("RANK", 0), ("WORLD_SIZE", 1)))
    print(f"rank {rank} of {ranks} begins at step {start}", flush=True)
    for index in range(start, options.steps):
        loss = step(batch(index))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (index + 1) % 5 == 0:
            checkpoints.save(index + 1)
    print(f"rank {rank} has logged {json.dumps(losses)}")


if __name__ == "__main__":
    main()
