"""Checkpoints of a training run, a folder each; the last complete one always loads."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pfeife.backend.state.extra_state import BESIDE, beside, check_beside, load_beside
from pfeife.backend.state.restoring import (
    MODEL,
    OPTIMIZER,
    load_model,
    load_optimizers,
    names_of,
    plain_name,
)
from pfeife.frontend.deferred.checkpoint_folder import Folder
from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.process_group import join_world
from pfeife.runtime.distributed.world.shares import all_state, share_of_model, share_of_optimizers
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.distributed.world.writing import Writer, Writing, complete

_STEP = "step"


class Checkpoints:
    """The checkpoints of a training run in a folder, `step-00000040` and so on, of which the `keep`
    latest stay (all for None).

    Each is a folder of torch.distributed.checkpoint: under torchrun a rank writes what it trains,
    by the names of one device, as `torch.distributed.checkpoint.state_dict.get_state_dict` gives
    them under "model" and "optim". So other ranks, stages, schedules and replicas can load it, and
    plain torch. Beside the `model` and `optimizer` (or several) there are the random numbers and
    the states of `others`, by their names: a scheduler, a torchdata StatefulDataLoader, a
    GradScaler; those of rank 0.

    Under torchrun all ranks make one, and call the same methods; the folder is one that all see.

    >>> import tempfile
    >>> model = torch.nn.Linear(2, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> checkpoints = pfeife.Checkpoints(tempfile.mkdtemp(), model, optimizer)
    >>> checkpoints.load()
    0
    >>> checkpoints.save(1)
    >>> checkpoints.load()
    1
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        keep: int | None = 2,
        **others: Any,
    ):
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep}: must be at least 1, or None to keep all")
        self.folder, self.model, self.keep, self.others = Path(folder), model, keep, others
        alone = isinstance(optimizer, torch.optim.Optimizer)
        self.optimizers: list[Any] = [optimizer] if alone else [*optimizer]  # type: ignore[misc]
        self._writing: Writing | None = None

    def latest(self) -> Path | None:
        """The last complete checkpoint; None if there is none."""
        return next(reversed(complete(self.folder).values()), None)

    def save(self, step: int, wait: bool = True) -> None:
        """Saves all after so many steps, at once or, unless this is to `wait`, on a thread: then
        the next `save`, `wait` or `load` waits, and raises what went wrong. A save that is
        interrupted leaves the last checkpoint as it is.

        Raises ValueError, on all ranks, if there is one of this step or a later one, for a state of
        other things than tensors and plain data, and if a rank cannot write; PipelineError if one
        does not come.
        """
        self.wait()
        world = self._world()
        state = self._state(step, world)
        # A world that has ended has taken its writer with it; the folder goes on.
        if self._writing is None or self._writing.world is not world:
            self._writing = Writing(world)
        self._writing.start(state, Writer(self.folder, step, self.keep), wait)

    def wait(self) -> None:
        """Waits until what is being written is complete, and raises what went wrong."""
        if self._writing is not None:
            self._writing.wait()

    def load(self, path: str | os.PathLike[str] | None = None) -> int:
        """Loads the last complete checkpoint, or the one in a folder, which may be one that plain
        torch has saved as {"model": ..., "optim": ...}; the step that it is of, 0 if there is none.

        A rank reads what it trains. Before the first step nobody knows what that is: then the model
        is read whole on every rank, or, if it is from `pfeife.deferred_init()`, at that first step,
        and the optimizers' state when they step. Raises ValueError for other names or shapes, and
        where ranks see another checkpoint.
        """
        self.wait()
        world = self._world()
        checkpoint = Path(path) if path is not None else self.latest()
        if world is not None:
            with world.busy(lambda: Activity("Checkpoints.load")):
                world.check_agreement(str(checkpoint and checkpoint.name), "the checkpoint to load")
        if checkpoint is None:
            return 0
        folder = Folder(checkpoint)
        # All that can be refused comes before anything is loaded: a model that is half of another
        # checkpoint would train on without a word.
        check_beside(folder, self.others)
        load_model(self.model, folder, world)
        load_optimizers(self.optimizers, names_of(self.model), folder, world)
        load_beside(folder, self.others)
        return int(folder.read([_STEP])[_STEP]) if _STEP in folder.objects else 0

    def _world(self) -> World | None:
        first = next(self.model.parameters(), torch.empty(0))
        return join_world(torch.device("cpu") if first.is_meta else first.device)

    def _state(self, step: int, world: World | None) -> dict[str, Any]:
        """What this rank writes: a dict for torch.distributed.checkpoint."""
        beside_model: dict[str, Any] = {}
        refused: ValueError | None = None
        try:
            self._check_step(step)
            extra = beside(self.others)
            optim = share_of_optimizers(names_of(self.model), self.optimizers, world)
            beside_model = {OPTIMIZER: optim} if self.optimizers else {}
            # Loaders and schedulers are the same on all ranks, which read the same data.
            if world is None or world.rank == 0:
                beside_model |= {BESIDE: extra, _STEP: step}
        # Told to all with the state: a rank that goes alone would leave the others waiting.
        except ValueError as error:
            refused = error
        if world is None:
            if refused is not None:
                raise refused
            state: dict[str, Any] = dict(self.model.state_dict())
        else:
            groups = beside_model.get(OPTIMIZER, {}).get("param_groups", ())
            text = "\n".join([*self.others, *map(str, groups)])
            whole = all_state(self.model, world, f"Checkpoints.save({step})", text, refused)
            state = share_of_model(self.model, whole, world)
        return {**beside_model, MODEL: {plain_name(name): value for name, value in state.items()}}

    def _check_step(self, step: int) -> None:
        last = max(complete(self.folder), default=-1)
        if step <= last:
            raise ValueError(
                f"{self.latest()} is there already, and this would be step {step}: load it before "
                "training goes on, or remove it"
            )
