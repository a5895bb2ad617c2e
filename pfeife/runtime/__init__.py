"""Running a schedule: one interpreter, several transports."""

from pfeife.runtime.interpret import RankRunner, Transport
from pfeife.runtime.local.pipeline import LocalPipeline

__all__ = ["LocalPipeline", "RankRunner", "Transport"]
