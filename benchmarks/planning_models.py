"""How long planning takes for models that are trained on clusters, in how much memory, and what is
predicted for them, beside what others have published.

    python benchmarks/planning_models.py [--only NAME] [--json FILE]

Each row is the command line (`pfeife plan config.json ...`) in a process of its own, with an empty
cache and then with the capture that the first one kept. The configurations are those of the models'
cards, written out here; nothing is downloaded. What is published was run in other ways (tensor
parallelism, FSDP, LoRA), which the notes say.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs

from pfeife import report
from pfeife.data import plain
from pfeife.data.forecast import Forecast

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
GPT_3 = {  # Brown et al., 2020, table 2.1; the vocabulary as Megatron-LM pads it
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.0,  # with it, what is captured is attention as CPUs have it, not fused
    "model_type": "gpt2",
    "n_embd": 12288,
    "n_head": 96,
    "n_layer": 96,
    "n_positions": 2048,
    "vocab_size": 51200,
}
SDXL = {
    "_class_name": "UNet2DConditionModel",
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "in_channels": 4,
    "layers_per_block": 2,
    "out_channels": 4,
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}
TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks"
NODES = "--inside nvlink4 --between ib-ndr"
A100 = "--inside nvlink3 --between ib-hdr"


@attrs.frozen
class Case:
    """A model, what is asked about it, and what others have published."""

    name: str
    config: dict
    options: str
    published: str
    source: str


CASES = (
    Case(
        "Llama-3-8B, 8 x H100",
        LLAMA_8B,
        "--machine h100-sxm --ranks 8 --microbatches 32 --batch 32 --sequence 8192 "
        "--precision bf16-mixed --optimizer AdamW --recompute auto",
        "5,762 tokens/s a rank, 6,667 with torch.compile; 82 and 77 GiB",
        f"torchtitan, FSDP on 8 H100s of 96 GB, {TITAN}/llama3_h100_202412_torchtitan.md. Some of "
        "its activations are recomputed, its H100s have a limit of 500 W and memory of 2.4 TB/s; "
        "FSDP has no bubble. Llama 3.1 has the same layers.",
    ),
    Case(
        "Llama-3-8B, 16 x H100, 2 nodes",
        LLAMA_8B,
        f"--machine h100-sxm --ranks 16 --nodes 2 {NODES} --microbatches 64 --batch 64 "
        "--sequence 8192 --precision bf16-mixed --optimizer AdamW --recompute auto",
        "5,605 tokens/s a rank on 128 H100s, 6,514 with torch.compile; 67 and 62 GiB",
        f"torchtitan, FSDP on 128 H100s, the nearest, {TITAN}/llama3_h100_202412_torchtitan.md.",
    ),
    Case(
        "Llama-3-70B, 64 x H100, 8 nodes",
        LLAMA_70B,
        f"--machine h100-sxm --ranks 64 --nodes 8 {NODES} --replicas 2 --data-parallel shard "
        "--microbatches 256 --batch 256 --sequence 8192 --precision bf16-mixed "
        "--optimizer AdamW --recompute auto",
        "597 tokens/s a rank on 256 H100s, 652 with asynchronous tensor parallelism",
        "torchtitan, FSDP 32 x TP 8 in bfloat16, all activations recomputed, "
        f"{TITAN}/asyncTP_llama3_h100_2025-06_torchtitan.md. Tensor parallelism waits for its "
        "messages; a pipeline has a bubble instead, and recomputes only what it must. Two "
        "replicas of 32 stages have the bubble of four of 16, which do not fit: a backward holds "
        "all gradients of its stage beside those that are summed.",
    ),
    Case(
        "GPT-3-175B, 96 x H200, 12 nodes",
        GPT_3,
        f"--machine h200-sxm --ranks 96 --nodes 12 {NODES} --replicas 8 --data-parallel shard "
        "--microbatches 768 --batch 768 --sequence 2048 --precision bf16 --optimizer AdamW "
        "--recompute auto",
        "163 TFLOP/s a rank, 52 % of the peak, for 1,008 G parameters on 3,072 A100s",
        "Narayanan et al., SC 2021, https://arxiv.org/abs/2104.04473 (abstract: 502 PFLOP/s). They "
        "count what is recomputed, here it does not count; each of their stages is 8 tensor "
        "parallel GPUs, here it is one, which asks for the memory of an H200.",
    ),
    Case(
        "GPT-3-175B, 96 x A100, 12 nodes",
        GPT_3,
        f"--machine a100-sxm-80gb --ranks 96 --nodes 12 {A100} --replicas 8 --data-parallel shard "
        "--microbatches 768 --batch 768 --sequence 2048 --precision bf16 --optimizer AdamW "
        "--recompute auto",
        "",
        "The refusal says what is lacking: parameters, their gradients, the optimizer's state and "
        "the gradients of one microbatch are 99 GB of a stage of 15 G parameters.",
    ),
    Case(
        "SDXL's UNet, 4 x RTX 4090",
        SDXL,
        "--machine rtx-4090 --ranks 4 --inside pcie4 --microbatches 16 --batch 16 "
        "--precision bf16 --optimizer AdamW --recompute auto",
        "0.85 samples/s on one RTX 4090 a row at a time; 2.7 with LoRA, 8 rows at a time",
        "OneTrainer, bfloat16, https://github.com/Nerogar/OneTrainer/issues/164: 1.16 to 1.20 s a "
        "step, 8,000 images in 3.5 to 4 hours, so of one row; on Windows, with both text encoders, "
        "all activations recomputed. LoRA: 3 s for 8 rows, "
        "https://github.com/bmaltais/kohya_ss/issues/1288, where weights have no gradients and "
        "activations are recomputed: 55 TFLOP/s, a third of the peak. For one row on one card, all "
        "recomputed, 0.26 s are predicted: convolutions and products are taken to run as "
        "large products do, at 97 % of the peak (see rtx-4090), which these show they do not; "
        "measure on the card (`pfeife profile`) before a plan is trusted.",
    ),
)


@attrs.frozen
class Asked:
    """One process: its seconds (those of the CPU tell more where others work too), the most memory
    that it had, and what it said."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    forecast: Forecast | None
    said: str


