"""Where the state of a process that has several devices lives: with the stage that uses it."""

import functools
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from pfeife.ir.messages import holders
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.runtime.memory_spans import overlapping


class Residence:
    """Which parameters and buffers steps have moved, by the tensors themselves.

                 captured on   lives on
        0.weight   cuda:0       cuda:0
        1.weight   cuda:0       cuda:1    so do its gradient and what optimizers keep for it
        tied       cuda:0       cuda:0    with the first stage that uses it; cuda:1 gets copies

    They stay the same objects. The step that is the first to use one decides; what a script moves
    away (`model.cpu()`) comes back at the next call. What other tensors also look at stays.
    """

    def __init__(self) -> None:
        self.known = WeakIdKeyDictionary()  # device, and the one on which steps are captured
        self.follows = False

    def home(self, tensor: torch.Tensor) -> torch.device | None:
        """Where steps that use a tensor are captured, None for one that was not moved."""
        return self.known[tensor][1] if tensor in self.known else None

    def settle(
        self, state: Sequence[tuple[str, torch.Tensor, torch.device]], home: torch.device
    ) -> list[torch.Tensor]:
        """Brings tensors with their names to their devices; returns those that are moved from
        where their steps are captured. Raises ValueError, and moves none, for different tensors in
        one memory."""
        places = [(o, *self.known.get(o, (device, home))) for _, o, device in state]
        moving = [(tensor, device) for tensor, device, _ in places if tensor.device != device]
        if moving:
            names = {id(tensor): name for name, tensor, _ in state}
            _check_memory(
                [tensor for tensor, _, _ in places], {id(tensor) for tensor, _ in moving}, names
            )
        # Also those that are in place: the first step to use a tensor decides for all others.
        for tensor, device, captured in places:
            self.known[tensor] = device, captured
        for tensor, device in moving:
            _move(tensor, device)
        if moving and not self.follows:
            self.follows = True
            register_optimizer_step_pre_hook(self._follow)
        return [tensor for tensor, device, captured in places if device != captured]

    def _follow(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """What an optimizer keeps, perhaps since before the first call, is where its parameters
        are."""
        for group in optimizer.param_groups:
            counts = bool(group.get("capturable") or group.get("fused"))  # steps there, too
            for parameter in group["params"]:
                if parameter in self.known:
                    _bring(optimizer.state.get(parameter, {}), parameter.device, counts)


@functools.cache
def residence() -> Residence:
    """That of this process: steps over one model share it."""
    return Residence()


def devices_of(
    program: Program, devices: Sequence[torch.device], carried: Iterable[str]
) -> dict[str, torch.device]:
    """By the ports of parameters and buffers the device of the first rank that uses each, but for
    those that are `carried`, which a call replaces."""
    used = holders(program, Role.PARAMETER, Role.BUFFER)
    ranks = {name: min(call.rank or 0 for call in calls) for name, calls in used.items() if calls}
    ports = program.ports(Role.PARAMETER, Role.BUFFER)
    left = set(carried)
    return {p.name: devices[ranks[p.fqn]] for p in ports if p.fqn in ranks and p.name not in left}


def may_move(tensor: Any) -> bool:
    """Whether a tensor can be put somewhere else without another one noticing."""
    return isinstance(tensor, torch.Tensor) and tensor.is_leaf and not tensor.is_inference()


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    # A gradient is on the device of its tensor: it is taken off until both have moved.
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(device)
    if gradient is not None:
        tensor.grad = gradient.to(device)


def _bring(state: MutableMapping[str, Any], device: torch.device, counts: bool) -> None:
    """Brings what an optimizer keeps for a parameter to a device, the count of steps only if its
    kernels want it there."""
    for name, value in state.items():
        # torch keeps counts on the CPU, where it reads them each step, unless a kernel counts.
        if isinstance(value, torch.Tensor) and (name != "step" or counts):
            state[name] = value.to(device)


def _check_memory(
    tensors: Sequence[torch.Tensor], moving: set[int], names: Mapping[int, str]
) -> None:
    for tensor, other in overlapping(tensors):
        if {id(tensor), id(other)} & moving:
            raise ValueError(
                f"option devices: {names[id(tensor)]} and {names[id(other)]} share memory, but are "
                "two tensors, and would not share it on the devices of their stages: tie them by "
                "being one parameter (b.weight = a.weight)"
            )
