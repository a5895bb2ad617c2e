"""A training step in, a `Program` out: Dynamo finds the graph, AOTAutograd the gradients."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch
from torch import fx, nn

from pfeife import _torch
from pfeife.frontend.arguments import Argument, Given, Inputs, Kept, describe, is_below
from pfeife.frontend.batch import Cutter
from pfeife.frontend.reductions import LossReduction, told
from pfeife.frontend.results import Key, Leaf, Loss, find_loss, label, leaves_of
from pfeife.ir.program import Port, Program, Role, output_node, returned, verify
from pfeife.ir.seeding import is_random, seeded

log = logging.getLogger("pfeife")
T = TypeVar("T")


@attrs.frozen(eq=False)
class Captured:
    """A program and how Dynamo's positional arguments and results belong to its ports.

    `arguments` has an input port's name for every argument of the graph, None for a number; those
    are in `numbers`. `results` has an output port's name for every result, `leaves` where each
    stands in what the step returns. `detached` are the indices of those that the step has
    detached. `unknown` says of results why it is not known how their microbatches combine. `kept`
    are the results that the step assigns to attributes, `carried` has those by the input ports
    whose value in the next microbatch they are, and `in_place` such ports that are their own
    result (`self.n += 1`). `moved` are input ports that the step assigns to attributes.
    """

    program: Program
    arguments: tuple[str | None, ...]
    numbers: tuple[Any, ...]
    results: tuple[str, ...]
    detached: tuple[int, ...]
    leaves: tuple[Leaf, ...] | None = None
    unknown: Mapping[str, str] = attrs.field(factory=dict)
    kept: Mapping[str, Kept] = attrs.field(factory=dict)
    carried: Mapping[str, str] = attrs.field(factory=dict)
    in_place: tuple[str, ...] = ()
    moved: Mapping[str, str] = attrs.field(factory=dict)

    def label(self, result: str) -> Key:
        """How options call a result."""
        return label(self.results.index(result), self.leaves)

    def is_returned(self, result: str) -> bool:
        """Whether the step itself returns it, as far as that is known."""
        index = self.results.index(result)
        return self.leaves is None or any(leaf.index == index for leaf in self.leaves)

    def warning(self) -> str:
        """What to say where the loss is averaged because nothing else is known; "" else."""
        return "".join(
            f"how the losses of microbatches combine is not known, because of "
            f"{self.unknown[port.name]}: they are averaged; say "
            'loss_reduction="mean" if that is right, or "sum" if the loss is a sum over the rows '
            "(perhaps divided by a count that is an input)"
            for port in self.program.ports(Role.LOSS)
            if port.name in self.unknown
        )


def capture(
    step: Callable[..., Any],
    *example_microbatch: Any,
    loss: Loss = None,
    loss_reduction: LossReduction = "auto",
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Program:
    """The flat joint graph of a training step on one microbatch.

    `step` is a module or any callable that closes over modules; it returns a scalar loss or a
    pytree with the loss in it (`loss` says which of its tensors, where several could be it, or
    "outside" if none is). `loss_reduction` says how the losses of microbatches combine, see
    `pfeife.reductions`.
    Without a differentiable scalar every differentiable output gets a tangent port; under
    `torch.no_grad()` the program has no gradients. Tensors may be fake, or live on the meta
    device, which is captured as `device`: nothing is run or allocated. Raises ValueError when
    no single graph can be captured.
    """
    call = Cutter(step, None, 1)(example_microbatch, kwargs)
    target = torch.device(device)

    def flat(values: Sequence[torch.Tensor]) -> Captured:
        given = {
            id(one): Given(leaf.name, i)
            for i, (leaf, one) in enumerate(zip(call.leaves, values, strict=True))
        }

        def read(
            module: fx.GraphModule, examples: list[Any]
        ) -> tuple[fx.GraphModule, Inputs, tuple[Leaf, ...] | None]:
            moved = copied(module, target)
            return moved, describe(moved, examples, target, given), leaves_of(module)

        args, named = call.made(values)
        module, inputs, leaves = dynamo_graph(step, args, named, read)
        return trace(module, inputs, loss, leaves=leaves)

    def larger() -> Program:
        values = [leaf.first for leaf in call.leaves]
        return flat([torch.cat([one, one]) if one.dim() else one for one in values]).program

    captured = with_reductions(flat([leaf.first for leaf in call.leaves]), loss_reduction, larger)
    if captured.warning():
        log.warning(captured.warning())
    return captured.program


def with_reductions(
    captured: Captured,
    loss_reduction: LossReduction,
    larger: Callable[[], Program] | None = None,
) -> Captured:
    """A captured program that says how the microbatches of its results are put together; see
    `reductions.told`."""
    program, unknown = told(captured.program, loss_reduction, larger)
    last = set(captured.carried.values())
    outputs = tuple(as_last(port) if port.name in last else port for port in program.outputs)
    return attrs.evolve(
        captured,
        program=attrs.evolve(program, outputs=outputs),
        unknown={name: why for name, why in unknown.items() if name not in last},
    )


def as_last(port: Port) -> Port:
    """A result of which the last microbatch's value is that of the batch."""
    return attrs.evolve(port, reduction="last", counts=(), batch_dim=None)


