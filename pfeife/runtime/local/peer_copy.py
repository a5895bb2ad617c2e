"""Copies from one GPU to another beside the computing of both. Not yet run on a GPU."""

import torch

from pfeife.lowering.envelope import Tensors


class PeerCopies:
    """Brings values to one device, from each other device on a pair of side streams.

    torch copies on the source's current stream, after what the destination's current stream has
    been given so far; on side streams neither waits for the other's computing. They are kept from
    step to step: the allocator keeps the memory of copies for the stream that took it.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def __call__(self, values: Tensors, ready: torch.cuda.Event | None) -> Tensors:
        """The values here; `ready` is when they are there. What is here already is not copied."""
        return tuple(
            value if value.device == self.device else self._one(value, ready) for value in values
        )

    def _one(self, value: torch.Tensor, ready: torch.cuda.Event | None) -> torch.Tensor:
        if {value.device.type, self.device.type} != {"cuda"}:
            return value.to(self.device)  # when it is there, for whoever reads it next
        away, here = self._side(value.device)
        if ready is not None:
            away.wait_event(ready)
        with torch.cuda.stream(away), torch.cuda.stream(here):
            copy = value.to(self.device, non_blocking=True)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(here)
        # The allocator must not reuse either memory before the other stream is through with it.
        value.record_stream(away)
        copy.record_stream(computing)
        return copy

    def _side(self, source: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if source not in self.streams:  # replicas may ask at once, and must get the same
            pair = torch.cuda.Stream(source), torch.cuda.Stream(self.device)
            self.streams.setdefault(source, pair)
        return self.streams[source]


def made_by_now(values: Tensors) -> torch.cuda.Event | None:
    """An event after all that this thread has queued for the values' device, None on a CPU."""
    device = next((value.device for value in values if value.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()
