"""What a real step took, as the same kind of timeline as the simulator's."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from pfeife import plain
from pfeife.evaluate import State
from pfeife.plan import Action, Event, Timeline
from pfeife.runtime.distributed import DistributedPipeline, from_all_ranks
from pfeife.runtime.interpret import Observer
from pfeife.runtime.local import LocalPipeline


class Stopwatch:
    """Notes when each action of each rank ends; the next one begins there."""

    def __init__(self, devices: Sequence[torch.device]):
        self.events: list[Event] = []
        self.devices = devices
        self.begin = self._now()

    def _now(self) -> float:
        for device in self.devices:
            if device.type == "cuda":  # the work that the action has queued belongs to it
                torch.cuda.synchronize(device)
        return time.perf_counter()

    def __call__(self, rank: int) -> Observer:
        last = 0.0

        def observe(action: Action) -> None:
            nonlocal last
            now = self._now() - self.begin
            self.events.append(Event(rank, action, last, now))
            last = now

        return observe


def profile(
    pipeline: LocalPipeline | DistributedPipeline,
    state: State,
    microbatches: Sequence[Any],
    **options: Any,
) -> Timeline:
    """Runs one step (arguments as for `evaluate`) and returns when each action ran.

    On CUDA every action is waited for, so that its time is its own; overlap is lost. With a rank
    a process this is collective: all ranks begin together and all get the whole timeline of the
    first replica.
    """
    step = pipeline.start(state, microbatches, **options)
    if isinstance(pipeline, LocalPipeline):
        watch = Stopwatch([device for device in pipeline.devices if device])
        step.run(watch=watch)
        return _ordered(watch.events)
    from_all_ranks("", pipeline.device)  # all are here
    watch = Stopwatch([pipeline.device])
    step.run(watch=watch)
    texts = from_all_ranks(plain.to_json(Timeline(tuple(watch.events))), pipeline.device)
    first = texts[: pipeline.transport.mesh.ranks]
    return _ordered([event for text in first for event in plain.from_json(Timeline, text).events])


def _ordered(events: list[Event]) -> Timeline:
    return Timeline(tuple(sorted(events, key=lambda event: (event.start, event.rank))))
