"""A cluster before it is bought: one GPT planned for four machines, two nodes of four each.

python examples/four_machines.py

Nothing is run and nothing allocated: the model is on the meta device, and times are estimates.
"""

import torch
import torch.nn.functional as F
from gpt import GPT

import pfeife
from pfeife import report
from pfeife.forecasting import flat_program

MACHINES = {  # what joins the ranks of a node
    "a100-sxm-80gb": "nvlink3",
    "h100-sxm": "nvlink4",
    "b200-hgx": "nvlink5",
    "rtx-4090": "pcie4",
}
CONTEXT, ROWS, RANKS, MICROBATCHES = 1024, 4, 8, 16


def main() -> None:
    with torch.device("meta"):
        model = GPT(CONTEXT, width=1024, depth=8)
        tokens, targets = torch.zeros(2, ROWS, CONTEXT, dtype=torch.int64)

    def loss_fn(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    program = flat_program(loss_fn, tokens, targets)  # captured once, for all questions
    rows = []
    for name, inside in MACHINES.items():
        network = pfeife.Network.of(
            nodes=2, ranks_per_node=RANKS // 2, inside=inside, between="ib-ndr"
        )
        found = pfeife.forecast(
            program,
            machine=name,
            ranks=RANKS,
            microbatches=MICROBATCHES,
            network=network,
            optimizer="adamw",
        ).forecast
        rows.append((found.step_seconds, name, found))
    best = min(rows)[1]
    shown = [
        (name, f"{seconds:.3f} s", f"{found.utilization:.1%}", found.waits[0].what,
         "best" if name == best else "")
        for seconds, name, found in sorted(rows, key=lambda row: row[0])
    ]  # fmt: skip
    print(report.table(shown, ("machine", "step", "MFU", "limited by", "")))
    print(f"the fastest of {len(rows)} machines is {best}")


if __name__ == "__main__":
    main()
