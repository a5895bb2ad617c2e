"""One checkpoint, and training that goes on from it: on other ranks, by other schedules, plainly.

    python benchmarks/resharding.py

Four ranks train a GPT for 6 steps and save. From there 2 ranks, 3 with another schedule, 2
pipelines of 2, one process and plain torch each train 6 more, and 2 ranks go on from what plain
torch has saved in between. Printed: how far each curve, and the parameters and the optimizer's
state at its end, are from those of plain torch without any of this.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import pfeife

sys.path.append(str(Path(__file__).parent.parent / "examples"))

MICROBATCHES, SAVED, STEPS, WIDTH = 4, 6, 12, 64
REST = SAVED, STEPS
Curve = list[float]


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[..., torch.Tensor]]:
    from gpt import GPT

    torch.manual_seed(0)
    model = GPT(context=16, words=64, width=WIDTH, depth=6)
    weights, others = ([p for p in model.parameters() if (p.dim() > 1) == w] for w in (True, False))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]

    def loss_fn(rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return model, torch.optim.AdamW(groups, lr=3e-3), loss_fn


def batch(index: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(index)
    return torch.cumsum(torch.randint(1, 4, (16, 17), generator=noise), 1) % 64


def train(
    step: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, first: int, last: int
) -> Curve:
    losses = []
    for index in range(first, last):
        losses.append(step(batch(index)))
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def on_ranks(given: argparse.Namespace) -> None:
    """One rank, or the only process. Rank 0 says what there was in a line of JSON."""
    model, optimizer, loss_fn = made()
    compiled = pfeife.compile(
        loss_fn, microbatches=MICROBATCHES, progress=False, **json.loads(given.options)
    )

    def step(rows: torch.Tensor) -> torch.Tensor:
        loss = compiled(rows)
        loss.backward()
        return loss

    checkpoints = pfeife.Checkpoints(given.folder, model, optimizer)
    first = SAVED if given.load and checkpoints.load(given.load) in (0, SAVED) else 0
    losses = train(step, optimizer, first, given.until)
    if given.until == SAVED:
        checkpoints.save(SAVED)
    state, states = pfeife.full_state_dict(model), optimizer.state_dict()
    if os.environ.get("RANK", "0") == "0":
        torch.save({"model": state, "optim": states["state"], "losses": losses}, given.result)


class Plain:
    """Training on one device with accumulation over the same microbatches, as so many `pipelines`
    add up."""

    def __init__(self, pipelines: int = 1) -> None:
        self.model, self.optimizer, self.loss_fn = made()
        self.pipelines = pipelines

    def step(self, rows: torch.Tensor) -> torch.Tensor:
        parts = [self.part(part) for part in rows.chunk(self.pipelines)]
        for parameter, *each in zip(
            self.model.parameters(), *(one for _, one in parts), strict=True
        ):
            parameter.grad = sum(each) / self.pipelines
        return sum(loss for loss, _ in parts) / self.pipelines

    def part(self, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What a pipeline makes of its rows: its loss and gradients."""
        self.optimizer.zero_grad()
        count, total = MICROBATCHES // self.pipelines, torch.zeros(())
        for part in rows.chunk(count):
            loss = self.loss_fn(part) / count
            loss.backward()
            total += loss.detach()
        return total, [parameter.grad for parameter in self.model.parameters()]

    def train(self, first: int, last: int) -> Curve:
        return train(self.step, self.optimizer, first, last)

    def load(self, path: Path) -> None:
        """As torch's documentation says."""
        state, states = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": state, "optim": states}, checkpoint_id=path, no_dist=True)
        set_state_dict(self.model, self.optimizer, model_state_dict=state, optim_state_dict=states)

    def save(self, path: Path) -> None:
        state, states = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": state, "optim": states}, checkpoint_id=path, no_dist=True)

    def result(self, losses: Curve) -> dict[str, Any]:
        states = copy.deepcopy(self.optimizer.state_dict()["state"])
        return {"model": self.model.state_dict(), "optim": states, "losses": losses}


def launched(folder: Path, ranks: int, until: int, load: str, **options: Any) -> dict[str, Any]:
    """What ranks have at the end."""
    result = folder / "result.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*command, "--nproc-per-node", str(ranks)] if ranks > 1 else [sys.executable]
    command += [__file__, "--folder", str(folder / "ranks"), "--result", str(result)]
    command += ["--until", str(until), "--load", load, "--options", json.dumps(options)]
    command += ["--double"] * (torch.get_default_dtype() == torch.float64)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return torch.load(result, weights_only=True)


