"""Tensors whose values are not here: of a batch of rank zero, of state that other ranks train, of
its gradients.

What may be asked of one, and who answers:

    what is asked                                   answer
    shape, strides, dtype, device, views            as of any tensor
    zeros_like, randn_like, new_zeros, ...          a tensor of this rank
    what computes each element, or along dimensions absent, too: who has the values computes it
    what changes it in place                        nothing here: who has the values changes them
    random numbers in place                         they are drawn here as there
    what is written into a tensor of this rank      makes that one absent, and all that share memory
    a norm                                          asked of all ranks, of a gradient
    all else reads values                           ValueError
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife._torch import OpOverload, is_absent, record_of
from pfeife.frontend.watch.gc_objects import living

aten = torch.ops.aten
Rule = Callable[["Absence", OpOverload, tuple, dict[str, Any]], Any]


class Absence:
    """Why a tensor has no values here."""

    def refusal(self, what: str) -> ValueError:
        """What to raise where something reads values."""
        raise NotImplementedError

    def derived(self) -> "Absence":
        """That of what is computed of each element."""
        return self

    def written(self, tensor: torch.Tensor) -> None:
        """It is changed in place, here as where its values are."""

    def loaded(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """It is given values that this rank has. Those of a part of its memory alone are left to
        where the others are."""
        self.written(tensor)
        if is_whole(tensor):
            take_values(tensor, values.detach())

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """What was computed of it is about to be written into the memory of some tensors of this
        rank, which are absent from then on."""

    def norm(self, tensor: torch.Tensor, order: float) -> float:
        """The norm of its values."""
        raise self.refusal("a norm")

    @property
    def overflow(self) -> bool:
        """Whether a gradient of any rank is not finite."""
        return False

    def operation(self, operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of one of aten's operations, by the rules of this file."""
        rule = _RULES.get(operation)
        if rule is None and _has_out(operation):
            rule = _written_out
        if rule is None and operation.name().startswith("aten::_foreach_"):
            rule = _each_written if _writes(operation) else _each_computed
        return (rule or (_written if _writes(operation) else _computed))(
            self, operation, args, kwargs
        )


