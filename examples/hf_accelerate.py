"""A loop with Accelerate on pipeline ranks: accumulation, clipping, checkpoints.

torchrun --nproc-per-node 2 examples/hf_accelerate.py    two pipeline ranks
python examples/hf_accelerate.py                         two stages in one process
python examples/hf_accelerate.py --one-device            without Pfeife
"""

import argparse
import json

import accelerate
import torch
from gpt import GPT
from torch.utils.data import DataLoader

import pfeife
from pfeife.integrations.accelerate import Accelerator  # in place of Accelerate's own


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told.add_argument("--one-device", action="store_true")
    told.add_argument("--save", help="a folder for the state after the first epoch")
    told.add_argument("--load", help="a folder with such a state: only the second epoch is run")
    told.add_argument("--lengths", action="store_true", help="each batch has a length of its own")
    options = told.parse_args()
    torch.set_num_threads(1)

    torch.manual_seed(0)
    model = GPT(context=16, words=64, width=32, depth=2)
    text = torch.randint(64, (32, 17))
    kind = accelerate.Accelerator if options.one_device else Accelerator
    accelerator = kind(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=4)
    ends = (17, 13, 16, 9) if options.lengths else (17,) * 4  # of 8 rows each
    rows = [row[: ends[index // 8]] for index, row in enumerate(text)]
    loader = DataLoader([(row[:-1], row[1:]) for row in rows], batch_size=8)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    compiled = pfeife.compile(model.loss, microbatches=4, stages=2)
    step = model.loss if options.one_device else compiled
    if options.load:
        accelerator.load_state(options.load)
    losses = []
    for epoch in range(1 if options.load else 0, 2):
        for tokens, targets in loader:
            with accelerator.accumulate(model):
                loss = step(tokens, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if options.save and epoch == 0:
            accelerator.save_state(options.save)
    print(f"rank {accelerator.process_index} has logged {json.dumps(losses)}")


if __name__ == "__main__":
    main()
