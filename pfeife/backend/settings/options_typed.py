"""The options as keyword arguments with their types, for type checkers; `Options` says of each what
it means, and has its default."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict

import torch

from pfeife.backend.settings.declared import Sizes
from pfeife.backend.settings.options import Batch, Capture
from pfeife.compilers import Compiler
from pfeife.data.figures import OnStep
from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.data.optimizers import Optimizer
from pfeife.data.plan import Costs, Plan
from pfeife.data.replicas import DataParallel
from pfeife.ir.program import Program
from pfeife.passes.compose import Passes
from pfeife.runtime.distributed.batches.meshes import MeshLike
from pfeife.runtime.protocols import Runtime
from pfeife.sched.by_family import Scheduling
from pfeife.sched.cutting import CutAt, Partition, RecomputePolicy

PathOf = str | os.PathLike[str]
Where = int | str | tuple[int | str, ...]  # of a result: its index, name or path


class Asked(TypedDict, total=False):
    """What `pfeife.compile`, `pfeife.backend` and `pfeife.explain` may be asked for."""

    microbatches: int
    batch: Batch
    stages: int | None
    schedule: Scheduling
    plan: Plan | PathOf | None
    search_seconds: float
    search_work: int | None
    jobs: int
    split_at: Mapping[str, str] | None
    replicas: int
    data_parallel: DataParallel
    bucket_bytes: int
    mesh: MeshLike | None
    costs: str | Costs | Callable[[Program], Costs]
    partition: Partition | None
    cut_at: CutAt
    message_tolerance: float
    recompute: RecomputePolicy | None
    passes: Passes
    machine: Machine | PathOf | None
    network: Network | PathOf | None
    cache: PathOf | None
    memory_limit: int | None
    optimizer: Optimizer | None
    accumulate: torch.dtype | str | None
    param_dtype: torch.dtype | str | None
    deferred_batch_norm: bool
    devices: Sequence[str | torch.device] | None
    loss: Where | None
    loss_reduction: Literal["mean", "sum", "auto"]
    reduce: Mapping[Where, str]
    timeout: float
    compiler: str | Compiler
    runtime: Runtime | None
    cuda_graphs: bool
    fit_smaller_batches: bool
    capture: Capture
    dynamic: bool | None
    max_sizes: Sizes
    sizes_hint: Sizes
    max_programs: int
    check: bool | float
    compare_batches: bool
    log_every: int | None
    on_step: OnStep | None
    progress: bool
