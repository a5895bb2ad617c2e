"""The batch of a library's model, by what its forward takes and its configuration says."""

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from torch import nn

SEQUENCE = 2048
Sizes = dict[str, tuple[tuple[int, ...], str]]  # of a row, and the dtype, by the names of inputs


@attrs.frozen
class Wanted:
    """What was said about a step: `settings` of its configuration or function, rows and tokens,
    further inputs by name (sizes of a row, dtype), and the type to compute in."""

    what: str
    settings: Mapping[str, Any]
    rows: int
    batch: int | None
    sequence: int | None
    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    dtype: torch.dtype


def batch_of(
    model: nn.Module, wanted: Wanted, rows: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    """What a model is called with: tensors of so many rows (some in dictionaries), what is the same
    in every call, and the tensors alone by their paths. Raises ValueError if a model says too
    little of its inputs."""
    arguments = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    # diffusers has dictionaries, transformers objects.
    if isinstance(config, Mapping):
        config = SimpleNamespace(**config)
    sizes = (
        _text(arguments, config, wanted)
        or _image(arguments, config)
        or _diffusion(arguments, config, wanted)
    )
    sizes |= wanted.inputs  # what the user says goes before what the configuration says
    for name in sizes:
        if name.split(".")[0] not in arguments and not _any_name(arguments):
            raise ValueError(
                f"--input {name}: the forward of {type(model).__name__} takes {list(arguments)}"
            )
    if not sizes:
        raise ValueError(_unsaid(type(model).__name__, arguments, config))
    tensors = {
        name: _tensor((rows, *size), _dtype(dtype, wanted.dtype), device)
        for name, (size, dtype) in sizes.items()
    }
    batch: dict[str, Any] = {}
    # "added_cond_kwargs.time_ids" is an entry of the dictionary that a forward takes by that name.
    for path, value in tensors.items():
        first, _, rest = path.partition(".")
        if rest:
            batch.setdefault(first, {})[rest] = value
        else:
            batch[first] = value
    # From labels a language model of transformers computes its loss; they are its tokens again.
    if "labels" in arguments and "input_ids" in batch and "labels" not in batch:
        batch["labels"] = batch["input_ids"]
    _check_positions(model, config, tensors)
    # A cache of keys and values is for generation; in training it would be one more output.
    constants = {"use_cache": False} if "use_cache" in arguments else {}
    return batch, constants, tensors


def _unsaid(name: str, arguments: Mapping[str, Any], config: Any) -> str:
    """What a configuration lacks to tell what its model is given, and the words that say it."""
    side = "image_size" if "pixel_values" in arguments else "sample_size"
    if {"pixel_values", "sample"} & set(arguments) and hasattr(config, side):
        return f"{name} does not say how large its inputs are: --set {side}=64, or what yours have"
    required = [
        n
        for n, argument in arguments.items()
        if argument.default is argument.empty and n != "kwargs"
    ]
    example = required[0] if required else "x"
    return (
        f"{name} does not say what its inputs are: say {' and '.join(required) or 'them'}, each "
        f"with sizes (without the rows) and a dtype, as --input {example}=3x32x32:float32"
    )


def _check_positions(model: nn.Module, config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for more tokens than a model has learned positions: on the meta device
    nothing is looked up, and so nothing is missed."""
    most = _setting(config, "max_position_embeddings", "n_positions")
    tokens = tensors["input_ids"].shape[-1] if "input_ids" in tensors else 0
    if not isinstance(most, int) or tokens <= most:
        return
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    if any(most <= table.num_embeddings <= most + 2 for table in tables):  # two: OPT's padding
        raise ValueError(
            f"--sequence {tokens}: {type(model).__name__} has {most} positions; make it "
            f"{most} at most, or the model's larger"
        )


def _setting(config: Any, *names: str, default: Any = None) -> Any:
    """What a configuration says under the first of some names that is not None."""
    settings = (getattr(config, name, None) for name in names)
    return next((setting for setting in settings if setting is not None), default)


def _text(arguments: Mapping[str, Any], config: Any, wanted: Wanted) -> Sizes:
    if "input_ids" not in arguments:
        return {}
    most = _setting(config, "max_position_embeddings", "n_positions", default=SEQUENCE)
    return {"input_ids": ((wanted.sequence or min(most, SEQUENCE),), "int64")}


def _image(arguments: Mapping[str, Any], config: Any) -> Sizes:
    side, channels = _setting(config, "image_size"), _setting(config, "num_channels", default=3)
    if "pixel_values" not in arguments or side is None:
        return {}
    height, width = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    sizes: Sizes = {"pixel_values": ((channels, height, width), "")}
    if "labels" in arguments:
        sizes["labels"] = ((), "int64")
    return sizes


def _diffusion(arguments: Mapping[str, Any], config: Any, wanted: Wanted) -> Sizes:
    """A denoiser: a noisy sample, its time, and what it is conditioned on."""
    side, channels = _setting(config, "sample_size"), _setting(config, "in_channels")
    if not {"sample", "timestep"} <= set(arguments) or side is None or channels is None:
        return {}
    height, width = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    sizes: Sizes = {"sample": ((channels, height, width), ""), "timestep": ((), "int64")}
    wide = _setting(config, "encoder_hid_dim", "cross_attention_dim")
    if "encoder_hidden_states" in arguments and isinstance(wide, int):
        sizes["encoder_hidden_states"] = ((wanted.sequence or 77, wide), "")  # CLIP's tokens
    if _setting(config, "addition_embed_type") == "text_time":
        # Sizes and crops, six numbers each as wide as a time, beside a text.
        time_width = _setting(config, "addition_time_embed_dim")
        width = _setting(config, "projection_class_embeddings_input_dim")
        sizes["added_cond_kwargs.text_embeds"] = ((width - 6 * time_width,), "")
        sizes["added_cond_kwargs.time_ids"] = ((6,), "")
    return sizes


def _any_name(arguments: Mapping[str, Any]) -> bool:
    return any(argument.kind == inspect.Parameter.VAR_KEYWORD for argument in arguments.values())


def _dtype(name: str, default: torch.dtype) -> torch.dtype:
    dtype = getattr(torch, name, None) if name else default
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--input: {name!r} is no dtype; write it as torch does: int64, bfloat16")
    return dtype


def _tensor(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Zeros for integers: any table has a row 0, be it of tokens, classes or times.
    if dtype.is_floating_point and device.type != "meta":
        return torch.randn(size, device=device).to(dtype)
    return torch.zeros(size, dtype=dtype, device=device)
