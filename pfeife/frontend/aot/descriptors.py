"""What AOTAutograd's descriptors of a joint graph stand for: each placeholder and each result is a
port of the program, which has a name, a role, and where the batch is in it.

    placeholders                      returned
    ParamAOTInput, BufferAOTInput     PlainAOTOutput          ->  loss, output
      ->  parameter, buffer           InputMutationAOTOutput  ->  buffer_update
                                        of the batch  ->  output
    PlainAOTInput    ->  batch        GradAOTOutput of state  ->  gradient
    TangentAOTInput  ->  tangent                of the batch  ->  batch_gradient
"""

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.frontend.arguments import Argument
from pfeife.frontend.cache.capture_key import Traceable
from pfeife.ir.nodes import output_node, source_line
from pfeife.ir.parts import Role

_STATE = (_torch.ParamAOTInput, _torch.BufferAOTInput)


@attrs.frozen
class Place:
    """What a port is, before its value is known."""

    name: str
    role: Role
    names: tuple[str, ...]
    batch_dim: int | None = None


@attrs.frozen(eq=False)
class Descriptors:
    """What the descriptors of a joint graph stand for. All raise ValueError for what has no place
    in a program."""

    joint: fx.GraphModule
    traceable: Traceable

    @functools.cached_property
    def by_name(self) -> dict[str, Argument]:
        """The arguments by the names that modules give to state."""
        return {registered(argument): argument for argument in self.traceable.arguments}

    @functools.cached_property
    def rest(self) -> list[Argument]:
        """The arguments that are no state of modules, which AOTAutograd numbers."""
        return stateless(self.traceable.arguments)

    @functools.cached_property
    def outputs(self) -> list[tuple[fx.Node | None, Any]]:
        """The results with their descriptors; None for the gradient of what has no influence on the
        loss."""
        output: Any = output_node(self.joint)
        return list(zip(output.args[0], output.meta["desc"], strict=True))

    @functools.cached_property
    def changed(self) -> set[str]:
        """The names of the parameters that the step changes in place."""
        changes: list[Any] = [desc for _, desc in self.outputs if _is_change(desc)]
        sources = [change.mutated_input for change in changes]
        return {source.target for source in sources if isinstance(source, _torch.ParamAOTInput)}

    def argument(self, desc: Any) -> Argument:
        """The step's argument that an input is."""
        if isinstance(desc, _torch.PlainAOTInput):
            return self.rest[desc.idx]
        if isinstance(desc, _STATE):
            return self.by_name[desc.target]
        raise ValueError(
            "the step does more than to compute its results (it prints, asserts or calls out: "
            f"{type(desc).__name__}), which cannot be put into a schedule; take that out of it"
        )

    def input(self, node: fx.Node) -> Place | None:
        """What a placeholder is; None for a tangent that nobody reads."""
        desc: Any = node.meta["desc"]
        if not isinstance(desc, _torch.TangentAOTInput):
            argument = self.argument(desc)
            assert argument.role is not None
            # A parameter that the step changes in place is read and updated like a buffer.
            role = Role.BUFFER if getattr(desc, "target", "") in self.changed else argument.role
            return Place(argument.name, role, argument.names, argument.batch_dim)
        of: Any = desc.output
        if not _is_change(of):
            result = result_name(getattr(of, "idx", -1), self.traceable.loss)
            return Place(f"tangent_{result}", Role.TANGENT, (result,))
        # The gradient of an input's new value: of a parameter, `_take_changes_apart` has seen to it
        # that nothing reads it.
        if node.users or not isinstance(of.mutated_input, _torch.ParamAOTInput):
            raise ValueError(self._refusal(of.mutated_input))
        return None

    def output(self, desc: Any, node: fx.Node) -> Place:
        """What a result is, of which a node has the value."""
        if isinstance(desc, _torch.PlainAOTOutput):
            name = result_name(desc.idx, self.traceable.loss)
            role = Role.LOSS if name == "loss" else Role.OUTPUT
            return Place(name, role, (name,), self.traceable.result_dims[desc.idx])
        if _is_change(desc):
            return self._change(desc.mutated_input, node)
        if isinstance(desc, _torch.GradAOTOutput):
            argument = self.argument(desc.grad_of)
            name, names = f"grad_{argument.name}", argument.names
            if isinstance(desc.grad_of, _torch.PlainAOTInput):
                return Place(name, Role.BATCH_GRADIENT, names, argument.batch_dim)
            return Place(name, Role.GRADIENT, names)
        raise ValueError(f"the step has a result that Pfeife does not know: {desc}")

    def _change(self, source: Any, node: fx.Node) -> Place:
        """What an input becomes that the step changes in place: an update of state, or a result
        with the rows of a batch input."""
        if isinstance(source, _STATE):
            argument = self.argument(source)
            return Place(new_name(argument), Role.BUFFER_UPDATE, argument.names)
        if not isinstance(source, _torch.PlainAOTInput):
            raise ValueError(self._refusal(source))
        argument = self.argument(source)
        if argument.batch_dim is None or not _in_its_place(argument, node.meta["val"]):
            raise ValueError(self._refusal(source))
        name = new_name(argument)
        return Place(name, Role.OUTPUT, (name,), argument.batch_dim)

    def _refusal(self, source: Any) -> str:
        """Why an input that the step changes in place is refused."""
        changes: Any = self.outputs
        line = next(
            source_line(node)
            for node, desc in changes
            if _is_change(desc) and desc.mutated_input == source
        )
        if isinstance(source, _torch.ParamAOTInput):
            return (
                f"the step changes the parameter {self.argument(source).names[0]} in place, "
                "and autograd would have to follow it: do that under torch.no_grad(), or after "
                f"optimizer.step() ({line})"
            )
        where = self.rest[source.idx].names[0] if hasattr(source, "idx") else str(source)
        return (
            f"the step changes its input {where} in place; only buffers of modules may be changed, "
            "and inputs that are cut into microbatches and have no gradients: copy the input "
            f"first, by x = x.clone() ({line})"
        )


def _is_change(desc: Any) -> bool:
    """Whether a result is the new value of an input that the step changes in place."""
    return isinstance(desc, _torch.InputMutationAOTOutput)


def registered(argument: Argument) -> str:
    """The name under which `_Joint` has a parameter or buffer."""
    return f"{'p' if argument.role == Role.PARAMETER else 'b'}_{argument.name}"


def stateless(arguments: Sequence[Argument]) -> list[Argument]:
    """The arguments that are no state of modules, in the order of their ports."""
    rest = [a for a in arguments if a.role in (Role.BATCH, Role.CONSTANT, Role.SIZE)]
    return sorted(rest, key=lambda argument: argument.position)


def result_name(index: int, loss: int | None) -> str:
    """The port of a result of the step by its index; `loss` is the index of the loss."""
    return "loss" if index == loss else f"output_{index}"


def new_name(argument: Argument) -> str:
    """The port of what an argument becomes that the step changes in place."""
    return f"new_{argument.name}"


def _in_its_place(argument: Argument, value: torch.Tensor) -> bool:
    """Whether a value can be written to where an argument is, and autograd need not know of it."""
    # The caller's tensor gets the new rows after the call, when no graph could follow any more.
    old = argument.example
    return old.shape == value.shape and old.dtype == value.dtype and not old.requires_grad
