"""All that a plan decides, pass by pass."""

from collections.abc import Mapping

from pfeife.data.machine import Mesh
from pfeife.data.plan import Plan
from pfeife.data.replicas import Replicas, replicas_of
from pfeife.data.schedule import Do
from pfeife.ir.parts import Kind
from pfeife.ir.program import Program
from pfeife.passes.compose import Pass, Passes, compose
from pfeife.passes.dp_wrap import dp_wrap
from pfeife.passes.partition import partition
from pfeife.passes.send_recv import insert_send_recv
from pfeife.passes.split_backward import join_backward, split_backward


def apply(
    plan: Plan,
    replicas: int | Replicas = 1,
    owners: Mapping[str, frozenset[int]] | None = None,
    more: Passes | None = None,
) -> Pass:
    """A pass from a program of clusters to that of the ranks, as a plan has it: cuts,
    recomputation, split backwards, sends and receives, and what `replicas` reduce.

    Backwards are split where the plan's schedule wants it, whether those of the clusters are or
    not. `owners` are the ranks that train some of the state already, and `more` has what else the
    programs of "stages" and "ranks" become. Raises what these passes raise.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    >>> plan = pfeife.Plan((0, 1), sched.families.zb_h1(2, 4))
    >>> ranks = pfeife.apply(plan)(pfeife.fuse()(flat))
    >>> [call.node for call in ranks.calls if call.unit == 1]
    ['stage_1_forward', 'stage_1_input_backward', 'stage_1_weight_backward']
    """
    return lambda program: compose(*passes_of(plan, program, replicas, owners, more))(program)


def passes_of(
    plan: Plan,
    program: Program,
    replicas: int | Replicas = 1,
    owners: Mapping[str, frozenset[int]] | None = None,
    more: Passes | None = None,
) -> tuple[Pass, ...]:
    """The passes that `apply` makes of a program of clusters, for `record`."""
    replication = replicas_of(replicas)
    mesh = Mesh(len(plan.schedule.ranks), replication.count)
    stages, ranks = ((more or {}).get(level, ()) for level in ("stages", "ranks"))
    return (
        *_cut(plan, program),
        *stages,
        insert_send_recv(owners=owners),
        dp_wrap(mesh, replication),
        *ranks,
    )


def _cut(plan: Plan, program: Program) -> tuple[Pass, ...]:
    """Stages. What is recomputed is known of whole backwards: which part repeats it comes out when
    they are split."""
    are_split = any(call.kind == Kind.INPUT_BACKWARD for call in program.calls)
    wanted = any(action.do == Do.INPUT_BACKWARD for rank in plan.schedule.ranks for action in rank)
    trains = any(call.kind != Kind.FORWARD for call in program.calls)
    # A joined backward is split again by the same rule, so nothing else changes.
    if are_split and plan.recompute:
        return join_backward(), partition(plan), split_backward()
    if wanted and trains and not are_split:
        return partition(plan), split_backward()
    return (partition(plan),)
