"""All ranks in one process, a thread each."""

from pfeife.runtime.local.pipeline import LocalPipeline, LocalStep

__all__ = ["LocalPipeline", "LocalStep"]
