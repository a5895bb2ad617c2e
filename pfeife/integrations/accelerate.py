"""Accelerate over a pipeline: all processes of torchrun are one process to it.

    from pfeife.integrations.accelerate import Accelerator      # for: from accelerate import ...

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = pfeife.compile(lambda batch: model(**batch).loss, microbatches=4)

`prepare` wraps no model in DDP and shards no loader: every rank is given every batch.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn

from pfeife.backend.state.full import clip_grad_norm_, full_state_dict
from pfeife.integrations.together import together
from pfeife.runtime.distributed.process_group import join_world


class Accelerator(accelerate.Accelerator):
    """An Accelerator whose processes are the ranks of a pipeline.

    Each process keeps its number and device, so that the main one alone logs and writes, but none
    knows of others: batches, gradients and metrics are neither shared out nor gathered. What needs
    the state of all ranks (`clip_grad_norm_`, `get_state_dict`, `save_model`, `save_state`) all
    ranks must call. Raises ValueError where another plugin (FSDP, DeepSpeed, ...) distributes the
    model.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.join()

    def join(self) -> None:
        """Makes the processes one, as far as Accelerate goes."""
        kind = self.distributed_type
        if kind != DistributedType.NO and not self.multi_device and kind.name != "MULTI_CPU":
            raise ValueError(
                f"Accelerate distributes the model itself ({kind.name}): a pipeline wants none of "
                "its plugins (FSDP, DeepSpeed, Megatron, TPU)"
            )
        # Not before: `__init__` has chosen each process's device by these.
        for state in (PartialState(), AcceleratorState()):  # of all Accelerators of this process
            state.distributed_type, state.num_processes = DistributedType.NO, 1
        self.dataloader_config.dispatch_batches = False  # each rank reads its own copy

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """`pfeife.clip_grad_norm_`, after the gradients' scale is taken out."""
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """`pfeife.full_state_dict` of a model."""
        return full_state_dict(self.unwrap_model(model) if unwrap else model)

    def wait_for_everyone(self) -> None:
        """Returns when all ranks are here. Raises ValueError if one calls something else,
        PipelineError if one does not come."""
        join_world(self.device)
        together("Accelerator.wait_for_everyone")

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The others wait until the main process has done what is inside."""
        yield from self._first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The others wait until the main process of each node has done what is inside."""
        yield from self._first(self.is_local_main_process)

    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Accelerate's own; returns on all ranks when it is written."""
        super().save_model(*args, **kwargs)
        together("Accelerator.save_model")

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Accelerate's own; returns on all ranks when it is written."""
        where: str = super().save_state(*args, **kwargs)
        together("Accelerator.save_state")
        return where


def joined(accelerator: accelerate.Accelerator) -> Accelerator:
    """The same Accelerator, which somebody else has made, as one of ours."""
    accelerator.__class__ = Accelerator
    accelerator.join()
    return accelerator
