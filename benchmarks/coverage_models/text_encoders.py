"""Encoders of text: masked language models and classifiers, by transformers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from coverage_models.example import Example
from coverage_models.small import WORDS, words

USUAL = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 2, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0, "type_vocab_size": 2,
    "classifier_dropout": 0.0,
}  # fmt: skip
NONE = {"dropout": 0.0, "attention_dropout": 0.0}


def masked(
    kind: str, sizes: Mapping[str, Any], lengths: tuple[int, int] = (8, 10)
) -> Callable[[], Example]:
    """A masked language model, with its own loss over all words."""

    def build() -> Example:
        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = transformers.AutoModelForMaskedLM.from_config(config)

        def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return model(input_ids=tokens, labels=labels).loss

        return Example(model, step, lambda n, size: (words(n, size), words(n, size)), lengths)

    return build


def answers(kind: str, sizes: Mapping[str, Any]) -> Callable[[], Example]:
    """The first and the last word of an answer."""

    def build() -> Example:
        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = transformers.AutoModelForQuestionAnswering.from_config(config)

        def step(tokens: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
            return model(input_ids=tokens, start_positions=first, end_positions=last).loss

        def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
            return words(rows, size), torch.randint(size, (rows,)), torch.randint(size, (rows,))

        return Example(model, step, draw, (8, 10))

    return build


def classifier(kind: str, sizes: Mapping[str, Any]) -> Callable[[], Example]:
    """A classifier of sequences that are padded."""

    def build() -> Example:
        config = transformers.AutoConfig.for_model(kind, **sizes, num_labels=3)
        model = transformers.AutoModelForSequenceClassification.from_config(config)

        def step(tokens: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return model(input_ids=tokens, attention_mask=mask, labels=labels).loss

        def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
            mask = (torch.arange(size) < torch.randint(3, size + 1, (rows, 1))).long()
            return words(rows, size) * mask, mask, torch.randint(3, (rows,))

        return Example(model, step, draw, (8, 10))

    return build


MODELS = {
    "bert": masked("bert", USUAL),
    "bert_answers": answers("bert", USUAL),
    "splinter": answers("splinter", USUAL | {"question_token_id": 5}),
    "nystromformer": masked("nystromformer", USUAL | {
        "num_landmarks": 4, "segment_means_seq_len": 8, "conv_kernel_size": 3}, (8, 8)),
    "roberta": masked("roberta", USUAL | {"pad_token_id": 1}),
    "electra": masked("electra", USUAL | {"embedding_size": 8}),
    "albert": masked("albert", USUAL | {"embedding_size": 8, "num_hidden_groups": 1,
                                        "classifier_dropout_prob": 0.0}),
    "distilbert": masked("distilbert", {"vocab_size": WORDS, "dim": 16, "hidden_dim": 32,
                                        "n_layers": 3, "n_heads": 2, "max_position_embeddings": 32,
                                        **NONE}),
    "mobilebert": masked("mobilebert", USUAL | {"embedding_size": 8, "intra_bottleneck_size": 16,
                                                "true_hidden_size": 16, "num_hidden_layers": 2}),
    "deberta": masked("deberta", USUAL | {"relative_attention": True, "pos_att_type": "c2p|p2c",
                                          "position_biased_input": False}),
    "deberta_v2": classifier("deberta-v2", USUAL | {"relative_attention": True,
                                                    "pos_att_type": ["c2p", "p2c"],
                                                    "position_buckets": 4,
                                                    "norm_rel_ebd": "layer_norm",
                                                    "share_att_key": True}),
    "convbert": masked("convbert", USUAL | {"embedding_size": 8, "conv_kernel_size": 3,
                                            "head_ratio": 1}),
    "squeezebert": masked("squeezebert", USUAL | {"embedding_size": 16, "q_groups": 1,
                                                  "k_groups": 1, "v_groups": 1,
                                                  "post_attention_groups": 1,
                                                  "intermediate_groups": 1, "output_groups": 1}),
    "mpnet": masked("mpnet", USUAL | {"relative_attention_num_buckets": 32, "pad_token_id": 1}),
    "layoutlm": classifier("layoutlm", USUAL | {"max_2d_position_embeddings": 32}),
    "funnel": masked("funnel", {"vocab_size": WORDS, "d_model": 16, "block_sizes": [1, 1, 1],
                                "num_decoder_layers": 1, "n_head": 2, "d_head": 8, "d_inner": 32,
                                "hidden_dropout": 0.0, "attention_dropout": 0.0,
                                "activation_dropout": 0.0}),
    "bert_classifier": classifier("bert", USUAL),
    "xlnet": classifier("xlnet", {"vocab_size": WORDS, "d_model": 16, "n_layer": 3, "n_head": 2,
                                  "d_inner": 32, "dropout": 0.0, "summary_last_dropout": 0.0}),
    "longformer": masked("longformer", USUAL | {"attention_window": 4, "pad_token_id": 1}),
    "modernbert": masked("modernbert", USUAL | {"embedding_dropout": 0.0, "mlp_dropout": 0.0,
                                                "attention_dropout": 0.0, "local_attention": 4,
                                                "cls_token_id": 1, "sep_token_id": 2,
                                                "bos_token_id": 1, "eos_token_id": 2}),
    "fnet": masked("fnet", USUAL),
    "big_bird": masked("big_bird", USUAL | {"attention_type": "original_full"}),
    "reformer": masked("reformer", {"vocab_size": WORDS, "hidden_size": 16, "is_decoder": False,
                                    "attn_layers": ["local", "local", "local"],
                                    "num_attention_heads": 2, "attention_head_size": 8,
                                    "feed_forward_size": 32, "local_attn_chunk_length": 4,
                                    "axial_pos_embds": False, "max_position_embeddings": 32,
                                    "hidden_dropout_prob": 0.0,
                                    "local_attention_probs_dropout_prob": 0.0}, (8, 12)),
}  # fmt: skip
