"""What a run of a step leaves behind, put back: values, gradients, generators, attributes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from pfeife.frontend.watch.foreign_generators import watching
from pfeife.frontend.watch.reachable_state import Places, state_kept

States = list[tuple[torch.Generator, torch.Tensor]]


@contextlib.contextmanager
def untouched(
    step: Callable[..., Any], arguments: Mapping[str, Any], *, values: bool
) -> Iterator[None]:
    """While a step runs that is to leave nothing behind in what it reaches, by itself or in its
    arguments. With `values` those of tensors, and their gradients, are kept as copies: else the
    step must not run on them."""
    places = Places(step, arguments)
    reachable = {id(value): value for value in (slot.get() for slot in places.slots)}.values()
    tensors = [
        value for value in reachable if isinstance(value, torch.Tensor) and not value.is_meta
    ]
    own = [
        (generator, generator.get_state())
        for generator in reachable
        if isinstance(generator, torch.Generator)
    ]
    with contextlib.ExitStack() as stack:
        if values:
            stack.enter_context(values_kept(tensors))
            stack.enter_context(_gradients_kept(tensors))
        for context in (watching(), torchs_generators(), state_kept(places, {})):
            stack.enter_context(context)
        try:
            yield
        finally:
            for generator, state in own:
                generator.set_state(state)


@contextlib.contextmanager
def torchs_generators(seed: int | None = None) -> Iterator[States]:
    """While a step may draw from torch's default generators, which begin with a `seed` if there is
    one, and are put back, on all devices in use. Gives what those of the CPU and of CUDA were
    before. (torch.manual_seed seeds also devices that nobody has used yet, when somebody does.)"""
    accelerator = torch.accelerator.current_accelerator()
    module = torch.get_device_module(accelerator) if accelerator else torch.cuda
    # Where nobody has used the accelerator, its generators have no state to keep, and to ask for it
    # would start it.
    begun = getattr(module, "is_initialized", module.is_available)()
    devices = range(module.device_count()) if begun else ()
    with torch.random.fork_rng(devices=devices):
        states = torchs_states()
        if seed is not None:
            for generator, _ in states:
                generator.manual_seed(seed)
        yield states


def torchs_states() -> States:
    """torch's default generators, of the CPU and of CUDA if in use, with their states."""
    on_cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [(generator, generator.get_state()) for generator in (torch.default_generator, *on_cuda)]


def set_states(states: States) -> None:
    """Puts generators back to these states."""
    for generator, state in states:
        generator.set_state(state)


@contextlib.contextmanager
def values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """While tensors may be written to, which get their values back; meta tensors have none."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors if not tensor.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                # Else a backward would be refused that has saved it before: a write is a change.
                if _differ(tensor, value):
                    tensor.copy_(value)


@contextlib.contextmanager
def _gradients_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """While a step may run backwards, by itself."""
    before = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
    try:
        with values_kept([grad for _, grad in before if grad is not None]):
            yield
    finally:
        for tensor, grad in before:
            if tensor.grad is not grad:
                tensor.grad = grad


def _differ(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have other values somewhere; NaN is as NaN. (Versions do not tell: batch
    norm writes its statistics without a new one.)"""
    return bool((first.ne(second) & (first.eq(first) | second.eq(second))).any())


def alike(first: Any, second: Any) -> bool:
    """Whether two values are of one type, and tensors equal to within rounding."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return type(first) is type(second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.allclose(first, second, rtol=1e-5, atol=1e-6, equal_nan=True)
