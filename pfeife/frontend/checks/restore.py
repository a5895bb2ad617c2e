"""What a run of a step leaves behind, put back: values, gradients, generators, attributes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from pfeife.frontend.checks.foreign_generators import watching
from pfeife.frontend.trace.reachable_state import Places, StateGuard

States = list[tuple[torch.Generator, torch.Tensor]]


@contextlib.contextmanager
def untouched(
    step: Callable[..., Any], arguments: Mapping[str, Any], *, values: bool
) -> Iterator[None]:
    """While a step runs that is to leave nothing behind in what it reaches, by itself or in its
    arguments. With `values` those of tensors, and their gradients, are kept as copies: else the
    step must not run on them."""
    places = Places(step, arguments)
    found = {id(one): one for one in (slot.get() for slot in places.slots)}.values()
    tensors = [one for one in found if isinstance(one, torch.Tensor) and not one.is_meta]
    own = [(one, one.get_state()) for one in found if isinstance(one, torch.Generator)]
    with contextlib.ExitStack() as stack:
        if values:
            stack.enter_context(values_kept(tensors))
            stack.enter_context(_gradients_kept(tensors))
        for one in (watching(), torchs_generators(), StateGuard(places, {})):
            stack.enter_context(one)
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
    return [(one, one.get_state()) for one in (torch.default_generator, *on_cuda)]


def set_states(states: States) -> None:
    for generator, state in states:
        generator.set_state(state)


@contextlib.contextmanager
def values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """While tensors may be written to, which get their values back; meta tensors have none."""
    before = [(one, one.detach().clone()) for one in tensors if not one.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for one, value in before:
                if _differ(one, value):
                    one.copy_(value)


@contextlib.contextmanager
def _gradients_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """While a step may run backwards, by itself."""
    before = [(one, one.grad) for one in tensors if one.is_leaf]
    try:
        with values_kept([grad for _, grad in before if grad is not None]):
            yield
    finally:
        for one, grad in before:
            if one.grad is not grad:
                one.grad = grad


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have other values somewhere; NaN is as NaN. (Versions do not tell: batch
    norm writes its statistics without a new one.)"""
    return bool((one.ne(other) & (one.eq(one) | other.eq(other))).any())


def alike(one: Any, other: Any) -> bool:
    """Whether two values are of one type, and tensors equal to within rounding."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
