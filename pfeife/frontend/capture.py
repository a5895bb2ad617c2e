"""A training step in, a `Program` out: Dynamo or a trace finds its forward, AOTAutograd the
gradients."""

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.data.progress import Progress
from pfeife.frontend.aot.joint import trace
from pfeife.frontend.arguments import Given, Inputs
from pfeife.frontend.batch import Arguments, Cutter
from pfeife.frontend.cache.capture_cache import Folder
from pfeife.frontend.captured import Captured, Door, neither, taken
from pfeife.frontend.deferred.tensors import deferred_tensors, prepare
from pfeife.frontend.describe import describe
from pfeife.frontend.dynamo import copied, dynamo_forward, dynamo_graph
from pfeife.frontend.forward import Forward
from pfeife.frontend.results import Loss
from pfeife.frontend.rows.by_running import Sample
from pfeife.frontend.rows.reductions import Larger, LossReduction, derive_reductions
from pfeife.frontend.trace.tracing import traced
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program

log = logging.getLogger("pfeife")


@_torch.one_at_a_time
def capture(
    step: Callable[..., Any],
    *example_microbatch: Any,
    loss: Loss = None,
    loss_reduction: LossReduction = "auto",
    device: torch.device | str = "cpu",
    door: Door | Literal["auto"] = "auto",
    progress: Progress | None = None,
    cache: Folder = None,
    **kwargs: Any,
) -> Program:
    """The flat joint graph of a training step on one microbatch.

    `step` is a module or any callable that closes over modules; it returns a scalar loss or a
    pytree with the loss in it (`loss` says which of its tensors, where several could be it, or
    "outside" if none is). `loss_reduction` says how the losses of microbatches combine, see
    `frontend.rows.reductions`.
    Without a differentiable scalar every differentiable output gets a tangent port; under
    `torch.no_grad()` the program has no gradients. Tensors may be fake, or live on the meta
    device, which is captured as `device`, and models may be made in `deferred_init`: nothing is run
    or allocated.

    `door` says how: by Dynamo ("dynamo"), traced as it runs ("trace"), or so where Dynamo finds no
    single graph ("auto"). Who evaluates what was traced must know that it holds for what the trace
    has assumed (the log says it at DEBUG); where the step asks for values of tensors, each answer
    has a last result that counts the microbatches in which it is another. `progress` is called with
    how many of how many parts of the work are done. Raises ValueError when no single graph can be
    captured.

    >>> net = torch.nn.Linear(4, 1)
    >>> flat = pfeife.capture(lambda x: net(x).mean(), torch.ones(2, 4))
    >>> print(flat.inputs[0], "and", [port.name for port in flat.inputs[1:]])
    weight: parameter weight float32 1x4 cpu and ['bias', 'x', 'tangent_loss']
    >>> [port.name for port in flat.outputs]
    ['loss', 'grad_weight', 'grad_bias']
    """
    if door not in ("auto", "dynamo", "trace"):
        raise ValueError(f'door={door!r}: must be "auto", "dynamo" or "trace"')
    report = progress or (lambda done, total: None)
    report(0, 3)
    cutter = Cutter(step, None, 1)
    steps = _Doors(step, cutter(example_microbatch, kwargs), torch.device(device))
    # Before any door: Dynamo reads the values of tensors without dimensions.
    prepare(deferred_tensors(step, steps.call.others))
    through, refused, forward_and_inputs = steps.first(door)
    log.info("%s", taken(cutter.name, through, refused))
    report(1, 3)
    flat = trace(*forward_and_inputs, loss, cache=cache)
    report(2, 3)
    reduced = with_reductions(flat, loss_reduction, steps.larger(through, loss, cache))
    captured = with_flags(reduced, forward_and_inputs[1].flags)
    report(3, 3)
    if captured.warning():
        log.warning(captured.warning())
    return captured.program


