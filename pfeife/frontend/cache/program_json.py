"""A flat program as plain data, and back: the same graph, ports, and what nodes say of themselves.

Of a node's `meta` it keeps what Pfeife reads: its fake value, its line and module, what it has to
do with gradients, and what the user has annotated.
"""

import base64
import keyword
import re
from typing import Any

import attrs
import torch
from torch import fx, nn

from pfeife import _torch
from pfeife.frontend.cache import graph_json
from pfeife.ir.nodes import returned
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.ir.verify import verify

KEPT: dict[str, Any] = {
    **{"val": object, "sizes": tuple, "stack_trace": str, "module_stack": tuple},
    **{"module_path": str, "custom": dict, "partitioner_tag": str, "seq_nr": int},
    **{"is_gradient_acc": bool, "sized_by_data": bool | tuple, "autograd_backward": bool},
}
MOST_BYTES = 2**20  # of a constant
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OPS = ("placeholder", "get_attr", "call_function")


@attrs.frozen
class StoredPort:
    """An input or output."""

    name: str
    role: Role
    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    device: str
    batch_dim: int | None
    sized_by_data: bool
    sizes: int | None = None  # the number of a text


@attrs.frozen
class StoredNode:
    """A node; what it is given, and what is said of it, are numbers of texts."""

    name: str
    op: str
    target: str
    args: int
    kwargs: int
    meta: dict[str, int]