def ask(case: Case, folder: Path) -> Asked:
    """One `pfeife plan`, with the captures of a folder."""
    config, out = folder / "config.json", folder / "forecast.json"
    config.write_text(json.dumps(case.config))
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pfeife", "plan", str(config), *case.options.split()]
    command += ["--cache", str(folder / "cache"), "--json", str(out)]
    start = time.perf_counter()
    with open(folder / "said.txt", "w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        _, _, used = os.wait4(process.pid, 0)  # of this child alone
        seconds = time.perf_counter() - start
        said.seek(0)
        text = said.read()
    found = plain.load(Forecast, out) if out.exists() else None
    return Asked(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, found, text)


def row(case: Case, cold: Asked, again: Asked) -> tuple:
    times = tuple(f"{one.seconds:.0f} s ({one.cpu_seconds:.0f} s)" for one in (cold, again))
    memory = report.size(max(cold.peak_bytes, again.peak_bytes))
    found = cold.forecast
    if found is None:
        return (case.name, *times, memory, cold.said.strip().splitlines()[-1], "", "", "", "")
    rate = found.tokens_per_second or found.samples_per_second
    each = f"{rate / found.world:.4g} {'tokens' if found.tokens else 'samples'}/s"
    figures = (f"{found.step_seconds:.3g} s", each, f"{found.utilization:.1%}")
    return (case.name, *times, memory, *figures, report.size(found.peak_bytes), case.published)


HEAD = ("model", "cold (CPU)", "cached (CPU)", "planning's peak", "step", "a rank", "MFU")
HEAD = (*HEAD, "peak a rank", "published")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="the cases whose names have this in them")
    parser.add_argument("--json", help="where to write all forecasts")
    given = parser.parse_args()
    rows, kept = [], {}
    for case in CASES:
        if given.only and given.only.lower() not in case.name.lower():
            continue
        with tempfile.TemporaryDirectory() as folder:
            cold = ask(case, Path(folder))
            again = ask(case, Path(folder))
        rows.append(row(case, cold, again))
        kept[case.name] = json.loads(plain.to_json(cold.forecast)) if cold.forecast else cold.said
        print(f"{case.name}: {cold.seconds:.0f} s, {again.seconds:.0f} s", file=sys.stderr)
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    for one in rows:
        print("| " + " | ".join(map(str, one)) + " |")
    for case in CASES:
        if case.source:
            print(f"\n{case.name}: {case.source}")
    if given.json:
        Path(given.json).write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
