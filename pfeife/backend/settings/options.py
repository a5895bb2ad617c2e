"""What a user may ask of the backend, checked before anything runs."""

import math
import os
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
import torch

from pfeife.backend.settings.declared import Sizes, check_sizes
from pfeife.backend.settings.option_checks import (
    check_accumulate,
    check_costs,
    check_param_dtype,
    check_partition,
    check_passes,
    check_plan,
    check_recompute,
    check_runtime,
    check_schedule,
    check_together,
    check_where,
    described,
    described_passes,
    dtype_of,
    passes_of,
    plan_of,
)
from pfeife.compilers import Compiler, checked, compiler_name
from pfeife.data.figures import OnStep
from pfeife.data.machine import Machine, Mesh
from pfeife.data.network import Network
from pfeife.data.optimizers import Optimizer, optimizer_name, optimizer_of
from pfeife.data.plan import Costs, Plan
from pfeife.data.replicas import BUCKET_BYTES, DataParallel, Replicas
from pfeife.ir.program import Program
from pfeife.passes.compose import Passes
from pfeife.runtime.distributed.batches.meshes import mesh_of
from pfeife.runtime.protocols import Runtime
from pfeife.sched.by_family import Scheduling
from pfeife.sched.cutting import MESSAGE_TOLERANCE, CutAt, Partition, RecomputePolicy
from pfeife.version import VERSION