def dynamo_graph(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    read: Callable[[fx.GraphModule, list[Any]], T],
) -> T:
    """What is `read` from Dynamo's graph of a call and its inputs, while Dynamo compiles it (it
    may empty the graph afterwards); nothing is run. Raises ValueError when there is no single
    graph."""
    found: list[T] = []

    def backend(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        found.append(read(module, examples))
        raise _Enough

    try:
        _torch.whole_graph(step, backend)(*args, **kwargs)
    except Exception as error:
        if not found:
            raise plain_error(error) from error
    if not found:
        raise ValueError("the step computes nothing with tensors, so there is no graph to capture")
    return found[0]


def copied(module: fx.GraphModule, device: torch.device | None = None) -> fx.GraphModule:
    """A copy of Dynamo's graph, which outlives Dynamo's compilation, with another `device`
    wherever it names the meta device."""
    graph = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}

    def moved(argument: Any) -> Any:
        meta = device and isinstance(argument, torch.device) and argument.type == "meta"
        return device if meta else argument

    for node in module.graph.nodes:
        copied = here[node] = graph.node_copy(node, here.__getitem__)
        copied.args = fx.node.map_aggregate(copied.args, moved)
        copied.kwargs = fx.node.map_aggregate(copied.kwargs, moved)
    return fx.GraphModule(module, graph)


class _Enough(Exception):
    """Ends Dynamo's compilation once its graph has been read, so that nothing is run."""


_RAISED = "Developer debug context: raised exception "  # of the step's own


