"""The joint graph of a step: AOTAutograd traces its forward together with its gradients."""

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch import fx, nn

from pfeife import _torch
from pfeife.frontend.aot.descriptors import new_name, registered, result_name, stateless
from pfeife.frontend.aot.kernel_numbers import read_numbers
from pfeife.frontend.aot.ports import PortAssigner
from pfeife.frontend.arguments import Argument, Inputs, Kept
from pfeife.frontend.cache.capture_cache import Folder, kept
from pfeife.frontend.cache.capture_key import Traceable, key_of
from pfeife.frontend.captured import Captured
from pfeife.frontend.forward import Forward
from pfeife.frontend.results import Loss, find_loss
from pfeife.ir.nodes import has_effects
from pfeife.ir.parts import Role
from pfeife.ir.program import Program


class _Joint(nn.Module):
    """The forward of a step as a module: state is registered, everything else is an argument.

    AOTAutograd tells parameters, buffers and arguments apart by where a module has them, and names
    them in its descriptors by that alone, while a `Forward` takes all of them as arguments.
    """

    def __init__(self, step: Forward, arguments: Sequence[Argument], loss: int | None):
        super().__init__()
        self.step, self.arguments, self.loss = step, arguments, loss
        for argument in arguments:
            if argument.role == Role.PARAMETER:
                value = argument.example.detach()
                parameter = nn.Parameter(value, requires_grad=argument.example.requires_grad)
                self.register_parameter(f"p_{argument.name}", parameter)
            elif argument.role == Role.BUFFER:
                self.register_buffer(f"b_{argument.name}", argument.example)

    def forward(self, *batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = {a.name: v for a, v in zip(stateless(self.arguments), batch, strict=True)}
        values = [
            argument.example
            if argument.role is None
            else rest[argument.name]
            if argument.name in rest
            else getattr(self, registered(argument))
            for argument in self.arguments
        ]
        # Keeps the lines of the user's model and the stacks of modules on the joint graph's nodes.
        with torch.fx.traceback.preserve_node_meta(), _torch.numbers_for_kernels() as numbers:
            results = self.step.run(*values)
        # AOTAutograd hands these back in ways that lose gradients.
        shared = self.step.shared()
        results = [r.clone() if i in shared else r for i, r in enumerate(results)]
        # Beside a loss, other results are for looking at: without the detach each one would get a
        # tangent that no schedule knows before the last forward. A forward alone has none at all,
        # even if the step switches gradients on again at the end of its own torch.no_grad().
        results = [
            r if example.requires_grad and self.loss in (None, i) else r.detach()
            for i, (r, example) in enumerate(zip(results, self.step.results, strict=True))
        ]
        return (*results, *numbers)


def trace(
    step: Forward,
    inputs: Inputs,
    loss: Loss,
    result_dims: Sequence[int | None] | None = None,
    gradients: bool = True,
    cache: Folder = None,
) -> Captured:
    """The joint program of a step at the shapes of the arguments' examples, or its forward alone,
    without `gradients`.

    `result_dims` says for every result along which dimension microbatches are joined, `cache` in
    which folder programs are kept.
    """
    # The loss first: what a step assigns anew and is the loss stays the loss.
    at = find_loss(step.results, loss, step.leaves)
    arguments, carried = _with_roles(step, inputs, at)
    # A buffer that is changed in place has its update from AOTAutograd already.
    anew = [
        (result_name(i, at), arguments[place])
        for place, i in carried.items()
        if not step.is_itself(place, i)
    ]
    dims = result_dims or [None] * len(step.results)
    plain = (
        step if gradients else attrs.evolve(step, results=tuple(r.detach() for r in step.results))
    )
    traceable = Traceable(plain, arguments, at, dims, anew, inputs.roots)
    with nullcontext() if gradients else torch.no_grad():  # the key has the mode, too
        program = kept(
            cache, functools.partial(key_of, traceable), functools.partial(_program, traceable)
        )
    return _captured(program, step, attrs.evolve(inputs, arguments=arguments), at, carried)


def _with_roles(
    step: Forward, inputs: Inputs, loss: int | None
) -> tuple[list[Argument], dict[int, int]]:
    """The arguments, each with what it is to the joint graph, and what is `_carried`."""
    arguments = [  # a tensor from outside of any module is trained if it asks for gradients
        attrs.evolve(a, role=Role.PARAMETER)
        if a.role == Role.CONSTANT and a.example.requires_grad
        else a
        for a in inputs.arguments
    ]
    carried = _carried(step, inputs.kept, arguments, loss)
    for place in carried:  # as buffers they may change from microbatch to microbatch
        arguments[place] = attrs.evolve(arguments[place], role=Role.BUFFER)
    return arguments, carried


def _captured(
    program: Program, step: Forward, inputs: Inputs, at: int | None, carried: Mapping[int, int]
) -> Captured:
    """How the arguments and results of a step belong to the ports of its program; result `at` is
    its loss, `carried` is as in `_carried`."""
    arguments = inputs.arguments
    program = attrs.evolve(program, premises=inputs.premises)
    outputs = {port.name for port in program.ports(Role.OUTPUT)}
    tensors = [a.role is not None for a in arguments]
    return Captured(
        program,
        tuple(None if a.role is None else a.name for a in arguments),
        tuple(_number(a.example) if a.role is None else None for a in arguments),
        tuple(result_name(i, at) for i in range(len(step.results))),
        tuple(i for i, value in enumerate(step.results) if not value.requires_grad),
        leaves=step.leaves,
        kept={result_name(index, at): assignment for index, assignment in inputs.kept.items()},
        carried={arguments[place].name: result_name(i, at) for place, i in carried.items()},
        in_place=tuple(
            arguments[place].name for place, i in carried.items() if step.is_itself(place, i)
        ),
        changed={a.name: new_name(a) for a in arguments if new_name(a) in outputs},
        moved={arguments[place].name: to for place, to in inputs.moved.items() if tensors[place]},
        assumed=tuple(arguments[place].name for place in sorted(inputs.assumed) if tensors[place]),
    )


def _number(example: Any) -> Any:
    """A number of a microbatch, also where its rows are a symbol."""
    return _torch.size_now(example) if isinstance(example, torch.SymInt) else example


def _program(traceable: Traceable) -> Program:
    wrapper = _Joint(traceable.step, traceable.arguments, traceable.loss)
    examples = tuple(a.example for a in stateless(traceable.arguments))
    try:
        joint = _torch.joint_graph(wrapper, examples)
    except ValueError:
        raise
    except Exception as error:  # of a kernel's rules for shapes, say
        raise ValueError(_reason(error)) from error
    # Numbers first: until they are read they are results, which `Descriptors` would not know.
    read_numbers(joint, len(traceable.step.results))
    _simplify(joint.graph)
    _take_changes_apart(joint.graph)
    # After both, which leave nodes behind that nobody reads.
    joint.graph.eliminate_dead_code(has_effects)
    return PortAssigner(joint, traceable).program()


def _simplify(graph: fx.Graph) -> None:
    """Takes out what is there for autograd's sake alone: the transpose of a matrix's transpose,
    of which it makes four for every linear layer, and the detaching of what it saves."""
    transpose, detach = torch.ops.aten.t.default, torch.ops.aten.detach.default
    for node in graph.nodes:
        if node.target is transpose and node.args[0].target is transpose:
            node.replace_all_uses_with(node.args[0].args[0])
        # Of an input it stays, so that no result is the input itself.
        elif node.target is detach and node.args[0].op != "placeholder":
            node.replace_all_uses_with(node.args[0])


def _take_changes_apart(graph: fx.Graph) -> None:
    """Takes out the gradients that would arrive at the new values of parameters that the step
    changes in place, to which AOTAutograd adds those of the parameters: the step is where they are
    read last."""
    tangents = [
        node
        for node in graph.nodes
        if isinstance(node.meta.get("desc"), _torch.TangentAOTInput)
        and isinstance(node.meta["desc"].output, _torch.InputMutationAOTOutput)
    ]
    for tangent in tangents:
        for user in list(tangent.users):
            if user.target is torch.ops.aten.add.Tensor and user.args[0] is tangent:
                user.replace_all_uses_with(user.args[1])
                graph.erase_node(user)
        results = next(iter(reversed(graph.nodes)))
        assert results.op == "output"
        # Of what the step does not read there is no gradient.
        results.args = ([None if result is tangent else result for result in results.args[0]],)


def _reason(error: Exception) -> str:
    """Why a step has no joint graph, and the line: that of the operation which fx was running."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    places = [line for line in lines if line.startswith('File "')]
    what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    where = f" ({places[-1]})" if places else ""
    return f"the step could not be captured with its gradients: {what}{where}"


def _carried(
    step: Forward,
    assignments: Mapping[int, Kept],
    arguments: Sequence[Argument],
    loss: int | None,
) -> dict[int, int]:
    """By the place of an argument the result that is its value in the next microbatch: what the
    step assigns anew to an attribute that it has read."""
    values = step.results
    return {
        place: index
        for index, assignment in assignments.items()
        for place in assignment.replaces
        # With a gradient, the next microbatch's backward would run into this one's.
        if index != loss
        and not values[index].requires_grad
        and arguments[place].role in (Role.BUFFER, Role.CONSTANT)
        # With another dtype or shape it cannot stand in that argument's port: see `check_outputs`.
        and values[index].dtype == arguments[place].example.dtype
        and _torch.written_shape(values[index]) == _torch.written_shape(step.arguments[place])
    }
