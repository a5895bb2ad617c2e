"""What a step would take on machines that nobody has at hand: captured, planned, nothing run."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from pfeife.cost import estimate, member_prices, timing_of
from pfeife.cost import machine as machine_of
from pfeife.data.forecast import Forecast
from pfeife.data.garbage import seldom_collected
from pfeife.data.machine import Machine, Mesh
from pfeife.data.network import Network
from pfeife.data.optimizers import Optimizer, optimizer_of
from pfeife.data.plan import Plan
from pfeife.data.progress import Progress
from pfeife.data.replicas import DataParallel, Replicas
from pfeife.data.schedule import Schedule
from pfeife.frontend.cache.capture_cache import Folder
from pfeife.frontend.capture import capture
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.lowering.lower import lower
from pfeife.lowering.verify import verify_schedule
from pfeife.passes import (
    annotate,
    fuse,
    master_weights,
    overlap,
    record,
    shard,
    split_backward,
)
from pfeife.passes.apply import apply, passes_of
from pfeife.passes.compose import Recorded, compose
from pfeife.passes.overlap import still_bounded, with_overlap
from pfeife.passes.shard import Attention, Every, Placements, ways_to_share
from pfeife.report import Run, Target, expected, forecast_of
from pfeife.sched import plan as make_plan
from pfeife.sched.by_family import Scheduling, splits
from pfeife.sched.cutting import RecomputePolicy, split_at
from pfeife.sched.cutting.blocks import CutAt, cut_blocks
from pfeife.sched.cutting.recompute_policy import check_policy
from pfeife.sched.families.policies import policy
from pfeife.sched.sharing import first_planned, preferred


@attrs.frozen(kw_only=True)
class Question:
    """What a step is to be planned for.

    machine: a `Machine`, the name of a shipped one ("h100-sxm"), or the path of its JSON.
    ranks: how many there are, in all replicas together, and in all groups of members.
    microbatches: into how many parts the batch of all replicas is cut.
    stages, schedule, recompute, memory_limit, optimizer, search_seconds, jobs, cut_at: as of
        `sched.plan`; the stages and ranks of a given schedule are its own.
    split_at: cuts by hand, {"blocks.4": "begin"}.
    replicas: pipelines that share the microbatches; data_parallel: what they do with gradients,
        "average" or "shard".
    members: ranks that share the work of each stage;
        parallel: how parameters are cut over them, as `shard` takes it; "auto": all of them
        ("cut"), unless with some of them gathered a step takes less and fits;
        attention: whether they "gather" keys and values of a sequence that is cut, or let them go
        around in a "ring".
    network: the links between all ranks, where they are not the machine's own; pipelines are
        neighbours in it, and members of a stage are.
    master: the type of the parameters that an optimizer steps, where the step computes in a
        narrower one ("float32": master weights, see `master_weights`).
    plan: a plan that there is already; nothing is decided then.
    """

    machine: Machine | str = "h100-sxm"
    ranks: int
    microbatches: int
    replicas: int = 1
    members: int = 1
    parallel: Placements | Every = "auto"
    attention: Attention = "gather"
    data_parallel: DataParallel = "average"
    stages: int | None = None
    schedule: Scheduling = "1f1b"
    network: Network | None = None
    optimizer: Optimizer | None = None
    memory_limit: int | None = None
    recompute: RecomputePolicy | None = None
    split_at: dict[str, str] | None = None
    cut_at: CutAt = "anywhere"
    master: str | None = None
    search_seconds: float | None = None
    jobs: int = 1
    plan: Plan | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("ranks", "microbatches"):
            if getattr(self, name) % self.replicas:
                raise ValueError(
                    f"{name}={getattr(self, name)} and replicas={self.replicas}: every replica has "
                    "the same number of them"
                )
        if self.ranks // self.replicas % self.members:
            raise ValueError(
                f"ranks={self.ranks} and members={self.members}: each stage is a group of "
                f"{self.members} ranks, and {self.replicas} replicas of such stages do not have "
                f"{self.ranks} in all"
            )
        # These raise for what they do not know: here it costs nothing, after a capture a minute.
        if isinstance(self.machine, str):
            machine_of(self.machine)
        if self.optimizer is not None:
            optimizer_of(self.optimizer)
        check_policy(self.recompute)
        if isinstance(self.schedule, str) and self.schedule != "search":
            policy(self.schedule)

    @property
    def each(self) -> int:
        """The ranks of a replica, each of which is a group of members."""
        return self.ranks // self.replicas // self.members

    @property
    def share(self) -> int:
        """The microbatches of a replica."""
        return self.microbatches // self.replicas

    @property
    def on(self) -> Machine:
        """The machine itself, with the links between members."""
        machine = self.machine if isinstance(self.machine, Machine) else machine_of(self.machine)
        return self.network.for_members(machine, self.mesh) if self.network else machine

    @property
    def splits(self) -> bool:
        """Whether the clusters have their backwards in two parts."""
        # Where there is a plan already, `apply` splits as its schedule wants it.
        return splits(self.schedule) and self.plan is None

    @property
    def mesh(self) -> Mesh:
        """How the ranks are pipelines, replicas and members."""
        return Mesh(self.each, self.replicas, members=self.members)


@attrs.frozen(eq=False)
class Outlook:
    """A step with its plan and all that is expected of it: `run` is its timeline, critical path and
    memory on the `target`. `clusters` with their costs is what was planned, `ranks` the program
    of the plan, and `schedule` what its ranks do, transfers and all."""

    clusters: Program
    ranks: Program
    schedule: Schedule
    plan: Plan
    target: Target
    run: Run
    forecast: Forecast
    replicas: Replicas

    def history(self) -> tuple[Recorded, ...]:
        """The programs from the clusters to that of the ranks, with what each pass has changed."""
        more = with_overlap({}, self.clusters.members, timing_of(self.target.machine))
        return record(self.clusters, *passes_of(self.plan, self.clusters, self.replicas, more=more))


def forecast(
    step: Callable[..., Any] | Program,
    *microbatch: Any,
    cache: Folder = None,
    progress: Progress | None = None,
    **question: Any,
) -> Outlook:
    """The plan of a step for a machine, and its forecast; nothing is run and nothing allocated.

    `step` is called with one `microbatch`, whose tensors may be on the meta device, as the model
    may be; or it is a flat program that `flat_program` gave, so that a second question needs no
    second capture. The other arguments are the fields of `Question`. Raises ValueError for a
    question without an answer, as `capture` and `sched.plan` do, before anything is captured where
    its machine or its schedule is not known.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> step = lambda x: net(x).square().mean()
    >>> batch = torch.ones(2, 4)
    >>> outlook = pfeife.forecast(step, batch, machine="cpu-core", ranks=2, microbatches=4)
    >>> figures = outlook.forecast
    >>> outlook.plan.stages, figures.parameters, figures.step_seconds < 1
    (2, 40, True)
    """
    valid_question = Question(**question)
    flat = step if isinstance(step, Program) else flat_program(step, *microbatch, cache=cache)
    return answer(flat, valid_question, progress)


@seldom_collected()
def flat_program(
    step: Callable[..., Any], *microbatch: Any, cache: Folder = None, **kwargs: Any
) -> Program:
    """A step captured for planning: as `capture` does, where all tensors of a microbatch have their
    rows in front, and nobody asks how the losses of microbatches combine."""
    program = capture(step, *microbatch, loss_reduction="mean", cache=cache, **kwargs)
    inputs = (
        attrs.evolve(port, batch_dim=0) if port.role == Role.BATCH and port.shape else port
        for port in program.inputs
    )
    return attrs.evolve(program, inputs=tuple(inputs))


def answer(flat: Program, question: Question, progress: Progress | None = None) -> Outlook:
    """What `forecast` says of a flat program."""
    return outlook(clusters_of(flat, question), question, progress)


@seldom_collected()
def outlook(
    ways: Sequence[Program], question: Question, progress: Progress | None = None
) -> Outlook:
    """What `forecast` says of the first of the `clusters_of` a question that has a plan."""
    return first_planned(ways, lambda way: _outlook(way, question, progress), ValueError)


def _outlook(clusters: Program, question: Question, progress: Progress | None) -> Outlook:
    machine = question.on
    mesh, replicas = question.mesh, Replicas(question.replicas, question.data_parallel)
    # Two views of the links: those in a pipeline carry the messages of stages, those between the
    # pipelines the gradients that replicas reduce.
    network = question.network.within(mesh) if question.network else None
    between = question.network.between(mesh) if question.network and question.replicas > 1 else None
    plan = question.plan or _plan(clusters, question, machine, network, replicas, progress)
    # The same passes, lowering and proof as before a real step: a forecast of a plan that could not
    # run would be worth nothing.
    plain = apply(plan, replicas)(clusters)
    program = overlap(timing_of(machine))(plain)
    plan = still_bounded(plan, plain, program)
    schedule = verify_schedule(lower(plan.schedule, program))
    target = Target(machine, network, between, question.optimizer, question.memory_limit)
    run = expected(program, schedule, target)
    figures = forecast_of(plan, clusters, program, run, target, schedule_name(question))
    # What the report cannot know of: the links in words, and the blocks that the cuts go through.
    joins = question.network.summary if question.network else ""
    within = cut_blocks(clusters, plan.stage_of_cluster)
    figures = attrs.evolve(figures, network=joins, cut_blocks=within)
    return Outlook(clusters, program, schedule, plan, target, run, figures, replicas)


def schedule_name(question: Question) -> str:
    """What a question's schedule is called."""
    if question.plan is not None:
        return "the given plan"
    schedule = question.schedule
    return schedule if isinstance(schedule, str) else f"a {type(schedule).__name__}"