def plain_error(error: Exception) -> Exception:
    """Our own ValueError from inside Dynamo's wrapping, or one that names Dynamo's reason and
    the line of the user's code."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ValueError):
            return cause
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    if _torch.is_limit_of_compilations(error):
        return compiled_too_often()
    if not _torch.is_dynamo_error(error):
        return error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    places = [line for line in lines if line.startswith('File "')]
    where = f" ({places[-1]})" if places else ""
    why = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation:")]
    raised = [line.removeprefix(_RAISED) for line in lines if line.startswith(_RAISED)]
    reason = f"it raises {raised[0]}" if raised else " ".join([f"{lines[0]}.", *why[:1]])
    return ValueError(f"the step could not be captured as one graph: {reason}{where}")


def compiled_too_often() -> ValueError:
    """What to say of a step that Dynamo would not compile once more."""
    return ValueError(
        "this step has been compiled so often that torch would run it eagerly from now on: "
        "something in it changes with every call (a counter, a float, a mode; "
        'TORCH_LOGS="recompiles" says what). Keep it in a tensor, such as a buffer of a module'
    )


class _Joint(nn.Module):
    """Dynamo's graph as a module: state is registered, everything else is an argument."""

    def __init__(self, module: fx.GraphModule, arguments: list[Argument], loss: int | None):
        super().__init__()
        self.graph, self.arguments, self.loss = [module], arguments, loss
        for argument in arguments:
            if argument.role == Role.PARAMETER:
                value = argument.example.detach()
                parameter = nn.Parameter(value, requires_grad=argument.example.requires_grad)
                self.register_parameter(f"p_{argument.name}", parameter)
            elif argument.role == Role.BUFFER:
                self.register_buffer(f"b_{argument.name}", argument.example)

    def forward(self, *batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = {a.name: v for a, v in zip(_rest(self.arguments), batch, strict=True)}
        values = [
            argument.example
            if argument.role is None
            else rest[argument.name]
            if argument.name in rest
            else getattr(self, _registered(argument))
            for argument in self.arguments
        ]
        with torch.fx.traceback.preserve_node_meta():
            results = fx.Interpreter(self.graph[0]).run(*values)
        shared = _sharing_storage(self.graph[0])
        results = [r.clone() if i in shared else r for i, r in enumerate(results)]
        if self.loss is None:
            return tuple(results)
        return tuple(r if i == self.loss else r.detach() for i, r in enumerate(results))


def _registered(argument: Argument) -> str:
    """The name under which `_Joint` has a parameter or buffer."""
    return f"{'p' if argument.role == Role.PARAMETER else 'b'}_{argument.name}"


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


def _rest(arguments: Sequence[Argument]) -> list[Argument]:
    """The arguments that are no state of modules, in the order of their ports."""
    rest = [a for a in arguments if a.role in (Role.BATCH, Role.CONSTANT)]
    return sorted(rest, key=lambda argument: argument.position)


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
    for place in carried:
        arguments[place] = attrs.evolve(arguments[place], role=Role.BUFFER)
    wrapper = _Joint(module, arguments, at)
    joint = _torch.joint_graph(wrapper, tuple(a.example for a in _rest(arguments)))
    count = len(returned(module))
    porter = _Porter(joint, arguments, at, result_dims or [None] * count)
    in_place = [place for place, index in carried.items() if _is_itself(module, place, index)]
    porter.carried = [
        (_result_name(i, at), arguments[place])
        for place, i in carried.items()
        if place not in in_place
    ]
    return attrs.evolve(
        porter.captured(module, inputs.roots),
        leaves=leaves,
        kept={_result_name(index, at): one for index, one in inputs.kept.items()},
        carried={arguments[place].name: _result_name(i, at) for place, i in carried.items()},
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


def _simplify(graph: fx.Graph) -> None:
    """Takes out what is there for autograd's sake alone: the transpose of a matrix's transpose,
    of which it makes four for every linear layer, and the detaching of what it saves."""
    transpose, detach = torch.ops.aten.t.default, torch.ops.aten.detach.default
    for node in graph.nodes:
        if node.target is transpose and node.args[0].target is transpose:
            node.replace_all_uses_with(node.args[0].args[0])
        elif node.target is detach and node.args[0].op != "placeholder":
            node.replace_all_uses_with(node.args[0])


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class _Porter:
    """Rewrites a joint graph with descriptors into a graph with ports."""

    def __init__(
        self,
        joint: fx.GraphModule,
        arguments: list[Argument],
        loss: int | None,
        result_dims: Sequence[int | None],
    ):
        _simplify(joint.graph)
        joint.graph.eliminate_dead_code()
        self.joint, self.loss, self.result_dims = joint, loss, result_dims
        self.by_name = {_registered(argument): argument for argument in arguments}
        self.rest = _rest(arguments)
        self.arguments = arguments
        self.graph = fx.Graph()
        self.inputs: list[Port] = []
        self.here: dict[fx.Node, fx.Node] = {}
        self.draws = 0
        self.carried: list[tuple[str, Argument]] = []

    def captured(self, module: fx.GraphModule, roots: Mapping[str, str]) -> Captured:
        nodes = list(self.joint.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._input(node)
        for node in nodes:
            if node.op not in ("placeholder", "output"):
                self._copy(node, roots)
        outputs, results = self._outputs(output_node(self.joint))
        self._check_tangents(module)
        self.graph.output(results)
        holder = nn.Module()
        for node in self.graph.nodes:
            if node.op == "get_attr":
                setattr(holder, node.target, getattr(self.joint, node.target))
        program = Program(fx.GraphModule(holder, self.graph), tuple(self.inputs), tuple(outputs))
        values = [node.meta["example_value"] for node in returned(module)]
        return Captured(
            verify(program),
            tuple(None if a.role is None else a.name for a in self.arguments),
            tuple(a.example if a.role is None else None for a in self.arguments),
            tuple(_result_name(i, self.loss) for i in range(len(self.result_dims))),
            tuple(i for i, value in enumerate(values) if not value.requires_grad),
        )

    def _input(self, node: fx.Node) -> None:
        desc: Any = node.meta["desc"]
        value = node.meta["val"]
        tangent = isinstance(desc, _torch.TangentAOTInput)
        if tangent and isinstance(desc.output, _torch.InputMutationAOTOutput):
            raise ValueError(self._changed(desc.output.mutated_input))
        if tangent:
            result = _result_name(getattr(desc.output, "idx", -1), self.loss)
            port = _port(f"tangent_{result}", Role.TANGENT, (result,), value)
        else:
            argument = self._argument(desc)
            assert argument.role is not None
            port = _port(argument.name, argument.role, argument.names, value, argument.batch_dim)
        self.here[node] = self.graph.create_node("placeholder", port.name, name=port.name)
        self.here[node].meta = dict(node.meta)
        assert self.here[node].name == port.name
        self.inputs.append(port)

    def _check_tangents(self, module: fx.GraphModule) -> None:
        """Every differentiable result must have its gradient come in."""
        values = [node.meta["example_value"] for node in returned(module)]
        wanted = {
            _result_name(index, self.loss)
            for index, value in enumerate(values)
            if value.requires_grad and self.loss in (None, index)
        }
        found = {port.fqn for port in self.inputs if port.role == Role.TANGENT}
        if found != wanted:
            raise ValueError(
                f"the results {sorted(wanted)} are differentiable, but AOTAutograd gives gradients "
                f"of {sorted(found)}; return copies (x.clone()) of results that share storage"
            )

    def _seed(self) -> fx.Node:
        """The seed's placeholder, made when the first random operation asks for it."""
        seeds = [port for port in self.inputs if port.role == Role.SEED]
        if seeds:
            return next(node for node in self.graph.nodes if node.name == seeds[0].name)
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        with self.graph.inserting_after(last):
            node = self.graph.create_node("placeholder", "seed", name="seed")
        with _torch.FakeTensorMode():
            node.meta["val"] = torch.empty((), dtype=torch.int64)
        self.inputs.append(_port("seed", Role.SEED, ("seed",), node.meta["val"]))
        return node

    def _copy(self, node: fx.Node, roots: Mapping[str, str]) -> None:
        copied = self.graph.node_copy(node, self.here.__getitem__)
        stack = copied.meta["module_stack"] = _module_stack(node, roots)
        copied.meta["module_path"] = stack[-1][0] if stack else ""
        if node.op == "call_function" and is_random(node.target, node.args, node.kwargs):
            operation: Any = node.target
            copied.args = (operation, self.draws, self._seed(), *copied.args)
            copied.target = seeded
            self.draws += 1
        if node.target in _VIEWS:  # fake strides can be wrong (a batch norm of a transposed input)
            copied.target = torch.ops.aten.reshape.default
        self.here[node] = copied

    def _outputs(self, joint: fx.Node) -> tuple[list[Port], dict[str, fx.Node]]:
        ports, results = [], {}
        for node, desc in zip(joint.args[0], joint.meta["desc"], strict=True):  # type: ignore[arg-type]
            if node is not None:
                port = self._output(desc, node.meta["val"])
                ports.append(port)
                results[port.name] = self._made(port, self.here[node])
        for result, argument in self.carried:
            node = results[result]
            port = _port(
                f"new_{argument.name}", Role.BUFFER_UPDATE, argument.names, node.meta["val"]
            )
            if port.name in results:
                raise ValueError(
                    f"the step changes {argument.names[0]} in place and assigns it anew: do one"
                )
            ports.append(port)
            results[port.name] = node
        return ports, results

    def _made(self, port: Port, value: fx.Node) -> fx.Node:
        """The node of an output; a copy for a gradient that arrives as it is handed back, so
        that some rank computes it."""
        if value.op != "placeholder" or port.role not in (Role.GRADIENT, Role.BATCH_GRADIENT):
            return value
        copied = self.graph.call_function(torch.ops.aten.clone.default, (value,))
        copied.meta = dict(value.meta)
        return copied

    def _argument(self, desc: Any) -> Argument:
        if isinstance(desc, _torch.PlainAOTInput):
            return self.rest[desc.idx]
        if isinstance(desc, _torch.ParamAOTInput | _torch.BufferAOTInput):
            return self.by_name[desc.target]
        raise ValueError(
            "the step does more than to compute its results (it prints, asserts or calls out: "
            f"{type(desc).__name__}), which cannot be put into a schedule; take that out of it"
        )

    def _changed(self, source: Any) -> str:
        """Why an input that the step changes in place is refused."""
        if isinstance(source, _torch.ParamAOTInput):
            return (
                f"the step changes the parameter {self.by_name[source.target].names[0]} in place "
                "(max_norm of an embedding, weights that are clipped), and autograd would have to "
                "follow it: do that after optimizer.step() instead"
            )
        where = self.rest[source.idx].names[0] if hasattr(source, "idx") else str(source)
        return (
            f"the step changes its input {where} in place; only buffers of modules may be "
            "changed: copy the input first (x = x.clone())"
        )

    def _output(self, desc: Any, value: torch.Tensor) -> Port:
        if isinstance(desc, _torch.PlainAOTOutput):
            name = _result_name(desc.idx, self.loss)
            role = Role.LOSS if name == "loss" else Role.OUTPUT
            return _port(name, role, (name,), value, self.result_dims[desc.idx])
        if isinstance(desc, _torch.InputMutationAOTOutput):
            source = desc.mutated_input
            if not isinstance(source, _torch.BufferAOTInput):
                raise ValueError(self._changed(source))
            names = self.by_name[source.target].names
            name = self.by_name[source.target].name
            return _port(f"new_{name}", Role.BUFFER_UPDATE, names, value)
        if isinstance(desc, _torch.GradAOTOutput):
            source = desc.grad_of
            if isinstance(source, _torch.PlainAOTInput):
                argument = self.rest[source.idx]
                role, dim = Role.BATCH_GRADIENT, argument.batch_dim
            else:
                assert isinstance(source, _torch.ParamAOTInput | _torch.BufferAOTInput)
                argument, role, dim = self.by_name[source.target], Role.GRADIENT, None
            return _port(f"grad_{argument.name}", role, argument.names, value, dim)
        raise ValueError(f"the step has a result that Pfeife does not know: {desc}")


def _result_name(index: int, loss: int | None) -> str:
    return "loss" if index == loss else f"output_{index}"


def _port(
    name: str, role: Role, names: tuple[str, ...], value: torch.Tensor, dim: int | None = None
) -> Port:
    return Port(name, role, names, tuple(value.shape), value.dtype, value.device, dim)


def _module_stack(node: fx.Node, roots: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The modules that a forward node comes from, the innermost last: their paths ("" for the
    outermost) and the names of their classes; `roots` has the readable names of the outermost."""
    found = []
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        root = next((root for root in roots if is_below(path, root)), "")
        rest = path.removeprefix(root).removeprefix(".")
        name = f"{roots[root]}.{rest}".rstrip(".") if len(roots) > 1 and root else rest
        found.append((name, getattr(kind, "__name__", str(kind))))
    return tuple(found)
