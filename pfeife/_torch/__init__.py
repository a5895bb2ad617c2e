"""Every private name of torch that Pfeife uses, each with the reason and the way out.

Tried on torch 2.11, 2.13 and 2.15; when one of these moves, only this folder changes. Read first
what is about the frame that Dynamo compiles (`dynamo`, `sources` and `results`), then `aot` (its
joint graph); `modules`, `recurrent`, `tensors`, `sizes`, `gloo` and `trace` are about what their
names say.
"""

from pfeife._torch.aot import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    flop_formulas,
    inductor,
    joint_graph,
    no_autocast,
)
from pfeife._torch.dynamo import (
    assumed_values,
    broken_guard,
    draws_by_numpy,
    eager_stance,
    frame,
    frame_arguments,
    frame_name,
    graph_break,
    guards,
    is_drawn,
    is_dynamo_error,
    is_last_compilation,
    is_limit_of_compilations,
    named_graphs,
    numbers_of,
    said_to_compile,
    who_compiles,
    whole_graph,
    willing,
)
from pfeife._torch.gloo import gloo_device, gloo_group
from pfeife._torch.modules import graph_module, is_unwritten
from pfeife._torch.recurrent import as_captured
from pfeife._torch.results import assigned, assigned_constants, changed_attributes, result_paths
from pfeife._torch.sizes import (
    forgetting_symbols,
    order_of_facts,
    symbolic_mode,
    without_symbols,
)
from pfeife._torch.sources import is_there, placeholder_source, source_value, source_words
from pfeife._torch.tensors import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    asks_for_values,
    converting_others,
    hooks_of,
    is_shared,
    leaf_dims,
    marked_dims,
)
from pfeife._torch.trace import compilation, trace_artifact

__all__ = [
    "BufferAOTInput",
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "TorchDispatchMode",
    "as_captured",
    "asks_for_values",
    "assigned",
    "assigned_constants",
    "assumed_values",
    "broken_guard",
    "changed_attributes",
    "compilation",
    "converting_others",
    "draws_by_numpy",
    "eager_stance",
    "flop_formulas",
    "forgetting_symbols",
    "frame",
    "frame_arguments",
    "frame_name",
    "gloo_device",
    "gloo_group",
    "graph_break",
    "graph_module",
    "guards",
    "hooks_of",
    "inductor",
    "is_drawn",
    "is_dynamo_error",
    "is_last_compilation",
    "is_limit_of_compilations",
    "is_shared",
    "is_there",
    "is_unwritten",
    "joint_graph",
    "leaf_dims",
    "marked_dims",
    "named_graphs",
    "no_autocast",
    "numbers_of",
    "order_of_facts",
    "placeholder_source",
    "result_paths",
    "said_to_compile",
    "source_value",
    "source_words",
    "symbolic_mode",
    "trace_artifact",
    "who_compiles",
    "whole_graph",
    "willing",
    "without_symbols",
]
