"""Fine-tuning by Hugging Face's Trainer where each batch is padded to its longest row: the curve of
one device, how many programs there are, and seconds beside the Trainer alone.

    python benchmarks/trainer_lengths.py                           all of it
    python benchmarks/trainer_lengths.py --models t5 --ranks 2 --steps 25

Tiny models of transformers with the collators that are there, batches dealt out at random and
grouped by length; on one rank two stages share the process. A curve is what the Trainer logs at
each step, of parameters in float64: in float32 plain torch moves T5's by 1e-2 in 200 steps if one
weight is another one in its last bit. Exits non-zero if one differs from that of one device by more
than 1e-4 of its value (sums of microbatches are associated otherwise; three digits more than the
loss moves in a step).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from differences import largest
from harness import command
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from pfeife import report
from pfeife.integrations.transformers import pipelined

WORDS, SHORTEST, LONGEST = 64, 4, 120
CLOSE = 1e-4


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{at}": at for at in range(WORDS)}
    made = Tokenizer(WordLevel(words, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", unk_token="w1")


def rows(name: str, count: int) -> list[dict[str, Any]]:
    """Counting from anywhere, of any length; to be classified, continued, or turned round."""
    draw, found = random.Random(1), []
    for _ in range(count):
        start, length = draw.randrange(2, WORDS), draw.randint(SHORTEST, LONGEST)
        words = [2 + (start + at) % (WORDS - 2) for at in range(length)]
        labels: Any = start % 2 if name == "bert" else words
        labels = words[::-1][: length // 2] if name == "t5" else labels
        found.append({"input_ids": words, "labels": labels, "length": length})
    return found


def model(name: str) -> Any:
    torch.manual_seed(0)
    if name == "bert":
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config: Any = BertConfig(vocab_size=WORDS, intermediate_size=64, pad_token_id=0, **size)
        config.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
        return BertForSequenceClassification(config)
    if name == "gpt2":
        config = GPT2Config(vocab_size=WORDS, n_positions=128, n_embd=32, n_layer=2, n_head=2)
        config.update({"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "eos_token_id": 0})
        return GPT2LMHeadModel(config)
    size = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    starts = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=WORDS, dropout_rate=0.0, **size, **starts)
    )


def one(name: str, order: str, steps: int, device: bool, out: Path) -> None:
    """What this process is asked for: one run, told in a file by rank 0."""
    torch.set_num_threads(1)
    net, words = model(name).double(), tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            disable_tqdm=True,
            per_device_train_batch_size=8,
            max_steps=steps,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            train_sampling_strategy="group_by_length" if order == "grouped" else "random",
        )
        kind = Trainer if device else pipelined(Trainer, microbatches=4, stages=2, progress=False)
        collator = (
            DataCollatorWithPadding(words)
            if name == "bert"
            else DataCollatorForSeq2Seq(words, model=net)
        )
        trainer = kind(net, arguments, collator, rows(name, 256))
        start, busy = time.perf_counter(), time.process_time()
        trainer.train()
        seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    programs = 0 if device else len(trainer._training.backend.compiled)
    if int(os.environ.get("RANK", "0")) == 0:
        told = {"losses": losses, "seconds": seconds, "cpu": cpu, "programs": programs}
        out.write_text(json.dumps(told))


def ran(name: str, order: str, steps: int, ranks: int, folder: Path) -> dict[str, Any]:
    """A run in processes of its own; no `ranks` are one device without Pfeife."""
    out = folder / f"{name}-{order}-{ranks}.json"
    asked = ["--one", name, "--order", order, "--steps", str(steps), "--out", str(out)]
    asked += ["--device"] if not ranks else []
    start = [sys.executable, __file__] if ranks < 2 else command(__file__, ranks, [])
    ended = subprocess.run([*start, *asked], capture_output=True, text=True, timeout=1800)
    if ended.returncode:
        print(ended.stderr[-3000:], file=sys.stderr)
        return {"losses": [], "seconds": 0.0, "cpu": 0.0, "programs": 0}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def compared(run: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """How far a curve is from another one, as a share of its values."""
    pairs = list(zip(run["losses"], plain["losses"], strict=False))
    if len(run["losses"]) != len(plain["losses"]) or not pairs:
        return float("inf")
    return largest([abs(one - other) / max(abs(other), 1e-3) for one, other in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="bert,gpt2,t5")
    parser.add_argument("--orders", default="random,grouped")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--order", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", action="store_true", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.one:
        one(told.one, told.order, told.steps, told.device, told.out)
        return
    lines, worst = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, order in product(told.models.split(","), told.orders.split(",")):
            plain = ran(name, order, told.steps, 0, Path(folder))
            for ranks in map(int, told.ranks.split(",")):
                run = ran(name, order, told.steps, ranks, Path(folder))
                apart = compared(run, plain)
                worst = largest([worst, apart])
                seconds = [f"{one['seconds']:.1f} ({one['cpu']:.1f})" for one in (run, plain)]
                lines.append((name, order, ranks, f"{apart:.0e}", run["programs"], *seconds))
                print(*lines[-1], sep="  ", flush=True)
    names = ("model", "batches", "ranks", "curve differs", "programs")
    print(report.table(lines, (*names, "seconds (CPU)", "alone")))
    sys.exit(worst > CLOSE)


if __name__ == "__main__":
    main()
