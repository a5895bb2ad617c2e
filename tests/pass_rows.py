"""The passes under test, in the order in which a program meets them, with strategies for their
options. A new pass needs no more than a row here."""

import operator
from collections.abc import Callable, Collection

import attrs
import torch
from decisions import CPU_CORE
from hypothesis import strategies as st
from torch import fx

import pfeife
from pfeife.cost import timing_of
from pfeife.ir.editing.rewrite import Operation
from pfeife.passes import join_backward, shard
from pfeife.testing import plans, tied_across

# A pass, and the gradients that it may change by rounding (None: everything).
Drawn = tuple[pfeife.Pass, Collection[str] | None]


@attrs.frozen
class Row:
    """One pass: `draw` gives it with options for a program and a number of microbatches; a pass
    that programs do not need is left out `sometimes`."""

    name: str
    draw: Callable[[pfeife.Program, int], st.SearchStrategy[Drawn]]
    sometimes: bool = False


def exactly(one: pfeife.Pass) -> st.SearchStrategy[Drawn]:
    """A pass that changes no bit."""
    return st.just((one, ()))


def with_costs(program: pfeife.Program, microbatches: int) -> st.SearchStrategy[Drawn]:
    names = [call.node for call in program.calls]
    seconds = st.lists(st.floats(1e-6, 1e-3), min_size=len(names), max_size=len(names))
    costs = seconds.map(lambda each: pfeife.Costs("drawn", dict(zip(names, each, strict=True))))
    return costs.map(lambda drawn: (pfeife.annotate(drawn), ()))


def by_plan(program: pfeife.Program, microbatches: int) -> st.SearchStrategy[Drawn]:
    """A weight that several stages use has its gradient summed in another order."""
    return plans(program, microbatches).map(
        lambda plan: (pfeife.partition(plan), tied_across(plan, program))
    )


def on_devices(program: pfeife.Program, microbatches: int) -> st.SearchStrategy[Drawn]:
    ranks = 1 + max(call.rank or 0 for call in program.calls)
    return exactly(pfeife.place([torch.device("cpu")] * ranks))


def there_and_back(program: pfeife.Program, microbatches: int) -> st.SearchStrategy[Drawn]:
    """On a GPU that is not there, and on the CPU again."""
    return exactly(pfeife.compose(pfeife.move_to_device("cuda:0"), pfeife.move_to_device("cpu")))


def in_replicas(program: pfeife.Program, microbatches: int) -> st.SearchStrategy[Drawn]:
    """Replicas add the microbatches in another order, and each has batch statistics of its own."""
    ranks = 1 + max(call.rank or 0 for call in program.calls)
    two = microbatches % 2 == 0 and not program.ports(pfeife.Role.BUFFER_UPDATE)
    counts = st.sampled_from([1, 2] if two else [1])
    options = st.tuples(counts, st.sampled_from(["average", "shard"]), st.sampled_from([1, 200]))
    return options.map(
        lambda drawn: (
            pfeife.dp_wrap(pfeife.Mesh(ranks, drawn[0]), pfeife.Replicas(*drawn)),
            None if drawn[0] > 1 else (),
        )
    )


def with_plain_nodes(program: pfeife.Program, _: int) -> st.SearchStrategy[Drawn]:
    """Operations beside the bodies, between calls: some values negated twice."""

    def negated_twice(chosen: Collection[int]) -> pfeife.Pass:
        def change(operation: Operation) -> fx.Node | None:
            value = operation.value
            known = isinstance(value, torch.Tensor) and value.dtype != torch.bool
            if operation.target is not operator.getitem or not known:
                return None
            if len(operation.node.name) % 4 not in chosen:
                return None
            part = operation.make(operator.getitem, *operation.args)
            once = operation.make(torch.ops.aten.neg.default, part)
            return operation.make(torch.ops.aten.neg.default, once)

        return lambda program: program.rewrite(change, of="calls")

    return st.sets(st.integers(0, 3)).map(lambda chosen: (negated_twice(chosen), ()))


def over_members(program: pfeife.Program, microbatches: int) -> st.SearchStrategy[Drawn]:
    """Some parameters cut along any dimensions, others gathered, or either, each with a keeper or
    none: sums that are cut are rounded otherwise."""

    def place(port: pfeife.Port, dim: int, members: int) -> int | str:
        is_cut = dim < len(port.shape) and not port.shape[dim] % members
        return dim if is_cut else "shared" if dim == 8 else "gathered"

    def sharded(drawn: tuple[int, dict[str, int], dict | None]) -> Drawn:
        members, dims, keepers = drawn
        places = {
            port.fqn: place(port, dims[port.fqn], members)
            for port in program.ports(pfeife.Role.PARAMETER)
        }
        return shard(places, members, unknown="gather", keepers=keepers), None

    names = [port.fqn for port in program.ports(pfeife.Role.PARAMETER)]
    dims = st.fixed_dictionaries(dict.fromkeys(names, st.sampled_from([0, 1, 8, 9])))
    return st.tuples(st.sampled_from([2, 3]), dims, st.sampled_from([None, {}])).map(sharded)


def beside(program: pfeife.Program, microbatches: int) -> st.SearchStrategy[Drawn]:
    """Collectives that are under way for a while, on faster and slower links."""
    rates = st.sampled_from([1e3, 1e6, 1e9])
    machines = st.builds(lambda rate: attrs.evolve(CPU_CORE, link_bandwidth=rate), rates)
    return machines.map(lambda machine: (pfeife.overlap(timing_of(machine)), ()))


PLAIN = Row("plain nodes", with_plain_nodes, sometimes=True)
MOVED = Row("move_to_device", there_and_back, sometimes=True)
SPLIT = Row("split_backward", lambda program, _: exactly(pfeife.split_backward()), sometimes=True)

ROWS = (
    MOVED,
    Row("shard", over_members, sometimes=True),
    Row("fuse", lambda program, _: exactly(pfeife.fuse())),
    SPLIT,  # of clusters
    Row("join_backward", lambda program, _: exactly(join_backward()), sometimes=True),
    Row("annotate", with_costs),
    PLAIN,
    Row("partition", by_plan),
    PLAIN,
    SPLIT,  # of stages
    Row("insert_send_recv", lambda program, _: exactly(pfeife.insert_send_recv())),
    PLAIN,
    Row("dp_wrap", in_replicas),
    Row("overlap", beside, sometimes=True),
    MOVED,
    Row("absorb", lambda program, _: exactly(pfeife.absorb), sometimes=True),
    Row("place", on_devices),
)
