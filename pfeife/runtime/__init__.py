"""Running a schedule: one interpreter, several transports.

`interpret` is the loop and the table; read it first, then `local/` (a thread a rank) or
`distributed/` (a process a rank). `parts` keeps forward and backward of a step in order, `failure`
says what went wrong, `profile` measures a step; `protocols` has what another runtime must be.
"""

from pfeife.runtime.interpret import RankRunner, Transport
from pfeife.runtime.local.pipeline import LocalPipeline
from pfeife.runtime.protocols import Pipeline, Step

__all__ = ["LocalPipeline", "Pipeline", "RankRunner", "Step", "Transport"]
