"""How many of other people's models are cut over the members of a group with one device's numbers.

    python benchmarks/sharded_models.py                        all models, half an hour
    python benchmarks/sharded_models.py --only 'gpt2|unet' --members 4 --json out.json

Needs what `coverage.py` needs. Each model's step is captured, `shard` cuts its parameters (every
matrix that can be) and all else, and `evaluate` runs all members in lockstep, beside the program
that was captured: in float64 where the model has no float32 of its own. Compared are
the loss, gradients and buffers of two microbatches. A model is right within rounding (1e-7 of the
value's size, of chains of batch norms over two rows, 1e-4 in float32; what is a thousandth of the
largest of its kind is as exact as that). What `capture` refuses is not counted, nor a step whose
state is found neither in its model nor in what it closes over.
"""

import argparse
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import coverage_models
import torch
from coverage import every, prepare
from coverage_case import ROUNDING, SMALL, built, cut, drawn, in_dtype, seed, text
from coverage_models.example import Example
from differences import largest_of
from torch import nn
from tqdm import tqdm

import pfeife
from pfeife.cost import machine
from pfeife.cost.estimate import member_prices
from pfeife.ir.evaluate import Result, State
from pfeife.ir.members import MEANING
from pfeife.ir.parts import STATE_ROLES


def examined(family: str, name: str, out: Path, members: int) -> None:
    """Writes what becomes of a model."""
    row: dict[str, Any] = {"family": family, "name": name, "verdict": "failed", "cause": ""}
    try:
        row |= {"phase": "capture", "verdict": "uncaptured"}
        build = coverage_models.models(family)[name]
        try:
            flat, state, microbatches, expected = _whole(build, torch.float64)
        except Exception:
            flat, state, microbatches, expected = _whole(build, torch.float32)
        row |= {"phase": "shard", "verdict": "refused"}
        prices = member_prices(machine("cpu-core"))
        local = pfeife.shard("cut", members, unknown="gather", prices=prices)(flat)
        parameters = local.ports(pfeife.Role.PARAMETER)
        row |= {"phase": "run", "verdict": "failed", "parameters": len(parameters)}
        row["cut"] = sum(port.split is not None for port in parameters)
        nodes = local.module.graph.nodes
        row["told"] = Counter(n.target.__name__ for n in nodes if n.target in MEANING)
        computed = pfeife.evaluate(local, state, microbatches, seed=7)
        error, worst = difference(_values(expected), _values(computed))
        dtypes = {node.meta["val"].dtype for node in nodes if _is_tensor(node.meta.get("val"))}
        exact = not dtypes & {torch.float32, torch.bfloat16, torch.float16}
        wrong = not error <= (1e-7 if exact else ROUNDING)
        row |= {"error": error, "exact": exact, "verdict": "WRONG" if wrong else "right"}
        row["cause"] = worst if wrong else ""
    except Exception as problem:
        row["cause"] = text(problem)
    out.write_text(json.dumps(row))


def _whole(
    build: Callable[[], Example], dtype: torch.dtype
) -> tuple[pfeife.Program, State, list[tuple[Any, ...]], Result]:
    """An example's program in a dtype, its state, two microbatches, and what it makes of them."""

    example = built(build)
    example.model.to(dtype)
    microbatches = cut(example, in_dtype(drawn(example, 0), dtype))[:2]
    seed(7)
    flat = pfeife.capture(example.step, *microbatches[0])
    state = _state(flat, example)
    return flat, state, microbatches, pfeife.evaluate(flat, state, microbatches, seed=7)


def _state(flat: pfeife.Program, example: Example) -> State:
    """The state of a program, by the names of the model or of what the step closes over."""
    try:
        return pfeife.state_of(flat, example.model)
    except ValueError as error:
        variables = inspect.getclosurevars(example.step)
        scope = {**variables.globals, **variables.nonlocals}
        ports = flat.ports(*STATE_ROLES)
        state = {port.fqn: _reached(scope, port.fqn.split(".")) for port in ports}
        if not all(map(_is_tensor, state.values())):
            raise error
        return {name: value.detach() for name, value in state.items()}


def _reached(value: Any, path: Sequence[str]) -> Any:
    """What is found at a path of attributes, keys and numbers, None if nothing is."""
    for name in path:
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list | tuple | nn.ModuleList | nn.Sequential) and name.isdigit():
            value = value[int(name)]
        else:
            value = getattr(value, name, None)
    return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def difference(
    expected: dict[str, torch.Tensor], computed: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest difference by the size of its value, and where it is."""
    sizes = {name: _largest(value) for name, value in expected.items()}
    by_kind: dict[str, float] = {}
    for name, size in sizes.items():
        kind = name.split()[0]
        by_kind[kind] = max(by_kind.get(kind, 0.0), size)
    errors = {}
    for name, value in expected.items():
        size = max(sizes[name], SMALL * by_kind[name.split()[0]])
        gap = _largest(value - computed[name]) if value.dtype != torch.bool else 0.0
        errors[name] = gap / size if size else gap
    return largest_of(errors)


def _largest(value: torch.Tensor) -> float:
    return float(value.abs().max()) if value.numel() and value.dtype != torch.bool else 0.0


def _values(result: Result) -> dict[str, torch.Tensor]:
    gradients = {f"grad {name}": value for name, value in result.gradients.items()}
    buffers = {f"buffer {name}": value for name, value in result.buffers.items()}
    values = {"loss": result.loss, **gradients, **buffers}
    return {name: v.to_dense() if v.is_sparse else v for name, v in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression for family/name")
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=200.0, help="that a model may take")
    parser.add_argument("--json", type=Path, help="where the rows go")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no threads beside this one, which forks
    todo = [one for one in coverage_models.names() if re.search(asked.only, "/".join(one))]
    prepare(list(dict.fromkeys(family for family, _ in todo)))
    rows = []
    work = partial(examined, members=asked.members)
    for row in tqdm(every(todo, asked.jobs, asked.seconds, work), total=len(todo), disable=None):
        rows.append(row)
        if asked.json:
            asked.json.write_text(json.dumps(rows, indent=1))
        if row["verdict"] != "right":
            tqdm.write(f"{row['family']}/{row['name']}: {row['verdict']}: {row['cause'][:200]}")
    verdicts = Counter(row["verdict"] for row in rows)
    of = len(rows) - verdicts["uncaptured"]
    print(f"{verdicts['right']} of {of} right, {dict(verdicts)}")
    sys.exit(verdicts["WRONG"] > 0)


if __name__ == "__main__":
    main()