class LayoutAlone(Absence):
    """Why a tensor may be asked for its layout and for views: all else is refused."""

    def operation(self, operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> NoReturn:
        """Raises the refusal: views do not come here."""
        raise self.refusal(str(operation))

    def derived(self) -> NoReturn:
        """Raises the refusal, of what reads several tensors, the first of which is another's."""
        raise self.refusal("an operation on several tensors")

    def written(self, tensor: torch.Tensor) -> NoReturn:
        """Raises the refusal, as `derived`."""
        raise self.refusal("an operation on several tensors")


class RankZeroBatch(Absence):
    """A batch that rank zero alone has. What is computed of it between the loader and the step has
    shapes as well, whatever operations these are."""

    def refusal(self, what: str) -> ValueError:
        """Says where values of the batch may be read."""
        return ValueError(
            f"{what} reads values of a batch that rank 0 alone has: do it in the loader, or in a "
            'step that is compiled with batch="rank0", or pass values=True to from_rank0'
        )

    def operation(self, operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What the operation gives, as shapes."""
        return _shaped(self, operation, args, kwargs)


def absent(like: torch.Tensor, device: torch.device, absence: Absence) -> torch.Tensor:
    """A tensor with the shape, strides and dtype of another one, and no values."""
    return _torch.without_values(like, device, absence)


def become_absent(tensor: torch.Tensor, absence: Absence) -> None:
    """Lets go of a tensor's values, and of all of Python's tensors that share its bytes."""
    # What lies elsewhere in the same storage keeps its values.
    sharing = [user for user in users_of(tensor) if _torch.overlap(user, tensor)]
    if len(sharing) < 2:  # one without elements has no bytes
        _torch.let_go(tensor, absence)
    else:
        _torch.let_go_all(sharing, absence)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows each value of its storage once."""
    values = tensor.untyped_storage().nbytes() // max(1, tensor.itemsize)
    steps = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    dense = all(
        stride * size == next_stride for (stride, size), (next_stride, _) in pairwise(steps)
    )
    return tensor.numel() == values and ((dense and (not steps or steps[0][0] == 1)) or values < 2)


def take_values(tensor: torch.Tensor, values: torch.Tensor | None = None) -> None:
    """Gives an absent tensor, which is the whole of its storage, values (None: any), and so all
    tensors that share that."""
    # Not `tensor` itself: an absent one would make an absent one.
    room = torch.empty_like(_torch.as_meta(tensor), device=tensor.device)
    if values is not None:
        room.copy_(values)
    with torch.no_grad():
        for user in users_of(tensor):
            user.data = room.as_strided(user.shape, user.stride(), user.storage_offset())


def users_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All tensors of Python's in the memory of one."""
    # Nearly always, and it spares a look at all objects that there are.
    if _torch.views_of_memory(tensor) == 1:
        return [tensor]
    place = _torch.storage_of(tensor)
    users = {id(user): user for user in living(torch.Tensor) if _torch.storage_of(user) == place}
    return list({**users, id(tensor): tensor}.values())


def _written(absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operation that changes its first argument."""
    target = args[0]
    if torch.Tag.nondeterministic_seeded in operation.tags:
        # Drawn for nothing: this rank's generator goes on as that of the rank with the values.
        drawn = torch.empty_like(_torch.as_meta(target), device=target.device)
        operation(drawn, *args[1:], **kwargs)
    if is_absent(target):
        _check_leaf(target)
        torch.autograd.graph.increment_version(target)
        record_of(target).written(target)
    else:
        _lose(target, absence.derived())
    return target


def _written_out(
    absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """An operation with `out=`, which changes that."""
    target = kwargs.get("out")
    result = _computed(absence, operation, args, kwargs)
    if target is None or result.shape != target.shape:
        raise absence.refusal(f"{operation}, which would change the shape of what it writes to,")
    return _written(absence, operation, (target,), {})


def _lose(target: torch.Tensor, absence: Absence) -> None:
    """Values that are not here are written into a tensor of this rank. Raises ValueError if
    something has its memory which nobody finds, such as autograd."""
    # Autograd's saved tensors are no objects of Python's: such memory has more views than users.
    users = users_of(target)
    if _torch.views_of_memory(target) > len(users):
        raise ValueError(
            f"{absence.refusal('this write')}; it goes into a tensor {list(target.shape)} whose "
            "memory something else looks at: write into a tensor with memory of its own"
        )
    absence.spread([user for user in users if _torch.overlap(user, target)])
    if not is_absent(target):
        become_absent(target, absence)
    torch.autograd.graph.increment_version(target)


def _check_leaf(target: torch.Tensor) -> None:
    """What autograd says on the rank that has the values."""
    if torch.is_grad_enabled() and target.requires_grad and target.is_leaf:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )


def _copied(absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`copy_`, by which state is loaded."""
    target, source = args[:2]
    if not is_absent(target) or is_absent(source):
        return _written(absence, operation, args, kwargs)
    _check_leaf(target)
    torch.autograd.graph.increment_version(target)
    record_of(target).loaded(target, source)
    return target


def _each_written(
    absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]
) -> None:
    """An operation that changes each of a list of tensors."""
    # The rules are those of a single tensor, which is the first argument of a list of one.
    rule = _copied if operation is aten._foreach_copy_.default else _written
    for is_here, _, arguments in _apart(args):
        if is_here:
            operation(*arguments, **kwargs)
            continue
        firsts = [argument[0] if isinstance(argument, list) else argument for argument in arguments]
        rule(_torch.first_record(arguments), operation, tuple(firsts), kwargs)


def _each_computed(
    absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """An operation that computes something of each of a list of tensors."""
    results: list[Any] = [None] * len(args[0])
    for is_here, places, arguments in _apart(args):
        if is_here:
            computed = operation(*arguments, **kwargs)
        else:
            own_absence = _torch.first_record(arguments).derived()
            computed = _shaped(own_absence, operation, tuple(arguments), kwargs)
        for at, result in zip(places, computed, strict=True):
            results[at] = result
    return results


def _apart(args: tuple) -> Iterator[tuple[bool, list[int], list[Any]]]:
    """The arguments for all that is here (True), if anything is, in one, as one kernel may compute
    it, and then for each tensor that is not (False), with the places in the lists.

    lists of    here, gone, here, gone   ->   True, [0, 2]   False, [1]   False, [3]
    """
    count = len(args[0])
    lists = [isinstance(argument, list | tuple) and len(argument) == count for argument in args]
    entries_of = zip(*(a for a, is_list in zip(args, lists, strict=True) if is_list), strict=True)
    gone = [at for at, entries in enumerate(entries_of) if any(map(is_absent, entries))]
    here = [at for at in range(count) if at not in set(gone)]
    for places in ([here] if here else []) + [[at] for at in gone]:
        arguments = [
            [argument[at] for at in places] if is_list else argument
            for argument, is_list in zip(args, lists, strict=True)
        ]
        yield places is here, places, arguments


def _computed(absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operation that computes something of each element."""
    if not (torch.Tag.pointwise in operation.tags or operation in _COPIES):
        raise absence.refusal(str(operation))
    return _along(absence, operation, args, kwargs)


def _along(absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operation of which only the shape of the result is known."""
    return _shaped(absence.derived(), operation, args, kwargs)


def _shaped(absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What an operation computes, as shapes. Raises ValueError if data would decide these, or
    something else than tensors comes out."""
    leaves = pytree.tree_leaves((args, kwargs))
    device = next(leaf.device for leaf in leaves if is_absent(leaf))
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        kwargs = {**kwargs, "device": "meta"}
    # torch's own rules for shapes: on the meta device nothing is computed, and what asks for values
    # fails.
    shapes = pytree.tree_map_only(torch.Tensor, _torch.as_meta, (args, kwargs))
    try:
        result = operation(*shapes[0], **shapes[1])
    except (NotImplementedError, RuntimeError) as error:
        raise absence.refusal(str(operation)) from error
    if not all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
        raise absence.refusal(str(operation))
    return pytree.tree_map_only(torch.Tensor, lambda leaf: absent(leaf, device, absence), result)


def _made(
    absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]
) -> torch.Tensor:
    """A new tensor of this rank with the shape of one."""
    kwargs = {**kwargs, "device": kwargs.get("device") or args[0].device}
    tensor: torch.Tensor = operation(_torch.as_meta(args[0]), *args[1:], **kwargs)
    return tensor


def _emptied(absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Without dimensions that is how torch begins a deep copy, which is absent, too."""
    return (_made if args[1] else _shaped)(absence, operation, args, kwargs)


def _norm(
    absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]
) -> torch.Tensor:
    tensor, order, dims = (*args, *(2, None)[len(args) - 1 :])[:3]
    # Of some dimensions it is a tensor of norms, computed by who has the values; of all it is what
    # `clip_grad_norm_` compares with a limit, and every rank needs the number.
    if dims or kwargs.get("dim"):
        return _along(absence, operation, args, kwargs)
    norm = absence.norm(tensor, float(order))
    dtype = tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype
    return torch.tensor(norm, dtype=kwargs.get("dtype") or dtype, device=tensor.device)


def _norms(absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    # One by one: each comes back here, if it is absent, and is computed here, if it is not.
    return [torch.linalg.vector_norm(tensor, *args[1:], **kwargs) for tensor in args[0]]


def _unscaled(absence: Absence, operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """What GradScaler does: all ranks find out if any gradient is not finite."""
    for is_here, _, arguments in _apart(args):
        if is_here:
            operation(*arguments, **kwargs)
        else:  # torch does not count it as a version
            record_of(arguments[0][0]).written(arguments[0][0])
    # `args[1]` is found_inf: by it GradScaler leaves the step out, on all ranks or on none.
    if any(record_of(gradient).overflow for gradient in args[0] if is_absent(gradient)):
        args[1].fill_(1.0)


def _has_out(operation: OpOverload) -> bool:
    """Whether an operation changes what it is given by name."""
    named = (argument for argument in operation._schema.arguments if argument.kwarg_only)
    return any(each.alias_info is not None and each.alias_info.is_write for each in named)


def _writes(operation: OpOverload) -> bool:
    """Whether an operation changes its first argument."""
    arguments = operation._schema.arguments
    written = arguments[0].alias_info if arguments else None
    return written is not None and written.is_write


_COPIES = (aten.clone.default, aten._to_copy.default)
_LIKE = (
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty),
    *(aten.rand_like, aten.randn_like),
)
_ALONG = (  # some dimensions
    *(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default),
    aten.var.correction,
)
_RULES: Mapping[Any, Rule] = {
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _norms,
    **{operation.default: _made for operation in _LIKE},
    **dict.fromkeys(_ALONG, _along),
    # Behind `_LIKE`, which has it too: the last entry counts.
    aten.new_empty.default: _emptied,
    aten.copy_.default: _copied,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
}
