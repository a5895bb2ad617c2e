"""A pass of one's own: what a forward saves for its backward waits in the host's memory.

Run `python examples/offload.py`: it checks the numbers, and that nothing else is kept. On the CPU
the copies stand for those from and to a GPU.
"""

import sys

import torch
import torch.nn.functional as F
from gpt import GPT

import pfeife

copy = torch.ops.aten._to_copy.default


def offload(program: pfeife.Program) -> pfeife.Program:
    """Values that a stage's forward makes and its backward reads go to the host behind the forward
    and come back before the backward. The forward's stage runs the one copy, the backward's the
    other: between them a rank holds nothing of the value on its device."""
    backwards = {call.node for call in program.calls if call.kind != pfeife.Kind.FORWARD}
    forwards = {call.node for call in program.calls} - backwards

    def change(module):
        graph = module.graph
        for value in list(graph.nodes):
            if not value.args or getattr(value.args[0], "name", None) not in forwards:
                continue
            readers = [user for user in value.users if user.name in backwards]
            if not readers:
                continue
            with graph.inserting_after(value):
                host = graph.call_function(copy, (value,), {"device": torch.device("cpu")})
            host.meta["side"] = "maker"
            for reader in readers:
                with graph.inserting_before(reader):
                    device = value.meta["val"].device
                    back = graph.call_function(copy, (host,), {"device": device})
                back.meta["side"] = "reader"
                reader.replace_input_with(value, back)

    return program.edit(change, of="calls")


def kept(program: pfeife.Program) -> list[str]:
    """What made the values that backwards read of forwards."""
    graph, found = program.graph(), []
    for maker, reader, values in graph.edges(data="values"):
        if graph.nodes[maker]["kind"] == "F" and graph.nodes[reader]["kind"] != "F":
            results = program.body(program.call(pfeife.Kind.FORWARD, graph.nodes[maker]["unit"]))
            outputs = next(reversed(results.graph.nodes)).args[0]
            places = [program.node(value).args[1] for value in values]
            found += [outputs[place].target for place in places]
    return found


def main() -> None:
    torch.manual_seed(0)
    model = GPT(context=16, width=32, depth=2)

    def loss_fn(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    options = {"microbatches": 4, "stages": 2, "passes": {"stages": [offload]}}
    step, plain = pfeife.compile(loss_fn, **options), pfeife.compile(loss_fn, microbatches=4)
    gradients = []
    for one in (step, plain):
        loss = one(*torch.randint(256, (2, 8, 16), generator=torch.Generator().manual_seed(1)))
        loss.backward()
        gradients.append([loss, *(parameter.grad.clone() for parameter in model.parameters())])
        model.zero_grad()
    same = all(map(torch.equal, *gradients))
    stages = next(one for one in step.backend.compiled[0].history if one.maker == "offload")
    copies = [target == copy for target in kept(stages.program)]
    print(f"{sum(copies)} of {len(copies)} values that backwards read of forwards are copies")
    print(f"the same loss and gradients, bit for bit: {same}")
    sys.exit(not (same and copies and all(copies)))


if __name__ == "__main__":
    main()
