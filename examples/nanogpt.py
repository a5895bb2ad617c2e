"""A loop as nanoGPT has it, on pipeline ranks. It needed what is marked with <-, and no DDP.

torchrun --nproc-per-node 2 examples/nanogpt.py    two pipeline ranks
python examples/nanogpt.py --one-device            without Pfeife
"""

import argparse
import json
import math
import os

import torch
from gpt import GPT

import pfeife

STEPS, ACCUMULATED, ROWS, CONTEXT = 8, 2, 8, 16
told = argparse.ArgumentParser(description=__doc__.splitlines()[0])
told.add_argument("--one-device", action="store_true")
told.add_argument("--save", help="a checkpoint, after half of the steps")
told.add_argument("--resume", help="a checkpoint")
options = told.parse_args()
torch.set_num_threads(1)
rank = int(os.environ.get("RANK", "0"))

torch.manual_seed(1337)
text = (torch.cumsum(torch.randint(1, 4, (4096,)), 0) % 64).unfold(0, CONTEXT + 1, 1)
model, start, losses = GPT(CONTEXT, words=64, width=32, depth=2), 0, []
groups = [[p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False)]
decays = [{"params": p, "weight_decay": d} for p, d in zip(groups, (0.1, 0.0), strict=True)]
optimizer = torch.optim.AdamW(decays, lr=1e-2, betas=(0.9, 0.95))
if options.resume:
    checkpoint = torch.load(options.resume, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    start = checkpoint["steps"]


def batch(seed):
    rows = text[torch.randint(4079, (ROWS,), generator=torch.Generator().manual_seed(seed))]
    return rows[:, :-1], rows[:, 1:]  # every rank has the whole batch  <-


step = model.loss if options.one_device else pfeife.compile(model.loss, microbatches=4)  # <-
for index in range(start, STEPS):
    for group in optimizer.param_groups:
        group["lr"] = 5e-3 * (1 + math.cos(math.pi * index / STEPS))
    for part in range(ACCUMULATED):
        loss = step(*batch(index * ACCUMULATED + part)) / ACCUMULATED
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        losses.append([loss.item(), norm.item(), step(*batch(9999)).item()])
    if options.save and index + 1 == STEPS // 2 and rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "steps": index + 1}, options.save)
print(f"rank {rank} has logged {json.dumps(losses)}")
