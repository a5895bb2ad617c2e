"""Along which dimension a model's parameters are cut, from a plan in torch's or Hugging Face's
words."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from pfeife.factors import Place

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
    "moe_tp_experts": (None, None),
    "ep_dispatch_experts": (None, None),
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
# Of a parameter that a plan names itself, as those of experts, [experts, columns, rows]; "packed"
# are two matrices in one, beside one another.
_OF_PARAMETERS: Mapping[str, int | Place] = {
    "colwise": -2,
    "rowwise": -1,
    "packed_colwise": Place(-2, 2),
    "packed_rowwise": Place(-1, 2),
    "grouped_gemm": 0,
}


def placements(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, int | Place]:
    """The dimensions of parameters by name, for `shard`, of a plan from patterns of modules' names:
    to torch's styles (`ColwiseParallel()`), or to Hugging Face's words ("colwise"), as a model's
    `base_model_tp_plan` has them, or its `base_model_ep_plan`. These also name parameters.

    What styles say of activations is not needed: it follows from the weights. Raises ValueError for
    a pattern that no module and no parameter has, and for a style that is not known.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    >>> pfeife.placements(net, {"0": "colwise", "1": "rowwise"})
    {'0.weight': 0, '0.bias': 0, '1.weight': 1}
    """
    dims: dict[str, int | Place] = {}
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for pattern, style in plan.items():
        matched = [name for name in modules if _matches(name, pattern)]
        named = [name for name in parameters if _matches(name, pattern)]
        if not matched and not named:
            raise ValueError(f"parallel: no module is called {pattern!r}, and no parameter")
        for name in matched:
            weight, bias = _looked_up(_styles(modules[name]), style, pattern)
            for parameter, dim in (("weight", weight), ("bias", bias)):
                if dim is not None and getattr(modules[name], parameter, None) is not None:
                    dims[f"{name}.{parameter}"] = dim
        for name in named:
            place = _looked_up(_OF_PARAMETERS, style, pattern)
            if parameters[name].dim() > 1:  # a vector stays whole
                dims[name] = place
    return dims


def _matches(name: str, pattern: str) -> bool:
    """A star stands for one part of a name; a plan may be of the model inside of another one."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(
        fnmatchcase(part, word)
        for part, word in zip(parts[len(parts) - len(wanted) :], wanted, strict=True)
    )


def _styles(module: nn.Module) -> Mapping[str, tuple[int | None, int | None]]:
    return {**_STYLES, **_OF_EMBEDDINGS} if isinstance(module, nn.Embedding) else _STYLES


def _looked_up(known: Mapping[str, Any], style: Any, pattern: str) -> Any:
    word = style if isinstance(style, str) else type(style).__name__
    if word not in known:
        raise ValueError(
            f"parallel: {pattern!r} is {word}, which is not known; known are {', '.join(known)}"
        )
    return known[word]
