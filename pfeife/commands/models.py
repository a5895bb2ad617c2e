"""From a few words to a training step: a function, a class with its options, a config.json.

A model of a library is made on the meta device from its configuration; nothing is downloaded. Its
batch is read off its forward's arguments and its configuration.
"""

import contextlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from pfeife.commands.batches import Wanted, batch_of
from pfeife.commands.file_kinds import json_of

LIBRARIES = ("transformers", "diffusers")


@attrs.frozen(eq=False)
class ModelRequest:
    """A step with its batch, which its `args` and `kwargs` are; `key` says in words what it is if
    that decides all of it, else it is None. `note` is what a person should know."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: str | None = None
    note: str = ""


def asked(wanted: Wanted, *, real: bool = False) -> ModelRequest:
    """The step that words are about. Its tensors are on the meta device, unless they shall be
    `real`. Raises ValueError if there is no such step."""
    if wanted.what.endswith(".json"):
        return _of_model(_from_file(wanted), wanted, real)
    # A class may be called too: it is a model or a configuration, and not a function of a step.
    target = _named(wanted.what)
    if isinstance(target, type):
        return _of_model(_from_class(target, wanted), wanted, real)
    return _from_function(target, wanted, real)


def _named(what: str) -> Any:
    """What module:name or file.py:name stands for."""
    place, colon, name = what.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(
            f"{what!r} is no step: write module:function, file.py:function, a class such as "
            "transformers:LlamaConfig, or the path of a config.json"
        )
    module = _module(place)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            near = get_close_matches(part, dir(target), n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"{what!r}: {place} has no {part!r}{hint}")
        target = getattr(target, part)
    if not callable(target):
        raise ValueError(f"{what!r} is {type(target).__name__}, and not a function or a class")
    return target


def _module(place: str) -> Any:
    """A module by its name, or by the path of its file. What its code raises is told with its
    line."""
    path = Path(place)
    if place.endswith(".py") and not path.is_file():
        raise ValueError(f"{place!r}: there is no such file")
    try:
        if place.endswith(".py"):
            sys.path.insert(0, str(path.parent.absolute()))  # for its imports from beside it
            # A file may be called as a module that is there: random.py.
            name = f"{path.stem}_of_a_file" if path.stem in sys.modules else path.stem
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # before it runs: dataclasses look it up there
            spec.loader.exec_module(module)
            return module
        # A console script has its own folder on the path, where Python has the current one.
        if "" not in sys.path:
            sys.path.insert(0, "")
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and place.split(".")[0] == error.name:
            extra = "; pip install 'pfeife[models]'" if error.name in LIBRARIES else ""
            raise ValueError(f"there is no module {place!r}{extra}") from None
        raise ValueError(f"{place!r} does not import: {_line(error)}") from error
    except Exception as error:
        raise ValueError(f"{place!r} does not import: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """An error of the user's code, and where it was raised."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace else ""
    return f"{type(error).__name__}: {error}{where}"


def _from_function(function: Callable[..., Any], wanted: Wanted, real: bool) -> ModelRequest:
    """What a function returns: a step and its batch."""
    name, settings = wanted.what, dict(wanted.settings)
    signature = inspect.signature(function)
    for word, value in (("batch", wanted.batch), ("sequence", wanted.sequence)):
        if value is not None and word not in settings:
            if word not in signature.parameters:
                raise ValueError(f"--{word}: {name}{signature} has no argument {word!r}")
            settings[word] = value
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise ValueError(f"{name}{signature}: {error}; give them with --set NAME=VALUE") from None
    with contextlib.nullcontext() if real else torch.device("meta"), _default(wanted.dtype):
        try:
            returned = function(**settings)
        except Exception as error:
            raise ValueError(f"{name} raised {_line(error)}") from error
    if not isinstance(returned, tuple) or len(returned) < 2 or not callable(returned[0]):
        raise ValueError(
            f"{name} returned {type(returned).__name__}: it must return the step and its batch, "
            "`return step, batch` or `return step, inputs, targets`"
        )
    # Both `return step, batch` and `return step, inputs, targets` are usual.
    step, *batch = returned
    if len(batch) == 1 and isinstance(batch[0], tuple):
        batch = list(batch[0])
    return ModelRequest(step, tuple(batch), {})


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """While modules are made with parameters of a type."""
    # Parameters made in the type need no second copy in another one.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


Make = Callable[[], nn.Module]


