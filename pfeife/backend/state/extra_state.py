"""What a checkpoint has beside the model and its optimizers: schedulers, loaders, random numbers.

Each is text, with its tensors beside it: nothing that would have to run code to be read.
"""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from pfeife.frontend.deferred.checkpoint_folder import Folder
from pfeife.runtime.distributed.control.questions import decoded, encoded
from pfeife.runtime.failure import CollectiveError

BESIDE = "beside"
_RANDOM = "random numbers"


def beside(others: Mapping[str, Any]) -> dict[str, Any]:
    """The states of some objects with `state_dict()`, and that of Python's, numpy's and torch's
    random numbers on the CPU, with those of generators that objects have (as a DataLoader). Raises
    ValueError for a state of other things than tensors and plain data."""
    states = {name: other.state_dict() for name, other in others.items()}
    numbers = {"of": {name: each.get_state() for name, each in _generators(others).items()}}
    return {name: _written(name, state) for name, state in {**states, _RANDOM: numbers}.items()}


def check_beside(folder: Folder, others: Mapping[str, Any]) -> None:
    """Raises ValueError for a state that is not there."""
    lost = [name for name in others if not folder.under(f"{BESIDE}.{name}.")]
    if lost:
        raise ValueError(f"{folder.path} has no state of {', '.join(lost)}")


def load_beside(folder: Folder, others: Mapping[str, Any]) -> None:
    """Reads these states back."""
    for name, other in others.items():
        other.load_state_dict(_read(name, folder))
        # A loader makes its iterator now, so that its draws come before the numbers are put back.
        other.state_dict()
    if folder.under(f"{BESIDE}.{_RANDOM}."):
        states = _read(_RANDOM, folder)["of"]
        for name, generator in _generators(others).items():
            if name in states:
                generator.set_state(states[name])


def _written(name: str, state: Any) -> dict[str, Any]:
    tensors: list[torch.Tensor] = []
    try:
        # Neither pickle nor code: a checkpoint may come from anybody.
        text = encoded(state, tensors)
    except CollectiveError as error:
        raise ValueError(f"the state of {name} cannot be saved: {error}") from None
    return {"text": text, "tensors": {str(at): tensor.clone() for at, tensor in enumerate(tensors)}}


def _read(name: str, folder: Folder) -> Any:
    prefix = f"{BESIDE}.{name}."
    values = {
        key.removeprefix(prefix): value for key, value in folder.read(folder.under(prefix)).items()
    }
    text = values.pop("text")
    return decoded(text, [values[f"tensors.{at}"] for at in range(len(values))])


class _Python:
    """Python's random numbers as a generator of torch's."""

    def get_state(self) -> Any:
        version, numbers, spare = random.getstate()
        return [version, torch.tensor(numbers), spare]

    def set_state(self, state: Any) -> None:
        random.setstate((state[0], tuple(state[1].tolist()), state[2]))


class _Numpy:
    """numpy's."""

    def get_state(self) -> Any:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        return [kind, torch.tensor(keys.tolist()), *rest]

    def set_state(self, state: Any) -> None:
        kind, keys, *rest = state
        numpy = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.array(keys.tolist(), dtype="uint32"), *rest))


def _generators(others: Mapping[str, Any]) -> dict[str, Any]:
    generators: dict[str, Any] = {"torch": torch.default_generator, "python": _Python()}
    if "numpy" in sys.modules:
        generators["numpy"] = _Numpy()
    own = {name: getattr(other, "generator", None) for name, other in others.items()}
    return generators | {
        f"{n}.generator": g for n, g in own.items() if isinstance(g, torch.Generator)
    }