@attrs.frozen(eq=False)
class _Doors:
    """A step that is called with what a call has for its first microbatch."""

    step: Callable[..., Any]
    call: Arguments
    device: torch.device

    def first(
        self, door: Door | Literal["auto"]
    ) -> tuple[Door, Exception | None, tuple[Forward, Inputs]]:
        """The door that is asked for, or the first that takes the step; what Dynamo has refused;
        and what was found."""
        if door != "auto":
            return door, None, self.by(door)
        try:
            return "dynamo", None, self.by("dynamo")
        except Exception as error:  # of whatever kind: a trace, which runs the step, may take it
            refused = error
        try:
            return "trace", refused, self.by("trace")
        except Exception as error:
            raise neither(refused, error) from error

    def larger(self, door: Door, loss: Loss, cache: Folder) -> Larger:
        """Gives the program for so many times as many rows, with or without gradients."""
        # The rules of one row and of two ask for the same ones.
        grown = functools.cache(lambda times: self.by(door, times=times))
        return functools.cache(
            lambda gradients, times: (
                trace(*grown(times), loss, gradients=gradients, cache=cache).program
            )
        )

    def by(self, door: Door, times: int = 1) -> tuple[Forward, Inputs]:
        """The step's forward and its inputs, for so many times as many rows."""
        # Without in_dims the batch is in front.
        firsts = (leaf.first for leaf in self.call.leaves)
        values = [
            torch.cat([tensor] * times) if tensor.dim() and times > 1 else tensor
            for tensor in firsts
        ]
        args, kwargs = self.call.made(values)
        pairs = list(zip(self.call.leaves, values, strict=True))
        if door == "trace":
            leaves = tuple(attrs.evolve(leaf, first=tensor) for leaf, tensor in pairs)
            call = attrs.evolve(self.call, leaves=leaves, args=args, kwargs=kwargs)
            traced_step = traced(self.step, call, self.device)
            arguments = [
                attrs.evolve(a, role=Role.BATCH) if a.given else a
                for a in traced_step.inputs.arguments
            ]
            return traced_step.forward, attrs.evolve(traced_step.inputs, arguments=arguments)
        caller_tensors = {
            id(tensor): Given(leaf.name, at) for at, (leaf, tensor) in enumerate(pairs)
        }

        def read(module: fx.GraphModule, examples: list[Any]) -> tuple[Forward, Inputs]:
            moved = copied(module, self.device)
            return dynamo_forward(moved), describe(moved, examples, self.device, caller_tensors)

        return dynamo_graph(self.step, args, kwargs, read)


def with_flags(captured: Captured, flags: Collection[int]) -> Captured:
    """The same where flags, results by their indices, are added up over microbatches."""
    # Each is 1 in a microbatch where the trace would be wrong: the sum counts these microbatches.
    names = tuple(captured.results[index] for index in flags)
    outputs = captured.program.outputs
    ports = [reduced_as(port, "sum") if port.name in names else port for port in outputs]
    program = attrs.evolve(captured.program, outputs=tuple(ports))
    unknown = {name: why for name, why in captured.unknown.items() if name not in names}
    return attrs.evolve(captured, program=program, unknown=unknown, flags=names)


def with_reductions(
    captured: Captured,
    loss_reduction: LossReduction,
    larger: Larger | None = None,
    args: Sequence[Any] | None = None,
    fixed: Callable[[], Program] | None = None,
) -> Captured:
    """A captured program that says how the microbatches of its results are put together; see
    `derive_reductions`. `args` are those of a call with two microbatches or more."""
    # Only where it is asked for: it takes two microbatches out of the call's tensors.
    sample = None if args is None else functools.partial(_sample, captured, args)
    program, unknown, mixed = derive_reductions(
        captured.program, loss_reduction, larger, sample, fixed
    )
    # What the step keeps for its next microbatch is, after a call, what the last one has left.
    last = set(captured.carried.values())
    outputs = [reduced_as(p, "last") if p.name in last else p for p in program.outputs]
    return attrs.evolve(
        captured,
        program=attrs.evolve(program, outputs=tuple(outputs)),
        unknown={name: why for name, why in unknown.items() if name not in last},
        mixed={name: why for name, why in mixed.items() if name not in last},
    )


def _sample(captured: Captured, args: Sequence[Any]) -> Sample:
    """Two microbatches of a call."""
    return Sample(*(captured.slots(captured.part(args, index)) for index in (0, 1)))


def reduced_as(port: Port, how: Any) -> Port:
    """A result whose microbatches are put together so: "last" has the value of the last one."""
    return attrs.evolve(port, reduction=how, counts=(), batch_dim=None)
