"""Costs without the device: a roofline over operations and bytes."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pfeife.data.machine import Machine
from pfeife.data.plan import Costs
from pfeife.ir.flops import computed_dtype, node_flops, operation_of
from pfeife.ir.members import (
    ALONE,
    MEANING,
    added_rows,
    all_to_all,
    begins,
    exchanged_bytes,
    fetched_rows,
    messages,
    peers,
)
from pfeife.ir.messages import call_of
from pfeife.ir.nodes import returned, sharers
from pfeife.ir.outline import is_view
from pfeife.ir.parts import Call, Role
from pfeife.ir.program import Program
from pfeife.passes.member_ways import Prices
from pfeife.passes.overlap import Timing


def estimate(program: Program, machine: Machine | Sequence[Machine]) -> Costs:
    """Seconds of every call: per operation the larger of FLOPs over the machine's rate for their
    dtype and bytes over its bandwidth (Williams et al., Roofline, CACM 2009), and a launch.

    FLOPs are torch.utils.flop_counter's; bytes are those of all tensors read and written. To
    add up a gradient reads two tensors and writes one. Members of a group wait for what the others
    send, one after another (an all-gather of p ranks in a ring: (p - 1) latencies and messages,
    Thakur et al., IJHPCA 2005), over the machine's link, beside what they compute where these are
    under way meanwhile (`overlap`). Of several machines, one a rank, each call is on that of its
    rank; raises ValueError where it has none, or there are fewer machines.
    """
    seconds: dict[str, float] = {}
    on: dict[str, Machine] = {}
    for call in program.calls:
        here = on[call.node] = _machine_of(call, machine)
        seconds[call.node] = timing_of(here).seconds(program.body(call))
    results = returned(program.module)
    accumulate: dict[str, float] = {}
    for port in program.ports(Role.GRADIENT):
        name = call_of(results[port.name]).name
        here = on[name]
        # Reads the sum and the new gradient, writes the sum.
        adding = here.launch_seconds + 3 * port.bytes / here.memory_bandwidth
        accumulate[name] = accumulate.get(name, 0.0) + adding
    names = (
        [machine.name] if isinstance(machine, Machine) else [profile.name for profile in machine]
    )
    return Costs(f"estimate for {', '.join(dict.fromkeys(names))}", seconds, accumulate=accumulate)


def _machine_of(call: Call, machine: Machine | Sequence[Machine]) -> Machine:
    if isinstance(machine, Machine):
        return machine
    if call.rank is None or call.rank >= len(machine):
        raise ValueError(
            f"{len(machine)} machines, and {call.node} is on rank {call.rank}: estimate programs "
            "of ranks (after insert_send_recv) with a machine for each of them"
        )
    return machine[call.rank]


def node_seconds(node: fx.Node, machine: Machine) -> float:
    """Seconds of one node; views and what is no operation take none."""
    if node.op != "call_function" or is_view(node):
        return 0.0
    if node.target in MEANING:
        return _collective_seconds(node, machine)
    if not hasattr(operation_of(node)[0], "_schema"):
        return 0.0
    return machine.launch_seconds + max(_rooflines(node, machine))


def timing_of(machine: Machine) -> Timing:
    """What nodes take on a machine, by these estimates: for `overlap`."""

    def sending(node: fx.Node) -> float:
        if node.target not in MEANING:
            return 0.0
        return _sending_seconds(node, machine, most=1 if begins(node) else None)

    return Timing(
        computing=lambda node: node_seconds(node, machine) - sending(node),
        sending=sending,
        hidden=machine.overlap,
    )


def telling_seconds(body: fx.GraphModule, machine: Machine) -> float:
    """Seconds of a body in which members of a group wait for what they tell one another, and work
    on it."""
    collectives = (node for node in body.graph.nodes if node.target in MEANING.keys() - ALONE)
    working = sum(map(timing_of(machine).computing, collectives))
    return working + sending_seconds(body, machine)


def sending_seconds(body: fx.GraphModule, machine: Machine) -> float:
    """Seconds by which a body takes longer for the messages of its collectives."""
    _, waited = timing_of(machine).lanes(body)
    return waited


def member_prices(machine: Machine, microbatches: int = 1) -> Prices:
    """What members of a group pay on a machine, by these estimates, in a step of so many
    microbatches: for `shard`."""
    return Prices(
        compute=lambda node: node_seconds(node, machine),
        send=machine.transfer_seconds,
        copy=lambda size: machine.launch_seconds + 2 * size / machine.memory_bandwidth,
        once=lambda size: size / machine.link_bandwidth / microbatches,
    )


def _collective_seconds(node: fx.Node, machine: Machine) -> float:
    """What a member takes to tell the others its tensor and hear theirs, and to work on them."""
    moved = machine.launch_seconds + sum(_rooflines(node, machine))
    return moved + _sending_seconds(node, machine)


def _sending_seconds(node: fx.Node, machine: Machine, most: int | None = None) -> float:
    """What of that messages take, or the first ones of them."""
    target: Any = node.target
    if target in ALONE:
        return 0.0
    arguments = signature(target).bind(*node.args, **node.kwargs).arguments
    members, value = arguments["members"], node.all_input_nodes[0]
    along = target is all_to_all and arguments["old"] == arguments["new"]
    sent = messages(target, _bytes(value), members, along_one=along)
    if target in (fetched_rows, added_rows):
        sent = [8, _exchanged(arguments)]  # how many rows, and these
    return peers(target, members) * sum(map(machine.transfer_seconds, sent[:most]))


def _exchanged(arguments: Mapping[str, Any]) -> int:
    """The bytes that an exchange of rows sends to each other member, if data choose all alike."""
    members, value = arguments["members"], arguments["value"].meta["val"]
    cut = arguments.get("into", arguments["value"]).meta["val"]
    starts = arguments["targets" if "into" in arguments else "sources"]
    rows = len(cut) * (members if starts is None else 1)
    row = value[:1].numel() * value.dtype.itemsize
    return exchanged_bytes(rows, len(arguments["index"].meta["val"]), row, members)


def compute_bound(node: fx.Node, machine: Machine) -> bool:
    """Whether a node computes longer than it moves bytes."""
    computed, moved = _rooflines(node, machine)
    return computed > moved


def _rooflines(node: fx.Node, machine: Machine) -> tuple[float, float]:
    """Seconds that a node computes, and that it moves bytes."""
    moved = sum(map(_bytes, (*node.all_input_nodes, node)))
    # What a node computes and what it moves overlap on any machine: the longer one counts.
    computed = node_flops(node) / machine.flops_of(computed_dtype(node))
    return computed, moved / machine.memory_bandwidth


def _bytes(node: fx.Node) -> int:
    """The bytes of a node's value, if data give all members alike of what they share out."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors) // sharers(node)
