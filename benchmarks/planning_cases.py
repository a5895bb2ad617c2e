"""What `planning_models.py` asks about: configurations of models' cards, written out here, and what
others have published of their training."""

import attrs

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

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "max_position_embeddings": 32768,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "vocab_size": 32000,
}
MIXTRAL_8X7B = MIXTRAL | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
MIXTRAL_8X22B = MIXTRAL | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_attention_heads": 48,
    "num_hidden_layers": 56,
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "vocab_size": 201088,
}
GPT_OSS_20B = GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}
GPT_OSS_120B = GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}
LLAMA_4_SCOUT = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "use_qk_norm": True,
    "vocab_size": 202048,
}
AUTOMODEL = "https://github.com/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.md"
BF16 = "--precision bf16 --optimizer AdamW --recompute auto --data-parallel shard"

MEMBERS = (  # eight of a node share each stage, as in what is published
    Case(
        "Llama-3-70B, 64 x H100, 8 members a stage",
        LLAMA_70B,
        f"--machine h100-sxm --ranks 64 --nodes 8 {NODES} --replicas 2 --members 8 --data-parallel "
        "shard --microbatches 64 --batch 64 --sequence 8192 --precision bf16-mixed "
        "--optimizer AdamW --recompute auto",
        "597 tokens/s a rank on 256 H100s, 652 with asynchronous tensor parallelism",
        "as above: FSDP 32 x TP 8.",
    ),
    Case(
        "GPT-3-175B, 96 x A100, 8 members a stage",
        GPT_3,
        f"--machine a100-sxm-80gb --ranks 96 --nodes 12 {A100} --members 8 --microbatches 96 "
        "--batch 96 --sequence 2048 --precision bf16 --optimizer AdamW --recompute auto",
        "163 TFLOP/s a rank, 52 % of the peak, for 1,008 G parameters on 3,072 A100s",
        "as above: each of their stages is 8 tensor parallel GPUs.",
    ),
    Case(
        "DeepSeek-V3, 256 x H100, 8 members a stage",
        DEEPSEEK_V3,
        f"--machine h100-sxm --ranks 256 --nodes 32 {NODES} --replicas 2 --members 8 "
        f"--microbatches 256 --batch 256 --sequence 4096 {BF16}",
        "1,002 tokens/s a rank, 250 TFLOP/s",
        "as below.",
    ),
)

MIXTURES = (
    Case(
        "Mixtral-8x7B, 64 x H100, 8 nodes",
        MIXTRAL_8X7B,
        f"--machine h100-sxm --ranks 64 --nodes 8 {NODES} --replicas 4 --microbatches 256 "
        f"--batch 256 --sequence 4096 {BF16}",
        "468 TFLOP/s a rank",
        "Megatron Core 0.9, in bfloat16, with expert parallelism, "
        "https://github.com/NVIDIA/Megatron-LM/blob/022bcb5a/megatron/core/transformer/moe/README.md",
    ),
    Case(
        "Mixtral-8x22B, 128 x H100, 16 nodes",
        MIXTRAL_8X22B,
        f"--machine h100-sxm --ranks 128 --nodes 16 {NODES} --replicas 4 --microbatches 512 "
        f"--batch 512 --sequence 4096 {BF16}",
        "",
        "",
    ),
    Case(
        "Qwen3-30B-A3B, 8 x H100",
        QWEN3_30B,
        "--machine h100-sxm --ranks 8 --inside nvlink4 --microbatches 128 --batch 512 "
        "--sequence 4096 --precision bf16 --optimizer AdamW --recompute auto",
        "12,040 tokens/s a rank, 277 TFLOP/s",
        f"NeMo AutoModel, FSDP with experts over 8 ranks, 512 rows of 4,096 tokens, {AUTOMODEL}.",
    ),
    Case(
        "GPT-OSS-20B, 8 x H100",
        GPT_OSS_20B,
        "--machine h100-sxm --ranks 8 --inside nvlink4 --microbatches 128 --batch 256 "
        "--sequence 4096 --precision bf16 --optimizer AdamW --recompute auto",
        "13,058 tokens/s a rank, 279 TFLOP/s",
        f"NeMo AutoModel, FSDP, 256 rows of 4,096 tokens, {AUTOMODEL}.",
    ),
    Case(
        "GPT-OSS-120B, 64 x H100, 8 nodes",
        GPT_OSS_120B,
        f"--machine h100-sxm --ranks 64 --nodes 8 {NODES} --replicas 4 --microbatches 512 "
        f"--batch 512 --sequence 4096 {BF16}",
        "7,626 tokens/s a rank, 231 TFLOP/s; 5,824 by Megatron-Bridge",
        f"NeMo AutoModel, FSDP over 64 ranks with experts, 512 rows of 4,096 tokens, {AUTOMODEL}. "
        "Megatron-Bridge: 4 stages, experts over 8 ranks, 1,280 rows, "
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/performance-summary-archive.md",
    ),
    Case(
        "Llama-4-Scout, 64 x H100, 8 nodes",
        LLAMA_4_SCOUT,
        f"--machine h100-sxm --ranks 64 --nodes 8 {NODES} --replicas 4 --microbatches 256 "
        f"--batch 256 --sequence 4096 {BF16}",
        "",
        "transformers computes each of the 16 experts for every token, 15 of them of zeros "
        "(`Llama4TextMoe`), so the step has 6.4 times the operations of 17 billion active "
        "parameters; a plan says what runs.",
    ),
    Case(
        "DeepSeek-V3, 256 x H100, 32 nodes",
        DEEPSEEK_V3,
        f"--machine h100-sxm --ranks 256 --nodes 32 {NODES} --replicas 4 --microbatches 512 "
        f"--batch 512 --sequence 4096 {BF16}",
        "1,002 tokens/s a rank, 250 TFLOP/s",
        f"NeMo AutoModel, 8 stages, experts over 64 ranks, 512 rows of 4,096 tokens, {AUTOMODEL}.",
    ),
)
