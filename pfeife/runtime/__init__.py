"""Running a schedule: one interpreter, several transports.

`interpret` is the loop and `handlers` its table; read these first, then `local/` (a thread a rank)
or `distributed/` (a process a rank). `step` is what a rank knows meanwhile, `results` what comes
out, `pipeline` how a step is started, `buffered` which messages have memory when; `phase_guard`
keeps forward and backward of a step in order, `failure` says what went wrong, `profile` measures a
step, `peak` its memory; `memory_spans` tells who shares it; `threads` work beside a script;
`protocols` has what another runtime must be.
"""

from pfeife.runtime.interpret import RankRunner
from pfeife.runtime.local.pipeline import LocalPipeline
from pfeife.runtime.pipeline import parts_of
from pfeife.runtime.protocols import Pipeline, StepProtocol
from pfeife.runtime.results import joined
from pfeife.runtime.step import Part, Transport

__all__ = [
    "LocalPipeline",
    "Part",
    "Pipeline",
    "RankRunner",
    "StepProtocol",
    "Transport",
    "joined",
    "parts_of",
]
