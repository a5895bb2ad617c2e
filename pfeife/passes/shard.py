"""Parallelism inside of a stage: a flat program of whole values as that of one of its members."""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import attrs
import torch
from torch import fx

from pfeife.factors.equation import Place, Rule
from pfeife.factors.rules import RINGS, RULES
from pfeife.factors.way import Way
from pfeife.factors.ways import Ways, dividing
from pfeife.ir.nodes import node_bytes, returned, source_line, value_of
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.ir.split import Split
from pfeife.passes.member_graph import Member
from pfeife.passes.member_ways import Prices, member_ways

Attention = Literal["gather", "ring"]
Every = Literal["auto", "cut", "gathered"]  # what all parameters may be
Word = Literal["shared", "cut", "gathered", "auto"]
Placements = Mapping[str, int | Place | Word | None]


def shard(
    placements: Placements | Every,
    members: int,
    *,
    unknown: Literal["refuse", "gather"] = "refuse",
    attention: Attention = "gather",
    keepers: Mapping[str, int] | None = None,
    prices: Prices | None = None,
    sizes: Mapping[str, int] | None = None,
    decided: Callable[[Callable[[], str]], str] = lambda decide: decide(),
) -> Callable[[Program], Program]:
    """A pass that cuts parameters over the members of a group, and all that is computed of them.

    `placements` says along which dimension, by patterns of names ("layers.*.q.weight": 0); a
    `Place(0, 3)` cuts each of three blocks of it, as of queries, keys and values in one; "cut"
    means along any that `members` divide, "auto" there or not at all, None (and a parameter that is
    not named) not at all. "gathered" is whole on all members in a step, which are told it before,
    however many microbatches this has; so is what shall be "cut" and cannot. "shared" is either,
    whichever takes less by `prices`. "cut" alone is that for all that has several dimensions, and
    "auto" for the rest; "auto" alone is "shared" for all, "gathered" that.

    Everything else follows by a linear program: each operation is computed along one of its
    factors, or as a whole, so that by `prices` a step takes least. Without these that is where the
    fewest bytes are sent. The batch may be cut as well; sums are added up where they are read,
    several at once. Optimizers, losses and results see what they saw: a gradient is cut as its
    parameter is, all else is whole. A dropout draws what it draws on one device.

    The result is the program of any one of the members; `pfeife.evaluate` runs it for all of them,
    on whole values. It agrees with the program that was given to within the rounding of sums that
    are cut. What has no rule is refused by its line, or, with `unknown="gather"`, computed by each
    member as a whole. Where a sequence is cut, members `"gather"` the keys and values of attention,
    or let them go around in a `"ring"`, block by block: half as many bytes more are sent, and no
    member holds those of all. With `keepers` each parameter that is cut, or gathered, is whole on
    one member, which is given its whole gradient and tells the others what they need of it in each
    step: so any optimizer does with it what it does on one device. They are named, by names of
    parameters, or chosen so that each member keeps about as many bytes. Ranks that shard each for
    itself have to decide alike: `decided` gives all of them what one has decided.

    A size that is open is cut where members divide it as it was captured, and in a call with the
    `sizes` by the names of their ports if these are told. That they do is a limit of the result.

    Raises ValueError for other words, a pattern that no parameter has, a dimension that is not
    there or that `members` does not divide, an operation without a rule, and a program that is not
    flat.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> flat = pfeife.capture(lambda x: net(x).mean(), torch.ones(2, 4))
    >>> local = pfeife.shard({"0.*": 0, "2.weight": 1}, members=2)(flat)
    >>> [node.name for node in local.module.graph.nodes if "all_" in node.name]
    ['all_reduce']
    """

    _check_words(placements, members, unknown, attention)

    def run(program: Program) -> Program:
        if program.calls or program.members > 1:
            raise ValueError("shard: the program is fused or sharded already; shard a flat one")
        wanted = _wanted(program, placements)
        rules = RINGS if attention == "ring" else RULES
        ways = _ways(program, wanted, members, rules, [sizes] if sizes else [])
        numbers = decided(
            lambda: _numbers(ways, _chosen(program, ways, prices or _FEWEST_BYTES, unknown))
        )
        chosen = _decided(ways, numbers)
        splits = _splits(program.ports(Role.PARAMETER), chosen, members)
        local = Member(program, splits, chosen, ways).program()
        shared = {
            port.fqn
            for port in program.ports(Role.PARAMETER)
            if port.fqn in splits or wanted[port.name] in ("shared", "cut", "gathered")
        }
        return local if keepers is None else _kept(local, shared, keepers)

    return run


