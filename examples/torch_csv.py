"""A schedule of torch.distributed.pipelining runs in Pfeife, and one of Pfeife's goes to torch.

python examples/torch_csv.py
"""

import torch
import torch.nn.functional as F
from gpt import GPT
from torch.distributed.pipelining.schedules import _Action  # as torch reads a cell

import pfeife
from pfeife import sched

STAGES, MICROBATCHES = 2, 4
THEIRS = """\
0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3
1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3
"""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(context=16, width=32, depth=2)
    tokens, targets = torch.randint(256, (2, 8, 16))

    def loss_fn(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    schedule = pfeife.Schedule.from_csv(THEIRS)
    step = pfeife.compile(loss_fn, microbatches=MICROBATCHES, schedule=schedule)
    loss = step(tokens, targets)
    alone = sum(
        loss_fn(*part) / MICROBATCHES
        for part in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
    )
    print(f"the same loss: {torch.equal(loss, alone)}")

    ours = sched.families.zb_h1(STAGES, MICROBATCHES)
    text = ours.to_csv()  # a row a rank: what `schedule._load_csv` of torch takes
    read = [[_Action.from_str(cell) for cell in row.split(",")] for row in text.splitlines()]
    assert read[1][0] == _Action.from_str("1F0")
    print(text, end="")
    print(f"torch reads {sum(map(len, read))} actions of {len(read)} ranks")
    print(f"the same schedule: {pfeife.Schedule.from_csv(text) == ours}")


if __name__ == "__main__":
    main()