@seldom_collected()
def clusters_of(flat: Program, question: Question) -> Sequence[Program]:
    """The clusters with costs, the same for all questions of one machine, one precision, as many
    members of a stage and as many parts of a backward; several if there are `ways_to_share`, as
    `preferred`."""
    ways = ways_to_share(question.parallel) if question.members > 1 else (question.parallel,)
    clusters = [_clusters(flat, question, parallel) for parallel in ways]
    return [clusters[at] for at in preferred(clusters, question.on, question.share, question.plan)]


def _clusters(flat: Program, question: Question, parallel: Placements | Every) -> Program:
    passes = []
    if question.master is not None:
        wide = getattr(torch, question.master, None)
        if not isinstance(wide, torch.dtype):
            raise ValueError(f"master={question.master!r}: must be a dtype such as 'float32'")
        passes.append(master_weights(wide))
    if question.members > 1:
        prices = member_prices(question.on, question.share)
        passes.append(
            shard(
                parallel,
                question.members,
                unknown="gather",
                attention=question.attention,
                keepers={},
                prices=prices,
            )
        )
    passes.append(fuse(boundaries=question.split_at or {}))  # type: ignore[arg-type]
    # Without tangents there is no backward to split.
    if question.splits and flat.ports(Role.TANGENT):
        passes.append(split_backward())
    # Costs last: they are of the calls that the passes before have made.
    fused = compose(*passes)(flat)
    return annotate(estimate(fused, question.on))(fused)


def _plan(
    clusters: Program,
    question: Question,
    machine: Machine,
    network: Network | None,
    replicas: Replicas,
    progress: Progress | None,
) -> Plan:
    # A given schedule has a number of stages already; another one beside it would be refused.
    schedule_given = isinstance(question.schedule, Schedule)
    return make_plan(
        clusters,
        machine=machine,
        microbatches=question.share,
        ranks=question.each,
        stages=None if schedule_given else question.stages,
        schedule=question.schedule,
        cuts=split_at(clusters, question.split_at) if question.split_at else None,
        memory_limit=question.memory_limit,
        cut_at=question.cut_at,
        network=network,
        optimizer=question.optimizer,
        replicas=replicas,
        search_seconds=question.search_seconds,
        jobs=question.jobs,
        recompute=question.recompute,
        progress=progress,
        passes=with_overlap({}, clusters.members, timing_of(machine)),
    )
