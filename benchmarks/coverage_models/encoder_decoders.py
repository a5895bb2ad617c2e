"""Models with an encoder and a decoder, of text, speech and images, by transformers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from coverage_models.example import Example
from coverage_models.small import WORDS, words

BART = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8, "pad_token_id": 0,
}  # fmt: skip


def translator(kind: str, sizes: Mapping[str, Any]) -> Callable[[], Example]:
    def build() -> Example:
        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)

        def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return model(input_ids=tokens, labels=labels, use_cache=False).loss

        return Example(model, step, lambda n, size: (words(n, size), words(n, size - 2)), (8, 10))

    return build


def whisper() -> Example:
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            **(BART | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32})
        )
    )

    def step(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_features=features, labels=labels, use_cache=False).loss

    return Example(model, step, lambda n, size: (torch.randn(n, 8, 32), words(n, size)), (8, 10))


def speech_to_text() -> Example:
    model = transformers.Speech2TextForConditionalGeneration(
        transformers.Speech2TextConfig(
            **(BART | {"input_feat_per_channel": 8, "max_source_positions": 64, "conv_channels": 16,
                       "max_target_positions": 32, "num_conv_layers": 2})
        )
    )  # fmt: skip

    def step(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_features=features, labels=labels, use_cache=False).loss

    return Example(model, step, lambda n, size: (torch.randn(n, 32, 8), words(n, size)), (8, 10))


def captioner() -> Example:
    """A ViT that a GPT-2 reads, as trocr and captioners are made."""
    encoder = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=8, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    decoder = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, add_cross_attention=True, is_decoder=True,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id = config.pad_token_id = 0
    model = transformers.VisionEncoderDecoderModel(config)

    def step(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(pixel_values=pixels, labels=labels, use_cache=False).loss

    return Example(model, step, lambda n, size: (torch.randn(n, 3, 8, 8), words(n, size)), (6, 8))


def torch_transformer() -> Example:
    model = nn.Transformer(16, 2, 2, 2, 32, 0.0, batch_first=True)
    embedding = nn.Embedding(WORDS, 16)
    whole = nn.ModuleList([model, embedding])

    def step(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        found = model(embedding(source), embedding(target), tgt_mask=mask)
        logits = found @ embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    return Example(whole, step, lambda n, size: (words(n, size), words(n, size - 2)), (8, 10))


MODELS = {
    "t5": translator("t5", T5),
    "t5_gated": translator("t5", T5 | {"feed_forward_proj": "gated-gelu",
                                       "tie_word_embeddings": False}),
    "mt5": translator("mt5", T5),
    "umt5": translator("umt5", T5),
    "longt5": translator("longt5", T5 | {"local_radius": 3}),
    "switch_transformers": translator("switch_transformers", T5 | {
        "num_experts": 2, "expert_capacity": 16, "num_sparse_encoder_layers": 1,
        "router_jitter_noise": 0.0,
        "num_sparse_decoder_layers": 1}),
    "bart": translator("bart", BART),
    "mbart": translator("mbart", BART),
    "marian": translator("marian", BART),
    "pegasus": translator("pegasus", BART),
    "blenderbot": translator("blenderbot", BART),
    "m2m_100": translator("m2m_100", BART),
    "led": translator("led", BART | {"attention_window": 4, "max_encoder_position_embeddings": 32,
                                     "max_decoder_position_embeddings": 32}),
    "prophetnet": translator("prophetnet", {
        "vocab_size": WORDS, "hidden_size": 16, "num_encoder_layers": 2, "num_decoder_layers": 2,
        "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "dropout": 0.0, "attention_dropout": 0.0,
        "activation_dropout": 0.0, "max_position_embeddings": 32, "ngram": 2, "num_buckets": 8,
        "relative_max_distance": 16, "disable_ngram_loss": True, "decoder_start_token_id": 1}),
    "whisper": whisper,
    "speech_to_text": speech_to_text,
    "captioner": captioner,
    "torch_transformer": torch_transformer,
}  # fmt: skip
