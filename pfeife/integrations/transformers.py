"""Hugging Face's Trainer over a pipeline.

    from pfeife.integrations.transformers import pipelined

    trainer = pipelined(Trainer, microbatches=4)(model=model, args=args, ...)

The script is otherwise as it was, and runs in one process and under torchrun: the losses, logs,
checkpoints and the model are those of one device, with one device's arguments.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pfeife.backend.settings.options import Options
from pfeife.backend.settings.options_typed import with_more_options
from pfeife.backend.state.full import full_state_dict
from pfeife.backend.step import compile as pipeline
from pfeife.integrations.accelerate import joined
from pfeife.integrations.together import together
from pfeife.runtime.distributed.parallelised import with_cuts

if TYPE_CHECKING:
    Base = Any
else:
    Base = object


@with_more_options(Options)
def pipelined(trainer: type, **options: Any) -> type:
    """A subclass of a Trainer class (Trainer, Seq2SeqTrainer, one of your own) whose steps run as
    pipelines; the options are those of `pfeife.compile`.

    `compute_loss` is what is captured: the model's own loss, label smoothing, `compute_loss_func`
    or an override; evaluation and prediction go through the pipeline too. `args` mean what they
    mean on one device: `per_device_train_batch_size` is the batch of the whole pipeline, which is
    cut into `microbatches`, and every rank reads all data. A model that was loaded with `tp_plan`
    is cut so. Making the Trainer raises ValueError for
    arguments under which something else compiles or distributes the model. Raises ValueError for a
    Trainer of trl whose loss is trl's own.
    """
    if trainer.compute_loss.__module__.startswith("trl."):  # type: ignore[attr-defined]
        name = trainer.__name__
        raise ValueError(
            f"{name}.compute_loss is trl's: it has kernels and reads metrics, which no graph has. "
            f"If the model's own loss is what you want, as of SFTTrainer's loss_type='nll': `class "
            f"Own({name}): compute_loss = transformers.Trainer.compute_loss`, and pipelined(Own)"
        )
    if options.get("batch") == "replica":
        raise ValueError(
            "option batch='replica': a Trainer gives each rank all rows, and each replica would "
            "train on the same ones; leave batch out"
        )
    return type(f"Pipelined{trainer.__name__}", (_Pipelined, trainer), {"pfeife_options": options})


class _Pipelined(Base):
    """What differs from a Trainer; stands before it, so that its `super()` is the Trainer."""

    pfeife_options: Mapping[str, Any]

    def __init__(self, *args: Any, **kwargs: Any):
        model: Any = kwargs.get("model", args[0] if args else None)
        # Every rank reads all rows here, also where a model was shared out over replicas.
        given: Mapping[str, Any] = {"batch": "global", **self.pfeife_options}
        options = given
        if isinstance(model, nn.Module):
            options = with_cuts(given, [model])
        if options is not given:
            # Else the Trainer takes its parameters for parts, whose gradients it would add up.
            model._tp_size = None
        super().__init__(*args, **kwargs)
        if options is not given:
            self.is_distributed_loading_by_transformers = False
        self._training = pipeline(self._loss, **options)
        self._evaluation = pipeline(self._loss_and_outputs, **{"loss": "loss", **options})
        self._prediction = pipeline(self._outputs, **options)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.torch_compile:
            raise ValueError(
                "TrainingArguments(torch_compile=True): the pipeline's step is compiled by Pfeife; "
                "leave it out, and say compiler='inductor' to pipelined() if you want Inductor"
            )
        joined(self.accelerator)

    def _loss(self, inputs: dict[str, Any], count: Any) -> torch.Tensor:
        loss: torch.Tensor = super().compute_loss(self.model, inputs, num_items_in_batch=count)
        return loss

    def _loss_and_outputs(self, inputs: dict[str, Any], count: Any) -> dict[str, Any]:
        loss, outputs = super().compute_loss(self.model, inputs, True, num_items_in_batch=count)
        # Outputs are joined over microbatches by rows, which a loss has not.
        if isinstance(outputs, dict):  # the loss goes once
            outputs = type(outputs)(**{name: outputs[name] for name in outputs if name != "loss"})
        else:
            outputs = (None, *outputs[1:])
        return {"loss": loss, "outputs": outputs}

    def _outputs(self, inputs: dict[str, Any]) -> Any:
        return self.model(**inputs)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The Trainer's own, as a pipeline of the model's stages."""
        if not return_outputs:
            return self._training(inputs, num_items_in_batch)
        results = self._evaluation(inputs, num_items_in_batch)
        return results["loss"], results["outputs"]

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Without labels there is no loss to compute: the model alone runs as a pipeline."""
        return super().prediction_step(
            lambda **batch: self._prediction(batch), inputs, *args, **kwargs
        )

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """All ranks must call it; the main one writes, and it returns when that is done."""
        super().save_model(*args, **kwargs)
        together("Trainer.save_model")

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Returns on all ranks when it is written: the main one asks the others for their state."""
        super()._save_checkpoint(*args, **kwargs)
        together("Trainer._save_checkpoint")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, full_state_dict(self.model) if state_dict is None else state_dict)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all ranks have the same, and the file has one name
            super()._save_rng_state(output_dir)
