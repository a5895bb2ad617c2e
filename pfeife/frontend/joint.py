"""The joint graph of a step: AOTAutograd traces Dynamo's graph together with its gradients."""

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import fx, nn

from pfeife import _torch
from pfeife.frontend.arguments import Argument, Inputs, Kept
from pfeife.frontend.captured import Captured
from pfeife.frontend.ports import Porter, registered, result_name, stateless
from pfeife.frontend.results import Leaf, Loss, find_loss
from pfeife.ir.program import Role, returned


class _Joint(nn.Module):
    """Dynamo's graph as a module: state is registered, everything else is an argument.

    AOTAutograd tells parameters, buffers and arguments apart by where a module has them, and names
    them in its descriptors by that alone, while Dynamo hands all of them over as arguments.
    """

    def __init__(self, module: fx.GraphModule, arguments: list[Argument], loss: int | None):
        super().__init__()
        # In a list, else the graph's own state would be registered a second time.
        self.graph, self.arguments, self.loss = [module], arguments, loss
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
        with torch.fx.traceback.preserve_node_meta():
            results = fx.Interpreter(self.graph[0]).run(*values)
        shared = _sharing_storage(self.graph[0])
        results = [r.clone() if i in shared else r for i, r in enumerate(results)]
        # Beside a loss, other results are for looking at: without the detach each one would get a
        # tangent that no schedule knows before the last forward.
        if self.loss is None:
            return tuple(results)
        return tuple(r if i == self.loss else r.detach() for i, r in enumerate(results))


def _sharing_storage(module: fx.GraphModule) -> set[int]:
    """The results that look at the storage of another result or of an argument: AOTAutograd
    hands them back in ways that lose gradients, so they are copied."""
    users: dict[int, int] = {}
    results = [node.meta["example_value"] for node in returned(module)]
    inputs = [n.meta.get("example_value") for n in module.graph.nodes if n.op == "placeholder"]
    for value in (*results, *inputs):
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata
            users[key] = users.get(key, 0) + 1
    return {i for i, r in enumerate(results) if users[r.untyped_storage()._cdata] > 1}


def trace(
    module: fx.GraphModule,
    inputs: Inputs,
    loss: Loss,
    result_dims: Sequence[int | None] | None = None,
    leaves: tuple[Leaf, ...] | None = None,
) -> Captured:
    """The joint program of Dynamo's graph at the shapes of the arguments' examples.

    `result_dims` says for every result along which dimension microbatches are joined, `leaves`
    where it stands in what the step returns.
    """
    at = find_loss(module, loss, leaves)
    arguments = [  # a tensor from outside of any module is trained if it asks for gradients
        attrs.evolve(a, role=Role.PARAMETER)
        if a.role == Role.CONSTANT and a.example.requires_grad
        else a
        for a in inputs.arguments
    ]
    carried = _carried(module, inputs.kept, arguments, at)
    for place in carried:  # as buffers they may change from microbatch to microbatch
        arguments[place] = attrs.evolve(arguments[place], role=Role.BUFFER)
    wrapper = _Joint(module, arguments, at)
    joint = _torch.joint_graph(wrapper, tuple(a.example for a in stateless(arguments)))
    count = len(returned(module))
    porter = Porter(joint, arguments, at, result_dims or [None] * count)
    # A buffer that is changed in place has its update from AOTAutograd already.
    in_place = [place for place, index in carried.items() if _is_itself(module, place, index)]
    porter.carried = [
        (result_name(i, at), arguments[place])
        for place, i in carried.items()
        if place not in in_place
    ]
    return attrs.evolve(
        porter.capture(module, inputs.roots),
        leaves=leaves,
        kept={result_name(index, at): one for index, one in inputs.kept.items()},
        carried={arguments[place].name: result_name(i, at) for place, i in carried.items()},
        in_place=tuple(arguments[place].name for place in in_place),
        moved={
            arguments[place].name: to
            for place, to in inputs.moved.items()
            if arguments[place].role is not None
        },
    )


def _is_itself(module: fx.GraphModule, place: int, index: int) -> bool:
    """Whether a result is an argument that the step has changed in place."""
    given = [node for node in module.graph.nodes if node.op == "placeholder"][place]
    old, new = given.meta["example_value"], returned(module)[index].meta["example_value"]
    return bool(old.untyped_storage()._cdata == new.untyped_storage()._cdata)


def _carried(
    module: fx.GraphModule,
    kept: Mapping[int, Kept],
    arguments: Sequence[Argument],
    loss: int | None,
) -> dict[int, int]:
    """By the place of an argument the result that is its value in the next microbatch: what the
    step assigns anew to an attribute that it has read."""
    values = [node.meta["example_value"] for node in returned(module)]
    return {
        place: index
        for index, one in kept.items()
        for place in one.replaces
        if index != loss
        and not values[index].requires_grad
        and arguments[place].role in (Role.BUFFER, Role.CONSTANT)
        and values[index].dtype == arguments[place].example.dtype
        and tuple(values[index].shape) == tuple(arguments[place].example.shape)
    }
