"""A training step in, a `Program` out: Dynamo finds the graph, AOTAutograd the gradients."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.frontend.arguments import Given, Inputs, describe
from pfeife.frontend.batch import Cutter
from pfeife.frontend.captured import Captured
from pfeife.frontend.dynamo import copied, dynamo_forward, dynamo_graph
from pfeife.frontend.forward import Forward
from pfeife.frontend.joint import trace
from pfeife.frontend.reductions import Larger, LossReduction, derive_reductions
from pfeife.frontend.results import Loss
from pfeife.ir.program import Port, Program

log = logging.getLogger("pfeife")


def capture(
    step: Callable[..., Any],
    *example_microbatch: Any,
    loss: Loss = None,
    loss_reduction: LossReduction = "auto",
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Program:
    """The flat joint graph of a training step on one microbatch.

    `step` is a module or any callable that closes over modules; it returns a scalar loss or a
    pytree with the loss in it (`loss` says which of its tensors, where several could be it, or
    "outside" if none is). `loss_reduction` says how the losses of microbatches combine, see
    `frontend.reductions`.
    Without a differentiable scalar every differentiable output gets a tangent port; under
    `torch.no_grad()` the program has no gradients. Tensors may be fake, or live on the meta
    device, which is captured as `device`: nothing is run or allocated. Raises ValueError when
    no single graph can be captured.

    >>> net = torch.nn.Linear(4, 1)
    >>> flat = pfeife.capture(lambda x: net(x).mean(), torch.ones(2, 4))
    >>> print(flat.inputs[0], "and", [port.name for port in flat.inputs[1:]])
    weight: parameter weight float32 1x4 cpu and ['bias', 'x', 'tangent_loss']
    >>> [port.name for port in flat.outputs]
    ['loss', 'grad_weight', 'grad_bias']
    """
    call = Cutter(step, None, 1)(example_microbatch, kwargs)
    target = torch.device(device)

    def flat(values: Sequence[torch.Tensor], gradients: bool = True) -> Captured:
        given = {
            id(one): Given(leaf.name, i)
            for i, (leaf, one) in enumerate(zip(call.leaves, values, strict=True))
        }

        def read(module: fx.GraphModule, examples: list[Any]) -> tuple[Forward, Inputs]:
            moved = copied(module, target)
            return dynamo_forward(moved), describe(moved, examples, target, given)

        args, named = call.made(values)
        return trace(*dynamo_graph(step, args, named, read), loss, gradients=gradients)

    def larger(gradients: bool) -> Program:
        values = [leaf.first for leaf in call.leaves]
        twice = [torch.cat([one, one]) if one.dim() else one for one in values]
        return flat(twice, gradients).program

    captured = with_reductions(flat([leaf.first for leaf in call.leaves]), loss_reduction, larger)
    if captured.warning():
        log.warning(captured.warning())
    return captured.program


def with_reductions(
    captured: Captured,
    loss_reduction: LossReduction,
    larger: Larger | None = None,
) -> Captured:
    """A captured program that says how the microbatches of its results are put together; see
    `derive_reductions`."""
    program, unknown = derive_reductions(captured.program, loss_reduction, larger)
    last = set(captured.carried.values())
    outputs = tuple(as_last(port) if port.name in last else port for port in program.outputs)
    return attrs.evolve(
        captured,
        program=attrs.evolve(program, outputs=outputs),
        unknown={name: why for name, why in unknown.items() if name not in last},
    )


def as_last(port: Port) -> Port:
    """A result of which the last microbatch's value is that of the batch."""
    return attrs.evolve(port, reduction="last", counts=(), batch_dim=None)