def _check_words(
    placements: Placements | Every, members: int, unknown: str, attention: str
) -> None:
    """Raises ValueError for arguments that mean nothing."""
    alone = isinstance(placements, str)
    places = {"*": placements} if alone else placements
    words = get_args(Every if alone else Word)
    if not isinstance(places, Mapping):
        raise ValueError(f"shard: placements={placements!r}: say them by names, or one of {words}")
    for name, place in places.items():
        known = place in words if isinstance(place, str) else place is None or _is_place(place)
        if not known:
            raise ValueError(
                f"shard: {name}: {place!r} is none of {words}, a dimension, a Place, or None"
            )
    for argument, value, those in (
        ("unknown", unknown, ("refuse", "gather")),
        ("attention", attention, get_args(Attention)),
    ):
        if value not in those:
            raise ValueError(f"shard: {argument}={value!r} is none of {those}")
    if not isinstance(members, int) or members < 2:
        raise ValueError(f"shard: members={members!r}: a group has 2 or more")


def _is_place(place: Any) -> bool:
    if isinstance(place, Place):
        return isinstance(place.dim, int) and isinstance(place.before, int) and place.before > 0
    return isinstance(place, int) and not isinstance(place, bool)


# What is computed and copied decides where as many bytes are sent.
_FEWEST_BYTES = Prices(
    compute=lambda node: 1e-3 * node_bytes(node),
    send=lambda size: size + 1.0,
    copy=lambda size: 1e-3 * size,
    once=float,
)


def _ways(
    program: Program,
    wanted: Mapping[str, Any],
    members: int,
    rules: Mapping[str, Rule],
    calls: Sequence[Mapping[str, int]],
) -> Ways:
    """In which ways its nodes may be computed where parameters are cut so."""
    ports = program.ports(Role.PARAMETER)
    places = {port.name: _places(port, wanted[port.name], members) for port in ports}
    free = {name for name, place in wanted.items() if place in ("shared", "cut", "auto")}
    return Ways(program, members, places, free, rules, calls)


def _numbers(ways: Ways, chosen: Mapping[fx.Node, Way]) -> str:
    """Which of its ways, and of how many, each node is computed in."""
    return json.dumps(
        [(ways.of[node].index(chosen[node]), len(ways.of[node])) for node in ways.nodes]
    )


def _decided(ways: Ways, numbers: str) -> dict[fx.Node, Way]:
    """The ways by such numbers of rank 0. Raises ValueError if it knows others."""
    told = json.loads(numbers)
    if [count for _, count in told] != [len(ways.of[node]) for node in ways.nodes]:
        raise ValueError(
            "shard: rank 0 may cut the program in other ways, as of one that was captured at other "
            "sizes: give all ranks the same cache of captures, or none"
        )
    pairs = zip(ways.nodes, told, strict=True)
    return {node: ways.of[node][number] for node, (number, _) in pairs}


def _chosen(program: Program, ways: Ways, prices: Prices, unknown: str) -> Mapping[fx.Node, Way]:
    """The best ways. Raises ValueError where there are none, with the operation that has no
    rule."""
    strict = unknown == "refuse"
    chosen = member_ways(program, ways, prices, strict)
    if chosen is None and strict:
        gathering = member_ways(program, ways, prices)
        if gathering is not None:
            _check_rules(ways, gathering)
    if chosen is None:
        raise ValueError(
            "shard: no way was found to cut the parameters so; say how, by their names"
        )
    return chosen


def _check_rules(ways: Ways, chosen: Mapping[fx.Node, Way]) -> None:
    """Raises ValueError for an operation without a rule of what is cut."""
    for node in filter(ways.has_no_rule, ways.nodes):
        if any(place is not None for read in ways.reads[node] for place in chosen[read].results):
            raise ValueError(
                f"shard: no rule says how {node.target} is computed on parts "
                f'({source_line(node)}); shard(..., unknown="gather") computes it as a whole'
            )


