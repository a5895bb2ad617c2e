"""The batch of a library's model, by what its forward takes and its configuration says."""

import inspect
from collections.abc import Mapping
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
    takes = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    said = _Config(config)
    sizes = _text(takes, said, wanted) or _image(takes, said) or _diffusion(takes, said, wanted)
    sizes |= wanted.inputs
    for name in sizes:
        if name.split(".")[0] not in takes and not _any_name(takes):
            raise ValueError(
                f"--input {name}: the forward of {type(model).__name__} takes {list(takes)}"
            )
    if not sizes:
        raise ValueError(_unsaid(type(model).__name__, takes, said))
    looks = {
        name: _tensor((rows, *size), _dtype(dtype, wanted.dtype), device)
        for name, (size, dtype) in sizes.items()
    }
    batch: dict[str, Any] = {}
    for path, value in looks.items():
        first, _, rest = path.partition(".")
        if rest:
            batch.setdefault(first, {})[rest] = value
        else:
            batch[first] = value
    if "labels" in takes and "input_ids" in batch and "labels" not in batch:
        batch["labels"] = batch["input_ids"]
    _check_positions(model, said, looks)
    left = {"use_cache": False} if "use_cache" in takes else {}
    return batch, left, looks


def _unsaid(name: str, takes: Mapping[str, Any], said: "_Config") -> str:
    """What a configuration lacks to tell what its model is given, and the words that say it."""
    side = "image_size" if "pixel_values" in takes else "sample_size"
    if {"pixel_values", "sample"} & set(takes) and said.knows(side):
        return f"{name} does not say how large its inputs are: --set {side}=64, or what yours have"
    wanted = [n for n, one in takes.items() if one.default is one.empty and n != "kwargs"]
    example = wanted[0] if wanted else "x"
    return (
        f"{name} does not say what its inputs are: say {' and '.join(wanted) or 'them'}, each with "
        f"sizes (without the rows) and a dtype, as --input {example}=3x32x32:float32"
    )


def _check_positions(model: nn.Module, said: "_Config", looks: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for more tokens than a model has learned positions: on the meta device
    nothing is looked up, and so nothing is missed."""
    most = said("max_position_embeddings", "n_positions")
    tokens = looks["input_ids"].shape[-1] if "input_ids" in looks else 0
    if not isinstance(most, int) or tokens <= most:
        return
    tables = (one for one in model.modules() if isinstance(one, nn.Embedding))
    if any(most <= table.num_embeddings <= most + 2 for table in tables):  # two: OPT's padding
        raise ValueError(
            f"--sequence {tokens}: {type(model).__name__} has {most} positions; make it "
            f"{most} at most, or the model's larger"
        )


class _Config:
    """What a configuration says, if it does."""

    def __init__(self, config: Any):
        self.config = config

    def knows(self, name: str) -> bool:
        """Whether there is such a setting, perhaps None."""
        return (
            name in self.config if isinstance(self.config, Mapping) else hasattr(self.config, name)
        )

    def __call__(self, *names: str, default: Any = None) -> Any:
        for name in names:
            found = (
                self.config.get(name)
                if isinstance(self.config, Mapping)
                else getattr(self.config, name, None)
            )
            if found is not None:
                return found
        return default


def _text(takes: Mapping[str, Any], said: _Config, wanted: Wanted) -> Sizes:
    if "input_ids" not in takes:
        return {}
    most = said("max_position_embeddings", "n_positions", default=SEQUENCE)
    return {"input_ids": ((wanted.sequence or min(most, SEQUENCE),), "int64")}


def _image(takes: Mapping[str, Any], said: _Config) -> Sizes:
    side, channels = said("image_size"), said("num_channels", default=3)
    if "pixel_values" not in takes or side is None:
        return {}
    height, width = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    found: Sizes = {"pixel_values": ((channels, height, width), "")}
    if "labels" in takes:
        found["labels"] = ((), "int64")
    return found


def _diffusion(takes: Mapping[str, Any], said: _Config, wanted: Wanted) -> Sizes:
    """A denoiser: a noisy sample, its time, and what it is conditioned on."""
    side, channels = said("sample_size"), said("in_channels")
    if not {"sample", "timestep"} <= set(takes) or side is None or channels is None:
        return {}
    height, width = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    found: Sizes = {"sample": ((channels, height, width), ""), "timestep": ((), "int64")}
    wide = said("encoder_hid_dim", "cross_attention_dim")
    if "encoder_hidden_states" in takes and isinstance(wide, int):
        found["encoder_hidden_states"] = ((wanted.sequence or 77, wide), "")  # CLIP's tokens
    if said("addition_embed_type") == "text_time":  # sizes and crops, six numbers, beside a text
        each, whole = said("addition_time_embed_dim"), said("projection_class_embeddings_input_dim")
        found["added_cond_kwargs.text_embeds"] = ((whole - 6 * each,), "")
        found["added_cond_kwargs.time_ids"] = ((6,), "")
    return found


def _any_name(takes: Mapping[str, Any]) -> bool:
    return any(one.kind == inspect.Parameter.VAR_KEYWORD for one in takes.values())


def _dtype(name: str, default: torch.dtype) -> torch.dtype:
    found = getattr(torch, name, None) if name else default
    if not isinstance(found, torch.dtype):
        raise ValueError(f"--input: {name!r} is no dtype; write it as torch does: int64, bfloat16")
    return found


def _tensor(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point and device.type != "meta":
        return torch.randn(size, device=device).to(dtype)
    return torch.zeros(size, dtype=dtype, device=device)
