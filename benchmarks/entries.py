"""Eight models of transformers and diffusers, unmodified, by both entries, on one process and two.

    python benchmarks/entries.py                   all of it, some ten minutes
    python benchmarks/entries.py gpt2 unet         these models alone

Needs `pip install -e '.[coverage]'`. The models are small and have random weights: nothing is
downloaded. Each takes three steps of SGD with other data, once by `pfeife.compile(step)` and once
by `model.compile(backend="pfeife", dynamic=True)`, beside eager from the same state. Compared are
every loss and, at the end, all parameters and buffers, relative to the largest value of each (or a
hundredth of the largest of all, below which are gradients that are zero but for rounding). Eager
takes the whole batch at once, whose rows it adds up in another order, so equal is within 1e-4.
Below the table stands what the log says of the module's graphs.
"""

import argparse
import copy
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import diffusers
import torch
import transformers
from coverage_models import imports
from differences import largest
from harness import world
from torch import nn
from torch.nn import functional

import pfeife
from pfeife import report

ROUNDING = 1e-4
STEPS = 3
ROWS = 8
MICROBATCHES = 2
WORDS = 64
USUAL = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
TEXT = USUAL | {"vocab_size": WORDS, "max_position_embeddings": 32}
Batch = dict[str, torch.Tensor]


@attrs.frozen(eq=False)
class Example:
    """A model as its package builds it, what draws its arguments by name, and the loss of what it
    returns."""

    model: nn.Module
    draw: Callable[[], Batch]
    loss: Callable[[Any, Batch], torch.Tensor] = lambda result, batch: result.loss


def tokens() -> Batch:
    drawn = torch.randint(1, WORDS, (ROWS, 16))
    return {"input_ids": drawn, "labels": drawn}


def images() -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.randint(4, (ROWS,))}


def waves() -> Batch:
    return {"input_values": torch.randn(ROWS, 400)}


def noisy() -> Batch:
    return {"sample": torch.randn(ROWS, 3, 16, 16), "timestep": torch.randint(1000, (ROWS,))}


def gpt2() -> Example:
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return Example(transformers.GPT2LMHeadModel(config), tokens)


def llama() -> Example:
    return Example(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)), tokens)


def t5() -> Example:
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=WORDS,
        decoder_start_token_id=0,
    )  # fmt: skip
    return Example(transformers.T5ForConditionalGeneration(config), tokens)


def bert() -> Example:
    return Example(transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)), tokens)


def vit() -> Example:
    config = transformers.ViTConfig(**USUAL, image_size=16, patch_size=4, num_labels=4)
    return Example(transformers.ViTForImageClassification(config), images)


def wav2vec2() -> Example:
    config = transformers.Wav2Vec2Config(
        **USUAL, vocab_size=32, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
        layerdrop=0.0, mask_time_prob=0.0,
    )  # fmt: skip
    return Example(
        transformers.Wav2Vec2Model(config),
        waves,
        lambda result, batch: result.last_hidden_state.square().mean(),
    )


def mixtral() -> Example:
    config = transformers.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4)
    return Example(transformers.MixtralForCausalLM(config), tokens)


def unet() -> Example:
    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(16, 32), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    return Example(
        model,
        noisy,
        lambda result, batch: functional.mse_loss(result.sample, batch["sample"]),
    )


MODELS = {build.__name__: build for build in (gpt2, llama, t5, bert, vit, wav2vec2, mixtral, unet)}


def without_dropout(model: nn.Module) -> nn.Module:
    """Training, but that nothing is drawn: the draws of a pipeline are not eager's."""
    for module in model.train().modules():
        for name in ("p", "dropout", "attention_dropout", "attn_dropout", "hidden_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def by_step(example: Example, options: dict[str, Any]) -> Callable[[Batch], torch.Tensor]:
    return pfeife.compile(lambda batch: example.loss(example.model(**batch), batch), **options)


def by_module(example: Example, options: dict[str, Any]) -> Callable[[Batch], torch.Tensor]:
    example.model.compile(backend="pfeife", dynamic=True, options=options)
    return lambda batch: example.loss(example.model(**batch), batch)


ENTRIES = {"pfeife.compile(step)": by_step, "model.compile": by_module}


class Told(logging.Handler):
    """What the log says of the graphs, and its warnings."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING or text.startswith("compiled "):
            self.texts.append(text)


def error(expected: torch.Tensor, found: torch.Tensor, least: float = 0.0) -> float:
    """The largest difference, relative to the largest value, if that is not less than `least`."""
    if torch.equal(expected, found):
        return 0.0
    return float((expected - found).abs().max()) / max(float(expected.abs().max()), least)


def trained(name: str, entry: str, ranks: int) -> tuple[float, list[str]]:
    """The largest error of three steps, and what the log has told."""
    torch._dynamo.reset()
    told, logger = Told(), logging.getLogger("pfeife")
    logger.addHandler(told)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    example = MODELS[name]()
    without_dropout(example.model)
    reference = copy.deepcopy(example.model)
    stages = {} if ranks > 1 else {"stages": 2}
    step = ENTRIES[entry](example, {"microbatches": MICROBATCHES, "progress": False, **stages})
    sides = [torch.optim.SGD(one.parameters(), 0.1) for one in (example.model, reference)]
    worst = 0.0
    try:
        for number in range(STEPS):
            torch.manual_seed(number)
            batch = example.draw()
            losses = step(batch), example.loss(reference(**batch), batch)
            worst = largest([worst, error(losses[1].detach(), losses[0].detach())])
            for loss, optimizer in zip(losses, sides, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        state = pfeife.full_state_dict(example.model)
        expected = reference.state_dict()
        least = 0.01 * max(float(value.abs().max()) for value in expected.values())
        errors = [error(value, state[key], least) for key, value in expected.items()]
        return largest([worst, *errors]), told.texts
    finally:
        logger.removeHandler(told)


def outcome(name: str, entry: str, ranks: int) -> dict[str, Any]:
    try:
        worst, told = trained(name, entry, ranks)
        verdict = "right" if worst <= ROUNDING else "WRONG"
        return {"verdict": verdict, "error": f"{worst:.0e}", "told": told}
    except (ValueError, pfeife.PipelineError) as refusal:
        return {"verdict": "refused", "error": "", "told": [str(refusal)]}


def rows(names: list[str], ranks: int, out: Path) -> None:
    """Examines the models on this rank; the first one writes what it has found."""
    torch.set_num_threads(1)
    imports.prepare()
    transformers.logging.set_verbosity_error()
    found = [
        {"model": name, "entry": entry, "processes": ranks, **outcome(name, entry, ranks)}
        for name in names
        for entry in ENTRIES
    ]
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=[], help=", ".join(MODELS))
    parser.add_argument("--out", type=Path, help="of a rank: where its rows go")
    asked = parser.parse_args()
    names = asked.models or list(MODELS)
    if asked.out:
        return rows(names, int(os.environ.get("WORLD_SIZE", "1")), asked.out)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        given = [*names, "--out", str(out)]
        subprocess.run([sys.executable, __file__, *given], check=True)
        found += json.loads(out.read_text())
        world(__file__, 2, given)
        found += json.loads(out.read_text())
    head = ("model", "entry", "processes", "verdict", "error")
    print(report.table([tuple(row[key] for key in head) for row in found], head))
    for row in found:
        for text in dict.fromkeys(row["told"]):
            print(f"\n{row['model']}, {row['entry']}, {row['processes']}: {text[:1000]}")
    return None


if __name__ == "__main__":
    main()
