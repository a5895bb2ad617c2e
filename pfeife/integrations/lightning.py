"""Lightning's Trainer over a pipeline.

    from pfeife.integrations.lightning import PipelineStrategy

    trainer = Trainer(strategy=PipelineStrategy(microbatches=4), ...)

The script is otherwise as it was, and runs in one process and under torchrun: the losses, logs,
checkpoints and the model are those of one device.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from torchmetrics import Metric

from pfeife.backend.settings.options import Options
from pfeife.backend.settings.options_typed import with_more_options
from pfeife.integrations.logged_step import LoggedStep
from pfeife.integrations.together import from_main, together
from pfeife.runtime.distributed.process_group import join_world

_PLAIN = Precision, HalfPrecision, DoublePrecision, MixedPrecision  # these replace no module


class PipelineStrategy(SingleDeviceStrategy):
    """A strategy whose `training_step`, `validation_step`, `test_step` and `predict_step` run as
    pipelines; the options are those of `pfeife.compile`.

    All processes of torchrun are one to the Trainer: each reads all data, the first logs and
    writes. What a step logs is what one device would log: the mean or sum over the microbatches,
    as its graph tells; its metrics are told the whole batch. With manual optimization
    `training_step` runs as it is, and compiles by `pfeife.compile` what it differentiates. `fit`
    raises ValueError where something else compiles or changes the module.
    """

    strategy_name = "pfeife"

    @with_more_options(Options)
    def __init__(self, **options: Any):
        super().__init__()
        self.options = options
        self.global_rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._compiled: dict[str, LoggedStep] = {}

    @property
    def is_global_zero(self) -> bool:
        """Whether this process logs and writes."""
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        """This process's own: the GPU of its number in its node, or the CPU."""
        cuda = isinstance(self.accelerator, CUDAAccelerator)
        return torch.device("cuda", self.local_rank) if cuda else torch.device("cpu")

    def connect(self, model: LightningModule) -> None:
        """Takes a module; what was compiled of another one is of no use any more."""
        if model is not self.lightning_module:
            self._compiled.clear()
        super().connect(model)

    def setup_environment(self) -> None:
        """Joins the other processes, which connect here and not in the first step."""
        super().setup_environment()
        join_world(self.root_device, self.options.get("timeout"))

    def setup(self, trainer: Trainer) -> None:
        """Looks at the module before anything runs. Raises ValueError for what does not fit."""
        assert self.lightning_module is not None
        self._check(trainer, self.lightning_module)
        # torchmetrics would add up over ranks what each of them has whole.
        for part in self.lightning_module.modules():
            if isinstance(part, Metric):  # every rank has all of what it is told
                part.distributed_available_fn = _alone
        super().setup(trainer)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        """Raises ValueError for what else wants to have the module's steps or parameters."""
        if getattr(module, "_compiler_ctx", None) is not None:
            raise ValueError(
                "torch.compile(module): the steps are compiled by Pfeife; hand the module over as "
                "it is, and say compiler='inductor' to PipelineStrategy if you want Inductor"
            )
        if type(self.precision_plugin) not in _PLAIN:
            raise ValueError(
                f"{type(self.precision_plugin).__name__} changes the modules: a pipeline takes "
                "precision='32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'"
            )

    def training_step(self, *args: Any) -> Any:
        """The module's step as a pipeline, or as it is under manual optimization."""
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            return super().training_step(*args)
        return self._run("training_step", self.precision_plugin.train_step_context, args)

    def validation_step(self, *args: Any) -> Any:
        """The module's step as a pipeline without a backward."""
        return self._run("validation_step", self.precision_plugin.val_step_context, args)

    def test_step(self, *args: Any) -> Any:
        """The same of its test."""
        return self._run("test_step", self.precision_plugin.test_step_context, args)

    def predict_step(self, *args: Any) -> Any:
        """The same of its prediction: what the module returns."""
        return self._run("predict_step", self.precision_plugin.predict_step_context, args)

    def _run(self, name: str, context: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if name not in self._compiled:
            self._compiled[name] = LoggedStep(self.lightning_module, name, self.options)
        with context():
            return self._compiled[name](*args)

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Returns when all ranks are here."""
        together(f"Trainer's barrier {name or ''}".strip())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What the main process has, on all: numbers, texts, and lists and dicts of them."""
        return from_main(obj, "Strategy.broadcast")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """What the main process has decided: who looks at values decides alike, and it alone looks
        at files."""
        return bool(from_main(bool(decision), "Strategy.reduce_boolean_decision"))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """On the main process alone, which writes it; empty elsewhere."""
        # The others answer from where they wait, which is the barrier behind it.
        return super().lightning_module_state_dict() if self.is_global_zero else {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """On the main process alone."""
        return super().optimizer_state(optimizer) if self.is_global_zero else {}


def _alone() -> bool:
    """Whether a metric has parts in other processes: it has none."""
    return False
