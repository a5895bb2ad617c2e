"""Operations along a dimension of which they need all, done on parts of it: the vocabulary of an
embedding, and of a cross entropy, whose logits nobody gathers (Shoeybi et al. 2019, section 3).

A recipe makes nodes for one member by `make(target, *args)`, of the arguments of the operation as
this one has them. Of a result that is a sum, by the operation's equation, it gives a member's part.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.ir.members import all_reduce, member

aten = torch.ops.aten
Make = Callable[..., fx.Node]


@attrs.frozen(eq=False)
class Part:
    """What a member has of an operation: its `arguments` by their names in the schema, `size`
    elements of the `whole` that is cut over the `members`, numbers or nodes of open ones, and the
    type and device of the result; `reads` is the type of the first operand, another one for kernels
    that widen (softmax on a GPU)."""

    arguments: Mapping[str, Any]
    size: int | fx.Node
    whole: int | fx.Node
    members: int
    dtype: torch.dtype
    device: torch.device
    reads: torch.dtype


Recipe = Callable[[Make, Part], Any]  # gives a node, or a tuple of them


def computed(make: Make, function: Callable[..., int], *numbers: int | fx.Node) -> int | fx.Node:
    """What a function makes of numbers, a node where some of them are."""
    is_known = all(isinstance(number, int) for number in numbers)
    return function(*numbers) if is_known else make(function, *numbers)


def softmax(make: Make, part: Part) -> fx.Node:
    """exp(x - max) / sum of these."""
    exponentials, total = _exponentials(make, part)[1:]
    return make(aten.div.Tensor, exponentials, total)


def log_softmax(make: Make, part: Part) -> fx.Node:
    """x - max - log of the sum of exp(x - max)."""
    shifted, _, total = _exponentials(make, part)
    return make(aten.sub.Tensor, shifted, make(aten.log.default, total))


def _exponentials(make: Make, part: Part) -> tuple[fx.Node, fx.Node, fx.Node]:
    """x - max, exp of it, and the sum of that along the dimension."""
    x, dim = _in_its_type(make, part, part.arguments["self"]), part.arguments["dim"]
    largest = make(all_reduce, make(aten.amax.default, x, [dim], True), part.members, "max")
    shifted = make(aten.sub.Tensor, x, largest)
    exponentials = make(aten.exp.default, shifted)
    total = make(aten.sum.dim_IntList, exponentials, [dim], True)
    return shifted, exponentials, make(all_reduce, total, part.members)


def softmax_backward(make: Make, part: Part) -> fx.Node:
    """y (g - sum of g y)."""
    gradient, y = part.arguments["grad_output"], part.arguments["output"]
    weighted = make(aten.mul.Tensor, gradient, y)
    total = make(aten.sum.dim_IntList, weighted, [part.arguments["dim"]], True)
    rest = make(aten.sub.Tensor, gradient, make(all_reduce, total, part.members))
    return _in_its_type(make, part, make(aten.mul.Tensor, y, rest))


def log_softmax_backward(make: Make, part: Part) -> fx.Node:
    """g - exp(y) sum of g."""
    gradient, y = part.arguments["grad_output"], part.arguments["output"]
    total = make(aten.sum.dim_IntList, gradient, [part.arguments["dim"]], True)
    scaled = make(aten.mul.Tensor, make(aten.exp.default, y), make(all_reduce, total, part.members))
    return _in_its_type(make, part, make(aten.sub.Tensor, gradient, scaled))


def _in_its_type(make: Make, part: Part, value: fx.Node) -> fx.Node:
    """A value of the operands' type in that of the result."""
    if part.reads == part.dtype:
        return value
    return make(aten._to_copy.default, value, dtype=part.dtype)


def looked_up(make: Make, part: Part) -> fx.Node:
    """embedding: a member looks up what is in its rows, and has zeros for the rest."""
    inside, index = _own(make, _checked(make, part.arguments["indices"], part), part)
    rows = make(aten.embedding.default, part.arguments["weight"], index)
    outside = make(aten.logical_not.default, make(aten.unsqueeze.default, inside, -1))
    return make(aten.masked_fill.Scalar, rows, outside, 0.0)


