"""Which equation an operation has."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.factors import recipes
from pfeife.factors.attention import ATTENTION, attended, attended_in_a_ring
from pfeife.factors.axes import (
    Axes,
    dims_of,
    permuted,
    picked,
    reduced,
    squeezed,
    transposed,
    unsqueezed,
)
from pfeife.factors.chosen import (
    grouped_gradients,
    grouped_product,
    grouped_rows,
    indexed,
    put,
    ranked,
)
from pfeife.factors.equation import (
    Dims,
    Equation,
    Label,
    NoRule,
    Operation,
    Rule,
    equation,
)
from pfeife.factors.recipes import Recipe
from pfeife.factors.views import reshaped
from pfeife.ir.nodes import bound
from pfeife.ir.seeding import seeded

aten = torch.ops.aten


def equation_of(node: fx.Node, rules: Mapping[str, Rule] | None = None) -> Equation:
    """The equation of a node, by RULES or others. Raises NoRule where nothing is known of its
    operation."""
    rules = RULES if rules is None else rules
    if node.target in (seeded, aten.view.dtype):  # that sees the bits of a number as another
        raise NoRule
    if not hasattr(node.target, "_schema"):
        raise NoRule
    operation = Operation(node, bound(node))
    if operation.name in rules:
        return rules[operation.name](operation)
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return pointwise(operation)
    raise NoRule


def pointwise(operation: Operation) -> Equation:
    """Each number of the result is one of the same numbers of the operands, by broadcasting."""
    rank = len(operation.results[0])
    # torch marks aten.equal so, whose result has no numbers for those of its operands.
    if any(len(shape) > rank for shape in operation.shapes):
        raise NoRule
    operands = [range(rank - len(shape), rank) for shape in operation.shapes]
    results = [range(rank)] * len(operation.results)
    return equation(operation, operands, results)


def along(operation: Operation) -> Equation:
    """As pointwise, but for a dimension of which each number of the result depends on all:
    softmax, cumsum, flip."""
    rank = len(operation.results[0])
    labels = [range(rank)] * len(operation.shapes)
    return equation(operation, labels, [range(rank)], whole=dims_of(operation, rank))


def normalised_exponentials(recipe: Recipe) -> Rule:
    """The rule of a softmax, or of its backward."""

    def rule(operation: Operation) -> Equation:
        (dim,) = dims_of(operation, len(operation.results[0]))
        return attrs.evolve(along(operation), recipes={dim: recipe})

    return rule


def likelihood(operation: Operation) -> Equation:
    """nll_loss of rows of classes, and its backward: rows are counted, for a mean."""
    if operation.arguments["weight"] is not None or len(operation.shape_of("self")) != 2:
        raise NoRule
    if operation.name.endswith("backward"):
        names: list[list[Label]] = [["row", "class"], ["row"], []]
        gradient = [["row"][: len(operation.shape_of("grad_output"))]]
        rule = equation(operation, [*gradient, *names], [["row", "class"]], whole=["class"])
        return attrs.evolve(rule, recipes={"class": recipes.negative_likelihood_backward})
    results = [["row"][: len(operation.results[0])], []]
    rule = equation(operation, [["row", "class"], ["row"]], results, whole=["row", "class"])
    added = frozenset({"class"} if results[0] else {"row", "class"})
    known: dict[Label, Recipe] = {"class": recipes.negative_likelihood}
    if not results[0]:
        known["row"] = recipes.negative_likelihood_of_rows
    return attrs.evolve(rule, sums=(added, frozenset[Label]()), recipes=known)


def placed(axes: Axes, *, sums: bool = False, averages: bool = False) -> Rule:
    """The rule of an operation that says where dimensions go. Of those that go nowhere all is
    needed, unless it sums over them."""

    def rule(operation: Operation) -> Equation:
        (shape,) = operation.shapes
        places = axes(operation, shape)
        results: list[list[Label]] = []
        for at, result in enumerate(operation.results):
            labels: list[Label] = [("part", at, place) for place in range(len(result))]
            for dim, place in enumerate(places):
                if place is not None:
                    labels[place] = dim
            results.append(labels)
        nowhere = [dim for dim, place in enumerate(places) if place is None]
        whole = [] if sums else [*nowhere, *_parts(results)]
        rule = equation(operation, [range(len(shape))], results, whole=whole)
        return attrs.evolve(rule, averages=averages)

    return rule


def expanded(operation: Operation) -> Equation:
    """The same numbers again along new dimensions, and along those of size 1."""
    rank = len(operation.results[0])
    (shape,) = operation.shapes
    return equation(operation, [range(rank - len(shape), rank)], [range(rank)], shape="size")


def _parts(lists: Sequence[Sequence[Label]]) -> list[Label]:
    return [label for labels in lists for label in labels if isinstance(label, tuple)]


def in_equal_parts(operation: Operation) -> Equation:
    """split: a dimension as several of one size, of which each may be cut."""
    (shape,), parts = operation.shapes, operation.results
    dim, whole = operation.arguments["dim"] % len(shape), placed(picked)
    if len({part[dim] for part in parts}) > 1 or parts[0][dim] == 1:
        return whole(operation)
    argument = "split_size" if "split_size" in operation.arguments else "split_sizes"
    return _in_blocks(whole(operation), dim, len(parts), counts={argument: "part"})


def _in_blocks(rule: Equation, dim: int, count: int, **more: Any) -> Equation:
    """The rule of parts of a dimension, where all of them are of one size."""
    split = len(rule.operands) == 1
    (of_part,) = (rule.results if split else rule.operands)[0][dim]
    size = rule.sizes[of_part]
    sizes = {k: n for k, n in rule.sizes.items() if k not in rule.whole}
    sizes |= {"block": count, "part": size}

    def named(tensors: tuple[Dims, ...], label: tuple[Label, ...]) -> tuple[Dims, ...]:
        return tuple((*dims[:dim], label, *dims[dim + 1 :]) for dims in tensors)

    wide, narrow = ("block", "part"), ("part",)
    return attrs.evolve(
        rule,
        sizes=sizes,
        operands=named(rule.operands, wide if split else narrow),
        results=named(rule.results, narrow if split else wide),
        whole=frozenset({"block"}),
        **more,
    )


def put_back(operation: Operation) -> Equation:
    """The backward of a part of a dimension: a larger tensor, zero elsewhere."""
    (shape,), (result,) = operation.shapes, operation.results
    rank = len(result)
    dim = operation.arguments["dim"] % rank
    rest = [d if d != dim else "part" for d in range(rank)]
    if len(shape) < rank:
        rest.remove("part")
    return equation(operation, [rest], [range(rank)], whole=[dim, "part"], shape="input_sizes")


def joined(operation: Operation) -> Equation:
    """Tensors beside one another in a dimension."""
    rank = len(operation.results[0])
    dim = operation.arguments["dim"] % rank
    operands: list[list[Label]] = []
    for at, shape in enumerate(operation.shapes):
        # torch joins an empty tensor of one dimension with any other
        labels: list[Label] = [d if d != dim else ("part", at) for d in range(rank)]
        operands.append(labels if len(shape) == rank else [("part", at)])
    rule = equation(operation, operands, [range(rank)], whole=[dim, *_parts(operands)])
    sizes = {shape[dim] if len(shape) == rank else 0 for shape in operation.shapes}
    if len(sizes) == 1 and len(operands) > 1 and sizes - {0, 1}:
        return _in_blocks(rule, dim, len(operands))
    return rule


def padded(operation: Operation) -> Equation:
    """Some dimensions with more around them, of which all is needed."""
    (shape,), (result,) = operation.shapes, operation.results
    grown = [d for d, (a, b) in enumerate(zip(shape, result, strict=True)) if a != b]
    pads = operation.arguments["pad"]
    grown += [len(shape) - 1 - at // 2 for at, pad in enumerate(pads) if pad]
    rest = [d if d not in grown else ("part", d) for d in range(len(shape))]
    return equation(operation, [range(len(shape))], [rest], whole=[*grown, *_parts([rest])])


def made_like(operation: Operation) -> Equation:
    """A new tensor with a size of its own, for which another one tells type and device."""
    (shape,), (result,) = operation.shapes, operation.results
    operand = [("like", d) for d in range(len(shape))]
    return equation(operation, [operand], [range(len(result))], whole=operand, shape="size")


def product(first: str, second: str, result: str) -> Rule:
    """The rule of a product of two tensors, which is a sum over what they share."""
    return lambda operation: equation(operation, [first, second], [result])


def biased_product(operation: Operation) -> Equation:
    """addmm and baddbmm: a product with something added, once."""
    batched = operation.name == "baddbmm"
    letters = ["bnk", "bkm", "bnm"] if batched else ["nk", "km", "nm"]
    bias = letters[2][len(letters[2]) - len(operation.shapes[0]) :]
    plain = operation.arguments["alpha"] == operation.arguments["beta"] == 1
    rule = equation(operation, [bias, *letters[:2]], letters[2:], whole="" if plain else "k")
    return attrs.evolve(rule, once=0)


def looked_up(operation: Operation) -> Equation:
    """embedding: rows of a table, all of which are needed."""
    table, indices = operation.shape_of("weight"), operation.shape_of("indices")
    places = range(len(indices))
    if len(table) != 2:
        raise NoRule
    rule = equation(operation, [["row", "h"], places], [[*places, "h"]], whole=["row"])
    return attrs.evolve(rule, sums=(frozenset({"row"}),), recipes={"row": recipes.looked_up})


def looked_up_backward(operation: Operation) -> Equation:
    """Rows of a gradient, added up in a table."""
    places = range(len(operation.shape_of("indices")))
    if operation.arguments["scale_grad_by_freq"]:
        raise NoRule
    rule = equation(operation, [[*places, "h"], places], [["row", "h"]], whole=["row"])
    return attrs.evolve(rule, recipes={"row": recipes.looked_up_gradient})


def normalised(operation: Operation) -> Equation:
    """A layer or RMS norm over the last dimensions, and its statistics."""
    rank = len(operation.shape_of("input"))
    inner = range(rank - len(operation.arguments["normalized_shape"]), rank)
    statistics = [d if d not in inner else ("one", d) for d in range(rank)]
    parameters = [inner] * (len(operation.operands) - 1)
    results = [range(rank), *[statistics] * (len(operation.results) - 1)]
    return equation(operation, [range(rank), *parameters], results, whole=inner)


def normalised_backward(operation: Operation) -> Equation:
    """The gradients of a layer norm: of its input, and, summed over the rest, of its parameters."""
    rank = len(operation.shape_of("input"))
    inner = range(rank - len(operation.arguments["normalized_shape"]), rank)
    statistics = [d if d not in inner else ("one", d) for d in range(rank)]
    whole_value, figures = [range(rank)] * 2, [statistics] * _count(operation, "mean", "rstd")
    parameters = [inner] * _count(operation, "weight", "bias")
    wanted = zip(operation.arguments["output_mask"], [range(rank), inner, inner], strict=False)
    results = [labels if asked else [] for asked, labels in wanted]
    return equation(operation, [*whole_value, *figures, *parameters], results, whole=inner)


def _count(operation: Operation, *names: str) -> int:
    """How many of some optional operands there are."""
    return sum(isinstance(operation.arguments.get(name), fx.Node) for name in names)


# Attention's operands by their names in the schemas: rows, heads, queries, keys, and their sizes.
def _table(names: str, rule: Rule) -> Mapping[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: Mapping[str, Rule] = {
    **_table("_to_copy alias detach native_dropout_backward", pointwise),
    **_table("zeros_like ones_like full_like empty_like", pointwise),
    **_table("_safe_softmax cumsum cumprod flip roll", along),
    **_table("_softmax", normalised_exponentials(recipes.softmax)),
    **_table("_log_softmax", normalised_exponentials(recipes.log_softmax)),
    **_table("_softmax_backward_data", normalised_exponentials(recipes.softmax_backward)),
    **_table("_log_softmax_backward_data", normalised_exponentials(recipes.log_softmax_backward)),
    **_table("nll_loss_forward nll_loss_backward", likelihood),
    **_table("sum", placed(reduced, sums=True)),
    **_table("mean", placed(reduced, sums=True, averages=True)),
    **_table("amax amin var std var_mean logsumexp any all argmax argmin", placed(reduced)),
    **_table("view _unsafe_view reshape", reshaped),
    **_table("permute", placed(permuted)),
    **_table("transpose t", placed(transposed)),
    **_table("unsqueeze", placed(unsqueezed)),
    **_table("squeeze", placed(squeezed)),
    **_table("expand", expanded),
    **_table("select slice unbind", placed(picked)),
    **_table("split split_with_sizes", in_equal_parts),
    **_table("slice_backward select_backward", put_back),
    **_table("cat", joined),
    **_table("constant_pad_nd", padded),
    **_table("new_zeros new_ones new_empty new_full", made_like),
    **_table("mm", product("nk", "km", "nm")),
    **_table("bmm", product("bnk", "bkm", "bnm")),
    **_table("mv", product("nk", "k", "n")),
    **_table("addmm baddbmm", biased_product),
    **_table("index", indexed),
    **_table("index_put", put),
    **_table("sort topk", ranked),
    **_table("_grouped_mm", grouped_product),
    **_table("grouped_mm_fallback", grouped_rows),
    **_table("grouped_mm_fallback_backward", grouped_gradients),
    **_table("embedding", looked_up),
    **_table("embedding_dense_backward", looked_up_backward),
    **_table("native_layer_norm _fused_rms_norm", normalised),
    **_table("native_layer_norm_backward", normalised_backward),
    **_table(ATTENTION, attended),
}
# Keys and values go around, where attention is of one sequence.
RINGS: Mapping[str, Rule] = {**RULES, **_table(ATTENTION, attended_in_a_ring)}
