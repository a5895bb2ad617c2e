"""Torch's scripts of models that are parallelised already, on four ranks, beside one device.

    python benchmarks/parallel_scripts.py FOLDER
    python benchmarks/parallel_scripts.py FOLDER --only fsdp_tp --steps 3 --seed 0 --seed 1

FOLDER is a checkout of pytorch/examples, which is no part of this repository. Each script is
changed by what is printed above the table, and nothing else that concerns the training: it keeps
its `parallelize_module` and `fully_shard`, its optimizer and its loop. On CPUs it runs in float64,
also where its model turns to float32 (whose rounding would be that of another number now and then).
Rank 0 trains a copy of the model on all ranks' rows by itself, from the state that torch gathers
of what is parallelised, and another one whose matrix products are added up in two halves, as two
members would: so far apart are two trainings on one device that round otherwise. `gradient` is
that of the element where these two part most, by the median of its tensor: a first step of Adam is
lr g / (|g| + eps), which changes by lr / eps times a change of a gradient g below eps.

Shown are the largest relative differences of losses, and of parameters by the largest of their
tensor, with the name of that one. --seed says what is drawn; several seeds are several rows. Exits
non-zero if parameters differ by more than LIMIT.
"""

import argparse
import copy
import difflib
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import harness
import torch
import torch.distributed as dist
from differences import largest, largest_of
from scripts import replaced
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer

import pfeife
from pfeife import report
from pfeife._torch import TorchDispatchMode

RANKS, MICROBATCHES, LIMIT, SECONDS = 4, 4, 1e-12, 3600.0
COLUMNS = ("losses", "parameters", "rounding", "gradient")
ROOT = Path(__file__).parent.parent


