"""A process group that behaves as Gloo's does, for tensors of the CPU: streams have no part in it,
and whoever waits for a message is kept. Opposite ways are apart. (Gloo keeps small messages for who
receives them later; here nothing is kept.)"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from strict.gpu import Half, Meets, Operation, Stream
from strict.group import Group
from strict.host import Host


class Message(dist.Work):
    """What the host waits for."""

    def __init__(self, host: Host, operation: Operation):
        super().__init__()
        self.host, self.operation = host, operation

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.host.synchronize(self.operation, "waits for a message of the CPU")
        return True


class GlooGroup(Group):
    """One rank's end of a group, for messages."""

    def _half(self, sends: bool, tensors: Sequence[torch.Tensor], peer: int) -> Message:
        host, other, (tensor,) = self.host, self.shared.ranks[peer], tensors
        way = (host.rank, other) if sends else (other, host.rank)
        comm = self.shared.of(way, True)
        if host.rank not in comm.streams:
            comm.streams[host.rank] = Stream(host.gpu, comm.name, deque())
            host.gpu.streams.append(comm.streams[host.rank])
        what = f"a {'send to' if sends else 'receive from'} rank {other} of {tensor.nbytes} bytes"
        meets = Meets(comm, [Half(sends, other, tensor)])
        return Message(host, comm.streams[host.rank].post(what, meets=meets))