def compare(name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    count = len(found["losses"])
    curve = [abs(a - b) for a, b in zip(found["losses"], expected["losses"][-count:], strict=True)]
    pairs = [(found["model"][key], expected["model"][key]) for key in expected["model"]]
    states = [
        (found["optim"][index][key], one)
        for index, state in expected["optim"].items()
        for key, one in state.items()
    ]
    worst = [max((a - b).abs().max().item() for a, b in these) for these in (pairs, states)]
    same = all(torch.equal(a, b) for a, b in (*pairs, *states)) and not any(curve)
    said = "the same bits" if same else f"{max(curve):.1e} {worst[0]:.1e} {worst[1]:.1e}"
    print(f"{name:58} {said}", flush=True)


def two_pipelines(folder: Path, saved: Path, expected: dict[str, Any]) -> None:
    """Goes on with two pipelines, and says what becomes of their other sums."""
    name, load = "from there: 2 pipelines of 2 ranks", str(saved)
    found = launched(folder, 4, STEPS, load, mesh="-2,2")
    compare(name, found, expected)
    halves = Plain(pipelines=2)
    halves.load(saved)
    compare("  beside plain torch that adds up halves", found, halves.result(halves.train(*REST)))
    print(f"  {where(found, expected)}")
    torch.set_default_dtype(torch.float64)
    plain = Plain()
    curve = plain.train(0, SAVED)
    plain.save(folder / "double")
    expected = plain.result(curve + plain.train(*REST))
    found = launched(folder, 4, STEPS, str(folder / "double"), mesh="-2,2")
    compare("  the same in float64, from what plain torch has saved", found, expected)
    torch.set_default_dtype(torch.float32)


def where(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """Which parameters differ most, and why."""
    apart = {n: (one - expected["model"][n]).abs() for n, one in found["model"].items()}
    worst = max(apart, key=lambda name: float(apart[name].max()))
    element = int(apart[worst].argmax())
    keys = slice(WIDTH, 2 * WIDTH)  # of the biases of queries, keys and values
    moments = [state["exp_avg_sq"] for state in found["optim"].values()]
    noise = max(float(one[keys].max()) for one in moments if one.shape == (3 * WIDTH,)) ** 0.5
    for name, one in apart.items():
        if name.endswith("qkv.bias"):
            one[keys] = 0
    rest = max(float(one.max()) for one in apart.values())
    return (
        f"The worst is element {element} of {worst}; elements {keys.start} to {keys.stop - 1} are "
        "biases of keys, which add\n  the same to all scores of a query: softmax takes them out, "
        "and what is left of their gradients is rounding (of\n  the size of the root of their "
        f"second moments, at most {noise:.0e}). AdamW divides it by itself and 1e-8, and so\n  "
        f"makes steps of it. All other parameters differ by at most {rest:.1e}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder")
    parser.add_argument("--result")
    parser.add_argument("--load", default="")
    parser.add_argument("--until", type=int)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--double", action="store_true")
    given = parser.parse_args()
    torch.set_default_dtype(torch.float64 if given.double else torch.float32)
    torch.set_num_threads(1)
    if given.folder:
        on_ranks(given)
        return
    folder = Path(tempfile.mkdtemp())
    plain = Plain()
    curve = plain.train(0, SAVED)
    half = plain.result(curve)
    half["model"] = {name: one.clone() for name, one in half["model"].items()}
    plain.save(folder / "plain")
    expected = plain.result(curve + plain.train(*REST))
    print(f"{'':58} largest difference of losses, parameters, state")
    compare("4 ranks, 1f1b, to step 6", launched(folder, 4, SAVED, "", schedule="1f1b"), half)
    saved = str(folder / "ranks" / f"step-{SAVED:08}")
    for name, ranks, load, options in [
        ("2 ranks, gpipe", 2, saved, {"schedule": "gpipe"}),
        ("3 ranks, 6 stages, interleaved", 3, saved, {"schedule": "interleaved", "stages": 6}),
        ("3 ranks, zb-h1", 3, saved, {"schedule": "zb-h1"}),
        ("1 process, 4 stages", 1, saved, {"stages": 4}),
        ("2 ranks, from what plain torch has saved", 2, str(folder / "plain"), {}),
    ]:
        compare(f"from there: {name}", launched(folder, ranks, STEPS, load, **options), expected)
    again = Plain()
    again.load(Path(saved))
    compare("from there: plain torch", again.result(again.train(*REST)), expected)
    two_pipelines(folder, Path(saved), expected)


if __name__ == "__main__":
    main()
