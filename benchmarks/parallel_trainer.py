"""Hugging Face's Trainer with a Llama that tensor parallelism cuts, on 2 x 2 ranks, beside the
Trainer alone on one device.

    python benchmarks/parallel_trainer.py

`plan`: its weights are loaded by transformers' `DistributedConfig(tp_plan="auto", tp_size=2,
fsdp_size=2)`, and Pfeife takes the members and replicas from them. `stages`: weights are loaded as
ever, and Pfeife is told the model's own plan, for two members of each of two stages. Both are
`pipelined(Trainer, ...)` and nothing else. Shown are the largest relative differences of what the
Trainer logs, and of parameters by the largest of their tensor, after some steps with AdamW, its
clipping and its schedule of rates. Exits non-zero if one is more than ROUNDING (all is float32).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from differences import largest
from harness import DEVICE, world
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import pfeife
from pfeife import report
from pfeife.integrations.transformers import pipelined
from pfeife.runtime.distributed.process_group import join_world

KINDS = ("plan", "stages")
RANKS, MEMBERS, ROWS, STEPS, ROUNDING = 4, 2, 4, 8, 1e-5
SIZES = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False},
}


def model_and_trainer(kind: str | None, weights: Path) -> tuple[Any, Any]:
    """The model, and the class that trains it; None for the Trainer alone."""
    if kind == "plan":
        cut = DistributedConfig(tp_plan="auto", tp_size=MEMBERS, fsdp_size=RANKS // MEMBERS)
        model = LlamaForCausalLM.from_pretrained(weights, distributed_config=cut)
        return model, pipelined(Trainer, microbatches=2)
    model = LlamaForCausalLM.from_pretrained(weights)
    if kind is None:
        return model, Trainer
    plan = {f"model.{name}": style for name, style in model.config.base_model_tp_plan.items()}
    return model, pipelined(Trainer, microbatches=2, members=MEMBERS, parallel=plan)


def trained(kind: str | None, folder: Path) -> None:
    """Writes the losses and the parameters of a run."""
    model, trainer_class = model_and_trainer(kind, folder / "weights")
    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (ROWS * STEPS, 6))]
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        logging_steps=1,
        per_device_train_batch_size=ROWS,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = trainer_class(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    state = pfeife.full_state_dict(model)
    if kind is None or not dist.get_rank():
        (folder / f"{kind}.json").write_text(json.dumps(losses))
        save_file(state, folder / f"{kind}.safetensors")


def row_of(kind: str, folder: Path) -> tuple[float, float]:
    """How far a run's losses and parameters are from those of one device."""
    losses, expected = (json.loads((folder / f"{name}.json").read_text()) for name in (kind, None))
    gaps = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    ours, theirs = (load_file(folder / f"{name}.safetensors") for name in (kind, None))
    far = [float((ours[name] - v).abs().max() / v.abs().max()) for name, v in theirs.items()]
    return largest(gaps), largest(far)


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)  # of a rank
    told.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = told.parse_args()
    if asked.one:
        join_world(DEVICE)
        trained(asked.one, asked.folder)
        dist.barrier()
        return
    rows, wrong = [], False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder / "weights")
        trained(None, folder)
        for kind in KINDS:
            world(__file__, RANKS, ["--one", kind, "--folder", str(folder)])
            losses, parameters = row_of(kind, folder)
            wrong = wrong or not max(losses, parameters) <= ROUNDING
            rows.append((kind, str(STEPS), f"{losses:.1e}", f"{parameters:.1e}"))
    print(report.table(rows, ("weights cut by", "steps", "losses", "parameters")))
    sys.exit(wrong)


if __name__ == "__main__":
    main()
