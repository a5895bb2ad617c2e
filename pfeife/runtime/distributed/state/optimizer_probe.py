"""Whether an optimizer takes each parameter by itself: a rank steps those that it trains alone.

                 one device            2 ranks
    Adam         m, v of each          m, v of each, where it is
    Lamb         a norm of them all    a norm of some, another one on each rank: refused

Nobody tells, so it is tried: a copy of the optimizer over a few numbers of each parameter steps
twice, the second time with other values and gradients of every second parameter, the way in which a
training that goes wrong would have them. Nothing of the optimizer itself is touched, nor is any
generator: numbers are drawn from one of our own.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pfeife.frontend.watch.foreign_generators import watching
from pfeife.frontend.watch.restore import torchs_generators
from pfeife.runtime.distributed.state.owned import parameters_of

log = logging.getLogger("pfeife")

_STEPS = 4  # some keep where they were, and look at it later
_SIDE = 2  # rows of what a tensor becomes, along each dimension
_OWN = ("step", "_opt_called")  # what schedulers put into an optimizer: of the one that is copied


def why_not_apart(optimizer: Optimizer) -> str:
    """What an optimizer does beside taking each parameter by itself, "" if nothing; for one that
    cannot be copied, or not be stepped without a closure, nobody knows."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return ""
    try:
        with torchs_generators():
            return _tried(optimizer)
    except Exception as error:
        log.debug("%s cannot be tried: %s", type(optimizer).__name__, error)
        return ""


def _tried(optimizer: Optimizer) -> str:
    (plain, drawn), (disturbed, _) = (_stepped(optimizer, wild=wild) for wild in (False, True))
    if drawn:
        return "draws random numbers, and those for the parameters of other ranks are not drawn"
    # Those at even places have the same values and gradients both times.
    same = (_same(first, second) for first, second in zip(plain[::2], disturbed[::2], strict=True))
    return "" if all(same) else "computes something of several parameters, as a norm of them all"


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _stepped(optimizer: Optimizer, *, wild: bool) -> tuple[list[torch.Tensor], bool]:
    """The small parameters after some steps, and whether these have drawn random numbers; every
    second one has `wild` values and gradients."""
    numbers = torch.Generator().manual_seed(0)
    small = _small(optimizer, numbers)
    parameters = list(dict.fromkeys(parameters_of(small)))
    generators = [torch.default_generator, *_own_generators(small)]
    before = [generator.get_state() for generator in generators]
    with watching() as moved:
        for _ in range(_STEPS):
            for at, parameter in enumerate(parameters):
                parameter.grad = torch.randn(parameter.shape, generator=numbers).to(parameter.dtype)
                if wild and at % 2:
                    parameter.data.mul_(8).add_(1)
                    parameter.grad.mul_(2.0**20)
            _plain_step(small)()
    after = [generator.get_state() for generator in generators]
    drawn = bool(moved) or not all(map(torch.equal, before, after))
    return [parameter.detach() for parameter in parameters], drawn


def _own_generators(optimizer: Optimizer) -> list[torch.Generator]:
    attributes = [value for part in _with_inner(optimizer) for value in vars(part).values()]
    return [value for value in attributes if isinstance(value, torch.Generator)]


def _plain_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Its step without what torch calls before and after."""
    step = type(optimizer).step
    inner = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    return inner.__get__(optimizer)


def _small(optimizer: Optimizer, numbers: torch.Generator) -> Optimizer:
    """A copy over small parameters, with all that it and optimizers within it have."""
    memo: dict[int, Any] = {}
    for part in _with_inner(optimizer):
        for parameter in parameters_of(part):
            memo[id(parameter)] = _cut(parameter, parameter.shape, numbers)
            for value in dict(part.state).get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    memo[id(value)] = _cut(value, parameter.shape, numbers)
    return _copied(optimizer, memo)


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """By its attributes; what it hands to pickle is less."""
    # Known to the memo before its attributes are copied, which may refer to it.
    duplicate: Optimizer = memo.setdefault(id(optimizer), type(optimizer).__new__(type(optimizer)))
    for inner in _with_inner(optimizer)[1:]:
        if id(inner) not in memo:
            _copied(inner, memo)
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
    # Hooks are the script's, and no trial calls them.
    attributes |= {
        name: type(hooks)() for name, hooks in attributes.items() if name.endswith("_hooks")
    }
    vars(duplicate).update(copy.deepcopy(attributes, memo))
    return duplicate


def _with_inner(optimizer: Optimizer) -> Sequence[Optimizer]:
    """It, and those that it calls."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return [optimizer, *(nested for nested in inner if nested is not optimizer)]


def _cut(tensor: torch.Tensor, like: Sequence[int], numbers: torch.Generator) -> torch.Tensor:
    """A few numbers in a tensor's place, as many along each dimension as of its parameter's; of
    another shape it is whole."""
    shape = list(tensor.shape)
    if shape == list(like):
        shape = [min(size, _SIDE) for size in shape]
    values = torch.rand(shape, generator=numbers, device="cpu").to(tensor.dtype)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(values, tensor.requires_grad)
    return values
