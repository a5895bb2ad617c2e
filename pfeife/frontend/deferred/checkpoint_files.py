"""Files and folders with tensors by their names, each of which is read by itself."""

import json
import os
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

INDEX = ".index.json"
Reader = Callable[[Mapping[str, torch.Tensor]], None]


@attrs.frozen
class Stored:
    """A checkpoint: the shapes of its tensors by their names, and what reads some of them into
    others of these shapes."""

    path: Path
    shapes: Mapping[str, Sequence[int]]
    read: Reader


def check_shapes(
    wanted: Mapping[str, Sequence[int]],
    there: Mapping[str, Sequence[int]],
    path: Path,
    optional: Container[str] = (),
) -> None:
    """Raises ValueError for names of which only the model (`wanted`) or the checkpoint (`there`)
    has a tensor, and for other shapes. The checkpoint may have any of the `optional` names, too."""
    # Names before shapes: a shape of another model's layer says less.
    unknown = [name for name in there if name not in wanted and name not in optional]
    missing = [name for name in wanted if name not in there]
    for names, where in ((unknown, "the model"), (missing, str(path))):
        if names:
            raise ValueError(f"{where} has no {names[:3]} ({len(names)} in all)")
    for name, shape in wanted.items():
        if list(there[name]) != list(shape):
            raise ValueError(
                f"{name} is {list(there[name])} in {path} and {list(shape)} in the model"
            )


@contextmanager
def stored(path: str | os.PathLike[str], model_names: Collection[str] = ()) -> Iterator[Stored]:
    """A file of safetensors, by its ending, or one that `torch.save` has written of a state_dict;
    a folder of such files with an index (`model.safetensors.index.json`), or that index; a folder
    of torch.distributed.checkpoint, where the model is by itself or under "model" (that is told by
    the `model_names`). Raises ValueError for something else."""
    path = Path(path)
    with ExitStack() as stack:
        if path.is_dir():
            yield _folder(path, model_names, stack)
        elif path.name.endswith(INDEX):
            yield _indexed(path, stack)
        else:
            yield _file(path, stack)


def _folder(path: Path, model_names: Collection[str], stack: ExitStack) -> Stored:
    from pfeife.frontend.deferred.checkpoint_folder import METADATA, Folder

    if (path / METADATA).exists():
        folder = Folder(path)
        prefix = "model." if any(f"model.{name}" in folder.tensors for name in model_names) else ""
        names = {key.removeprefix(prefix): key for key in folder.tensors if key.startswith(prefix)}
        shapes = {name: folder.tensors[key].shape for name, key in names.items()}
        return Stored(
            path,
            shapes,
            lambda into: folder.fill({names[name]: tensor for name, tensor in into.items()}),
        )
    # An index goes before files of its kind, which are parts of the model where there is one;
    # safetensors go before pickles, where a folder has both.
    for pattern in (f"*.safetensors{INDEX}", "*.safetensors", f"*.bin{INDEX}", "*.bin"):
        files = sorted(path.glob(pattern))
        if len(files) == 1:
            return _indexed(files[0], stack) if pattern.endswith(INDEX) else _file(files[0], stack)
        if files:
            raise ValueError(f"{path} has {[file.name for file in files]}: say which by its path")
    raise ValueError(
        f"{path} has no model: neither an index of safetensors, one such file, nor a complete "
        "checkpoint of torch.distributed.checkpoint"
    )


def _indexed(path: Path, stack: ExitStack) -> Stored:
    """Several files and an index of them, as Hugging Face ships large models."""
    content = json.loads(path.read_text())
    file_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
        raise ValueError(f"{path} is no index of a model: it has no weight_map")
    # The index may come from anywhere: it must not make us read a file of another folder.
    outside = [name for name in file_of.values() if Path(name).name != name]
    if outside:
        raise ValueError(f"{path} names {outside[0]}, which is not a file beside it")
    files = {name: _file(path.parent / name, stack) for name in sorted(set(file_of.values()))}
    lost = [name for name, file in file_of.items() if name not in files[file].shapes]
    if lost:
        raise ValueError(f"{file_of[lost[0]]} has no {lost[0]}, which {path} says")

    def read(into: Mapping[str, torch.Tensor]) -> None:
        for file, checkpoint in files.items():
            checkpoint.read(
                {name: tensor for name, tensor in into.items() if file_of[name] == file}
            )

    return Stored(path, {name: files[file].shapes[name] for name, file in file_of.items()}, read)


def _file(path: Path, stack: ExitStack) -> Stored:
    if path.suffix == ".safetensors":
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ValueError(f"{path} needs the package safetensors: pip install it") from error
        file: Any = stack.enter_context(safe_open(str(path), framework="pt"))
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        return Stored(path, shapes, lambda into: _copy(file.get_tensor, into))
    # Mapped, so that a tensor takes memory when it is read; nothing of the file is run.
    state = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    if not isinstance(state, dict) or not all(
        isinstance(tensor, torch.Tensor) for tensor in state.values()
    ):
        raise ValueError(
            f"{path} is no state_dict: it has something else than tensors by their names"
        )
    shapes = {name: tensor.shape for name, tensor in state.items()}
    return Stored(path, shapes, lambda into: _copy(state.__getitem__, into))


def _copy(read: Callable[[str], torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in into.items():
        tensor.copy_(read(name))
