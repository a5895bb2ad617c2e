"""What `import pfeife` has; `__init__.py` reads here where each name comes from."""

from pfeife.backend.entry import backend
from pfeife.backend.explain import Explanation, explain
from pfeife.backend.pipelined import PipelinedStep
from pfeife.backend.state.checkpoints import Checkpoints
from pfeife.backend.state.full import clip_grad_norm_, full_state_dict
from pfeife.backend.state.safetensors import save_safetensors
from pfeife.backend.step import compile
from pfeife.data.figures import StepFigures
from pfeife.data.forecast import Forecast
from pfeife.data.link import LinkKind
from pfeife.data.machine import Machine, Mesh
from pfeife.data.network import Network
from pfeife.data.plan import Costs, Plan, RecomputeOption
from pfeife.data.replicas import Replicas
from pfeife.data.schedule import Action, Schedule
from pfeife.data.timeline import Timeline
from pfeife.forecasting import Outlook, Question, forecast
from pfeife.frontend.capture import capture
from pfeife.frontend.deferred.making import deferred_init, materialize
from pfeife.frontend.placements import placements
from pfeife.ir.evaluate import Result, evaluate, state_of
from pfeife.ir.nodes import stage_boundary
from pfeife.ir.parts import Call, Kind, Port, Role
from pfeife.ir.program import Program, from_graph
from pfeife.ir.verify import verify
from pfeife.passes import (
    History,
    Pass,
    Totals,
    absorb,
    accumulate_in,
    annotate,
    apply,
    compose,
    defer_batch_norm,
    difference,
    dp_wrap,
    fuse,
    insert_send_recv,
    master_weights,
    move_to_device,
    overlap,
    partition,
    passes_of,
    place,
    record,
    shard,
    split_backward,
    totals,
)
from pfeife.runtime.distributed.batches.loading import data_sampler, from_rank0
from pfeife.runtime.failure import CollectiveError, PipelineError
from pfeife.sched.families.family import Family

__version__: str

__all__ = [
    "Action",
    "Call",
    "Checkpoints",
    "CollectiveError",
    "Costs",
    "Explanation",
    "Family",
    "Forecast",
    "History",
    "Kind",
    "LinkKind",
    "Machine",
    "Mesh",
    "Network",
    "Outlook",
    "Pass",
    "PipelineError",
    "PipelinedStep",
    "Plan",
    "Port",
    "Program",
    "Question",
    "RecomputeOption",
    "Replicas",
    "Result",
    "Role",
    "Schedule",
    "StepFigures",
    "Timeline",
    "Totals",
    "absorb",
    "accumulate_in",
    "annotate",
    "apply",
    "backend",
    "capture",
    "clip_grad_norm_",
    "compile",
    "compose",
    "data_sampler",
    "defer_batch_norm",
    "deferred_init",
    "difference",
    "dp_wrap",
    "evaluate",
    "explain",
    "forecast",
    "from_graph",
    "from_rank0",
    "full_state_dict",
    "fuse",
    "insert_send_recv",
    "master_weights",
    "materialize",
    "move_to_device",
    "overlap",
    "partition",
    "passes_of",
    "place",
    "placements",
    "record",
    "save_safetensors",
    "shard",
    "split_backward",
    "stage_boundary",
    "state_of",
    "totals",
    "verify",
]
