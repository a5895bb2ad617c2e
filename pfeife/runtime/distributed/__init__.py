"""A rank a process, over torch.distributed.

`pipeline` runs a rank's schedule over `transport`; read these first, then `peers` (how the
processes agree and wait for one another; `agreement` is a part of it), `world` (what they share)
and `process_group` (how they find one another).

`links/` carries tensors from rank to rank, `liveness/` sees who is late or gone, `state/` keeps
parameters, gradients and optimizers where they are trained, `served/` answers who asks for those of
another rank, `batches/` has what ranks are given. `batch_norms` joins what those of replicas have
found. Tensors that travel together are a message by `packing`. What all ranks do or none is done
`together`. `whole_state` tells members of a group their parts of what one of them keeps.
`parallelised` and `fully_sharded` take models that are cut over ranks already, `wrapped` refuses
those that DDP or FSDP distributes.
"""

from pfeife.runtime.distributed.pipeline import DistributedPipeline, DistributedStep

__all__ = ["DistributedPipeline", "DistributedStep"]
