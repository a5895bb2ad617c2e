"""torch.compile's entry: from Dynamo's graph to a pipelined step that autograd can use."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pfeife import _torch, plain
from pfeife.artifacts import Artifacts
from pfeife.build import Builder
from pfeife.call import Compiled, run_step
from pfeife.cost import machine
from pfeife.microbatch import BatchedGraph
from pfeife.options import Options, options_from, versions
from pfeife.plan import Machine, Network
from pfeife.progress import shown
from pfeife.runtime.meeting import join_world
from pfeife.sched import policy

log = logging.getLogger("pfeife")
_CPU = torch.device("cpu")


class Backend:
    """A compile backend with its options bound.

    `compiled` lists what it has built so far.
    """

    def __init__(self, options: Options):
        self.options = options
        self.alike = [*versions(), str(options)]  # on every rank
        self.compiled: list[Compiled] = []
        if options.schedule != "search":
            policy(options.schedule)
        given = options.machine
        target = given if isinstance(given, Machine | None) else machine(given)
        links = options.network
        network = links if isinstance(links, Network | None) else _measured(links)
        self.builder = Builder(options, target, network)

    def __call__(self, module: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Callable:
        """Called by Dynamo with a graph; the program is built at the first call of the result,
        for each shape that it is called with."""
        graph = BatchedGraph(module, examples)
        artifacts = Artifacts(_torch.compilation())
        known: dict[tuple, Compiled] = {}

        def run(*args: Any) -> list[torch.Tensor]:
            key = graph.key(args)
            device = next((a.device for a in args if isinstance(a, torch.Tensor)), _CPU)
            world = join_world(device, self.options.timeout)
            if world:
                with world.building("the arguments of a step"):
                    world.check_agreement(self._called_with(args), "the arguments of this call")
                    ready = known.get(key)
                    told = world.homes.news(ready.borrowed if ready else None, args)
                    world.homes.agree(world, world.from_all_ranks(told))
                    if ready and self.builder.outdated(ready, args, world):
                        del known[key]
            if key in known:
                return run_step(known[key], self.options, args)
            rank = world.rank if world else 0
            show = shown(log, progress=self.options.progress, rank=rank)
            with world.building("a step") if world else contextlib.nullcontext():
                known[key] = self.builder.build(graph, args, world, device, show, artifacts)
            self.compiled.append(known[key])
            return run_step(known[key], self.options, args, show)

        return run

    def _called_with(self, args: Sequence[Any]) -> str:
        """All that a call's program and its messages depend on, a line each."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        shapes = [f"a tensor of {a.dtype} {list(a.shape)} on {a.device.type}" for a in tensors]
        trains = f"gradients {'on' if torch.is_grad_enabled() else 'off'}"
        return "\n".join([*self.alike, trains, *shapes])


def _measured(path: str | os.PathLike[str]) -> Network:
    try:
        return plain.load(Network, Path(path))
    except OSError as error:
        raise ValueError(
            f"option network={str(path)!r}: {error.strerror}; `pfeife bench-network` writes one"
        ) from None


def backend(**options: Any) -> Backend:
    """A backend for torch.compile or torch.compiler.set_default_backend; see `Options`.

    Raises ValueError for an unknown option or a wrong value.
    """
    return Backend(options_from(options))


def entry(
    module: fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable:
    """What the name "pfeife" in torch.compile means."""
    if mode not in (None, "default"):
        raise ValueError(f"mode={mode!r}: pfeife has options, no modes")
    return backend(**(options or {}))(module, examples)


def compile(step: Callable[..., Any], *, in_dims: Any = 0, **options: Any) -> Callable[..., Any]:
    """torch.compile with this backend, with the batch dimension marked on every call.

    `in_dims` says for the positional arguments where the batch is, as in torch.vmap: a number,
    None for none, or a nested structure of them; keyword arguments have it in front. The
    result's `backend` attribute has what was compiled. Raises ValueError for wrong options.
    """
    ours = backend(**options)
    compiled = torch.compile(step, backend=ours)

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        dims = _torch.leaf_dims(in_dims, args) + _torch.leaf_dims(0, kwargs)
        leaves = pytree.tree_leaves(args) + pytree.tree_leaves(kwargs)
        for leaf, dim in zip(leaves, dims, strict=True):
            if isinstance(leaf, torch.Tensor) and dim is not None and leaf.dim() > 0:
                if not -leaf.dim() <= dim < leaf.dim():
                    raise ValueError(
                        f"in_dims: a tensor of {leaf.dim()} dimensions has no dimension {dim}"
                    )
                torch._dynamo.mark_dynamic(leaf, dim % leaf.dim())
        return compiled(*args, **kwargs)

    run.backend = ours  # type: ignore[attr-defined]
    return run
