"""Pfeife's own pipeline on every rank, over the model: real transport, runner, reducer and results.

Only what lies below them is the model's: the process group, streams, and where there are stores
and threads in a world of processes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import pfeife
from pfeife.ir.program import Call, Program, returned
from pfeife.runtime.distributed import world
from pfeife.runtime.distributed.heartbeat import Doing
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.reducing import Reducer
from pfeife.runtime.distributed.world import World
from pfeife.runtime.failure import Failure
from strict.cuda import CUDA, host_here, on_cuda, replaced
from strict.gpu import Machine
from strict.group import Communicators, Group
from strict.host import Host, Pace, run_hosts


class StrictConnection:
    """As Connection of NCCL, with a group of the model."""

    def __init__(self, shared: Communicators, host: Host):
        self.ranks, self.device, self.nccl = shared.ranks, CUDA, True
        self.mine = host.rank in self.ranks
        if self.mine:
            self.place, self.group = self.index(host.rank), Group(shared, host)

    def index(self, rank: int) -> int:
        return self.ranks.index(rank)


class StrictWorld(World):
    """A rank's world, without the store and the threads that look after processes."""

    def __init__(self, host: Host, size: int):
        self.device, self.timeout, self.rank, self.size = CUDA, 300.0, host.rank, size
        self.failure, self.raised, self.waiting, self.waited = None, False, None, 0.0
        self.inside, self.asking, self.generation = 0, False, 0
        self.nccl, self.gloo, self.store = True, None, dist.HashStore()
        self.look = lambda: Doing("the beginning")
        host.where = lambda: self.look().text
        self.connections: dict[Any, Any] = {}
        self.reducer, self.sender = Reducer(CUDA), None
        self.connection = self.connection_of(range(size))

    def stop(self, failure: Failure) -> Failure:
        self.failure = failure
        return failure


class StrictPipeline(DistributedPipeline):
    """A rank's pipeline in such a world."""

    def __init__(self, own: StrictWorld, *args: Any, **options: Any):
        self.own = own
        super().__init__(*args, device=CUDA, **options)

    def _world(self) -> StrictWorld:
        return self.own


def kernels(program: Program, host: Host) -> dict[str, Callable]:
    """Stage bodies that put a kernel on the stream, and compute where the host has what arrived by
    then; else they give values of the right shapes."""

    computes = host.pace == Pace.COMPUTING

    def body(call: Call) -> Callable:
        module = program.body(call)
        values = [node.meta["val"] for node in returned(module)]
        made = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).zero_() for v in values]

        def run(*values: torch.Tensor) -> Sequence[torch.Tensor]:
            host.gpu.current.post("a kernel")
            return module.forward(*values) if computes else [one.clone() for one in made]

        return run

    return {call.node: body(call) for call in program.calls}


Job = Callable[[StrictPipeline], Any]


def on_strict_ranks(
    program: Program,
    schedule: pfeife.Schedule,
    job: Job,
    *,
    mesh: pfeife.Mesh | None = None,
    queues: int | None = None,
    pace: Pace = Pace.AHEAD,
    **options: Any,
) -> list:
    """What `job` returns on every rank of a program's pipelines; the values mean something where
    hosts are computing. Raises Stuck or Mismatch."""
    mesh = mesh or pfeife.Mesh(len(schedule.ranks), program.replicas)
    machine = Machine(queues)
    shared: dict[Any, Communicators] = {}
    hosts = [Host(machine, rank, pace) for rank in range(mesh.size)]

    def start(host: Host) -> Any:
        own = StrictWorld(host, mesh.size)
        bodies = kernels(program, host)
        return job(StrictPipeline(own, program, schedule, bodies=bodies, mesh=mesh, **options))

    def connection(ranks: Sequence[int], *known: Any) -> StrictConnection:
        key = tuple(ranks), known[-2] or "world"
        members = shared.setdefault(key, Communicators(key[1], key[0]))
        return StrictConnection(members, host_here())

    jobs = [on_cuda(host, lambda host=host: start(host)) for host in hosts]
    with replaced(), mock.patch.object(world, "Connection", connection):
        return run_hosts(machine, hosts, jobs)


def steps_of(state: Mapping[str, torch.Tensor], microbatches: Sequence, count: int = 1) -> Job:
    """Some steps, one after another; the result of the last one."""

    def run(pipeline: StrictPipeline) -> Any:
        for _ in range(count):
            found = pipeline(state, microbatches)
        return found

    return run