def looked_up_gradient(make: Make, part: Part) -> fx.Node:
    """embedding's backward: a member adds up what goes to its own rows."""
    indices = part.arguments["indices"]
    inside, index = _own(make, indices, part)
    counted = make(aten.ne.Scalar, indices, part.arguments["padding_idx"])
    outside = make(aten.logical_not.default, make(aten.logical_and.default, inside, counted))
    gradient = part.arguments["grad_output"]
    gradient = make(aten.masked_fill.Scalar, gradient, make(aten.unsqueeze.default, outside, -1), 0)
    return make(aten.embedding_dense_backward.default, gradient, index, part.size, -1, False)


def _checked(make: Make, indices: fx.Node, part: Part) -> fx.Node:
    """The indices, looked up in a table of themselves: one that is in no member's part is the error
    that it is on one device."""
    numbers = make(aten.arange.default, part.whole, device=part.device)
    table = make(aten.unsqueeze.default, numbers, 1)
    return make(aten.squeeze.dim, make(aten.embedding.default, table, indices), -1)


def _own(make: Make, indices: fx.Node, part: Part) -> tuple[fx.Node, fx.Node]:
    """Which indices are in a member's part of so many, and where there; 0 for the others."""
    first = make(aten.mul.Tensor, make(member, indices, part.members), part.size)
    index = make(aten.sub.Tensor, indices, first)
    low, high = make(aten.ge.Scalar, index, 0), make(aten.lt.Scalar, index, part.size)
    last = computed(make, operator.sub, part.size, 1)
    return make(aten.logical_and.default, low, high), make(aten.clamp.default, index, 0, last)


def negative_likelihood(make: Make, part: Part) -> tuple[fx.Node, fx.Node]:
    """nll_loss: a member has the losses of targets in its classes, and zeros for the rest."""
    target, ignored = part.arguments["target"], part.arguments["ignore_index"]
    counted = make(aten.ne.Scalar, target, ignored)
    known = make(aten.masked_fill.Scalar, target, make(aten.logical_not.default, counted), 0)
    inside, index = _own(make, _checked(make, known, part), part)
    column = make(aten.unsqueeze.default, index, 1)
    scores = make(aten.squeeze.dim, make(aten.gather.default, part.arguments["self"], 1, column), 1)
    wanted = make(aten.logical_and.default, inside, counted)
    outside = make(aten.logical_not.default, wanted)
    own = make(aten.neg.default, make(aten.masked_fill.Scalar, scores, outside, 0.0))
    count = make(aten.sum.dim_IntList, make(aten._to_copy.default, counted, dtype=part.dtype), [])
    if part.arguments["reduction"] == 0:
        return own, make(aten.zeros_like.default, count)
    total = make(aten.sum.dim_IntList, own, [])
    if part.arguments["reduction"] == 1:
        total = make(aten.div.Tensor, total, count)
    return total, count


def negative_likelihood_of_rows(make: Make, part: Part) -> tuple[fx.Node, fx.Node]:
    """nll_loss of a member's rows, of which those that count are counted on all members."""
    scores, target = part.arguments["self"], part.arguments["target"]
    ignored, summed = part.arguments["ignore_index"], 2
    own = make(aten.nll_loss_forward.default, scores, target, None, summed, ignored)
    total, count = (make(operator.getitem, own, index) for index in range(2))
    count = make(all_reduce, count, part.members)
    mean = part.arguments["reduction"] == 1
    return make(aten.div.Tensor, total, count) if mean else total, count


def negative_likelihood_backward(make: Make, part: Part) -> fx.Node:
    """Of nll_loss: -g at the target's class, over the count for a mean."""
    target, gradient = part.arguments["target"], part.arguments["grad_output"]
    inside, index = _own(make, target, part)
    counted = make(aten.ne.Scalar, target, part.arguments["ignore_index"])
    wanted = make(aten.logical_and.default, inside, counted)
    if part.arguments["reduction"] == 1:
        gradient = make(aten.div.Tensor, gradient, part.arguments["total_weight"])
    outside = make(aten.logical_not.default, wanted)
    # Where no row counts, the count is 0, and one device has zeros.
    each = make(aten.masked_fill.Scalar, make(aten.neg.default, gradient), outside, 0.0)
    zeros = make(aten.zeros_like.default, part.arguments["self"])
    column = make(aten.unsqueeze.default, index, 1)
    return make(aten.scatter.src, zeros, 1, column, make(aten.unsqueeze.default, each, 1))
