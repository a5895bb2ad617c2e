"""Pfeife's own pipeline on every rank, over the model: real transport, runner, reducer and results.

Only what lies below them is the model's: the process group, streams, and where there are stores
and threads in a world of processes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import pfeife
from pfeife.ir.nodes import is_sized_by_data, returned
from pfeife.ir.parts import Call, Role
from pfeife.ir.program import Program
from pfeife.lowering.channel import MOST_QUEUED
from pfeife.runtime import interpret
from pfeife.runtime.distributed.batches.rank_zero import CallOfRankZero
from pfeife.runtime.distributed.control import peers
from pfeife.runtime.distributed.control.script_point import Script
from pfeife.runtime.distributed.links.channels import Ends
from pfeife.runtime.distributed.links.cuda_launch import MOST_QUEUES
from pfeife.runtime.distributed.links.reducing import Reducer
from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.failure import Failure
from strict.cuda import CUDA, host_here, on_cuda, replaced
from strict.gloo import GlooGroup
from strict.gpu import Machine
from strict.group import Communicators, Group
from strict.host import Host, Pace, run_hosts
from strict.programs import ROWS


class StrictConnection:
    """As Connection, with a group of the model: NCCL's, or Gloo's for a device that is the CPU."""

    def __init__(self, shared: Communicators, host: Host, device: torch.device):
        self.ranks, self.device, self.nccl = shared.ranks, device, device == CUDA
        self.mine = host.rank in self.ranks
        if self.mine:
            self.place = self.index(host.rank)
            self.group = (Group if self.nccl else GlooGroup)(shared, host)

    def index(self, rank: int) -> int:
        return self.ranks.index(rank)


class StrictWorld(World):
    """A rank's world, without the store and the threads that look after processes."""

    def __init__(self, host: Host, size: int):
        self.device, self.timeout, self.rank, self.size = CUDA, 300.0, host.rank, size
        self.failure, self.raised, self.waited, self.generation = None, False, 0.0, 0
        self.nccl, self.gloo, self.store = True, "gloo", dist.HashStore()
        self.looks = [lambda: Activity("the beginning")]
        host.where = lambda: self.looks[-1]().text
        self.connections: dict[Any, Any] = {}
        self.script = Script()
        self.reducer, self.ends = Reducer(CUDA), Ends(self)
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
    then; else they give values of the right shapes. Who does not know these before waits."""

    computes = host.pace == Pace.COMPUTING

    def body(call: Call) -> Callable:
        module = program.body(call)
        nodes = returned(module)
        values = [node.meta["val"] for node in nodes]
        made = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).zero_() for v in values]
        sized = [is_sized_by_data(node) for node in nodes]
        counts = any(node.target == torch.ops.aten.index.Tensor for node in module.graph.nodes)

        def run(*values: torch.Tensor) -> Sequence[torch.Tensor]:
            kernel = host.gpu.current.post("a kernel")
            if counts:
                host.synchronize(kernel, "counts rows")
            if computes:
                return module.forward(*values)
            rows = host.machine.operations % ROWS
            pairs = zip(made, sized, strict=True)
            return [(one[:rows] if some and one.dim() else one).clone() for one, some in pairs]

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
    told: int | None = None,
    blocks: bool = False,
    pace: Pace = Pace.AHEAD,
    **options: Any,
) -> list:
    """What `job` returns on every rank of a program's pipelines; the values mean something where
    hosts are computing. GPUs have so many hardware queues, of which pfeife is `told` the truth but
    where a test wants it otherwise. Raises Stuck or Mismatch."""
    mesh = mesh or pfeife.Mesh(len(schedule.ranks), program.replicas, members=program.members)
    machine = Machine(queues, blocks)
    shared: dict[Any, Communicators] = {}
    hosts = [Host(machine, rank, pace) for rank in range(mesh.size)]

    def start(host: Host) -> Any:
        own = StrictWorld(host, mesh.size)
        bodies = kernels(program, host) if program.members == 1 else {}  # these have collectives
        return job(StrictPipeline(own, program, schedule, bodies=bodies, mesh=mesh, **options))

    def connection(ranks: Sequence[int], device: torch.device, *known: Any) -> StrictConnection:
        key = tuple(ranks), known[-2] or "world"
        members = shared.setdefault(key, Communicators(key[1], key[0]))
        return StrictConnection(members, host_here(), device)

    jobs = [on_cuda(host, lambda host=host: start(host)) for host in hosts]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": str(told or queues or MOST_QUEUES)}
    with (
        replaced(),
        mock.patch.object(peers, "Connection", connection),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(interpret, "MOST", MOST_QUEUED),  # as for a program of a GPU
    ):
        return run_hosts(machine, hosts, jobs)


def steps_of(state: Mapping[str, torch.Tensor], microbatches: Sequence, count: int = 1) -> Job:
    """Some steps, one after another, of which each rank is given what it must be; the result of the
    last one."""

    def run(pipeline: StrictPipeline) -> Any:
        given = pipeline.given
        for _ in range(count):
            known = pipeline.known(microbatches[given.start : given.stop])
            found = pipeline(state, known)
        return found

    return run


def given_by_rank_zero(
    state: Mapping[str, torch.Tensor], microbatches: Sequence, *, everything: bool = False
) -> Job:
    """A step whose batch rank 0 alone has; others are sent what they read, or `everything`."""

    def run(pipeline: StrictPipeline) -> Any:
        own = pipeline.own
        batch = torch.cat([one for (one,) in microbatches])
        given = [batch] if own.rank == 0 else ["what does not count"]
        (whole,), _, sent = CallOfRankZero("a step")(own, given, {})
        if everything:
            sent.everything()
        sent.parts(pipeline.reads({port: whole for port in pipeline.program.ports(Role.BATCH)}))
        cut = [(one,) for one in whole.chunk(pipeline.microbatches)]
        return pipeline(state, pipeline.known(cut, of_rank_zero=True))

    return run


def beside(pipeline: StrictPipeline, program: Program, schedule: pfeife.Schedule) -> StrictPipeline:
    """Another pipeline in a rank's world (collective)."""
    bodies = kernels(program, host_here())
    return StrictPipeline(pipeline.own, program, schedule, bodies=bodies, mesh=pipeline.mesh)
