"""A LightningModule's step as a pipeline: what it logs of microbatches becomes results."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from pfeife.backend.step import compile as pipeline

_LOGS, _METRICS = ("log", "log_dict"), ("forward", "update", "compute", "reset")
_TENSOR = "a tensor, which is among the results"
_ROWS = "the rows of the batch"


class _Later:
    """What a call gives that is made afterwards: it can be logged."""

    def __init__(self, call: int):
        self.call = call


class _Own:
    """The module, or one of its metrics, among results, which may have no modules."""

    def __init__(self, name: str):
        self.name = name


_MOVED = (
    "the step reads {}; as it is traced, and not captured by Dynamo, it would go on with what is "
    "there now: give it that in the batch or in a buffer"
)


class _Reading:
    """The Trainer, as Dynamo reads it, with guards. A trace has none for what changes at each step,
    and does not look into this."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise ValueError(_MOVED.format(f"trainer.{name}"))
        return getattr(self.trainer, name)


class _Unread:
    """The number of a batch where nobody may read it."""

    def _read(self, *_: Any) -> Any:
        raise ValueError(_MOVED.format("the number of the batch"))

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = _read
    __mod__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _read
    __floordiv__ = __float__ = __str__ = __format__ = __hash__ = __neg__ = __repr__ = _read


class LoggedStep:
    """One of a module's steps, such as "training_step".

    While it is captured, what it logs and what it tells its metrics is noted. The tensors among
    that become results, which are combined over the microbatches as the loss is; then the calls
    are made, once a batch:

        a microbatch       acc = self.accuracy(guess, y); self.log("acc", acc, batch_size=len(y))
        the whole batch    {"loss": ..., "noted": [guess, y]}
        afterwards         acc = accuracy(guess, y); log("acc", acc, batch_size=8)
    """

    def __init__(self, module: Any, name: str, options: Mapping[str, Any]):
        self.module = module
        self.calls: list[tuple[Any, str, Any, Any]] = []
        self.noted: list[torch.Tensor] = []
        self.rows = 0  # of a microbatch, while one is captured
        self.instead: dict[tuple[int, str], tuple[Any, Any]] = {}
        self.numbers: list[int] = []  # of the batch and of its loader

        def step(*batch: Any) -> dict[str, Any]:
            self.calls, self.noted, self.rows = [], [], _rows(batch)
            # New lists each time: Dynamo turns what is appended to an old one into a side effect.
            traced = not torch.compiler.is_dynamo_compiling()
            numbers = [_Unread()] * len(self.numbers) if traced else self.numbers
            out = getattr(module, name)(*batch, *numbers)
            noted, self.noted, self.rows = self.noted, [], 0
            results = _parts(out) if trains else {"out": out}
            if traced:  # then only results are kept
                results["calls"] = pytree.tree_map(self._named, self.calls)
            return {**results, "noted": noted}

        trains = name == "training_step"
        loss: dict[str, Any] = {"loss": "loss"} if trains else {}
        self.run = pipeline(step, **loss, **options)

    def __call__(self, *args: Any) -> Any:
        """What the module's step returns for a batch."""
        self.numbers = [
            argument for argument in args if type(argument) is int
        ]  # the last ones, not compared
        # What stands in place of methods is taken away even where the step fails.
        with self._noting():
            results = self.run(*(argument for argument in args if type(argument) is not int))
        self._make(results.get("calls", self.calls), iter(results["noted"]), _rows(args))
        if "loss" not in results:
            return results["out"]
        return (
            {"loss": results["loss"], **results["more"]} if "more" in results else results["loss"]
        )

    def _make(self, calls: Iterable[Any], tensors: Iterator[torch.Tensor], rows: int) -> None:
        """Makes the calls that were noted."""
        results: list[Any] = []

        def real(value: Any) -> Any:
            if isinstance(value, _Later):
                return results[value.call]
            if isinstance(value, _Own):
                return self.module.get_submodule(value.name)
            stand_ins = {_TENSOR: lambda: next(tensors), _ROWS: lambda: rows}
            return stand_ins[value]() if isinstance(value, str) and value in stand_ins else value

        # In the order of the step: a later call may use what an earlier one gives.
        for target, method, args, kwargs in calls:
            target, args, kwargs = pytree.tree_map(real, (target, args, kwargs))
            results.append(getattr(target, method)(*args, **kwargs))

    def _named(self, value: Any) -> Any:
        names = (name for name, module in self.module.named_modules() if module is value)
        return _Own(next(names)) if isinstance(value, torch.nn.Module) else value

    def _instead(self, target: Any, name: str) -> Any:
        """What stands in a place, the same at each call: that is guarded."""
        before = vars(target).get(name) if name == "_trainer" else None
        key = id(target), name
        if key not in self.instead or self.instead[key][0] is not before:
            made = _Reading(before) if before is not None else self._note(target, name)
            self.instead[key] = before, made
        return self.instead[key][1]

    def _note(self, target: Any, method: str) -> Callable[..., _Later]:
        """What stands in place of a method."""

        def note(*args: Any, **kwargs: Any) -> _Later:
            if kwargs.get("batch_size") == self.rows:
                kwargs = {**kwargs, "batch_size": _ROWS}
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
            args, kwargs = pytree.tree_map(_told, (args, kwargs))
            self.noted = [*self.noted, *(tensor.detach() for tensor in tensors)]
            self.calls = [*self.calls, (target, method, args, kwargs)]
            return _Later(len(self.calls) - 1)

        return note

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """While methods note their calls, and the Trainer is read as it must be."""
        modules = list(self.module.modules())
        metrics = [module for module in modules if isinstance(module, Metric | MetricCollection)]
        pairs = [(self.module, method) for method in _LOGS]
        pairs += [(metric, method) for metric in metrics for method in _METRICS]
        pairs += [
            (module, "_trainer") for module in modules if vars(module).get("_trainer") is not None
        ]
        places = [(target, name, self._instead(target, name)) for target, name in pairs]
        originals = [(vars(target), name, vars(target).get(name)) for target, name, _ in places]
        for (attributes, name, _), (_, _, instead) in zip(originals, places, strict=True):
            attributes[name] = instead
        try:
            yield
        finally:
            for attributes, name, before in originals:
                attributes[name] = before
                # None: the name is one of the class, which the instance had nothing in place of.
                if before is None:
                    del attributes[name]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _told(value: Any) -> Any:
    return _TENSOR if _is_tensor(value) else value


def _parts(out: Any) -> dict[str, Any]:
    """The loss that a training step returns, and the rest, which nothing differentiates."""
    if not isinstance(out, Mapping):
        return {"loss": out}
    rest = {name: out[name] for name in out if name != "loss"}
    return {"loss": out["loss"], "more": pytree.tree_map_only(torch.Tensor, torch.detach, rest)}


def _rows(args: Any) -> int:
    """How many rows the first tensor has that has any."""
    tensors = (leaf for leaf in pytree.tree_leaves(args) if _is_tensor(leaf))
    return next((len(tensor) for tensor in tensors if tensor.dim()), 0)
