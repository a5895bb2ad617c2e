"""Along which dimension a model's parameters are cut, from a plan in torch's or Hugging Face's
words."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

# The dimension of a weight and of a bias, None for none, in Hugging Face's words for styles. What
# these say of activations follows from the weights.
_STYLES: Mapping[str, tuple[int | None, int | None]] = {
    "colwise": (0, 0),
    "colwise_gather_output": (0, 0),
    "colwise_rep": (0, 0),
    "rowwise": (1, None),
    "rowwise_rep": (1, None),
    "rowwise_split_input": (1, None),
    "embedding_rowwise": (0, None),
    "embedding_colwise": (1, None),
    "replicate": (None, None),
    "replicated_with_grad_allreduce": (None, None),
    "sequence_parallel": (None, None),
    "ColwiseParallel": (0, 0),
    "RowwiseParallel": (1, None),
    "SequenceParallel": (None, None),
    "PrepareModuleInput": (None, None),
    "PrepareModuleOutput": (None, None),
    "PrepareModuleInputOutput": (None, None),
}
_OF_EMBEDDINGS = {"ColwiseParallel": (1, None), "RowwiseParallel": (0, None)}


def placements(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, int]:
    """The dimensions of parameters by name, for `shard`, of a plan from patterns of modules' names:
    to torch's styles (`ColwiseParallel()`), or to Hugging Face's words ("colwise"), as a model's
    `base_model_tp_plan` has them.

    What torch's styles say of activations is not needed: it follows from the weights. Raises
    ValueError for a pattern that no module has, and for a style that is not known.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    >>> pfeife.placements(net, {"0": "colwise", "1": "rowwise"})
    {'0.weight': 0, '0.bias': 0, '1.weight': 1}
    """
    dims: dict[str, int] = {}
    modules = dict(model.named_modules())
    for pattern, style in plan.items():
        matched = [name for name in modules if _matches(name, pattern)]
        if not matched:
            raise ValueError(f"parallel: no module is called {pattern!r}")
        for name in matched:
            weight, bias = _dims(modules[name], style, pattern)
            for parameter, dim in (("weight", weight), ("bias", bias)):
                if dim is not None and getattr(modules[name], parameter, None) is not None:
                    dims[f"{name}.{parameter}"] = dim
    return dims


def _matches(name: str, pattern: str) -> bool:
    """A star stands for one part of a name; a plan may be of the model inside of another one."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(
        fnmatchcase(part, word)
        for part, word in zip(parts[len(parts) - len(wanted) :], wanted, strict=True)
    )


def _dims(module: nn.Module, style: Any, pattern: str) -> tuple[int | None, int | None]:
    word = style if isinstance(style, str) else type(style).__name__
    if isinstance(module, nn.Embedding) and word in _OF_EMBEDDINGS:
        return _OF_EMBEDDINGS[word]
    if word not in _STYLES:
        raise ValueError(
            f"parallel: {pattern!r} is {word}, which is not known; known are {', '.join(_STYLES)}"
        )
    return _STYLES[word]
