"""Attention by torch's kernels: of one sequence queries, or all of it, are cut by `blockwise`."""

from collections.abc import Mapping, Sequence

import attrs
from torch import fx

from pfeife._torch.attention import ON_CPU, ON_CPU_BACKWARD
from pfeife.factors.blockwise import Kernel
from pfeife.factors.equation import Equation, Label, NoRule, Operation, equation, shape_of
from pfeife.factors.recipes import Recipe
from pfeife.ir.nodes import value_of

_LABELS = {
    **{"query": "bhsd", "key": "bhtd", "value": "bhtv", "out": "bhsv"},
    **dict.fromkeys(("grad_out", "grad_out_"), "bhsv"),
    **dict.fromkeys(("attn_mask", "attn_bias"), "bhst"),
}
_MASKS = ("attn_mask", "attn_bias")
_GRAIN = 32  # to so many queries the efficient kernel pads the sums that it saves of rows
ATTENTION = " ".join(
    f"_scaled_dot_product_{kernel}_attention{more}"
    for kernel, last in (("flash", "_for_cpu"), *((k, "") for k in ("flash", "efficient", "cudnn")))
    for more in (last, f"{last}_backward")
)


def attended(operation: Operation) -> Equation:
    """Attention: each row, each head and each query by itself; where it is causal, queries by a
    recipe. What a dropout would draw with counts for nothing where there is none."""
    rule = _rule(operation, _LABELS)
    if not operation.arguments["is_causal"]:
        return rule
    kernel = _kernel(operation, ring=False)
    recipes: Mapping[Label, Recipe] = {"s": kernel.recipe} if kernel else {}
    return attrs.evolve(rule, whole=rule.whole | {"s"}, recipes=recipes)


def attended_in_a_ring(operation: Operation) -> Equation:
    """The same; of one sequence keys and values are cut as queries are, and go around."""
    kernel = _kernel(operation, ring=True)
    if kernel is None:
        return attended(operation)
    rule = _rule(operation, {**_LABELS, "key": "bhsd", "value": "bhsv"})
    passed = ("key", "value") * (2 if "backward" in operation.name else 1)  # and their gradients
    return attrs.evolve(
        rule,
        whole=rule.whole | {"s"},
        recipes={"s": kernel.recipe},
        passed={"s": tuple(operation.operands.index(operation.arguments[name]) for name in passed)},
    )


def _rule(operation: Operation, labels: Mapping[str, str]) -> Equation:
    """The equation by the labels of operands; what is of one sequence has no other than "s"."""
    if len(operation.shape_of("query")) != 4 or operation.arguments["dropout_p"]:
        raise NoRule
    sums_of_rows = _sums_of_rows(operation)
    is_padded = _is_padded(operation)
    saved = ("bhp1" if is_padded else "bhs1")[: len(sums_of_rows)]
    named = [(n, v) for n, v in operation.arguments.items() if isinstance(v, fx.Node)]
    operands = [
        saved if "sumexp" in name else _of_operand(labels, name, len(shape_of(node)))
        for name, node in named
        if value_of(node) is not None
    ]
    is_backward = "backward" in operation.name
    known: list[Sequence[Label]] = ["bhsv", saved]
    if is_backward:  # of a mask too, if it is trained and the kernel can
        wanted = zip(("query", "key", "value", "attn_bias"), operation.results, strict=False)
        known = [_of_operand(labels, name, len(shape)) for name, shape in wanted if shape]
    drawn = operation.results[len(known) :]
    results = [*known, *(_drawn(at, len(shape)) for at, shape in enumerate(drawn))]
    free = {*"bh"} if is_padded else {*"bhs"}
    whole = {label for labels in (*operands, *results) for label in labels} - free
    rule = equation(operation, operands, results, whole=whole)
    sums = (*rule.sums[: len(known)], *[frozenset[Label]()] * len(drawn))
    counts = {"max_q": "s"} if "max_q" in operation.arguments else {}
    grains: Mapping[Label, int] = {"s": _GRAIN} if "efficient" in operation.name else {}
    return attrs.evolve(rule, sums=sums, counts=counts, grains=grains)


def _kernel(operation: Operation, *, ring: bool) -> Kernel | None:
    """How members compute attention of one sequence block by block: there are as many keys as
    queries. A mask is known of the kernels of a CPU alone, as far as it has a column for each
    key."""
    arguments, target = operation.arguments, operation.node.target
    queries, keys = (operation.shape_of(name)[2] for name in ("query", "key"))
    if queries != keys or _is_padded(operation):
        return None
    mask = next((name for name in _MASKS if arguments.get(name) is not None), None)
    on_cpu = target in (ON_CPU, ON_CPU_BACKWARD)
    by_key = mask is not None and on_cpu and operation.shape_of(mask)[-1] == keys
    if mask is not None and (arguments["is_causal"] or not by_key):
        return None
    return Kernel(target, arguments["is_causal"], ring, len(_sums_of_rows(operation)), mask)


def _sums_of_rows(operation: Operation) -> Sequence[object]:
    """The shape of what the kernel saves of each row."""
    is_backward = "backward" in operation.name
    return operation.shape_of("logsumexp") if is_backward else operation.results[1]


def _is_padded(operation: Operation) -> bool:
    """Whether it is not of as many rows as there are queries."""
    saved = _sums_of_rows(operation)
    return len(saved) < 3 or saved[2] != operation.shape_of("query")[2]


def _of_operand(labels: Mapping[str, str], name: str, rank: int) -> Sequence[Label]:
    """The labels of an operand; a mask may have fewer dimensions, from the last one on."""
    own = labels.get(name)
    return _drawn(name, rank) if own is None else own[len(own) - rank :]


def _drawn(name: Label, rank: int) -> Sequence[Label]:
    """Of the state of a generator: dimensions that nothing else has."""
    return [("drawn", name, dim) for dim in range(rank)]
