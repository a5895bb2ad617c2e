"""A rank a process, over torch.distributed.

`pipeline` runs a rank's schedule over `transport`; read these first, then `world` (what the
processes share), `process_group` and `rendezvous` (how they find one another). `ownership`,
`foreign` and `gradients` keep state where it is trained, and `saving` and `optimizers` give it
whole to whoever saves it: `asking` knows who has what, `serving` asks and answers (`script`,
`questions`, `posting`, `givens` and `kept` are its parts). `staying`, `heartbeat`, `patience`,
`diagnosis` and `ending` are for when a rank is late or gone; `connection`, `sending`, `buffers` and
`arriving` are parts of the transport, `agreement` is one of the world.
"""

from pfeife.runtime.distributed.pipeline import DistributedPipeline, DistributedStep

__all__ = ["DistributedPipeline", "DistributedStep"]
