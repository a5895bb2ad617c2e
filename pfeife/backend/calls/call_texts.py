"""A call in words: what ranks compare before it runs, and why a step is compiled once more."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from pfeife.backend.building.compiled import Compiled
from pfeife.backend.graphs.step_graph import Graph
from pfeife.backend.settings.options import Options
from pfeife.frontend.deferred.tensors import is_waiting
from pfeife.ir.parts import Role
from pfeife.runtime.distributed.control.agreement import checksum
from pfeife.runtime.distributed.state.remote_parameters import version_of


class CallTexts:
    """Texts of the calls of a graph. `alike` must be so on every rank; `is_computed` tells
    arguments that are none of the batch's which the caller has made."""

    def __init__(
        self,
        graph: Graph,
        name: str,
        alike: Sequence[str],
        is_computed: Callable[[torch.Tensor], bool],
    ):
        self.graph, self.name, self.alike = graph, name, alike
        self.is_computed = is_computed
        self.sums = WeakIdKeyDictionary()  # of tensors, with their versions

    def compared(
        self, args: Sequence[Any], compiled: Compiled | None, options: Options
    ) -> tuple[str, str]:
        """All that a call's program and its messages depend on, a line each; and what the ranks of
        one replica have alike, if each replica is given a batch of its own."""
        gradients = f"gradients {'on' if torch.is_grad_enabled() else 'off'}"
        # Ranks may hold different programs of one step, where one of them has dropped or rebuilt
        # it: running both would mix their messages.
        built = f"program {compiled.digest}" if compiled else "a program that is not built yet"
        # The backwards run with this number before it arrives, so all ranks must expect the same.
        if compiled and compiled.loss_scale:
            built += f", its loss with the gradient {compiled.loss_scale.value:g}"
        lines = [
            *self.alike,
            f"the step {self.name} in {options.microbatches} microbatches, {gradients}",
            f"{built}, {self.graph.inputs.mode}",
        ]
        own: list[str] = []
        arguments, dims = self.graph.inputs.arguments, self.graph.dims
        for argument, dim, value in zip(arguments, dims, args, strict=True):
            if not isinstance(value, torch.Tensor):
                continue
            name = argument.names[0]
            where = f"{value.dtype} {list(value.shape)} on {value.device.type}"
            where += ", of a model from deferred_init" if is_waiting(value) else ""
            lines.append(f"{name}: {where}")
            # Values of state differ: ranks have what they train. So may those of what is trained
            # through the step, and rank 0 alone has its batch.
            state = argument.role in (Role.PARAMETER, Role.BUFFER)
            trained = state or (dim is None and value.requires_grad)
            trained = trained or (argument.given and options.batch == "rank0")
            if options.compare_batches and not (trained or self.is_computed(value)):
                values = f"{where}, values with the checksum {self._checksum(value, dim):x}"
                to = own if dim is not None and options.batch == "replica" else lines
                to.append(f"{name}: {values}")
        return "\n".join(lines), "\n".join(own)

    def _checksum(self, value: torch.Tensor, dim: int | None) -> int:
        """Of what is the same tensor at every call, such as a mask, it is computed once."""
        version = version_of(value)
        if dim is not None or version < 0:
            return checksum(value)
        if self.sums.get(value, (None, 0))[0] != version:
            self.sums[value] = version, checksum(value)
        return int(self.sums[value][1])

    def described(self, args: Sequence[Any]) -> dict[str, str]:
        """A call by what may be otherwise in another one."""
        words = {
            "step": self.name,
            "gradients": "on" if torch.is_grad_enabled() else "off",
            "modules": self.graph.inputs.mode,
        }
        for argument, value in zip(self.graph.inputs.arguments, args, strict=True):
            name = argument.names[0] if argument.names else argument.name
            if isinstance(value, torch.Tensor) and argument.given:
                words[name] = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            elif not isinstance(value, torch.Tensor) and argument.role != Role.SIZE:
                words[name] = f"{value!r}"[:80]
        return words


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """What is otherwise in a call than in one before."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    pairs = [(n, after.get(n, "not there"), before.get(n, "not there")) for n in names]
    texts = (f"{name} {now} (before: {then})" for name, now, then in pairs)
    return ", ".join(texts) or "other state, or what it assumes of its arguments"


def why_once_more(earlier: Sequence[Mapping[str, str]], now: Mapping[str, str]) -> str:
    """Why a step is compiled once more, "" at the first time."""
    if not earlier:
        return ""
    return f" (program {len(earlier) + 1} of it, for {changes(earlier[-1], now)})"
