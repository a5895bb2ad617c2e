"""Tunes a small Llama by LoRA (peft) with Hugging Face's Trainer on pipeline ranks.

torchrun --nproc-per-node 2 examples/hf_lora.py    two pipeline ranks
python examples/hf_lora.py                         two stages in one process
python examples/hf_lora.py --one-device            without Pfeife: the same losses
"""

import argparse
import json

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from pfeife.integrations.transformers import pipelined

ROWS, MICROBATCHES = 8, 4


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told.add_argument("--one-device", action="store_true")
    told.add_argument("--save", default="unused", help="a folder for the adapter")
    options = told.parse_args()
    torch.set_num_threads(1)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora)
    tokens = torch.randint(64, (32, 16))
    data = [{"input_ids": one, "labels": one} for one in tokens]
    cut = MICROBATCHES if options.one_device else 1
    args = TrainingArguments(
        output_dir=options.save, use_cpu=True, save_strategy="no", report_to="none",
        per_device_train_batch_size=ROWS // cut, gradient_accumulation_steps=cut,
        learning_rate=1e-2, max_steps=6, logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    pipeline = pipelined(Trainer, microbatches=MICROBATCHES, stages=2)
    kind = Trainer if options.one_device else pipeline
    trainer = kind(model, args, None, data)
    trainer.train()
    if options.save != "unused":
        trainer.save_model()
    print(f"rank {args.process_index} has logged {json.dumps(trainer.state.log_history)}")


if __name__ == "__main__":
    main()
