"""A run that is interrupted and goes on, bit for bit: dropout, AdamW, a schedule of learning rates,
the place in the data. It may go on with another number of ranks.

    torchrun --nproc-per-node 2 examples/resume.py runs/gpt --steps 5    is interrupted there
    torchrun --nproc-per-node 2 examples/resume.py runs/gpt              goes on to the end
    python examples/resume.py runs/gpt                                   or so
"""

import argparse
import json
import os

import torch
import torch.nn.functional as F
from gpt import GPT
from torchdata.stateful_dataloader import StatefulDataLoader

import pfeife


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=12)
    told = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(context=16, words=64, width=32, depth=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    text = torch.cumsum(torch.randint(1, 4, (40, 17)), 1) % 64
    loader = StatefulDataLoader(text, batch_size=8, shuffle=True)  # every rank has all batches

    def loss_fn(rows):
        logits = F.dropout(model(rows[:, :-1]), 0.1)
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    step = pfeife.compile(loss_fn, microbatches=4, stages=2)
    checkpoints = pfeife.Checkpoints(told.folder, model, optimizer, schedule=cosine, loader=loader)
    index, losses = checkpoints.load(), []
    while index < told.steps:
        for rows in loader:
            loss = step(rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            cosine.step()
            index += 1
            losses.append(loss.item())
            if index % 5 == 0:
                checkpoints.save(index, wait=False)  # written while the training goes on
            if index == told.steps:
                break
    checkpoints.wait()
    print(f"rank {os.environ.get('RANK', '0')} has logged {json.dumps(losses)}")


if __name__ == "__main__":
    main()