@attrs.frozen
class Constant:
    """A tensor in the graph itself: its bytes by base64."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: str


@attrs.frozen
class StoredProgram:
    """A flat program, and the `key` of what it was captured from. `texts` are spelled values, each
    of them once; `result` spells what the graph returns, and `limits` what is so of its sizes.
    `asked` is what was asked for in words where somebody has saved it."""

    key: str
    texts: tuple[str, ...]
    nodes: tuple[StoredNode, ...]
    result: int
    inputs: tuple[StoredPort, ...]
    outputs: tuple[StoredPort, ...]
    constants: tuple[Constant, ...]
    limits: tuple[int, ...] = ()
    asked: dict[str, str] = attrs.field(factory=dict)


def _is_name(text: str) -> bool:
    """Whether a text may stand in the code that fx writes for a graph."""
    return bool(_NAME.fullmatch(text)) and not keyword.iskeyword(text)


def store(program: Program, key: str) -> StoredProgram:
    """A flat program as data. Raises ValueError for one with something in it that has no spelling:
    an operation of others, a graph within the graph, a large constant."""
    if program.members > 1:
        raise ValueError("a program for members of a group is not stored; store the one before")
    texts: dict[str, int] = {}

    def text(value: Any) -> int:
        return texts.setdefault(graph_json.spelled(value), len(texts))

    graph = program.module.graph
    nodes = [node for node in graph.nodes if node.op != "output"]
    made = tuple(_stored(node, text) for node in nodes)
    inputs, outputs = (
        tuple(_port(port, text) for port in ports) for ports in (program.inputs, program.outputs)
    )
    limits = tuple(map(text, program.limits))
    # `result` comes before `texts`: its text may be the last of them.
    return StoredProgram(
        key,
        result=text(returned(program.module)),
        texts=tuple(texts),
        nodes=made,
        inputs=inputs,
        outputs=outputs,
        constants=tuple(_constant(n, program.module) for n in nodes if n.op == "get_attr"),
        limits=limits,
    )


def restore(stored: StoredProgram) -> Program:
    """The program that was stored. Raises ValueError for data that are none, whoever has made
    them: nothing of them is run."""
    graph, here = fx.Graph(), dict[str, fx.Node]()
    value = graph_json.Reader(stored.texts, here, _torch.symbolic_mode())
    for stored_node in stored.nodes:
        here[stored_node.name] = _restored(stored_node, graph, value)
    results = value(stored.result)
    if type(results) is not dict or not all(isinstance(n, fx.Node) for n in results.values()):
        raise ValueError("the graph does not return nodes by their names")
    graph.output(results)
    holder = nn.Module()
    for constant in stored.constants:
        if not _is_name(constant.name) or hasattr(holder, constant.name):
            raise ValueError(f"a constant is called {constant.name[:80]!r}")
        setattr(holder, constant.name, _tensor(constant))
    # Neither one too few, which would fail in the middle of a step, nor one too many.
    names = {constant.name for constant in stored.constants}
    if names != {node.target for node in graph.nodes if node.op == "get_attr"}:
        raise ValueError(f"the constants are {sorted(names)}"[:200])
    module = fx.GraphModule(holder, graph)
    inputs, outputs = (
        tuple(_restored_port(port, value) for port in ports)
        for ports in (stored.inputs, stored.outputs)
    )
    return verify(Program(module, inputs, outputs, limits=tuple(map(value, stored.limits))))


def _stored(node: fx.Node, text: Any) -> StoredNode:
    if node.op not in _OPS or node.type is not None:
        raise ValueError(f"the graph has the node {node.format_node()}")
    called = node.op == "call_function"
    # What torch's own passes have left there is of no use to anybody once the graph is made.
    values = {name: node.meta[name] for name in KEPT if name in node.meta}
    # A `val` of None is not the same as no `val` (rows/propagate.py); of the rest it says nothing.
    meta = {
        name: text(value) for name, value in values.items() if value is not None or name == "val"
    }
    target = graph_json.target_name(node.target) if called else str(node.target)
    return StoredNode(node.name, node.op, target, text(node.args), text(node.kwargs), meta)


def _restored(stored: StoredNode, graph: fx.Graph, value: graph_json.Reader) -> fx.Node:
    """A node, at the end of a graph."""
    args, kwargs = value(stored.args), value(stored.kwargs)
    called = stored.op == "call_function"
    target: Any = graph_json.function_of(stored.target) if called else stored.target
    if stored.op not in _OPS or not (called or _is_name(target)):
        raise ValueError(f"{stored.name[:80]} is a node of {stored.op[:80]} {stored.target[:80]}")
    if type(args) is not tuple or type(kwargs) is not dict or not all(map(_is_name, kwargs)):
        raise ValueError(f"{stored.name[:80]} is no node")
    meta = {name: value(at) for name, at in stored.meta.items()}
    if not all(isinstance(entry, KEPT.get(name, ())) for name, entry in meta.items()):
        raise ValueError(f"{stored.name[:80]} says of itself {[*meta]}"[:200])
    if not _is_name(stored.name) or (stored.op == "placeholder" and stored.target != stored.name):
        raise ValueError(f"a node may not be called {stored.name[:80]}")
    node = graph.create_node(stored.op, target, args, kwargs, name=stored.name)
    # fx has renamed it: texts and ports would name another node.
    if node.name != stored.name:
        raise ValueError(f"a node may not be called {stored.name}")
    node.meta = meta
    return node


def _port(port: Port, text: Any) -> StoredPort:
    # How microbatches are put together depends on options, which are no part of the key.
    if port.reduction or port.counts:
        raise ValueError(f"{port.name} is reduced already")
    stored_fields = attrs.fields_dict(StoredPort)
    fields = attrs.asdict(port, recurse=False, filter=lambda field, _: field.name in stored_fields)
    dtype, device = graph_json.name_of(port.dtype), str(port.device)
    sizes = None if port.sizes is None else text(port.sizes)
    return StoredPort(**fields | {"dtype": dtype, "device": device, "sizes": sizes})


def _restored_port(stored: StoredPort, value: graph_json.Reader) -> Port:
    if not _is_name(stored.name) or not stored.names or min(stored.shape, default=0) < 0:
        raise ValueError(f"{stored.name[:80]} is no port")
    dtype, device = graph_json.dtype_of(stored.dtype), graph_json.device_of(stored.device)
    sizes = None if stored.sizes is None else value(stored.sizes)
    fields = attrs.asdict(stored, recurse=False)
    return Port(**fields | {"dtype": dtype, "device": device, "sizes": sizes})


def _constant(node: fx.Node, module: fx.GraphModule) -> Constant:
    name = str(node.target)
    value = getattr(module, name, None)
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
        raise ValueError(f"the graph keeps {name}, a {type(value).__name__}")
    graph_json.spelled(value)
    if value.numel() * value.element_size() > MOST_BYTES or not value.is_contiguous():
        raise ValueError(f"the constant {name} has {list(value.shape)} elements")
    data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Constant(
        name, graph_json.name_of(value.dtype), tuple(value.shape), base64.b64encode(data).decode()
    )


def _tensor(constant: Constant) -> torch.Tensor:
    """A constant's tensor. Raises ValueError if its bytes are not those of its shape."""
    dtype = graph_json.dtype_of(constant.dtype)
    data = base64.b64decode(constant.data, validate=True)
    size = torch.Size(constant.shape).numel() * dtype.itemsize
    if min(constant.shape, default=0) < 0 or len(data) != size:
        raise ValueError(f"the constant {constant.name} has {len(data)} bytes")
    if not size:  # torch.frombuffer refuses an empty one
        return torch.empty(constant.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(constant.shape).clone()
