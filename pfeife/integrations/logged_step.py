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


class LoggedStep:
    """One of a module's steps, such as "training_step".

    While it is captured, what it logs and what it tells its metrics is noted. The tensors among
    that become results, which are combined over the microbatches as the loss is; then the calls
    are made, once a batch:

        a microbatch       acc = self.accuracy(found, y); self.log("acc", acc, batch_size=len(y))
        the whole batch    {"loss": ..., "noted": [found, y]}
        afterwards         acc = accuracy(found, y); log("acc", acc, batch_size=8)
    """

    def __init__(self, module: Any, name: str, options: Mapping[str, Any]):
        self.module = module
        self.calls: list[tuple[Any, str, Any, Any]] = []
        self.noted: list[torch.Tensor] = []
        self.rows = 0  # of a microbatch, while one is captured

        def step(*args: Any) -> dict[str, Any]:
            self.calls, self.noted, self.rows = [], [], _rows(args)
            out = getattr(module, name)(*args)
            noted, self.noted, self.rows = self.noted, [], 0
            found = _parts(out) if trains else {"out": out}
            if not torch.compiler.is_dynamo_compiling():  # then only results are kept
                found["calls"] = self.calls
            return {**found, "noted": noted}

        trains = name == "training_step"
        self.run = pipeline(step, **({"loss": "loss"} if trains else {}), **options)

    def __call__(self, *args: Any) -> Any:
        """What the module's step returns for a batch."""
        with self._noting():
            found = self.run(*args)
        self._make(found.get("calls", self.calls), iter(found["noted"]), _rows(args))
        if "loss" not in found:
            return found["out"]
        return {"loss": found["loss"], **found["more"]} if "more" in found else found["loss"]

    def _make(self, calls: Iterable[Any], tensors: Iterator[torch.Tensor], rows: int) -> None:
        """Makes the calls that were noted."""
        results: list[Any] = []

        def real(value: Any) -> Any:
            if isinstance(value, _Later):
                return results[value.call]
            known = {_TENSOR: lambda: next(tensors), _ROWS: lambda: rows}
            return known[value]() if isinstance(value, str) and value in known else value

        for target, method, args, kwargs in calls:
            args, kwargs = pytree.tree_map(real, (args, kwargs))
            results.append(getattr(target, method)(*args, **kwargs))

    def _note(self, target: Any, method: str) -> Callable[..., _Later]:
        """What stands in place of a method."""

        def note(*args: Any, **kwargs: Any) -> _Later:
            if kwargs.get("batch_size") == self.rows:
                kwargs = {**kwargs, "batch_size": _ROWS}
            tensors = [one for one in pytree.tree_leaves((args, kwargs)) if _is_tensor(one)]
            args, kwargs = pytree.tree_map(_told, (args, kwargs))
            self.noted = [*self.noted, *(one.detach() for one in tensors)]
            self.calls = [*self.calls, (target, method, args, kwargs)]
            return _Later(len(self.calls) - 1)

        return note

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """While methods note their calls."""
        kinds = Metric, MetricCollection
        metrics = [one for one in self.module.modules() if isinstance(one, kinds)]
        pairs = [(self.module, method) for method in _LOGS]
        pairs += [(one, method) for one in metrics for method in _METRICS]
        own = [(vars(target), method, vars(target).get(method)) for target, method in pairs]
        for target, method in pairs:
            vars(target)[method] = self._note(target, method)
        try:
            yield
        finally:
            for attributes, method, before in own:
                attributes[method] = before
                if before is None:
                    del attributes[method]


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
    tensors = (one for one in pytree.tree_leaves(args) if _is_tensor(one))
    return next((len(one) for one in tensors if one.dim()), 0)
