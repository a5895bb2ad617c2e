"""A call of a step on its way to its results."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import torch

from pfeife.backend.steps import Steps
from pfeife.frontend.batch import Arguments
from pfeife.frontend.captured import Door
from pfeife.runtime.distributed.batches.rank_zero import Sent


@attrs.define(eq=False)
class Invocation:
    """One call of a step. `call` has the batch and its first microbatch, `sent` what rank 0 alone
    was given of it; `waits` says that state has no values before what is built runs.

    Who takes the call notes how far it has come, since an error means something else there: the
    door that it is `at`, a graph that Dynamo has `handed` over, and whether what runs was
    `reached`: from there on errors are those of the pipeline.
    """

    call: Arguments
    sent: Sent | None = None
    waits: bool = False
    at: Door | Literal["batch"] = "batch"
    handed: bool = False
    reached: bool = False

    def everything(self) -> None:
        """Before a rank reads the batch by itself: what rank 0 has been given comes to all."""
        if self.sent:
            self.sent.everything()


# Builds what a door has captured, unless that is known, runs it with these values of its arguments,
# and joins the results.
Run = Callable[[Invocation, Steps, Sequence[Any]], list[torch.Tensor]]
