"""The table of options: a row is a field and its line in the docstring above it.

From a row come the check and the type of the option, `help(pfeife.compile)`, its default there and
its line in docs/options.md (`python docs/options_page.py` writes the page), the text by which ranks
compare what they were given, and a flag of the commands where `commands/arguments.py` names it. A
section of the page is a class here.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import attrs
import torch
from attrs.validators import optional

from pfeife.backend.settings import option_checks as checks
from pfeife.backend.settings.declared import Sizes, check_sizes
from pfeife.compilers import Compiler, checked, compiler_name
from pfeife.data.figures import OnStep
from pfeife.data.machine import Machine, Mesh
from pfeife.data.network import Network
from pfeife.data.optimizers import Optimizer, optimizer_name
from pfeife.data.plan import Costs, Plan
from pfeife.data.replicas import BUCKET_BYTES, DataParallel
from pfeife.ir.program import Program
from pfeife.passes.compose import Passes
from pfeife.passes.shard import Attention, Every
from pfeife.runtime.distributed.batches.meshes import mesh_of
from pfeife.runtime.protocols import Runtime
from pfeife.sched.by_family import Scheduling
from pfeife.sched.cutting import (
    MESSAGE_TOLERANCE,
    CutAt,
    Partition,
    RecomputePolicy,
    check_cut_at,
    checked_tolerance,
)

Batch = Literal["global", "replica", "rank0"]
Capture = Literal["auto", "dynamo", "trace"]
PathOf = str | os.PathLike[str]
Where = int | str | tuple[int | str, ...]  # of a result: its index, name or path


@attrs.frozen(kw_only=True, slots=False)
class BatchOptions:
    """The batch.

    microbatches: Into how many equal parts the batch of a call is cut. This counts the microbatches
        of all replicas together.
    in_dims: Where the batch is in the arguments, as in `torch.vmap`: a number, `None` for nowhere,
        or a nested structure of them. It may also go by name: `in_dims={"table": None}` hands
        `table` over whole. What is not said is cut along dimension 0. Only `pfeife.compile` takes
        it.
    batch: What each rank gives to a call under torchrun: the batch of all replicas (`"global"`),
        the batch of its own replica (`"replica"`), or nothing except on rank 0 (`"rank0"`). See
        [where batches come from](train.md#where-batches-come-from). One process is always given the
        whole batch.
    fit_smaller_batches: What happens to a batch that has fewer rows than the first one and does not
        divide. `True`: it runs with as many microbatches as divide it, the fewest that are not
        larger than those of the first batch (7 rows, where 4 were the most: 7 microbatches of one
        row); so does any batch without gradients, the first one too. With replicas each takes as
        many, so an odd batch is refused with two. The first batch that trains must divide. `False`:
        it is an error.
    compare_batches: Whether the ranks compare, at every call, the values of the batch and of other
        tensors that nobody trains (by SHA-256). With the loss outside of the step they compare the
        gradients that arrive as well.
    """

    microbatches: int = attrs.field(default=1, validator=checks.count)
    in_dims: Any = attrs.field(default=0, repr=False)
    batch: Batch = attrs.field(default="global", validator=checks.one_of(Batch))
    fit_smaller_batches: bool = attrs.field(default=True, validator=checks.flag)
    compare_batches: bool = attrs.field(default=True, validator=checks.flag)


@attrs.frozen(kw_only=True, slots=False)
class CutOptions:
    """Stages and where to cut.

    stages: How many stages there are; one a rank unless given. If there are more stages than ranks,
        they are assigned in turn.
    partition: Where to cut, if not by time. `"uniform"`, `"parameters"` or `"type:Block"`
        (DeepSpeed's words); a list of modules at which stages start (`["blocks.2", "blocks.4"]`) or
        of cluster numbers; or a function from the program to the stage of every cluster.
    cut_at: Where stages may start: `"anywhere"` between clusters, `"blocks"` only at the borders of
        the model's repeated blocks (elements of a ModuleList or Sequential that are alike), or a
        list of modules, only at their borders.
    message_tolerance: How much longer, as a fraction, a step may take if its messages are smaller.
        A plan gets as much of that as its messages take less, because seconds are estimates and
        bytes are exact. `0` takes the shortest step by estimate.
    split_at: Cuts by hand: `{"blocks.4": "begin"}`. In the model, `pfeife.stage_boundary(x)` does
        the same.
    plan: All decisions, made before: a `Plan`, or the path to its JSON. Nothing is searched. A plan
        that does not fit the program is refused.
    """

    stages: int | None = attrs.field(default=None, validator=optional(checks.count))
    partition: Partition | None = attrs.field(
        default=None,
        converter=checks.as_partition,
        validator=checks.check_partition,
        repr=checks.described,
    )
    cut_at: CutAt = attrs.field(
        default="anywhere",
        converter=checks.as_borders,
        validator=checks.unless_refused(check_cut_at),
    )
    message_tolerance: float = attrs.field(
        default=MESSAGE_TOLERANCE, validator=checks.unless_refused(checked_tolerance)
    )
    split_at: Mapping[str, str] | None = attrs.field(
        default=None,
        validator=checks.must_be("cuts such as {'blocks.4': 'begin'}", kinds=Mapping | None),
    )
    plan: Plan | None = attrs.field(
        default=None,
        converter=checks.plan_of,
        validator=checks.must_be(
            "a Plan (Plan(stages of the clusters, schedule) is the shortest one by hand), or the "
            "path to its JSON",
            kinds=Plan | None,
        ),
        repr=checks.described,
    )


@attrs.frozen(kw_only=True, slots=False)
class ScheduleOptions:
    """The schedule and its search.

    schedule: A family by name (`"gpipe"`, `"1f1b"`, `"interleaved"`, `"zb-h1"`, `"zb-v"`, ...; [all
        of them](compilers.md#schedules)), a `Family` of your own, a `Schedule`, or a function from
        a `Problem` to a `Schedule`. `"search"` looks for cuts, placement, stages a rank,
        recomputation and schedule together.
    search_seconds: How many seconds a search takes.
    search_work: How many operations a search looks at, in place of seconds. It finds the same plan
        on any machine.
    jobs: How many searches run side by side, each in a process of its own and from another seed.
    """

    schedule: Scheduling = attrs.field(
        default="1f1b", validator=checks.check_schedule, repr=checks.described
    )
    search_seconds: float = attrs.field(default=20.0, validator=checks.seconds)
    search_work: int | None = attrs.field(default=None, validator=optional(checks.count))
    jobs: int = attrs.field(default=1, validator=checks.count)


@attrs.frozen(kw_only=True, slots=False)
class ReplicaOptions:
    """Replicas and members.

    replicas: How many pipelines share the microbatches and average their gradients.
    data_parallel: What the replicas do with their gradients. `"average"`: every replica gets all of
        them. `"shard"`: one replica trains each parameter, and it alone keeps a gradient and
        optimizer state for it (ZeRO-2). The others have the new value when `optimizer.step()` is
        over.
    bucket_bytes: How many bytes of a stage's gradients are reduced together (25 MiB). The reduction
        starts after the last weight gradient of the stage, while the rest computes.
    mesh: Which ranks form a pipeline. Row-major sizes, of which the negative one is that of the
        replicas: `"-2,4"` means that ranks 0 to 3 are a pipeline, `"4,-2"` that ranks 0, 2, 4 and 6
        are. Or a `DeviceMesh` with dimensions `"pp"` and `"dp"`, or a `Mesh`. The mesh gives
        `replicas`. Without a mesh, the ranks of a pipeline are neighbours; if `network` has all
        links and a step is faster that way by estimate, the ranks of the replicas are.
    members: How many ranks share the work of each stage. A stage's ranks are neighbours, and a
        `mesh` gives them as its dimension `"tp"`, `"ep"` or `"cp"`: see [sharding](sharding.md).
    parallel: How parameters are shared among members: `"cut"`, each along the dimension that takes
        least; `"gathered"`, one member keeps it and tells the others all of it once a step;
        `"auto"`, whichever takes less, as far as there is room. Or patterns of modules' names to
        torch's styles (`{"*.up": ColwiseParallel()}`) or Hugging Face's words (as
        `config.base_model_tp_plan` and `base_model_ep_plan`), or of parameters to dimensions or
        `"gathered"`.
    attention: How members that have parts of a sequence read its keys and values: they `"gather"`
        all of them, or let them go around in a `"ring"`, block by block.
    """

    replicas: int = attrs.field(default=1, validator=checks.count)
    data_parallel: DataParallel = attrs.field(
        default="average",
        validator=checks.must_be("'average' or 'shard'", words=get_args(DataParallel)),
    )
    bucket_bytes: int = attrs.field(default=BUCKET_BYTES, validator=checks.count)
    mesh: Mesh | None = attrs.field(default=None, converter=mesh_of)
    members: int = attrs.field(default=1, validator=checks.count)
    parallel: Mapping[str, Any] | Every = attrs.field(
        default="auto", validator=checks.check_parallel, repr=checks.described_parallel
    )
    attention: Attention = attrs.field(default="gather", validator=checks.one_of(Attention))


@attrs.frozen(kw_only=True, slots=False)
class CostOptions:
    """What things cost.

    costs: Where the seconds come from: `"estimate"` (a roofline), `"measure"` (every cluster runs
        once on this machine), `Costs`, or a function from a program to `Costs`.
    machine: What to plan for: a name (`"h100-sxm"`; `pfeife machines` lists all), a path to a JSON
        file, or a `Machine`. This machine's kind unless given.
    network: The links: a `Network`, or a path to what `pfeife bench-network --out` has measured.
    cache: A folder for measured costs and captured programs. Without it, nothing is written. See
        [the capture cache](how_it_works.md#the-capture-cache).
    """

    costs: str | Costs | Callable[[Program], Costs] = attrs.field(
        default="estimate",
        validator=checks.must_be(
            "'estimate' or 'measure', Costs, or a function of a Program that gives them",
            words=("estimate", "measure"),
            kinds=Costs | Callable,
        ),
        repr=checks.described,
    )
    machine: Machine | PathOf | None = attrs.field(
        default=None,
        validator=checks.must_be(
            "a Machine, the name of one, or a path to its JSON",
            kinds=Machine | str | os.PathLike | None,
        ),
        repr=False,
    )
    network: Network | PathOf | None = attrs.field(
        default=None,
        validator=checks.must_be(
            "a Network or the path to its JSON", kinds=Network | str | os.PathLike | None
        ),
        repr=False,
    )
    cache: PathOf | None = attrs.field(default=None, validator=checks.check_folder, repr=False)


@attrs.frozen(kw_only=True, slots=False)
class MemoryOptions:
    """Memory.

    memory_limit: How many bytes a rank may use; the machine's memory unless given. No plan needs
        more, by an account of every byte.
    optimizer: Whose state counts within the limit: an optimizer, its class, its name (`"adamw"`),
        or how many bytes it keeps for each element of a parameter (8 for Adam, 12 with float32
        master weights).
    recompute: What the stages recompute in the backward. `"never"`, `"always"`, `"except_last"`
        (all stages but the last), `2` (the inside of every second block), `["blocks.0"]` (the
        inside of these modules), or `"auto"` (as little as keeps to the memory).
    """

    memory_limit: int | None = attrs.field(default=None, validator=optional(checks.count))
    optimizer: Optimizer | None = attrs.field(
        default=None, converter=checks.optimizer_or_none, repr=optimizer_name
    )
    recompute: RecomputePolicy | None = attrs.field(
        default=None, converter=checks.as_recompute, validator=checks.check_recompute
    )


@attrs.frozen(kw_only=True, slots=False)
class PrecisionOptions:
    """Precision.

    param_dtype: `"bfloat16"`: the step computes as it does after `model.to(torch.bfloat16)`, except
        for buffers. The model, its optimizer and its checkpoints stay in float32: they are the
        master weights. Copies are cast once a step, messages are in bfloat16, and gradients are
        added up and handed out in float32. Arguments are not cast. Only `pfeife.compile` takes it.
    accumulate: `"float32"`: gradients of bfloat16 or float16 parameters are added up in float32,
        over microbatches, stages and replicas, and rounded once. They are not rounded where
        `p.grad_dtype = torch.float32`.
    deferred_batch_norm: `True`: batch norms track the running statistics of the whole batch (of all
        replicas), once a step, as those of torchgpipe do. Each microbatch is still normalised by
        its own statistics.
    """

    param_dtype: torch.dtype | None = attrs.field(
        default=None,
        converter=checks.dtype_of,
        validator=checks.must_be(
            "'bfloat16', 'float16', 'float32' (of a model in float64), or None for the type that "
            "the parameters have",
            words=(None, torch.bfloat16, torch.float16, torch.float32),
        ),
    )
    accumulate: torch.dtype | None = attrs.field(
        default=None,
        converter=checks.dtype_of,
        validator=checks.must_be(
            "'float32', 'float64', or None for the type of the parameters",
            words=(None, torch.float32, torch.float64),
        ),
    )
    deferred_batch_norm: bool = attrs.field(default=False, validator=checks.flag)


@attrs.frozen(kw_only=True, slots=False)
class ResultOptions:
    """The loss and other results.

    loss: Which result is the loss, where several could be: a name (`"loss"`), a path (`("aux", 0)`)
        or an index (`1`) of what the step returns; or `"outside"` if none of them is.
    loss_reduction: How the losses of the microbatches combine: `"mean"`, `"sum"`, or what the graph
        tells (`"auto"`). See [the rules](guarantees.md#the-loss-and-other-results).
    reduce: How to combine results without a batch dimension, where the graph does not tell:
        `{"ratio": "mean"}`.
    """

    loss: Where | None = attrs.field(default=None, validator=checks.check_loss)
    loss_reduction: Literal["mean", "sum", "auto"] = attrs.field(
        default="auto",
        validator=checks.must_be("'mean', 'sum' or 'auto'", words=("mean", "sum", "auto")),
    )
    reduce: Mapping[Where, str] = attrs.field(factory=dict, validator=checks.check_reduce)


@attrs.frozen(kw_only=True, slots=False)
class CaptureOptions:
    """Capture and checks.

    dynamic: For which sizes of its arguments a program is, as in `torch.compile`. `None`: for those
        of the first call, and once a size has changed from call to call, for all that it may be.
        `True`: for all from the first call on. `False`: one program for each size.
        `torch._dynamo.mark_dynamic` on an argument says it of one dimension. With `passes` of your
        own, which may look at shapes, `None` is as `False`. See [lengths](train.md#lengths).
    max_sizes: The most that sizes of the arguments will be, `{"tokens": {1: 512}}`: by names and
        dimensions, as your tensors have them. They are left open from the first call on, and what
        does not fit into memory at these sizes is refused before anything runs.
        `torch._dynamo.mark_dynamic(tensor, 1, max=512)` says the same.
    sizes_hint: For which sizes of the arguments costs are taken and the cuts and the schedule are
        made; those of the first call unless given.
    max_programs: How many programs are kept of a step. Beyond that, those that have not come for
        longest are dropped, with what was compiled of them, and a line of the log says so once.
    capture: How `pfeife.compile` captures the step. `"dynamo"`: with torch's compiler, whose guards
        make it sound. `"trace"`: by running it on tensors without storage. `"auto"`: the second
        where the first does not find one graph.
    check: Whether the first call checks that the rows that are cut belong together and that the
        program computes what the step does. This costs some forwards of a microbatch, and with
        Dynamo a sixth of the time of a first call, in which the step is read on twice the rows: a
        number that counts these must not decide a result. Passes of your own must compute what they
        were given, too; a number (`0.02`) lets them change results by that share of the largest
        value of each.
    """

    dynamic: bool | None = attrs.field(default=None, validator=optional(checks.flag))
    max_sizes: Sizes = attrs.field(factory=dict, validator=check_sizes)
    sizes_hint: Sizes = attrs.field(factory=dict, validator=check_sizes)
    max_programs: int = attrs.field(default=64, validator=checks.count)
    capture: Capture = attrs.field(default="auto", validator=checks.one_of(Capture))
    check: bool | float = attrs.field(default=True, validator=checks.check_check)


@attrs.frozen(kw_only=True, slots=False)
class RunOptions:
    """How the stages run.

    compiler: What compiles the stages. `"aot_eager"` runs their graphs as they are, `"inductor"`
        compiles them, and so does a function of (graph module, example tensors).
    cuda_graphs: Whether stages on CUDA devices are captured as CUDA graphs; where batches have many
        sizes, for those that come again, 8 at most.
    devices: Without torchrun, the device of every rank: `["cuda:0", "cuda:1"]`. Parameters live
        with their stages. See [several devices](train.md#several-devices-in-one-process).
    passes: Passes of your own, by level: `{"flat": [...], "clusters": [...], "stages": [...],
        "ranks": [...]}`. Each is a function from `Program` to `Program`.
    runtime: Without torchrun, what runs the schedule in place of a thread a rank: a function of
        (program, schedule, bodies) that gives a `runtime.Pipeline`, with the results of all ranks.
        [A transport of your own](compilers.md#a-transport-of-your-own) gets in here.
    timeout: Under torchrun, after how many seconds without progress in a step a rank is given up.
    """

    compiler: str | Compiler = attrs.field(
        default="aot_eager", validator=checks.unless_refused(checked), repr=compiler_name
    )
    cuda_graphs: bool = attrs.field(default=False, validator=checks.flag)
    devices: tuple[Any, ...] | None = attrs.field(
        default=None, converter=checks.as_devices, validator=checks.check_devices
    )
    passes: Passes = attrs.field(
        factory=dict,
        converter=checks.passes_of,
        validator=checks.check_passes,
        repr=checks.described_passes,
    )
    runtime: Runtime | None = attrs.field(
        default=None,
        validator=checks.must_be(
            "a function of (program, schedule, bodies) that gives a Pipeline, such as a class with "
            "its methods",
            kinds=Callable | None,
        ),
        repr=checks.described,
    )
    timeout: float = attrs.field(default=300.0, validator=checks.seconds)


@attrs.frozen(kw_only=True, slots=False)
class ShownOptions:
    """What is shown.

    log_every: After how many training calls rank 0 logs a line with the means since the last one
        (logger `pfeife`, level INFO).
    on_step: A function that is given a `pfeife.StepFigures` after every training call.
    progress: Whether rank 0 shows progress bars on standard error, if that is a terminal.
    """

    log_every: int | None = attrs.field(default=None, validator=optional(checks.count))
    on_step: OnStep | None = attrs.field(
        default=None, validator=checks.must_be("a function", kinds=Callable | None), repr=False
    )
    progress: bool = attrs.field(default=True, validator=checks.flag, repr=False)