def _count(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    optional = attribute.default in (None, attrs.NOTHING)
    if not (value is None and optional) and (type(value) is not int or value < 1):
        raise ValueError(f"option {attribute.name}={value!r}: must be a positive integer")


Capture = Literal["auto", "dynamo", "trace"]


def _capture(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if value not in get_args(Capture):
        raise ValueError(f"option capture={value!r}: must be one of {list(get_args(Capture))}")


Batch = Literal["global", "replica", "rank0"]


def _batch(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if value not in get_args(Batch):
        raise ValueError(f"option batch={value!r}: must be one of {list(get_args(Batch))}")


def _flag(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"option {attribute.name}={value!r}: must be True or False")


def _flag_or_none(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if value is not None:
        _flag(instance, attribute, value)


def _check(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if not isinstance(value, bool) and not (isinstance(value, float) and 0 < value < 1):
        raise ValueError(
            f"option check={value!r}: must be True, False, or how much your own passes may change "
            "results, as a share of the largest value of each (0.01)"
        )


def _machine(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if value is not None and not isinstance(value, Machine | str | os.PathLike):
        raise ValueError(
            f"option machine={value!r}: must be a Machine, the name of one, or a path to its JSON"
        )


def _network(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if value is not None and not isinstance(value, Network | str | os.PathLike):
        raise ValueError(f"option network={value!r}: must be a Network or the path to its JSON")


def _of(kinds: Any, what: str) -> Callable[[object, attrs.Attribute, Any], None]:
    def check(instance: object, attribute: attrs.Attribute, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"option {attribute.name}={value!r}: must be {what}")

    return check


def _folder(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    _of(str | os.PathLike | None, "the path of a folder")(instance, attribute, value)
    path = Path(value or "")
    there = next((one for one in (path, *path.parents) if os.path.lexists(one)), None)
    if there and not os.path.isdir(there):
        raise ValueError(f"option {attribute.name}={str(value)!r}: {there} is no folder")


def _function(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if value is not None and not callable(value):
        raise ValueError(f"option {attribute.name}={value!r}: must be a function")


def _seconds(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    _of(int | float, "seconds")(instance, attribute, value)
    if not 0 < value < math.inf:
        raise ValueError(f"option {attribute.name}={value!r}: must be positive")


def _compiler(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    try:
        checked(value)
    except ValueError as error:
        raise ValueError(f"option {error}") from None


def _optimizer(given: Any) -> Any:
    if given is None:
        return None
    try:
        return optimizer_of(given)
    except ValueError as error:
        raise ValueError(f"option {error}") from None


def _tuple(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _devices(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    listed = value is None or isinstance(value, tuple)
    if not listed or not all(isinstance(one, str | torch.device) for one in value or ()):
        raise ValueError(f"option devices={value!r}: must be a list such as ['cuda:0', 'cuda:1']")


def _loss(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if value is not None and not _is_key(value):
        raise ValueError(
            f"option loss={value!r}: must be the name, the path or the index of a result, or "
            "'outside'"
        )


def _is_key(value: Any) -> bool:
    """Whether a value says where a result stands in what a step returns."""
    if isinstance(value, tuple):
        return bool(value) and all(type(one) in (int, str) for one in value)
    return type(value) in (int, str)


@attrs.frozen(kw_only=True, repr=False)
class Options:
    """Options of `pfeife.compile(step, ...)`, and of `torch.compile(step, backend="pfeife",
    options={...})`. What is built by them is in `step.backend.compiled`: a `Program` and its
    `Plan`.

    microbatches: into how many equal parts the batch of a call is cut, that of all replicas.
    batch: what each rank is given: "global", the batch of all replicas; "replica", that of its own
        replica, which is cut into microbatches / replicas parts (the batch of the step is then that
        of the first replica, of the second, and so on); or "rank0": what rank 0 is given counts,
        the others may be given nothing. In one process it is always that of all replicas.
    stages: how many stages; one a rank unless given.
    schedule: the name of a family, such as "1f1b" or "zb-h1"; a `Family` of your own; a `Schedule`;
        a function from a `Problem` (costs, bytes and ranks of the stages) to a `Schedule`; or
        "search" for cuts, placement and schedule that are searched together for `search_seconds`;
        or, if `search_work` is given, until so many operations were looked at, which gives the same
        plan on any machine.
    jobs: how many searches run side by side, in processes of their own, each from another seed.
    plan: cuts, schedule and what is recomputed, as `step.backend.compiled[0].plan` has them: a
        `Plan` or the path to its JSON. Nothing is searched then; it is refused unless it fits the
        program (see `sched.adopt_plan.adopted`).
    split_at: cuts by hand, {"blocks.4": "begin"}.
    replicas: pipelines that share the microbatches and average their gradients.
    data_parallel: what they do with these: "average", or "shard": each parameter is trained by one
        replica, which alone keeps optimizer state for it (ZeRO-2).
    bucket_bytes: how much of a stage's gradients is reduced together, while the rest computes.
    mesh: how the ranks of the world are spread over pipelines and replicas, which it then counts:
        row-major sizes of which the negative one is that of the replicas ("-2,4": two pipelines of
        neighbours; "4,-2": four ranks whose neighbours are replicas), a DeviceMesh with dimensions
        named "pp" and "dp", or a `Mesh`. Without one, the first step that trains decides by the
        `network`, if that has the links of all ranks, what is neighbours: pipelines or replicas.
    partition: where to cut, if not by the seconds: "uniform", "parameters" or "type:Regex", as
        DeepSpeed's partition_method has them; a list of clusters (numbers) or modules (names) at
        which stages start; or a function of a program that gives the stage of every cluster.
    cut_at: where stages may start: "anywhere" between clusters; "blocks", at the borders of the
        model's repeated blocks (elements of a ModuleList or Sequential that are alike); or a list
        of modules, at whose borders alone.
    message_tolerance: how much longer (a fraction, 0.01) a step may take whose messages take less,
        by as much of that as they take less: seconds are estimates, bytes are exact. 0 for the
        shortest step by estimate.
    recompute: what stages recompute: "never", "always", "except_last" (the last stage), a number k
        (the inside of every k-th block), a list of modules, or "auto": as little as keeps to the
        limit of memory. See `sched.cutting.with_recompute`.
    costs: "estimate", or "measure" by running every cluster on this machine; `Costs`, or a function
        of a program that gives them.
    passes: functions of a `Program`, for programs of the levels {"flat": [...], "clusters": [...],
        "stages": [...], "ranks": [...]}: as captured, fused, partitioned, and with all messages.
    machine: what to estimate for, a Machine, the name of a shipped one ("h100-sxm") or a path to
        its JSON; this machine's kind unless given.
    network: what `pfeife bench-network` has measured, a Network or the path to its JSON.
    cache: a folder in which measured costs and captured programs are kept.
    memory_limit: bytes a rank may use; the machine's memory unless given.
    optimizer: whose state counts beside the parameters, for the limit: an optimizer, its class,
        the class's name in torch.optim ("adamw"), or how many bytes are kept for each element
        of a parameter (float32 master weights are 4 of them).
    accumulate: in which type gradients are added up over microbatches, ranks and replicas:
        torch.float32 or "float32" where parameters are narrower; None for that of the parameters.
        They are rounded to that once, when they are handed out (unless `parameter.grad_dtype` is
        wider).
    param_dtype: the type that the step computes with: torch.bfloat16 or "bfloat16" while the
        model's parameters are in float32, which are its master weights. The step is captured as
        that of a model in this type (buffers and arguments stay what they are), copies are cast
        once a step, and gradients are added up and handed out in float32.
    deferred_batch_norm: whether batch norms track the running statistics of the whole batch, once
        a step, rather than those of every microbatch in turn. Each microbatch is normalised by its
        own in any case.
    devices: without torchrun, the device of every rank, such as ["cuda:0", "cuda:1"]; state that
        pfeife.compile finds lives with the stage that uses it.
    timeout: under torchrun, after how many seconds without progress in a step a rank is given up.
    compiler: of the stages: "aot_eager" runs their graphs as they are, "inductor" compiles them,
        and so does a function, see `pfeife.compilers.compile_bodies`.
    runtime: without torchrun, what runs the schedule in place of a thread a rank: a function of
        (program, lowered schedule, compiled bodies) that gives a `runtime.Pipeline`, with the
        results of all ranks.
    cuda_graphs: whether stages on CUDA devices are captured as CUDA graphs.
    loss: which result is the loss, where several could be: a name ("loss"), a path (("aux", 0))
        or an index into the tensors that the step returns, or "outside" if none of them is.
    loss_reduction: how the losses of microbatches combine: "mean", "sum", or "auto" for what the
        graph tells, see `pfeife.reductions`.
    reduce: for results without a batch dimension of which the graph does not tell, {name, path or
        index: "mean" or "sum"} over microbatches.
    fit_smaller_batches: whether a batch of fewer rows than the first, which does not divide into as
        many microbatches, runs with as many as keep them from having more rows; so does any batch
        without gradients, the first one too.
    capture: how `pfeife.compile` captures the step: by "dynamo", whose guards make that sound, by
        "trace", which runs it on tensors without storage, or "auto", the second where the first
        does not find one graph.
    dynamic: for which sizes of its arguments a program of `pfeife.compile` is, as in torch.compile:
        True for all, where the step does not depend on them; False for one each; None for one, and
        once a size has changed from call to call, for all that it may be (but with `passes` of your
        own, which may look at shapes: say True if they do not).
    max_sizes: the most that sizes of the arguments will be, {"tokens": {1: 512}}: by names and
        dimensions, as the caller's tensors have them. They are open from the first call on, and
        what does not fit into memory at these sizes is refused before anything runs.
        `torch._dynamo.mark_dynamic(tensor, 1, max=512)` says the same.
    sizes_hint: for which sizes of the arguments costs are taken and the cuts and the schedule are
        made, by names and dimensions; those of the first call unless given.
    max_programs: how many programs are kept of a step; beyond that, those that have not come for
        longest are dropped, with what was compiled of them.
    check: whether the first call is checked: that the rows of what is cut belong together, and that
        the captured program computes what the step does (some forwards of a microbatch; and a
        backward where the step was traced); and looked at where no rule tells what becomes of rows;
        and that `passes` change nothing of the first microbatch's results and gradients beyond
        rounding, or beyond this share of their largest value, if it is a number.
    compare_batches: whether ranks compare at every call the values of the batch that each of them
        was given, and the gradients that arrive where the loss is outside.
    log_every: after how many calls that train rank 0 logs a line (the logger `pfeife`, level INFO)
        with the means since the last one: seconds, tokens or samples and operations a second, the
        share of the machine's peak, the rank that waits longest, peaks of memory.
    on_step: a function that is given the `pfeife.StepFigures` of every call that trains, on the
        ranks that have one; calls that build a program have none.
    progress: whether rank 0 shows its progress on standard error, if that is a terminal.
    """

    microbatches: int = attrs.field(default=1, validator=_count)
    batch: Batch = attrs.field(default="global", validator=_batch)
    stages: int | None = attrs.field(default=None, validator=_count)
    schedule: Scheduling = attrs.field(default="1f1b", validator=check_schedule, repr=described)
    plan: Plan | str | os.PathLike[str] | None = attrs.field(
        default=None, converter=plan_of, validator=check_plan, repr=described
    )
    search_seconds: float = attrs.field(default=20.0, validator=_seconds)
    search_work: int | None = attrs.field(default=None, validator=_count)
    jobs: int = attrs.field(default=1, validator=_count)
    split_at: Mapping[str, str] | None = attrs.field(
        default=None, validator=_of(Mapping | None, "cuts such as {'blocks.4': 'begin'}")
    )
    replicas: int = attrs.field(default=1, validator=_count)
    data_parallel: DataParallel = attrs.field(default="average")
    bucket_bytes: int = attrs.field(default=BUCKET_BYTES, validator=_count)
    mesh: Mesh | None = attrs.field(default=None)
    costs: str | Costs | Callable[[Program], Costs] = attrs.field(
        default="estimate", validator=check_costs, repr=described
    )
    partition: Partition | None = attrs.field(
        default=None, converter=_tuple, validator=check_partition, repr=described
    )
    cut_at: CutAt = attrs.field(default="anywhere", converter=_tuple, validator=check_where)
    message_tolerance: float = attrs.field(default=MESSAGE_TOLERANCE, validator=check_where)
    recompute: RecomputePolicy | None = attrs.field(
        default=None, converter=_tuple, validator=check_recompute
    )
    passes: Passes = attrs.field(
        factory=dict, converter=passes_of, validator=check_passes, repr=described_passes
    )
    machine: Machine | str | os.PathLike[str] | None = attrs.field(
        default=None, validator=_machine, repr=False
    )
    network: Network | str | os.PathLike[str] | None = attrs.field(
        default=None, validator=_network, repr=False
    )
    cache: str | os.PathLike[str] | None = attrs.field(default=None, validator=_folder, repr=False)
    memory_limit: int | None = attrs.field(default=None, validator=_count)
    optimizer: Optimizer | None = attrs.field(
        default=None, converter=_optimizer, repr=optimizer_name
    )
    accumulate: torch.dtype | None = attrs.field(
        default=None, converter=dtype_of, validator=check_accumulate
    )
    param_dtype: torch.dtype | None = attrs.field(
        default=None, converter=dtype_of, validator=check_param_dtype
    )
    deferred_batch_norm: bool = attrs.field(default=False, validator=_flag)
    devices: tuple[str, ...] | None = attrs.field(
        default=None,
        converter=_tuple,
        validator=_devices,
    )
    loss: int | str | tuple[int | str, ...] | None = attrs.field(default=None, validator=_loss)
    loss_reduction: Literal["mean", "sum", "auto"] = attrs.field(default="auto")
    reduce: Mapping[int | str | tuple[int | str, ...], str] = attrs.field(
        factory=dict, validator=_of(Mapping, "a way by index such as {1: 'mean'}")
    )
    timeout: float = attrs.field(default=300.0, validator=_seconds)
    compiler: str | Compiler = attrs.field(
        default="aot_eager",
        validator=_compiler,
        repr=compiler_name,  # the same on every rank
    )
    runtime: Runtime | None = attrs.field(default=None, validator=check_runtime, repr=described)
    cuda_graphs: bool = attrs.field(default=False, validator=_flag)
    fit_smaller_batches: bool = attrs.field(default=True, validator=_flag)
    capture: Capture = attrs.field(default="auto", validator=_capture)
    dynamic: bool | None = attrs.field(default=None, validator=_flag_or_none)
    max_sizes: Sizes = attrs.field(factory=dict, validator=check_sizes)
    sizes_hint: Sizes = attrs.field(factory=dict, validator=check_sizes)
    max_programs: int = attrs.field(default=64, validator=_count)
    check: bool | float = attrs.field(default=True, validator=_check)
    compare_batches: bool = attrs.field(default=True, validator=_flag)
    log_every: int | None = attrs.field(default=None, validator=_count)
    on_step: OnStep | None = attrs.field(default=None, validator=_function, repr=False)
    progress: bool = attrs.field(default=True, validator=_flag, repr=False)

    @property
    def apart(self) -> int:
        """How many replicas are given batches of their own."""
        return self.replicas if self.batch == "replica" else 1

    @property
    def cut(self) -> int:
        """Into how many microbatches the batch is cut that one rank is given."""
        return self.microbatches // self.apart

    def __attrs_post_init__(self) -> None:
        if self.microbatches % self.replicas:
            raise ValueError(
                f"options microbatches={self.microbatches} and replicas={self.replicas}: "
                "every replica takes the same number of microbatches"
            )
        if self.data_parallel not in get_args(DataParallel):
            raise ValueError(
                f"option data_parallel={self.data_parallel!r}: must be 'average' or 'shard'"
            )
        if self.loss_reduction not in ("mean", "sum", "auto"):
            raise ValueError(
                f"option loss_reduction={self.loss_reduction!r}: must be 'mean', 'sum' or 'auto'"
            )
        wrong = {index: how for index, how in self.reduce.items() if how not in ("mean", "sum")}
        if wrong:
            raise ValueError(f"option reduce={wrong}: must be 'mean' or 'sum'")

    @property
    def texts(self) -> dict[str, str]:
        """What every option is, as all ranks write it."""
        fields = [field for field in attrs.fields(Options) if field.repr]
        return {
            field.name: (field.repr if callable(field.repr) else repr)(getattr(self, field.name))
            for field in fields
        }

    def __repr__(self) -> str:
        """Those that are not what they are anyway."""
        usual = Options().texts
        texts = (f"{name}={text}" for name, text in self.texts.items() if text != usual[name])
        return f"Options({', '.join(texts)})"

    def replicated(self, owners: Mapping[str, int | None]) -> Replicas:
        """What these options say of replicas; `owners` are those that train state already."""
        how, apart = self.data_parallel, self.apart > 1
        return Replicas(self.replicas, how, self.bucket_bytes, owners, apart)


def versions() -> tuple[str, ...]:
    """What must be the same on every rank beside the program."""
    python = ".".join(map(str, sys.version_info[:2]))
    return f"torch {torch.__version__}", f"pfeife {VERSION}", f"Python {python}"


def options_from(given: Mapping[str, Any]) -> Options:
    """Options from a mapping. Raises ValueError for a name that is none, or a wrong value."""
    known = [field.name for field in attrs.fields(Options)]
    unknown = sorted(map(str, set(given) - set(known)))
    if unknown:
        near = [name for one in unknown for name in get_close_matches(one, known, n=1)]
        meant = f"did you mean {near}?" if near else f"there are {known}"
        raise ValueError(f"unknown options {unknown}; {meant}")
    mesh = mesh_of(given.get("mesh"))
    if mesh is not None:
        if given.get("replicas", mesh.replicas) != mesh.replicas:
            raise ValueError(
                f"options replicas={given['replicas']} and mesh={given['mesh']!r}, which has "
                f"{mesh.replicas}: leave the first one out"
            )
        given = {**given, "mesh": mesh, "replicas": mesh.replicas}
    options = Options(**given)
    check_together(options)
    return options
