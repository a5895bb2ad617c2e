"""The collectives of a script's own: whether its thread waits in one of torch.distributed's."""

import sys
from collections.abc import Iterable
from types import FrameType

import attrs
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from pfeife import _torch


@attrs.frozen
class ScriptCollective:
    """A call of torch.distributed that a thread is in: its innermost frame, and how many
    collectives the default process group has begun, this one among them if it is one of those.

    Two are equal if the thread has not left the call in between. The frame is kept alive, so that
    no other one can be it; torch's functions call none of the script's from there."""

    frame: FrameType = attrs.field(eq=id)
    begun: int = attrs.field(eq=False)

    @property
    def name(self) -> str:
        """That of the function."""
        return f"torch.distributed.{self.frame.f_code.co_name}"

    def writes_to(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether its arguments share memory with any of some tensors."""
        values = pytree.tree_leaves(list(self.frame.f_locals.values()))
        arguments = {_torch.storage_of(v) for v in values if isinstance(v, torch.Tensor)} - {None}
        return any(_torch.storage_of(tensor) in arguments for tensor in tensors)


def collective_of(thread: int) -> ScriptCollective | None:
    """The collective that a thread is in, None if it is elsewhere. Only the functions that wait for
    other ranks count, not what else stands in torch.distributed: that may run parts of scripts."""
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_code.co_filename != dist.distributed_c10d.__file__:
        return None
    return ScriptCollective(frame, collectives_begun())


def collectives_begun() -> int:
    """How many collectives the default process group has begun, those that are over among them. A
    message between two ranks counts on these alone."""
    return _torch.sequence_of(dist.group.WORLD) if dist.is_initialized() else 0
