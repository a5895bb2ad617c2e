"""Pfeife as the default backend of torch.compile: a script that asks for no backend is pipelined.

torchrun --nproc-per-node 2 examples/default_backend.py    two pipeline ranks
python examples/default_backend.py                         two stages in one process

torch 2.13 and 2.15 have default backends; with torch 2.11 the backend is named instead.
"""

import torch
from gpt import GPT

import pfeife

MICROBATCHES, CONTEXT, WORDS = 4, 16, 64


def train(steps: int) -> list[float]:
    """A script of somebody who has compiled the loss, and says no more."""
    torch.manual_seed(0)
    model = GPT(CONTEXT, words=WORDS, width=32, depth=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = torch.compile(model.loss, dynamic=True)
    text, losses = torch.randint(WORDS, (8, CONTEXT + 1)), []
    for _ in range(steps):
        loss = step(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.set_num_threads(1)
    if not hasattr(torch.compiler, "set_default_backend"):
        print("this torch has no default backend: pass backend= to torch.compile")
        return
    before = torch.compiler.get_default_backend()
    backend = pfeife.backend(microbatches=MICROBATCHES, stages=2)
    torch.compiler.set_default_backend(backend)  # the one line
    losses = train(steps=5)
    torch.compiler.set_default_backend(before)
    (built,) = backend.compiled
    print(f"the default backend has made {built.plan.stages} stages, with the losses {losses}")


if __name__ == "__main__":
    main()
