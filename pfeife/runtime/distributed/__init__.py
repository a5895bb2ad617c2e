"""A rank a process, over torch.distributed.

`pipeline` runs a rank's schedule over `transport`; read these first, then `process_group` (how the
processes find one another). The folders stand on one another:

    batches/     what ranks are given
    world/       what they share, and what they tell one another of it before a step
    served/      what they ask one another for
    state/       parameters, gradients and optimizers where they are trained
    control/     how they agree, wait for one another and stop together
    links/       tensors from rank to rank      liveness/    who is late or gone

In short: `batches/`, `world/`, `served/`, `state/`, `control/`, `links/`, `liveness/`.
`parallelised` and `fully_sharded` take models that are cut over ranks already, `wrapped` refuses
those that DDP or FSDP distributes.
"""

from pfeife.runtime.distributed.pipeline import DistributedPipeline, DistributedStep

__all__ = ["DistributedPipeline", "DistributedStep"]