def _from_file(wanted: Wanted) -> tuple[str, Make]:
    """The model of a config.json, of a class of transformers or diffusers that it names."""
    # Three kinds of files: diffusers names its class, transformers the class or the kind of model.
    data = json_of(wanted.what)
    if not isinstance(data, dict):
        raise ValueError(f"{wanted.what}: a configuration is an object, this is a list or a number")
    if isinstance(data.get("_class_name"), str):
        kind = _of_library("diffusers", data["_class_name"], wanted.what)
        # Names with an underscore are notes of the library (its version, the class).
        settings = {name: value for name, value in data.items() if not name.startswith("_")}
        return _diffusers(kind, settings | _known(kind, wanted))
    architectures = data.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        kind = _of_library("transformers", architectures[0], wanted.what)
        own = {**data, **_known(kind.config_class, wanted)}
        return _transformers(kind, kind.config_class.from_dict(own))
    if isinstance(data.get("model_type"), str):
        transformers = _module("transformers")
        rest = {name: value for name, value in data.items() if name != "model_type"}
        try:
            config = transformers.AutoConfig.for_model(data["model_type"], **rest)
        except ValueError as error:
            raise ValueError(f"{wanted.what}: {str(error).splitlines()[0]}") from None
        own = {**config.to_dict(), **_known(type(config), wanted)}
        return _of_config(type(config).from_dict(own))
    raise ValueError(
        f'{wanted.what}: it has neither "architectures" or "model_type" (of transformers) nor '
        '"_class_name" (of diffusers)'
    )


def _of_library(library: str, name: str, where: str) -> Any:
    kind = getattr(_module(library), name, None) if name.isidentifier() else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(f"{where}: {library} has no model {name[:80]!r}")
    return kind


def _from_class(kind: type, wanted: Wanted) -> tuple[str, Make]:
    """A model of a class of configurations or of models, or any module of one's own."""
    config = getattr(kind, "config_class", None)
    if isinstance(config, type):
        return _transformers(kind, config(**_known(config, wanted)))
    if hasattr(kind, "model_type") and hasattr(kind, "to_dict"):
        return _of_config(kind(**_known(kind, wanted)))
    if not issubclass(kind, nn.Module):
        raise ValueError(f"{wanted.what} is a class, but neither a model nor its configuration")
    if hasattr(kind, "load_config"):
        return _diffusers(kind, _known(kind, wanted))
    settings = dict(wanted.settings)
    try:
        inspect.signature(kind).bind(**settings)
    except TypeError as error:
        raise ValueError(f"{wanted.what}: {error}; give them with --set NAME=VALUE") from None
    return "", lambda: kind(**settings)


def _known(kind: Any, wanted: Wanted) -> dict[str, Any]:
    """The settings for a configuration. Raises ValueError for a name that it has not: transformers
    takes any."""
    settings = dict(wanted.settings)
    names = set(inspect.signature(kind.__init__).parameters)
    if hasattr(kind, "to_dict"):
        with contextlib.suppress(Exception):  # some cannot be made without arguments
            names |= set(kind().to_dict())
    for name in settings:
        if name not in names:
            near = get_close_matches(name, names, n=3, cutoff=0.3)
            raise ValueError(f"--set {name}: {kind.__name__} has no such option; near are {near}")
    return settings


def _of_config(config: Any) -> tuple[str, Make]:
    """The model with a loss for a configuration of transformers."""
    transformers = _module("transformers")
    # Only making a model tells whether there is one; on the meta device that allocates nothing.
    for name in ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification"):
        with contextlib.suppress(ValueError, KeyError):
            with torch.device("meta"):
                model = getattr(transformers, f"AutoModelFor{name}").from_config(config)
            return _transformers(type(model), config)
    raise ValueError(
        f"{type(config).__name__}: transformers has no model with a loss for it; name the class of "
        "the model, such as transformers:LlamaForCausalLM"
    )


def _transformers(kind: Any, config: Any) -> tuple[str, Make]:
    text = json.dumps(config.to_dict(), sort_keys=True, default=str)
    return f"transformers {kind.__module__}.{kind.__name__} {text}", lambda: kind(config)


def _diffusers(kind: Any, settings: Mapping[str, Any]) -> tuple[str, Make]:
    text = json.dumps(dict(settings), sort_keys=True, default=str)
    return f"diffusers {kind.__module__}.{kind.__name__} {text}", lambda: kind.from_config(settings)


def _of_model(made: tuple[str, Make], wanted: Wanted, real: bool) -> ModelRequest:
    """A model with a batch and a loss."""
    words, make = made
    device = torch.device("cpu" if real else "meta")
    with device, _default(wanted.dtype):
        try:
            model = make()
        except Exception as error:
            raise ValueError(f"{wanted.what} is not made: {_line(error)}") from error
    model.train().to(wanted.dtype)
    rows = wanted.batch or wanted.rows
    batch, constants, tensors = batch_of(model, wanted, rows, device)
    library = words.split(" ")[0]
    # A library's code is told by its version. Without words the module is the user's own, and its
    # settings do not tell what its code does: it has no key.
    key = None
    if words:
        version = _module(library).__version__
        inputs = {name: (str(v.dtype), list(v.shape)) for name, v in tensors.items()}
        key = json.dumps(
            [words, version, str(wanted.dtype), sorted(inputs.items()), str(constants)]
        )

    def step(**microbatch: Any) -> Any:
        output = model(**microbatch, **constants)
        # A model that was given no labels has no loss; a plan needs some number to differentiate.
        loss = getattr(output, "loss", None)
        if loss is None:
            first = next(v for v in _tensors(output) if v.is_floating_point())
            loss = first.float().square().mean()
        return loss

    note = "" if "labels" in batch else "no labels: the mean square of the output is its loss"
    return ModelRequest(step, (), batch, key, note)


def _tensors(output: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
