"""Mixtures of experts and state-space models, by transformers."""

from coverage_models.text_decoders import HEAD, USUAL, decoder

MOE = USUAL | {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1, "router_jitter_noise": 0.0,
    "output_router_logits": False, "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK = MOE | {
    "n_routed_experts": 4, "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
EXPERTS = {
    "mixtral": ("mixtral", MOE),
    "qwen2_moe": ("qwen2_moe", MOE),
    "qwen3_moe": ("qwen3_moe", MOE | HEAD),
    "olmoe": ("olmoe", MOE),
    "phimoe": ("phimoe", MOE),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "granitemoe": ("granitemoe", MOE),
    "dbrx": ("dbrx", {
        "vocab_size": 50, "d_model": 16, "n_heads": 4, "n_layers": 3, "max_seq_len": 32,
        "attn_config": {"attn_pdrop": 0.0, "kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}}),
    "gpt_oss": ("gpt_oss", MOE | HEAD | {"sliding_window": 4}),
    "jamba": ("jamba", MOE | {"mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2,
                              "mamba_dt_rank": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
                              "expert_layer_period": 2, "expert_layer_offset": 1,
                              "use_mamba_kernels": False}),
}  # fmt: skip
STATE_SPACE = {
    "mamba": ("mamba", {"vocab_size": 50, "hidden_size": 16, "state_size": 4,
                        "num_hidden_layers": 3, "time_step_rank": 2}),
    "mamba2": ("mamba2", {"vocab_size": 50, "hidden_size": 16, "state_size": 4, "num_heads": 4,
                          "head_dim": 8, "n_groups": 1, "num_hidden_layers": 3, "chunk_size": 4,
                          "expand": 2}),
    "falcon_mamba": ("falcon_mamba", {"vocab_size": 50, "hidden_size": 16, "state_size": 4,
                                      "num_hidden_layers": 3, "time_step_rank": 2}),
    "rwkv": ("rwkv", {"vocab_size": 50, "hidden_size": 16, "attention_hidden_size": 16,
                      "intermediate_size": 32, "num_hidden_layers": 3, "context_length": 32}),
    "recurrent_gemma": ("recurrent_gemma", USUAL | HEAD | {"lru_width": 16,
                                                           "attention_window_size": 4}),
    "zamba2": ("zamba2", USUAL | {"mamba_d_state": 4, "mamba_ngroups": 1, "n_mamba_heads": 4,
                                  "mamba_headdim": 8, "chunk_size": 4, "num_key_value_heads": 4,
                                  "layers_block_type": ["mamba", "hybrid", "mamba"],
                                  "hybrid_layer_ids": [1], "attention_head_dim": 8,
                                  "kv_channels": 8, "adapter_rank": 4,
                                  "use_mamba_kernels": False}),
    "bamba": ("bamba", USUAL | {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 8,
                                "mamba_n_groups": 1, "mamba_chunk_size": 4,
                                "attn_layer_indices": [1]}),
}  # fmt: skip

MODELS = {name: decoder(*what) for name, what in (EXPERTS | STATE_SPACE).items()}
