"""Every private name of torch that Pfeife uses, each with the reason and the way out.

Tried on torch 2.11, 2.13 and 2.15; when one of these moves, only this folder changes. Read first
what is about the frame that Dynamo compiles (`dynamo`, `sources` and `results`), then `aot` (its
joint graph) and `surroundings` (what that depends on), then `sizes`, `size_arithmetic`,
`size_trees` (these as data), `open_values` (values of such sizes), `questions` and `kernel_numbers`
(what only data tell); `tensors` and `operations` are about their namesakes, `absent` about tensors
whose values are not here, `attention` about its kernels, `missing_rules` about what torch lacks for
some operations. `modules`, `process_groups` and `trace` are about what their names say,
`checkpoints` reads the list of one, and `fully_sharded` undoes what FSDP has done.
"""

# The names are imported for others: a list of them in `__all__` would say each twice.
# ruff: noqa: F401

# Roles of the joint graph's inputs and outputs, in node.meta["desc"]. If they move: follow what
# `aot_export_joint_with_descriptors` puts there.
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

# One of torch's operations for one set of arguments. If it moves: the type of
# `torch.ops.aten.add.Tensor`.
from torch._ops import OpOverload

# What Dynamo's graph calls where an autocast region begins and ends. If they move: a run that ends
# in between leaves autocast switched on.
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast

# Sees every operation of a thread; documented in torch's tutorials, yet in a private module.
from torch.utils._python_dispatch import TorchDispatchMode

from pfeife._torch import attention
from pfeife._torch.absent import (
    Record,
    as_meta,
    first_record,
    is_absent,
    let_go,
    let_go_all,
    natively,
    record_of,
    without_values,
)
from pfeife._torch.aot import (
    flop_formulas,
    inductor,
    joint_graph,
    no_autocast,
)
from pfeife._torch.checkpoints import listed, together
from pfeife._torch.dynamo import (
    assumed_values,
    broken_guard,
    draws_by_numpy,
    eager_stance,
    frame,
    frame_arguments,
    frame_name,
    graph_break,
    guard_tensors,
    guards,
    is_drawn,
    is_dynamo_error,
    is_last_compilation,
    is_limit_of_compilations,
    named_graphs,
    numbers_of,
    one_at_a_time,
    said_to_compile,
    sets_data,
    who_compiles,
    whole_graph,
    willing,
)
from pfeife._torch.fully_sharded import leave_fully_shard, precision_of_shards
from pfeife._torch.kernel_numbers import INSTEAD, MARK, floats, numbers_for_kernels
from pfeife._torch.missing_rules import as_captured
from pfeife._torch.modules import (
    function_of,
    graph_module,
    hooks_of_all_modules,
    is_unwritten,
    running_ddp,
    saved_state,
    write,
)
from pfeife._torch.open_values import OpenValues
from pfeife._torch.operations import (
    changes_layout,
    draws,
    has_no_rule,
    is_missing,
    lacks_device,
    makes_view,
    written,
)
from pfeife._torch.process_groups import (
    gather_into,
    gloo_device,
    gloo_group,
    nccl_group,
    sequence_of,
)
from pfeife._torch.questions import (
    as_answer,
    as_number,
    computed,
    extremes,
    is_decided_by_data,
    is_of_data,
    sizes_and_numbers,
    symbol_of,
    symbolic_mode,
    telling,
    texts_of_numbers,
    value_of,
)
from pfeife._torch.results import (
    OPAQUE,
    assigned,
    assigned_constants,
    changed_attributes,
    changed_containers,
    result_paths,
)
from pfeife._torch.size_arithmetic import divided_by, divides, divisors, expanded, quotient
from pfeife._torch.size_trees import is_expression, size_of_tree, tree_of_size
from pfeife._torch.sizes import (
    Size,
    SymbolicExamples,
    Symbols,
    assumed_of_sizes,
    forgetting_symbols,
    holds,
    is_fixed,
    is_single,
    name_of_size,
    named_sizes,
    order_of_facts,
    python_kernels,
    size_now,
    sizes_at,
    symbol_named,
    with_numbers,
    written_shape,
)
from pfeife._torch.sources import is_there, placeholder_source, source_value, source_words
from pfeife._torch.surroundings import is_higher_order, is_operation, is_torchs, surroundings
from pfeife._torch.tensors import (
    FakeTensor,
    FakeTensorMode,
    after_backward,
    asks_for_values,
    converting_others,
    copy_marks,
    fake_on,
    fake_tensor,
    hooks_of,
    is_handed_out,
    is_in_backward,
    is_shared,
    is_wrapper,
    keeps_graph,
    leaf_dims,
    mark_open,
    marked_dims,
    marked_most,
    no_dispatch,
    open_dims,
    opened,
    overlap,
    plainly,
    quiet_fakes,
    storage_of,
    views_of_memory,
)
from pfeife._torch.trace import compilation, is_profiled, trace_artifact
