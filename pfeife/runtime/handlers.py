"""The table: what each action of a schedule does to a rank's step.

| action         | handler | reads                              | makes                         |
|----------------|---------|------------------------------------|-------------------------------|
| F, B, I, W     | compute | the arguments of its stage's calls | their results (see below)     |
| SEND_F, SEND_B | send    | the values of a message            | a message to the transport    |
| RECV_F, RECV_B | receive | the channel's next message         | its values, under fresh names |
| REDUCE_GRAD    | reduce  | what the rank has summed up        | buckets on their way          |
| UNSHARD        | unshard | parameters that members keep       | what they tell one another    |
| RESHARD        | reshard | the values of other members        | they are dropped              |

A result of a call that is one of the program's too is kept as well: a gradient is added to its sum,
a buffer's update is what the next forward reads, a loss or an output is noted for its microbatch.
"""

from collections.abc import Callable, Mapping
from functools import cached_property

import torch

from pfeife import _torch
from pfeife.data.schedule import SENDS, Action, Do
from pfeife.ir.combine import tracked_names
from pfeife.ir.evaluate import as_computed
from pfeife.ir.messages import Message
from pfeife.ir.nodes import returned, value_of
from pfeife.ir.parts import Call, Kind, Port, Role
from pfeife.lowering.buckets import Bucket, buckets_of
from pfeife.lowering.telling import Kept, kept_by_stage
from pfeife.lowering.wiring import Wiring, summed_in_place
from pfeife.runtime.results import local_gradient, outputs_by_node, updated_buffers
from pfeife.runtime.step import Step

Handler = Callable[[Step, int], None]  # the microbatch, which a reduction does not look at
Keeper = Callable[[Step, int, torch.Tensor], None]


