"""Pfeife's passes inside another torch.compile backend: AOTAutograd's graphs as programs.

Run `python examples/other_backend.py`: it trains a GPT by it and checks every loss and gradient.
"""

import functools
import sys

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from gpt import GPT
from torch._dynamo.backends.common import aot_autograd

import pfeife

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)


def one_view(program: pfeife.Program) -> pfeife.Program:
    """A view of a view is one view."""

    def once(operation):
        if operation.target in VIEWS and operation.args[0].target in VIEWS:
            return operation.make(aten.view.default, operation.args[0].args[0], operation.args[1])
        return None

    return program.rewrite(once).edit(lambda module: module.graph.eliminate_dead_code())


def with_passes(graph, examples, said):
    """What AOTAutograd calls for its forward and for its backward: both go through the passes."""
    history = pfeife.record(pfeife.from_graph(graph), one_view, pfeife.fuse(), start="aot")
    said += [history]
    program = history[-1].program
    places = range(len(next(reversed(graph.graph.nodes)).args[0]))

    def run(*tensors):
        results = program.module(*tensors)
        return [results.get(f"result_{place}") for place in places]

    return make_boxed_func(run)


def main() -> None:
    torch.manual_seed(0)
    model, said = GPT(context=16, width=32, depth=2), []
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_fn(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    backend = aot_autograd(fw_compiler=functools.partial(with_passes, said=said))
    step, same = torch.compile(loss_fn, backend=backend), 0
    for _ in range(3):
        batch = torch.randint(256, (2, 8, 16))
        expected = torch.autograd.grad(loss_fn(*batch), list(model.parameters()))
        loss = step(*batch)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        same += torch.equal(loss, loss_fn(*batch)) and all(map(torch.equal, gradients, expected))
        optimizer.step()
        optimizer.zero_grad()
    print(*said, sep="\n\n")
    print(f"{same} of 3 losses are the same, with all gradients, bit for bit")
    sys.exit(same != 3)


if __name__ == "__main__":
    main()
