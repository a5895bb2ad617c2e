"""Language models that read from left to right: transformers' own code, from configurations."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from coverage_models.example import Example
from coverage_models.small import WORDS, words

USUAL = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}  # fmt: skip
GPT = {
    "vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
HEAD = {"head_dim": 4}


def decoder(kind: str, sizes: Mapping[str, Any]) -> Callable[[], Example]:
    """One of transformers' causal language models, with its own loss."""

    def build() -> Example:
        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss

        return Example(model, step, lambda rows, size: (words(rows, size),), (8, 10))

    return build


KINDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("gpt2", GPT),
    "gpt_neo": (
        "gpt_neo",
        {
            "vocab_size": WORDS, "hidden_size": 16, "num_layers": 2, "num_heads": 2,
            "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32,
            "window_size": 4, "intermediate_size": 32,
        },
    ),
    "gpt_neox": ("gpt_neox", USUAL),
    "gptj": ("gptj", GPT | {"rotary_dim": 4}),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "codegen": ("codegen", GPT | {"n_head": 4, "rotary_dim": 4}),
    "llama": ("llama", USUAL),
    "mistral": ("mistral", USUAL | {"sliding_window": 4}),
    "qwen2": ("qwen2", USUAL),
    "qwen3": ("qwen3", USUAL | HEAD),
    "gemma": ("gemma", USUAL | HEAD),
    "gemma2": ("gemma2", USUAL | HEAD | {"sliding_window": 4}),
    "gemma3_text": ("gemma3_text", USUAL | HEAD | {"sliding_window": 4}),
    "phi": ("phi", USUAL | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi3": ("phi3", USUAL | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "opt": (
        "opt",
        USUAL | {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0, "layerdrop": 0.0},
    ),
    "bloom": (
        "bloom", {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 3, "n_head": 2,
                  "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "falcon": ("falcon", USUAL | {"alibi": False, "new_decoder_architecture": False}),
    "mpt": ("mpt", {"vocab_size": WORDS, "d_model": 16, "n_layers": 3, "n_heads": 2,
                    "max_seq_len": 32, "expansion_ratio": 2}),
    "stablelm": ("stablelm", USUAL),
    "starcoder2": ("starcoder2", USUAL | {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "olmo2": ("olmo2", USUAL),
    "cohere": ("cohere", USUAL),
    "granite": ("granite", USUAL),
    "glm": ("glm", USUAL | HEAD),
    "smollm3": ("smollm3", USUAL),
    "openai-gpt": ("openai-gpt", GPT),
    "ctrl": ("ctrl", GPT | {"dff": 32}),
    "xglm": ("xglm", {"vocab_size": WORDS, "d_model": 16, "num_layers": 3, "attention_heads": 2,
                      "ffn_dim": 32, "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0,
                      "activation_dropout": 0.0, "max_position_embeddings": 32}),
    "biogpt": ("biogpt", USUAL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
                                  "layerdrop": 0.0, "activation_dropout": 0.0}),
}  # fmt: skip

MODELS = {name: decoder(*what) for name, what in KINDS.items()}
