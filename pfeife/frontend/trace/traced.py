"""What was traced: a step's forward, what it was assumed for, and how a call goes in and out."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pfeife.frontend.arguments import Argument, Inputs
from pfeife.frontend.batch import Arguments, Leaf
from pfeife.frontend.forward import Forward
from pfeife.frontend.trace.open_sizes import OpenSizes
from pfeife.frontend.watch.guards import Guard
from pfeife.frontend.watch.modes import Calls
from pfeife.frontend.watch.reachable_state import SIMPLE, Slot
from pfeife.frontend.watch.value_guards import Noted, ValueGuard, WrongAnswer, fails_elsewhere
from pfeife.ir.parts import Assumption

Read = tuple[Leaf | Slot, ...]  # where the value of an argument is: all places of one tensor


@attrs.frozen(eq=False)
class Warm:
    """What a run of a step in eager has shown: the slots in which it `left` something, and what
    data have decided."""

    left: frozenset[Slot]
    noted: Noted


@attrs.frozen(eq=False)
class Traced:
    """A step as it was traced for a call, and what must hold for another call to do the same.

    `reads` has for every argument of the `forward` where its value is. `guards` have all else that
    steers the step, `kind` the kind of the call (`kind_of`), `sizes` those of its tensors. `made`
    is what the step returned, with the fake tensors of `forward.results` in it; `written` are
    the slots that the step writes tensors to, by the indices of the results; the last results are
    flags, one for each of the `answers`. `warm` is what an eager run has shown, if there was one.
    """

    forward: Forward
    inputs: Inputs
    reads: tuple[Read, ...]
    guards: tuple[Guard, ...]
    kind: tuple
    sizes: OpenSizes
    made: Any
    written: Mapping[int, Slot]
    answers: tuple[ValueGuard, ...]
    modules: tuple[nn.Module, ...]
    warm: Warm | None

    @property
    def premises(self) -> tuple[Assumption, ...]:
        """All that `broken` looks at, and the answers."""
        answers = [
            Assumption("answer", f"{answer.line} asks and gets {answer.value}")
            for answer in self.answers
        ]
        pairs = zip(self.inputs.arguments, self.reads, strict=True)
        tensors = [Assumption("tensor", self._said(argument, read[0])) for argument, read in pairs]
        values = [
            Assumption("value", f"{guard.part.slot(key).name} is {value!r}")
            for guard in self.guards
            for key, value in zip(guard.keys, guard.values, strict=True)
            if isinstance(value, SIMPLE)
        ]
        count = sum(len(guard.values) for guard in self.guards)
        contents = f"{len(self.guards)} objects have the same {count} entries"
        call = "its arguments are built alike, its modes are the same"
        others = (Assumption("contents", contents), Assumption("call", call))
        return (*answers, *tensors, *values, *others)

    def _said(self, argument: Argument, place: Leaf | Slot) -> str:
        """What a tensor must be like, as a person would say it."""
        like = argument.example
        # Of the call's tensors the sizes may be open, which the example has as symbols.
        is_given = isinstance(place, Leaf)
        shape, strides = self.sizes.layouts[place.name] if is_given else layout_of(like)
        layout = f"{like.dtype} {list(shape)} with strides {list(strides)}"
        grad = ", with gradients" if like.requires_grad else ""
        text = f"{argument.names[0]} is {layout} on {like.device}{grad}"
        return text.replace("torch.", "")

    def broken(self, call: Arguments) -> str:
        """What does not hold any more for a call, "" if all does."""
        # The cheap questions first: this is asked before every call of the step.
        if kind_of(call) != self.kind:
            return "the arguments of the call, or the modes under which it is made"
        resized = self.sizes.broken(call)
        if resized:
            return resized
        changed = next(filter(None, (guard.broken() for guard in self.guards)), "")
        if changed:
            return changed
        for argument, read in zip(self.inputs.arguments, self.reads, strict=True):
            example = argument.example
            # Tied places must stay tied: the trace reads the first of them alone.
            values = [slot.get() for slot in read if isinstance(slot, Slot)]
            if any(value is not values[0] for value in values) or not all(
                isinstance(value, torch.Tensor)
                and (layout_of(value), _kind(value)) == (layout_of(example), _kind(example))
                for value in values
            ):
                return f"the tensor {argument.names[0]}"
        return ""

    def values(self, leaves: Sequence[Leaf]) -> list[torch.Tensor]:
        """The arguments of a call with the whole batch."""
        batches = {leaf.name: leaf.whole for leaf in leaves}
        return [
            read[0].get() if isinstance(read[0], Slot) else batches[read[0].name]
            for read in self.reads
        ]

    def unfit(self, error: Exception) -> Exception:
        """What to say where a call's microbatches do not all get an answer, or where an operation
        fails that none of the answers allows for; else the error itself."""
        if isinstance(error, WrongAnswer):
            answer = self.answers[error.index]
            return ValueError(
                f"{answer.line} asks for the value of a tensor: it was {answer.value} where "
                "the step was traced, and is not in each microbatch of this call, so the step "
                "would do something else there; compute it with tensors (torch.where)"
            )
        # Without answers nothing was assumed of values: the error is the step's own, or ours.
        if not self.answers or isinstance(error, ValueError | torch.OutOfMemoryError):
            return error
        return fails_elsewhere([answer.line for answer in self.answers], error)

    def returned(self, results: Sequence[torch.Tensor]) -> Any:
        """What the step returns, of the results of a call; writes what the step keeps."""
        for index, slot in self.written.items():
            slot.put(results[index])
        # For an object in its memo a deep copy takes what stands there: the results in place of the
        # trace's fake tensors, and the modules themselves.
        memo: dict[int, Any] = {id(module): module for module in self.modules}
        pairs = zip(self.forward.results, results, strict=True)
        memo |= {id(example): result for example, result in pairs}
        return copy.deepcopy(self.made, memo)


def kind_of(call: Arguments) -> tuple:
    """All about a call that a trace depends on, but for sizes and for what the step reaches by
    itself."""
    first = [leaf.first for leaf in call.leaves]
    device_types = sorted({tensor.device.type for tensor in first if not tensor.is_meta} | {"cpu"})
    # By the first leaf of the same tensor: one that is given twice has another trace than two.
    ids = [id(tensor) for tensor in first]
    return (
        pytree.tree_structure((call.args, call.kwargs)),
        tuple(
            (leaf.name, leaf.dim, tensor.dim(), _kind(tensor), ids.index(id(tensor)))
            for leaf, tensor in zip(call.leaves, first, strict=True)
        ),
        tuple(
            (name, value) if isinstance(value, SIMPLE) else (name, id(value))
            for name, value in call.others.items()
        ),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(
            (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            for device_type in device_types
        ),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


def _kind(value: torch.Tensor) -> tuple:
    return value.dtype, value.device, value.requires_grad


def layout_of(value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and the strides of a tensor, which may be symbols."""
    return tuple(value.shape), value.stride()


def _uncopied(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Raises ValueError where a tensor is copied."""
    if func is torch.Tensor.__deepcopy__:
        raise ValueError(
            "the step returns an object with tensors in it that Pfeife does not find: return "
            "tensors, or lists, tuples, dicts or dataclasses of them"
        )
    return func(*args, **kwargs)


def check_rebuilt(made: Any, results: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless what the step returns can be made anew of other tensors."""
    with Calls(_uncopied):
        copy.deepcopy(made, {id(tensor): None for tensor in results})
