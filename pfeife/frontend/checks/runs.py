"""Runs of a step, and of the program that was captured of it, on the same arguments.

    arguments of a microbatch          by the step itself, by the program
    the same with changed rows         by the step: results must be changed likewise

Both kinds of check compare results by the names of their ports; what is drawn is what is expected
of it (`deterministic`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pfeife import _torch
from pfeife.frontend.captured import Captured
from pfeife.frontend.forward import Forward
from pfeife.frontend.watch.deterministic import Expected, Unseeded, close
from pfeife.frontend.watch.restore import values_kept
from pfeife.frontend.watch.value_guards import fails_elsewhere
from pfeife.ir.nodes import has_effects, source_line
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.ir.sizes import with_sizes

Values = list[Any]
Named = Mapping[str, torch.Tensor]  # by the names of ports
Seen = Callable[[Port, torch.Tensor], torch.Tensor]


class Runs:
    """Runs of a step's forward on parts of a batch, whose `rows` are those of a microbatch; `args`
    are those of a call with the whole batch."""

    def __init__(self, step: Forward, captured: Captured, args: Sequence[Any]):
        self.step, self.captured, self.args = step, captured, args
        self.ports = captured.ports
        self.cut = [i for i, port in enumerate(self.ports) if port and port.batch_dim is not None]
        # Several inputs may have other multiples of the rows each: then nobody knows what a row is.
        sizes = {self.port(index).shape[self.dim(index)] for index in self.cut}
        self.rows = sizes.pop() if len(sizes) == 1 else 1
        self.outputs = {port.name: port for port in captured.program.outputs}

    def port(self, index: int) -> Port:
        """The port of an argument that is no number."""
        port = self.ports[index]
        assert port is not None
        return port

    def dim(self, index: int) -> int:
        """Where the batch is in an argument that is cut."""
        dim = self.port(index).batch_dim
        assert dim is not None
        return dim

    def part(self, index: int) -> Values:
        """The arguments of a microbatch. A traced step is run as it is, and may ask which tensors
        have gradients."""
        values = self.captured.part(self.args, index)
        for port, value, argument in zip(self.ports, values, self.args, strict=True):
            if port and self.captured.door == "trace":
                value.requires_grad_(argument.requires_grad)
        return values

    def by_step(self, values: Values, mode: Expected | None = None) -> dict[str, torch.Tensor]:
        """The results, and what becomes of arguments that the step changes in place; neither these
        nor buffers are changed."""
        copies = self._copies(values)
        with mode or Expected():  # gradients inside of the step are asked for as ever
            results = self.step.run(*copies)
        return self._named(results, copies)

    def with_gradients(self, values: Values) -> dict[str, torch.Tensor]:
        """The same, beside gradients and the new values of buffers; the gradients are of the loss,
        or of the sum of all results."""
        program = self.captured.program
        wanted = program.ports(Role.GRADIENT, Role.BATCH_GRADIENT)
        trained = {port.fqn for port in wanted}
        # Leaves of autograd: a gradient goes no further than to what this run was given.
        leaves = [
            value.detach().requires_grad_(port.fqn in trained) if port else value
            for port, value in zip(self.ports, self._copies(values), strict=True)
        ]
        inputs = {port.fqn: value for port, value in zip(self.ports, leaves, strict=True) if port}
        # A part that is computed again in the backward (a checkpoint) finds the buffers themselves
        # in their places, and writes to them.
        buffers = [
            value
            for port, value in zip(self.ports, self.args, strict=True)
            if port and port.role == Role.BUFFER
        ]
        trains = bool(program.ports(Role.TANGENT))
        with Expected(), torch.set_grad_enabled(trains), values_kept(buffers):
            results = self._named(self.step.run(*leaves), leaves)
            ends = [results[port.fqn] for port in program.ports(Role.TANGENT)]
            gradients: Sequence[torch.Tensor | None] = ()
            if ends and wanted:
                ones = [torch.ones_like(end) for end in ends]
                read = [inputs[port.fqn] for port in wanted]
                gradients = torch.autograd.grad(ends, read, ones, allow_unused=True)
        pairs = zip(wanted, gradients, strict=False)  # none where nothing trains
        results |= {port.name: gradient for port, gradient in pairs if gradient is not None}
        # What is assigned anew is a result already; other buffers were written to in their place.
        carried = {f"new_{name}" for name in self.captured.carried}
        for port in program.ports(Role.BUFFER_UPDATE):
            if port.name not in carried:
                results[port.name] = inputs[port.fqn]
        return {name: value.detach() for name, value in results.items()}

    def by_program(self, values: Values, *, forward: bool) -> Named:
        """The results of the program, all of them with tangents of 1, or those of its `forward`."""
        program = self.captured.program
        inputs = with_sizes(program, self.captured.slots(values))
        for port in program.ports(Role.TANGENT):
            inputs[port.name] = torch.ones(port.shape, dtype=port.dtype, device=port.device)
        ports = program.ports(Role.LOSS, Role.OUTPUT) if forward else program.outputs
        module = _returning(program, [port.name for port in ports])
        # What the step has asked of its values, torch asserts in the graph: another microbatch may
        # break that. The forward is run on the one that it was captured with.
        runner = _Located if self.step.asked and not forward else Unseeded
        with torch.no_grad(), _torch.no_autocast(), Expected():
            results: Named = runner(module).run(*(inputs.get(p.name) for p in program.inputs))
        return results

    def differing(
        self, before: Named, after: Named, expected: Seen | None = None, seen: Seen | None = None
    ) -> Iterator[tuple[Port, torch.Tensor, torch.Tensor]]:
        """The results of two runs that are others, beyond rounding, than is `expected` of those of
        the first; of the second ones is `seen` what is compared. Left out are those that the step
        only assigns to attributes."""
        for name, value in before.items():
            port = self.outputs[name]
            # What is only kept on an attribute need not have the batch's rows (a running mean).
            if name in self.captured.kept and not self.captured.is_returned(name):
                continue
            wanted = expected(port, value) if expected else value
            other = seen(port, after[name]) if seen else after[name]
            if not close(wanted, other):
                yield port, wanted, other

    def rows_of(self, port: Port, value: torch.Tensor) -> torch.Tensor:
        """A result with its rows in front, each of which may have several places along the
        dimension of the batch."""
        assert port.batch_dim is not None
        return value.movedim(port.batch_dim, 0).unflatten(0, (self.rows, -1))

    def _named(self, results: Sequence[Any], values: Values) -> dict[str, torch.Tensor]:
        """Results by the names of their ports, and the arguments that the step has changed."""
        slots = self.captured.slots(values)
        changed = {new: slots[name] for name, new in self.captured.changed.items()}
        return dict(zip(self.captured.results, results, strict=True)) | changed

    def _copies(self, values: Values) -> Values:
        """The same arguments, of which those are copies that the step may change in place."""
        changed = self.captured.changed
        return [
            value.clone() if port and (port.role == Role.BUFFER or port.name in changed) else value
            for port, value in zip(self.ports, values, strict=True)
        ]


def _returning(program: Program, names: Collection[str]) -> fx.GraphModule:
    """The graph of a flat program with some of its results alone."""
    graph = fx.Graph()
    results: Any = graph.graph_copy(program.module.graph, {})
    graph.output({name: results[name] for name in names})
    graph.eliminate_dead_code(has_effects)
    return _torch.graph_module(program.module, graph)


class _Located(Unseeded):
    """Says at which line of the step a run fails because data decide otherwise."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.extra_traceback = False  # of fx, which would add its own to the message

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except (IndexError, RuntimeError) as error:
            raise fails_elsewhere([source_line(n)], error) from error
