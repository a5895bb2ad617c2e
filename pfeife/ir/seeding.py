"""Random operations whose draws depend on a seed and on nothing else.

The rule: an operation draws from a generator seeded by (seed of the step, index of the
microbatch, index of the operation in the captured graph). So the draws are the same for every
number of stages, every schedule and every way of running them; they are not those of eager's
running generator.
"""

import hashlib
import threading
from typing import Any

import torch

# torch's operations draw from one generator per device and process; stages are threads.
_GENERATORS = threading.Lock()


def mix(*numbers: int) -> int:
    """A well-mixed 63-bit number that depends on all of the numbers."""
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seeded(operation: Any, index: int, seed: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Runs a random operation with the generator seeded, and leaves the generator as it was."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
    # there is nothing to draw on meta, so no generator is touched
    if device.type == "meta":
        return operation(*args, **kwargs)
    generator = _default_generator(device)
    with _GENERATORS:
        # Put back afterwards: what the user draws in between, from the same generator, is as
        # without us.
        before = generator.get_state()
        try:
            generator.manual_seed(mix(int(seed), index))
            return operation(*args, **kwargs)
        finally:
            generator.set_state(before)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def is_random(operation: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call of an aten operation draws random numbers: attention with a dropout rate of
    zero does not, though it is marked as random."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    schema = operation._schema.arguments
    arguments = {a.name: a.default_value for a in schema if a.has_default_value()}
    arguments |= dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    return arguments.get("dropout_p", 1) != 0