def _kept(program: Program, shared: Container[str], keepers: Mapping[str, int]) -> Program:
    """The same, whose parameters and gradients that members share are whole on one of them each."""
    kept_bytes, chosen = [0] * program.members, dict(keepers)
    for name, member in keepers.items():
        if not 0 <= member < program.members:
            raise ValueError(
                f"shard: keepers say that member {member} keeps {name}, of {program.members}"
            )
    for port in program.ports(Role.PARAMETER):
        if port.fqn in shared:
            least = kept_bytes.index(min(kept_bytes))
            whole = port.bytes * (program.members if port.split else 1)
            kept_bytes[chosen.setdefault(port.fqn, least)] += whole

    def keeper(port: Port) -> int | None:
        is_kept = port.role in (Role.PARAMETER, Role.GRADIENT) and port.fqn in shared
        return chosen[port.fqn] if is_kept else None

    inputs, outputs = (
        tuple(attrs.evolve(port, keeper=keeper(port)) for port in ports)
        for ports in (program.inputs, program.outputs)
    )
    return attrs.evolve(program, inputs=inputs, outputs=outputs)


def ways_to_share(parallel: Placements | Every) -> Sequence[Placements | Every]:
    """What of a model's placements has to be tried: "auto" does not know what is sent beside what
    is computed, nor how much memory there is."""
    return ("auto", "cut") if parallel == "auto" else (parallel,)


def of_all(every: Every, ports: Sequence[Port]) -> dict[str, Word]:
    """What a word alone means for parameters, by their names."""
    if every == "cut":
        return {port.fqn: "cut" if len(port.shape) > 1 else "auto" for port in ports}
    return dict.fromkeys((port.fqn for port in ports), "shared" if every == "auto" else every)


def _wanted(program: Program, given: Placements | Every) -> dict[str, Any]:
    """How each parameter shall be cut, by names of ports. That of a sparse gradient, some rows of
    a table, has no parts: it is gathered where nobody says along which dimension it is cut."""
    ports, results = program.ports(Role.PARAMETER), returned(program.module)
    values = {p.fqn: value_of(results[p.name]) for p in program.ports(Role.GRADIENT)}
    sparse = {n for n, v in values.items() if v is not None and v.layout != torch.strided}
    wanted = _by_name(ports, given)
    for port in ports:
        if port.fqn not in sparse:
            continue
        if isinstance(wanted[port.name], Place):
            raise ValueError(
                f"shard: the gradient of {port.fqn} is sparse, some rows of a table, and has no "
                'parts: say "gathered" for it, or make its embedding with sparse=False'
            )
        wanted[port.name] = wanted[port.name] and "gathered"
    return wanted


def _by_name(ports: Sequence[Port], given: Placements | Every) -> dict[str, Any]:
    """How each parameter shall be cut, by names of ports."""
    placements: Placements = of_all(given, ports) if isinstance(given, str) else given
    wanted: dict[str, Any] = dict.fromkeys((port.name for port in ports), None)
    exactly = {name: port for port in ports for name in port.names}
    for pattern, place in placements.items():
        if pattern in exactly:
            named = [exactly[pattern]]
        else:
            named = [p for p in ports if any(fnmatchcase(name, pattern) for name in p.names)]
        if not named:
            raise ValueError(f"shard: no parameter is called {pattern!r}")
        wanted |= {port.name: Place(place) if isinstance(place, int) else place for port in named}
    return wanted


def _places(port: Port, wanted: Place | str | None, members: int) -> tuple[Place | None, ...]:
    """Where a parameter may be cut."""
    if wanted in (None, "gathered"):
        return (None,)
    if isinstance(wanted, str):
        dims = dividing(port.shape, members)
        return (*dims,) if dims and wanted == "cut" else (None, *dims)
    rank = len(port.shape)
    if not -rank <= wanted.dim < rank:
        raise ValueError(f"shard: {port.fqn} of shape {port.shape} has no dimension {wanted.dim}")
    size = port.shape[wanted.dim]
    if size % (members * wanted.before):
        blocks = f"{wanted.before} blocks for " if wanted.before > 1 else ""
        raise ValueError(
            f"shard: dimension {wanted.dim} of {port.fqn} has {size} elements, which "
            f"{blocks}{members} members do not divide"
        )
    return (Place(wanted.dim % rank, wanted.before),)


def _splits(ports: Sequence[Port], ways: Mapping[fx.Node, Way], members: int) -> dict[str, Split]:
    """How parameters are cut, by their names."""
    where = {node.name: way.results for node, way in ways.items() if len(way.results) == 1}
    places = {port.fqn: where[port.name][0] for port in ports}
    return {
        name: Split(place.dim, members, place.before)
        for name, place in places.items()
        if isinstance(place, Place)
    }