class Handlers:
    """The handlers of one rank's actions, each for any microbatch.

    `bodies` has other functions for some calls than their graphs, by call nodes. `reads` are the
    values, inputs of the step among them, that the handlers which were asked for read.
    """

    def __init__(self, wiring: Wiring, rank: int, bodies: Mapping[str, Callable]):
        self.wiring, self.program = wiring, wiring.program
        self.rank, self.bodies = rank, bodies
        self.outputs = outputs_by_node(self.program)
        self.buffers = updated_buffers(self.program)
        self.tracked = tracked_names(self.program)
        self.kept = {kept.stage: kept for kept in kept_by_stage(self.program) if kept.rank == rank}
        self.told = {port.name: port for kept in self.kept.values() for port in kept.ports}
        self.messages: dict[str, Message] = {}  # by their nodes
        self.reads: set[str] = set()

    def of(self, action: Action) -> Handler:
        """The handler of an action, whose microbatch is not looked at."""
        if action.do.kind:
            kept = [kept for kept in self.kept.values() if action.stage in kept.users]
            calls = self.wiring.calls(action)
            return _in_turn([*map(self._arrive, kept), *map(self._compute, calls)])
        once = {
            Do.UNSHARD: self._unshard,
            Do.REDUCE_GRAD: self._reduce,
            Do.RESHARD: self._reshard,
        }
        if action.do in once:
            return once[action.do](action.stage)
        return self._transfer(action)

    def _unshard(self, stage: int) -> Handler:
        ports = self.kept[stage].ports
        layouts = {port.fqn: value_of(self.program.node(port.name)) for port in ports}

        def unshard(step: Step, _: int) -> None:
            step.telling[stage] = step.transport.unshard(ports, layouts, step.kept)

        return unshard

    def _arrive(self, kept: Kept) -> Handler:
        """Waits for what was told before the first computation with it."""

        def arrive(step: Step, _: int) -> None:
            if kept.stage not in step.telling:
                return
            telling = step.telling.pop(kept.stage)
            told = telling.wait()
            own = {port.name: as_computed(port, told[port.fqn]) for port in kept.ports}
            for values in step.values:
                values.update(own)
            step.ended[Action(kept.stage, Do.UNSHARD)] = telling.ended

        return arrive

    def _reshard(self, stage: int) -> Handler:
        names = [port.name for port in self.kept[stage].ports]

        def reshard(step: Step, _: int) -> None:
            for values in step.values:
                for name in names:
                    del values[name]

        return reshard

    def _compute(self, call: Call) -> Handler:
        body = self.bodies.get(call.node) or _torch.function_of(self.program.body(call))
        # A body is looked up by its node: replicas and microbatches share what was compiled.
        reads, slots = self.wiring.arguments(call), self.wiring.results(call)
        self.reads.update(reads)
        summed = summed_in_place(self.program, call)
        keep = [
            (self._keeper(port, port.name in summed), name)
            for name, _ in slots
            for port in self.outputs.get(name, ())
        ]
        buffers = [n for n in reads if n in self.buffers] if call.kind == Kind.FORWARD else []

        def compute(step: Step, microbatch: int) -> None:
            values = step.values[microbatch]
            for name in buffers:  # as the microbatch before left them; its own B reads the same
                values[name] = step.buffers[name]
            results = body(*[values[name] for name in reads])
            for name, index in slots:
                values[name] = results[index]
            for keeper, name in keep:
                keeper(step, microbatch, values[name])

        return compute

    def _keeper(self, port: Port, in_place: bool) -> Keeper:
        """What is done with a value that is a result of the program."""
        name = port.name

        def add(step: Step, _: int, value: torch.Tensor) -> None:
            before = step.sums.get(name)
            if before is None:
                step.sums[name] = value
            elif in_place:
                before.add_(value)
            else:
                step.sums[name] = before + value

        def update(step: Step, _: int, value: torch.Tensor) -> None:
            step.buffers[slot] = value

        def note(step: Step, microbatch: int, value: torch.Tensor) -> None:
            step.results[microbatch][name] = value

        def note_loss(step: Step, microbatch: int, value: torch.Tensor) -> None:
            # Some kernels leave a scalar in a storage of many elements.
            step.results[microbatch][name] = value.clone()

        if port.role == Role.GRADIENT:
            return add
        if port.role == Role.BUFFER_UPDATE and port.fqn not in self.tracked:
            slot = next(slot for slot, fqn in self.buffers.items() if fqn == port.fqn)
            return update
        return note_loss if port.role == Role.LOSS else note

    @cached_property
    def _buckets(self) -> list[Bucket]:
        """Those in which this rank has a part."""
        return [bucket for bucket in buckets_of(self.program) if self.rank in bucket.first.ranks]

    def _reduce(self, stage: int) -> Handler:
        buckets = [bucket for bucket in self._buckets if bucket.first.stages[0] == stage]
        ports = {port.fqn: port for port in self.program.ports(Role.PARAMETER)}
        names = [reduction.name for bucket in buckets for reduction in bucket.reductions]
        # Who reads a parameter for another stage may have to reduce it before its own first use.
        kept = [each for each in self.kept.values() if any(p.fqn in names for p in each.ports)]
        arrive = [*map(self._arrive, kept)]
        self.reads.update(ports[name].name for name in names)
        gradients = self.program.ports(Role.GRADIENT)
        summed = {name: [p.name for p in gradients if p.fqn == name] for name in names}
        results = returned(self.program.module)
        made = {name: results[summed[name][0]].meta["val"] for name in names}

        def part(step: Step, name: str) -> torch.Tensor:
            gradient = local_gradient(self.program, name, step)
            for port_name in summed[name]:
                step.sums.pop(port_name, None)
            # Once it is on its way nobody adds to it, and its memory is the bucket's.
            if gradient is None:  # read here, but without influence on the loss
                return _nothing(step.values[0][ports[name].name], made[name])
            return gradient

        def reduce(step: Step, microbatch: int) -> None:
            for handler in arrive:
                handler(step, microbatch)
            # All ranks begin their buckets in one order, that of the schedule: the reducer takes
            # them one after another, and waits in each for the others.
            for bucket in buckets:
                parts = [part(step, reduction.name) for reduction in bucket.reductions]
                step.reducing.append((step.at, step.transport.reduce(bucket, parts)))

        return reduce

    def _transfer(self, action: Action) -> Handler:
        message = self.wiring.message(action)
        self.messages[message.node] = message
        node, names, copies = message.node, message.values, message.copies
        source, destination = message.source, message.destination

        def send(step: Step, microbatch: int) -> None:
            values = step.values[microbatch]
            step.transport.send(
                destination, tuple([values[n] for n in names]), step.envelopes[node]
            )

        def receive(step: Step, microbatch: int) -> None:
            arrived = step.transport.receive(source)
            step.values[microbatch].update(zip(copies, arrived, strict=True))

        return send if action.do in SENDS else receive


def _nothing(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter without influence, of the form that others have made."""
    if gradient.layout == torch.strided or not isinstance(parameter, torch.Tensor):
        # What stands for a tensor has no shape.
        return parameter.new_zeros(gradient.shape, dtype=gradient.dtype)
    dims = gradient.sparse_dim()
    where = torch.empty((dims, 0), dtype=torch.int64, device=parameter.device)
    rows = parameter.new_empty((0, *parameter.shape[dims:]))
    return torch.sparse_coo_tensor(where, rows, parameter.shape)


def _in_turn(handlers: list[Handler]) -> Handler:
    if len(handlers) == 1:
        return handlers[0]

    def run(step: Step, microbatch: int) -> None:
        for handler in handlers:
            handler(step, microbatch)

    return run
