"""A net whose operations fail when they are told to, on ranks, ready to run."""

import os
import signal
import sys
import time
from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import fx, nn

import pfeife
from pfeife import sched
from pfeife.data.schedule import Action, Schedule
from pfeife.ir.members import ALONE, MEANING
from pfeife.ir.program import Program
from pfeife.lowering.buckets import buckets_of
from pfeife.lowering.envelope import APART
from pfeife.lowering.telling import kept_by_stage, tellings

WIDTH, ROWS = 8, 2
MANY = APART // (4 * WIDTH)  # rows of values that another thread sends
Strike = Callable[[torch.Tensor], torch.Tensor]


class Injected(ValueError):
    """What fails on purpose."""


class Switch:
    """Lets one of the next operations fail: the first, or the one after `skip` others."""

    def __init__(self) -> None:
        self.strike: Strike | None = None
        self.skip = 0

    def arm(self, strike: Strike | None, skip: int = 0) -> None:
        self.strike, self.skip = strike, skip

    def take(self) -> Strike | None:
        if self.strike is None or self.skip > 0:
            self.skip -= 1
            return None
        strike, self.strike = self.strike, None
        return strike


SWITCH = Switch()


# Members share what is computed number by number.
@torch.library.custom_op("pfeife_faults::pass_on", mutates_args=(), tags=(torch.Tag.pointwise,))
def pass_on(x: torch.Tensor) -> torch.Tensor:
    strike = SWITCH.take()
    return x.clone() if strike is None else strike(x)


pass_on.register_fake(torch.empty_like)
pass_on.register_autograd(lambda ctx, gradient: pass_on(gradient))


class Block(nn.Module):
    """A linear layer between two operations that may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = pass_on(x)
        x = torch.tanh(self.linear(x))
        return pass_on(x)


class Net(nn.Module):
    """Blocks in a chain; `tied`: the first one's weight is used again at the end."""

    def __init__(self, blocks: int, tied: bool):
        super().__init__()
        self.blocks, self.tied = nn.ModuleList(Block() for _ in range(blocks)), tied
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.seen.add_(x.detach().sum(0))
        return F.linear(x, self.blocks[0].linear.weight) if self.tied else x


def strikes(how: str) -> Strike:
    """What an operation does instead of its work."""

    def raise_one(x: torch.Tensor) -> torch.Tensor:
        raise Injected("injected")

    def exhaust(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(2**50)

    def misshape(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape[0] + 1, *x.shape[1:])

    return {"exception": raise_one, "out of memory": exhaust}.get(how, misshape)


def suffer(how: str) -> None:
    """What befalls a process as a whole."""
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how.startswith("SIGSTOP"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "SIGINT":
        os.kill(os.getpid(), signal.SIGINT)
    elif how == "exit":
        sys.exit(3)
    elif how == "slow":
        time.sleep(600)


@attrs.frozen(eq=False)
class Case:
    """A program and its schedule on `size` processes, with its state and its microbatches;
    `members` of them share each stage, where parameters are cut as `places` says."""

    name: str
    size: int
    program: Program
    schedule: Schedule
    net: Net
    step: Callable
    batch: list[tuple[torch.Tensor]]
    members: int = 1
    places: dict[str, int] = attrs.Factory(dict)

    @property
    def options(self) -> dict:
        """What pfeife.compile is told of members."""
        return {"members": self.members, "parallel": self.places} if self.places else {}

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return dict(pfeife.state_of(self.program, self.net))

    def actions(self, rank: int) -> tuple:
        return self.schedule.ranks[self._place(rank)]

    def _place(self, rank: int) -> int:
        """The rank of a pipeline that a rank of the world is, or is a member of."""
        return rank // self.members % len(self.schedule.ranks)

    def nearby(self, stage: int) -> list[int]:
        """The stages where a wrong value of a stage may be noticed: those beside it on its rank
        get it without a message."""
        stage_ranks = self.schedule.stage_ranks
        beside = [one for one in (stage - 1, stage + 1) if 0 <= one < len(stage_ranks)]
        return [stage, *(one for one in beside if stage_ranks[one] == stage_ranks[stage])]

    def operations(self, action: Action) -> int:
        """How many operations of an action can fail: none of those that only send or receive, nor
        of the gradients of weights."""
        nodes = self._nodes(action)
        return sum(node.op == "call_function" and "pass_on" in str(node.target) for node in nodes)

    def collectives(self, rank: int) -> int:
        """How many collectives a member is in within a step: keepers tell parameters, some in one
        message, then come those of the actions, and gradients in their buckets."""
        program, place = self.program, self._place(rank)
        told = [
            1 if telling.cut else sum(map(bool, telling.kept))
            for kept in kept_by_stage(program)
            if kept.rank == place
            for telling in tellings(kept.ports, program.members)
        ]
        reduced = [
            bucket.cut + (bucket.members > 1) * (1 if bucket.owned else 2)
            for bucket in buckets_of(program)
            if place in bucket.first.ranks
        ]
        nodes = [node for action in self.actions(rank) for node in self._nodes(action)]
        among = sum(node.target in MEANING.keys() - ALONE for node in nodes)
        return sum(told) + among + sum(reduced)

    def _nodes(self, action: Action) -> list[fx.Node]:
        """Those of the bodies that an action runs."""
        bodies = [
            self.program.body(call)
            for call in self.program.calls
            if call.unit == action.stage and action.runs(call.kind)
        ]
        return [node for body in bodies for node in body.graph.nodes]


def case(
    name: str,
    ranks: int,
    microbatches: int = 4,
    *,
    tied: bool = False,
    replicas: int = 1,
    members: int = 1,
    rows: int = ROWS,
) -> Case:
    """A chain of blocks under a family of schedules; members have the columns of one weight and the
    rows of the next one."""
    looped = name in ("interleaved", "zb-v")
    stages = 2 * ranks if looped else ranks
    torch.manual_seed(0)
    net = Net(2 * stages, tied)
    batch = [(torch.randn(rows, WIDTH),) for _ in range(microbatches * replicas)]

    def step(x: torch.Tensor) -> torch.Tensor:
        return net(x).square().mean()

    places: dict[str, int] = {}
    for at in range(0, 2 * stages if members > 1 else 0, 2):
        places |= {f"*blocks.{at}.linear.*": 0, f"*blocks.{at + 1}.linear.weight": 1}
    captured = pfeife.capture(step, *batch[0])
    if places:
        captured = pfeife.shard(places, members, keepers={})(captured)
    clusters = pfeife.fuse()(captured)
    if name.startswith("zb"):
        clusters = pfeife.split_backward()(clusters)
    core = pfeife.cost.machine("cpu-core")
    clusters = pfeife.annotate(pfeife.cost.estimate(clusters, core))(clusters)
    plan = sched.plan(
        clusters,
        machine=core,
        microbatches=microbatches,
        stages=stages,
        ranks=ranks,
        schedule=name,
    )
    passes = [pfeife.partition(plan), pfeife.insert_send_recv()]
    passes.append(pfeife.dp_wrap(pfeife.Mesh(ranks, replicas)))
    program = pfeife.compose(*passes)(clusters)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, program))
    words = [name, *(["tied"] if tied else []), *([f"{replicas} replicas"] if replicas > 1 else [])]
    words += ["large"] if rows >= MANY else []
    words += [f"{members} members"] if members > 1 else []
    size = ranks * replicas * members
    return Case(" ".join(words), size, program, schedule, net, step, batch, members, places)
