"""Trains a small GPT-2 with Hugging Face's Trainer on pipeline ranks; `pipelined` is Pfeife's.

torchrun --nproc-per-node 2 examples/hf_trainer.py    two pipeline ranks
python examples/hf_trainer.py                         two stages in one process
python examples/hf_trainer.py --one-device            without Pfeife: the same losses
"""

import argparse
import json

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from pfeife.integrations.transformers import pipelined


def sentences(count: int, length: int = 24, words: int = 64) -> list[dict[str, torch.Tensor]]:
    """Counting by steps of 1 to 5, from anywhere; the last words of some are padding."""
    draw = torch.Generator().manual_seed(1)
    starts, steps = torch.randint(words, (count, 1), generator=draw), torch.arange(count)[:, None]
    tokens = (starts + (1 + steps % 5) * torch.arange(length)) % words
    labels = tokens.masked_fill(torch.arange(length) >= 12 + steps % 13, -100)
    return [{"input_ids": t, "labels": n} for t, n in zip(tokens, labels, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one-device", action="store_true")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--save", help="a folder for checkpoints and the model")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    told = parser.parse_args()
    torch.set_num_threads(1)  # the same kernels, and so the same bits

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=24, n_embd=32, n_layer=2, n_head=2)
    config.update({"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "eos_token_id": 0})
    config.tie_word_embeddings = False  # else two stages add up one gradient, in another order
    cut = 4 if told.one_device else 1
    args = TrainingArguments(
        output_dir=told.save or "unused", use_cpu=True, bf16=told.bf16, disable_tqdm=True,
        per_device_train_batch_size=8 // cut, gradient_accumulation_steps=cut, max_steps=12,
        learning_rate=3e-3, logging_steps=1, eval_strategy="steps", eval_steps=6,
        save_strategy="steps" if told.save else "no", save_steps=6, report_to="none",
        include_num_input_tokens_seen="all", load_best_model_at_end=bool(told.save),
    )  # fmt: skip
    kind = Trainer if told.one_device else pipelined(Trainer, microbatches=4, stages=told.stages)
    trainer = kind(GPT2LMHeadModel(config), args, None, sentences(64), sentences(20))
    trainer.train(resume_from_checkpoint=told.resume)
    if told.save:
        trainer.save_model()
    print(f"rank {args.process_index} has logged {json.dumps(trainer.state.log_history)}")


if __name__ == "__main__":
    main()