class Halves(TorchDispatchMode):
    """Adds up matrix products in two halves of what they sum over."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if op not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            return op(*args, **(kwargs or {}))
        left, right = args
        first = left.shape[-1] // 2
        rest = left.shape[-1] - first
        return op(left.narrow(-1, 0, first), right.narrow(-2, 0, first)) + op(
            left.narrow(-1, first, rest), right.narrow(-2, first, rest)
        )


class OneDevice:
    """A copy of a script's model that rank 0 trains by itself.

    Args:
        model: the model before it is parallelised, also on "meta".
        optimizer: makes the optimizer of a model.
        members: how many ranks after one another have the same rows.
        clip: the largest norm of the gradients, and that they are set to zero after a step; None
            if a script does neither.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer],
        members: int = RANKS,
        clip: float | None = None,
    ) -> None:
        self.models = [copy.deepcopy(model), copy.deepcopy(model)]
        if any(parameter.is_meta for parameter in model.parameters()):
            self.models = [each.to_empty(device="cpu") for each in self.models]
        self.make, self.members, self.clip = optimizer, members, clip
        self.differences: list[float] = []
        self.rounding, self.gradient = 0.0, math.nan

    def begin(self, parallelised: nn.Module) -> None:
        """Takes the state of the parallelised model."""
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(parallelised, options=whole)
        if not dist.get_rank():
            for each in self.models:
                each.load_state_dict(state)
            self.optimizers = [*map(self.make, self.models)]

    def step(self, rows: torch.Tensor, loss: torch.Tensor) -> None:
        """Trains on all ranks' rows, and compares the loss."""
        batches: list = [None] * RANKS
        dist.all_gather_object(batches, rows)
        if dist.get_rank():
            return
        different = batches[:: self.members]
        each = MICROBATCHES // len(different)
        microbatches = [part for batch in different for part in batch.chunk(each)]
        total, gradients = self._trained(0, microbatches)
        with Halves():
            self._trained(1, microbatches)
        self._measure_rounding(gradients)
        self.differences.append(abs(total - float(loss.detach())) / abs(total))

    def _measure_rounding(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """How far the copies are apart, and the gradient there if they were nearer before."""
        one, other = (
            {name: p.detach() for name, p in each.named_parameters()} for each in self.models
        )
        apart, name = _apart(one, other)
        if apart <= self.rounding:
            return
        at = (one[name] - other[name]).abs().argmax()
        sizes = gradients[name].abs()
        self.rounding = apart
        self.gradient = float(sizes.flatten()[at] / sizes[sizes != 0].median())

    def _trained(
        self, at: int, microbatches: Sequence[torch.Tensor]
    ) -> tuple[float, Mapping[str, torch.Tensor]]:
        """Trains a copy, of which it returns the loss and the gradients."""
        model, optimizer, total = self.models[at], self.optimizers[at], 0.0
        for microbatch in microbatches:
            part = model(microbatch).sum()
            part.backward()
            total += float(part.detach())
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        if self.clip is not None:
            optimizer.zero_grad()
        return total, gradients

    def end(self, parallelised: nn.Module, out: str) -> None:
        """Compares the state, and writes what was found."""
        state = pfeife.full_state_dict(parallelised)
        if dist.get_rank():
            return
        apart, where = _apart(self.models[0].state_dict(), state)
        row = {
            "steps": len(self.differences),
            "losses": largest(self.differences),
            "parameters": apart,
            "rounding": self.rounding,
            "gradient": self.gradient,
            "where": where,
        }
        Path(out).write_text(json.dumps(row))


def _apart(
    expected: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """How far parameters are from others, by the largest of their tensor, and which one most."""
    sizes = {name: value.abs().max() for name, value in expected.items()}
    gaps = {
        name: float((state[name] - v).abs().max() / sizes[name]) for name, v in expected.items()
    }
    return largest_of(gaps)


Changes = Mapping[str, str]  # what stands there: what stands there instead


@attrs.frozen
class Example:
    """A script, and what is changed: what Pfeife needs in it, and what runs it on CPUs and beside
    one device ({out} is where the comparison goes)."""

    name: str
    file: str
    needs: Changes
    beside: Changes
    steps: str
    arguments: Sequence[str] = ()


STEP = "step = pfeife.compile(lambda inp: {}(inp).sum(), microbatches=4, loss_reduction='sum')\n"
BESIDE = (
    "from parallel_scripts import OneDevice\n"
    "torch.set_default_dtype(torch.float64)\n"
    "torch.manual_seed({seed})\n"
)  # fmt: skip
DEVICE = {"torch.accelerator.current_accelerator().type": "'cpu'"}
ALL_GPUS = {"if not verify_min_gpu_count(min_gpus=_min_gpu_count):": "if False:"}


def toy(kind: str, model: str, before: str, needs: Changes) -> Example:
    """Two layers on four members, the first cut by its columns and the second by its rows."""
    return Example(
        kind,
        f"distributed/tensor_parallelism/{kind}_example.py",
        {
            "import torch\n": "import torch\nimport pfeife\n",
            "optimizer = torch.optim": STEP.format(model) + "optimizer = torch.optim",
            f"    output = {model}(inp)\n    output.sum()": "    loss = step(inp)\n    loss",
            **needs,
        },
        DEVICE
        | ALL_GPUS
        | {
            "import torch.nn as nn\n": "import torch.nn as nn\n" + BESIDE,
            "# Custom parallelization plan": "plain = OneDevice(\n"
            f"    {before}, lambda m: torch.optim.AdamW(m.parameters(), lr=0.25, foreach=True)\n)\n"
            "# Custom parallelization plan",
            "lr = 0.25\n": f"lr = 0.25\nplain.begin({model})\n",
            "    optimizer.step()\n": "    optimizer.step()\n    plain.step(inp, loss)\n",
            "if dist.is_initialized():": f"plain.end({model}, {{out!r}})\n"
            "if dist.is_initialized():",
        },
        "num_iters = 10",
    )


EXAMPLES = (
    toy("tensor_parallel", "tp_model", "tp_model", {}),
    # Pfeife wants the whole batch on all members of a group, and cuts it itself.
    toy(
        "sequence_parallel",
        "sp_model",
        "model",
        {"    inp = torch.rand": "    torch.manual_seed(i)\n    inp = torch.rand"},
    ),
    Example(
        "fsdp_tp",
        "distributed/tensor_parallelism/fsdp_tp_example.py",
        {
            "import torch\n": "import torch\nimport pfeife\n",
            "# Create an optimizer": STEP.format("sharded_model") + "# Create an optimizer",
            "    output = sharded_model(inp)\n    output.sum()": "    loss = step(inp)\n    loss",
        },
        DEVICE
        | ALL_GPUS
        | {
            "import torch.nn as nn\n": "import torch.nn as nn\n" + BESIDE,
            "model.init_weights()\n": "model.init_weights()\n"
            "plain = OneDevice(\n    model,\n"
            "    lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, foreach=True),\n"
            "    members=tp_size,\n)\n",
            "lr = 3e-3\n": "lr = 3e-3\nplain.begin(sharded_model)\n",
            "    optimizer.step()\n": "    optimizer.step()\n    plain.step(inp, loss)\n",
            "if dist.is_initialized():": "plain.end(sharded_model, {out!r})\n"
            "if dist.is_initialized():",
        },
        "num_iterations = 10",
    ),
    Example(
        "fully_shard",
        "distributed/FSDP2/example.py",
        {
            "import torch\n": "import torch\nimport pfeife\n",
            "    optim = torch.optim": "    " + STEP.format("model") + "    optim = torch.optim",
            "        loss = model(x).sum()\n": "        loss = step(x)\n",
        },
        ALL_GPUS
        | {
            "torch.manual_seed(0)": "torch.manual_seed({seed})",
            "def verify_min_gpu": BESIDE + "def verify_min_gpu",
            "device_id=device)": "device_id=None)",
            "    fsdp_kwargs = {}\n": "    plain = OneDevice(\n        model,\n"
            "        lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),\n"
            "        members=1,\n        clip=1.0,\n    )\n    fsdp_kwargs = {}\n",
            "    inspect_model(model)\n": "",  # that wants float32
            # Its layers are left as memory was.
            "        model.reset_parameters()\n": "        for module in (model, *model.layers):\n"
            "            module.reset_parameters()\n",
            "    for _ in range(10):": "    plain.begin(model)\n    for _ in range(10):",
            "        optim.zero_grad()\n": "        optim.zero_grad()\n"
            "        plain.step(x, loss)\n",
            "    torch.distributed.destroy": "    plain.end(model, {out!r})\n"
            "    torch.distributed.destroy",
        },
        "range(10)",
        ["--dcp-api"],
    ),
)


def written(
    example: Example, source: Path, folder: Path, steps: int, seed: int
) -> tuple[Path, list[str]]:
    """The script as it runs, in a folder of its own, and the lines that a user changes."""
    shutil.copytree((source / example.file).parent, folder)
    for part in folder.glob("*.py"):
        part.write_text(part.read_text().replace(".float()", ".double()"))
    file = folder / Path(example.file).name
    before = file.read_text()
    after = replaced(before, example.needs)
    out = repr(str(folder / "row.json"))
    beside = {
        old: new.replace("{out!r}", out).replace("{seed}", str(seed))
        for old, new in example.beside.items()
    }
    shorter = {example.steps: example.steps.replace("10", str(steps))}
    file.write_text(replaced(replaced(after, beside), shorter))
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return file, [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told.add_argument("examples", type=Path, help="a checkout of pytorch/examples")
    told.add_argument("--only", action="append", choices=[each.name for each in EXAMPLES])
    told.add_argument("--steps", type=int, default=10)
    told.add_argument("--seed", action="append", type=int, help="of the draws (0)")
    asked = told.parse_args()
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    rows: list[Sequence[str]] = []
    wrong = False
    with tempfile.TemporaryDirectory() as name:
        for example, seed in itertools.product(EXAMPLES, asked.seed or [0]):
            if asked.only and example.name not in asked.only:
                continue
            folder = Path(name, f"{example.name}_{seed}")
            file, changed = written(example, asked.examples, folder, asked.steps, seed)
            print(f"\n{example.file}:\n", *changed, sep="\n    ", flush=True)
            harness.world(str(file), RANKS, example.arguments, SECONDS, folder)
            row = json.loads((folder / "row.json").read_text())
            wrong = wrong or not row["parameters"] <= LIMIT
            figures = [f"{row[name]:.1e}" for name in COLUMNS]
            rows.append((example.name, str(seed), str(row["steps"]), *figures, row["where"]))
    print("\n" + report.table(rows, ("script", "seed", "steps", *COLUMNS, "where")))
    sys.exit(wrong)


if __name__ == "__main__":
    main()
