"""All ranks in one process, a thread each.

`pipeline` has the step and the transport between the threads; read it first. `threads` keeps the
threads from step to step, `peer_copy` copies from one GPU to another while both compute.
"""

from pfeife.runtime.local.pipeline import LocalPipeline, LocalStep

__all__ = ["LocalPipeline", "LocalStep"]
