"""Tiny, randomly initialised models of other people's packages: a file a family.

Each file has `MODELS`, from a name to a function that builds an `Example` (`example.py`); what it
imports beyond torch stands there, for the packages are large. `imports.py` has how torchvision and
torchaudio are imported beside a torch for CPUs; `small.py` what several files build with.
"""

import importlib
from collections.abc import Callable, Iterator

from coverage_models import imports
from coverage_models.example import Example

FAMILIES = (
    "text_decoders",
    "text_encoders",
    "encoder_decoders",
    "experts",
    "vision",
    "dense",
    "generative",
    "speech",
    "recurrent",
    "graphs",
    "tabular",
    "physics",
    "learning",
)


def names() -> Iterator[tuple[str, str]]:
    """Every family with every one of its models."""
    for family in FAMILIES:
        yield from ((family, name) for name in models(family))


def models(family: str) -> dict[str, Callable[[], Example]]:
    imports.prepare()
    return importlib.import_module(f"coverage_models.{family}").MODELS
