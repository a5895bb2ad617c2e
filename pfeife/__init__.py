"""Automatic pipeline parallelism for PyTorch, as pure functions over torch.fx graphs."""

from pfeife.backend import backend
from pfeife.boundary import stage_boundary
from pfeife.capture import capture
from pfeife.evaluate import Result, evaluate, state_of
from pfeife.passes import (
    annotate,
    compose,
    dp_wrap,
    fuse,
    insert_send_recv,
    partition,
    place,
    record,
    split_backward,
)
from pfeife.plan import Action, Costs, Machine, Mesh, Plan, RecomputeOption, Schedule, Timeline
from pfeife.program import Call, Kind, Port, Program, Role, verify
from pfeife.runtime.failure import PipelineError
from pfeife.state import clip_grad_norm_, full_state_dict
from pfeife.step import compile

__all__ = [
    "Action",
    "Call",
    "Costs",
    "Kind",
    "Machine",
    "Mesh",
    "PipelineError",
    "Plan",
    "Port",
    "Program",
    "RecomputeOption",
    "Result",
    "Role",
    "Schedule",
    "Timeline",
    "annotate",
    "backend",
    "capture",
    "clip_grad_norm_",
    "compile",
    "compose",
    "dp_wrap",
    "evaluate",
    "full_state_dict",
    "fuse",
    "insert_send_recv",
    "partition",
    "place",
    "record",
    "split_backward",
    "stage_boundary",
    "state_of",
    "verify",
]
