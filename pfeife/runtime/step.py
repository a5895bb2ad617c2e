"""What one rank knows during a step, and what carries its values to the others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch

from pfeife.data.schedule import Action
from pfeife.ir.combine import Divisor
from pfeife.ir.evaluate import State
from pfeife.ir.parts import Port
from pfeife.lowering.buckets import Bucket
from pfeife.lowering.channel import Channel
from pfeife.lowering.envelope import Envelope, Tensors

Layouts = Mapping[str, torch.Tensor | None]  # what stands for state in a program, by names


class Transport(Protocol):
    """What carries values between ranks. Ranks are those of one pipeline.

    A channel is what one rank sends to another: its messages are received in the order in which
    they were sent, which is the only order there is. One thread at a time calls a rank's transport.
    `device` is where received values shall be, None for where they come from.
    """

    device: torch.device | None

    def expect(self, source: int, channel: Channel) -> None:
        """Announces the messages that a run will receive from a rank, before its first action."""

    def send(self, destination: int, values: Tensors, envelope: Envelope) -> None:
        """Sends one message; returns before it has arrived. No rank writes to the values later.
        `envelope.check` raises ValueError for values that the other rank does not expect."""

    def receive(self, source: int) -> Tensors:
        """The next message of the channel, once it is there: values with the shapes, strides and
        dtypes with which they were sent. Raises if it cannot come any more."""

    def release(self, destination: int, count: int) -> None:
        """Says that the first `count` messages to a rank that still count as sent have arrived."""

    def reduce(self, bucket: Bucket, parts: Sequence[torch.Tensor]) -> "Beside":
        """Begins to reduce gradients, of this rank's parts and the others'."""

    def unshard(self, ports: Sequence[Port], layouts: Layouts, state: State) -> "Beside":
        """Begins to tell the members of a group the parameters that one of them keeps each, laid
        out as the values that stand for them; who does not keep it needs no value in `state`."""


class Beside(Protocol):
    """What is on its way while its rank goes on."""

    @property
    def ended(self) -> float:
        """When that was done, as time.perf_counter tells it, once it has been waited for."""

    def wait(self) -> Mapping[str, torch.Tensor]:
        """What this rank has of it then, gradients or parameters, by names."""


@attrs.frozen(eq=False)
class Part:
    """The microbatches of a step that one pipeline runs, from the `first` on: their `inputs` by
    port name (all but the state), and by what their losses are `divided`. `parts_of` makes them."""

    first: int
    inputs: Sequence[Mapping[str, Any]]
    divided: Sequence[Divisor]


@attrs.define(eq=False)
class Step:
    """What one rank knows during a step.

    `values` has one mapping a microbatch; `at` is the index of the action under way, for those who
    look on from other threads. `reducing` are the buckets that were begun, by the indices of their
    actions, `telling` parameters of the `kept` ones by the stages of theirs, and `ended` says when
    what an action began was done. `envelopes` are those of the
    messages, by their nodes, at the `sizes` of this step.
    """

    transport: Transport
    part: Part
    sizes: Mapping[str, int]
    envelopes: Mapping[str, Envelope]
    values: list[dict[str, torch.Tensor]]
    buffers: dict[str, torch.Tensor]
    sums: dict[str, torch.Tensor] = attrs.Factory(dict)
    results: list[dict[str, torch.Tensor]] = attrs.Factory(list)
    gradients: dict[str, torch.Tensor] = attrs.Factory(dict)
    reducing: list[tuple[int, Beside]] = attrs.Factory(list)
    kept: State = attrs.Factory(dict)
    telling: dict[int, Beside] = attrs.Factory(dict)
    ended: dict[Action, float] = attrs.Factory(dict)
    at: int = 0


Observer = Callable[[Action], None]
Watch = Callable[[int], Observer]  # an observer for a rank
