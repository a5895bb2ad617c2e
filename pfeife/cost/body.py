"""Storages: what a body allocates, and what a stage keeps between its calls."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from pfeife.compilers.piece import inputs
from pfeife.ir.editing.absorb import absorb
from pfeife.ir.members import MEANING, begins, over_at, scratch
from pfeife.ir.messages import call_of, holders
from pfeife.ir.nodes import node_bytes, receive, returned, value_of
from pfeife.ir.outline import storage_owner
from pfeife.ir.parts import Kind, Role
from pfeife.ir.program import Program

CUDA_BLOCK = 512  # bytes, kMinBlockSize of torch's c10/cuda/CUDACachingAllocator.cpp


@attrs.frozen
class StageMemory:
    """Bytes of one stage: its parameters, what one microbatch keeps from its forward to its
    backward (values that look at one another's storage are counted once), and the most that one
    of its bodies needs beside its arguments while it runs, results included."""

    parameters: int
    saved: int
    temporaries: int


def stage_memory(program: Program) -> tuple[StageMemory, ...]:
    """The account of every stage of a partitioned program."""
    program = absorb(program)
    # Tied parameters count once a stage, on each stage that uses them.
    # A parameter that the step updates has the role of a buffer.
    sizes = {port.fqn: port.bytes for port in program.ports(Role.PARAMETER, Role.BUFFER)}
    parameters, saved, most = ([0] * program.units for _ in range(3))
    for name, users in holders(program).items():
        for unit in {call.unit for call in users}:
            parameters[unit] += sizes[name]
    bodies = {call.node: Body.of(program.body(call)) for call in program.calls}
    for call in program.calls:
        most[call.unit] = max(most[call.unit], bodies[call.node].peak + call.inside_bytes)
    for unit, storages in enumerate(kept_storages(program)):
        saved[unit] = sum(storage.bytes for storage in storages)
    accounts = zip(parameters, saved, most, strict=True)
    return tuple(StageMemory(*account) for account in accounts)


@attrs.frozen
class Storage:
    """Memory that a call allocates in one microbatch, by the node of the call's body, or of the
    program if the call's rank receives it."""

    call: str
    node: str
    bytes: int


def storage_of(program: Program, value: fx.Node) -> Storage | None:
    """Whose storage a value of a graph of calls looks at; None for an input's."""
    if value.op != "call_function":
        return None
    maker = value.all_input_nodes[0]
    if maker.target is receive:
        return Storage(maker.name, value.name, node_bytes(value))
    # A result may look at an argument's storage, and so at that of an earlier call.
    body = program.module.get_submodule(str(maker.target))
    assert isinstance(body, fx.GraphModule)
    return storage_in(program, maker, body, returned(body)[value.args[1]])


def storage_in(
    program: Program, call: fx.Node, body: fx.GraphModule, node: fx.Node
) -> Storage | None:
    """Whose storage a node of a call's body looks at; None for an input's, or no tensor."""
    owner = storage_owner(node)
    if owner.op == "call_function":
        size = node_bytes(owner)
        return Storage(call.name, owner.name, size) if isinstance(_value(owner), Tensor) else None
    if owner.op != "placeholder":
        return None
    return storage_of(program, call.all_input_nodes[inputs(body).index(owner)])


def kept_storages(program: Program) -> tuple[frozenset[Storage], ...]:
    """For every stage what forwards made and its backward reads."""
    program = absorb(program)
    calls = {call.node: call for call in program.calls}
    by_stage: list[set[Storage]] = [set() for _ in range(program.units)]
    # What a forward hands to another forward is not kept: its reader keeps it where that saves it.
    for value in program.module.graph.nodes:
        maker = calls.get(call_of(value).name) if value.op == "call_function" else None
        if maker is None or maker.kind != Kind.FORWARD:
            continue
        readers = [calls[user.name] for user in value.users if user.name in calls]
        units = {reader.unit for reader in readers if reader.kind != Kind.FORWARD}
        storage = storage_of(program, value) if units else None
        for unit in units if storage else ():
            assert storage is not None
            by_stage[unit].add(storage)
    return tuple(frozenset(storages) for storages in by_stage)


@attrs.frozen(eq=False)
class Body:
    """What a body allocates: bytes by the node that made a storage, the maker of every result's
    storage (an argument's node is not among `sizes`), and the peak while it runs, arguments not
    counted.

    A value is freed after the last node that reads it or a view of it, as fx's code does. Every
    storage is rounded up to a multiple of `rounding` bytes.
    """

    sizes: dict[fx.Node, int]
    results: tuple[fx.Node, ...]
    peak: int

    @staticmethod
    def of(body: fx.GraphModule, rounding: int = 1) -> "Body":
        """What the graph of a body allocates, in multiples of `rounding` bytes."""
        nodes = [node for node in body.graph.nodes if node.op == "call_function"]
        owners = {node: storage_owner(node) for node in nodes}
        results = tuple(storage_owner(node) for node in returned(body))
        parts = _parts(nodes, owners)
        ends = _ends(nodes, owners, parts) | dict.fromkeys(results, len(nodes))
        sizes = {n: rounded(node_bytes(n), rounding) for n in nodes if owners[n] is n}
        sizes |= {node: _untaken(node, group, rounding) for node, group in parts.items()}
        # The parts of an operation with several results are born with it, before they are taken.
        whole_of = {part: whole for whole, group in parts.items() for part in group}
        born: Counter[fx.Node] = Counter()
        dying: Counter[int] = Counter()
        for node, size in sizes.items():
            born[whole_of.get(node, node)] += size
            dying[ends[node]] += size
        live = peak = 0
        for index, node in enumerate(nodes):
            # What is under way has its buffers up to where it has arrived.
            over = over_at(node)
            under_way, most = _scratch(over or node)
            live += born[node] - (under_way if over else 0)
            peak = max(peak, live + (under_way if begins(node) else most))
            live += (under_way if begins(node) else 0) - dying[index]
        return Body(sizes, results, peak)


def _scratch(node: fx.Node) -> tuple[int, int]:
    """Bytes that an operation needs beside what it reads and gives, as far as we run it: while it
    is under way, and at most."""
    target: Any = node.target
    if target not in MEANING:
        return 0, 0
    value = value_of(node.all_input_nodes[0])
    assert value is not None
    return scratch(target, value, *fx.node.map_arg(node.args[1:], value_of))


def _parts(
    nodes: Sequence[fx.Node], owners: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """Of every operation with several results the nodes that take one with a storage of its own."""
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if owners[node] is node and isinstance(_value(node), tuple | list):
            parts[node] = []
        elif owners[node] is node and source in parts:
            parts[source].append(node)
    return parts


def _ends(
    nodes: Sequence[fx.Node],
    owners: Mapping[fx.Node, fx.Node],
    parts: Mapping[fx.Node, Sequence[fx.Node]],
) -> dict[fx.Node, int]:
    """After which node each storage is freed: the last that reads it, or a view of it."""
    # A view keeps its owner, so every node that touches a view ends the owner later.
    ends: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        for touched in (node, *node.all_input_nodes):
            if touched in owners:
                ends[owners[touched]] = index
            for part in parts.get(touched, ()):  # the tuple holds all its parts
                ends[part] = max(ends.get(part, 0), index)
    return ends


def _untaken(node: fx.Node, parts: Iterable[fx.Node], rounding: int) -> int:
    """Bytes of the results of an operation that are made although nothing asks for them."""
    # A kernel fills all that it returns, whether the graph takes it or not.
    values, taken = _value(node), {part.args[1] for part in parts}
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    mask: Any = arguments.get("output_mask")  # some fake kernels return what it says is not wanted
    return sum(
        rounded(tensor_bytes(value), rounding)
        for index, value in enumerate(values if isinstance(values, tuple | list) else ())
        if index not in taken and isinstance(value, torch.Tensor) and (mask is None or mask[index])
    )


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def rounded(size: int, rounding: int) -> int:
    """A size rounded up to a multiple of `rounding`."""
    return -(-size // rounding) * rounding


def tensor_bytes(value: torch.Tensor) -> int:
    """Bytes of a tensor's elements, whatever its storage has."""
    return value.numel() * value.dtype.itemsize
