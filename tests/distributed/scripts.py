"""Some of what people write in training loops, beside one device: `benchmarks/loop_table.py` has
all of it, in all cells."""

import functools
import os

import torch.distributed as dist
from beside import Cell, judged
from rows import Row, add
from scripts import SCRIPTS

SHARE = {  # on two ranks that have a stage each
    "a_moving_average": "right",
    "gradients_centred_and_clipped_by_rows": "right",
    "one_vector_of_parameters": "refused",
    "parameters_assigned": "right",
    "an_optimizer_with_a_norm_of_all": "refused",
}
MORE = {"a_copy_of_the_model": "right", "gradient_noise": "right", "low_rank_adapters": "right"}
MORE |= {"another_dtype": "right", "a_wider_head": "right", "a_target_that_follows": "right"}


def beside_one_device(name: str, kind: str, cell: Cell) -> None:
    found = judged(SCRIPTS[name], cell, int(os.environ["RANK"]), steps=15)
    assert found.kind == kind, found.text
    dist.barrier()  # no script is ahead


for _name, _kind in (SHARE | MORE).items():
    _check = functools.partial(beside_one_device, _name, _kind, Cell(2, "1f1b", 1))
    add(globals(), Row(_name, _check, ranks=(2,), whole=() if _name in SHARE else (2,)))
# Each replica loads the statistics of its own.
_check = functools.partial(
    beside_one_device, "saved_and_loaded_by_all", "right", Cell(4, "1f1b", 2)
)
add(globals(), Row("loaded by replicas", _check, ranks=(4,)))
