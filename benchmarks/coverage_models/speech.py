"""Speech and sound: transformers and torchaudio."""

from collections.abc import Callable
from typing import Any

import torch
import torchaudio
import transformers
from torch import nn

from coverage_models.example import Example
from coverage_models.small import WORDS, classified, words
from coverage_models.vision import without_dropout

WAV = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
    "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "feat_proj_dropout": 0.0,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0,
    "final_dropout": 0.0, "mask_time_prob": 0.0, "vocab_size": 12, "pad_token_id": 0,
    "classifier_proj_size": 8, "num_labels": 5, "conv_bias": True, "apply_spec_augment": False,
}  # fmt: skip


def waves(rows: int, size: int) -> tuple[torch.Tensor]:
    return (torch.randn(rows, 25 * size),)


def by_ctc(kind: str, **sizes: Any) -> Callable[[], Example]:
    """A transcriber with its own loss, connectionist temporal classification."""

    def build() -> Example:
        config = transformers.AutoConfig.for_model(kind, **(WAV | sizes), ctc_zero_infinity=True)
        model = transformers.AutoModelForCTC.from_config(config)

        def step(sound: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return model(input_values=sound, labels=labels).loss

        return Example(
            model, step, lambda n, size: (*waves(n, size), torch.randint(1, 12, (n, 4))), (16, 20)
        )

    return build


def by_class(kind: str, **sizes: Any) -> Callable[[], Example]:
    def build() -> Example:
        config = transformers.AutoConfig.for_model(kind, **(WAV | sizes))
        model = transformers.AutoModelForAudioClassification.from_config(config)
        return classified(model, waves, read=lambda found: found.logits, sizes=(16, 20))

    return build


def masked_wav2vec2() -> Example:
    """SpecAugment's masks are drawn by numpy inside of the step: to be refused, or re-drawn."""
    config = transformers.Wav2Vec2Config(
        **(WAV | {"apply_spec_augment": True, "mask_time_prob": 0.5, "mask_time_length": 2})
    )
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    return classified(model, waves, read=lambda found: found.logits, sizes=(16, 20))


def spectrogram_transformer() -> Example:
    config = transformers.ASTConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, patch_size=4, frequency_stride=4,
        time_stride=4, max_length=16, num_mel_bins=16, num_labels=5,
    )  # fmt: skip
    model = transformers.ASTForAudioClassification(config)
    return classified(
        model, lambda rows, size: (torch.randn(rows, 16, 16),), read=lambda found: found.logits
    )


def encodec() -> Example:
    config = transformers.EncodecConfig(
        num_filters=4, hidden_size=8, codebook_size=8, codebook_dim=8, num_lstm_layers=1,
        upsampling_ratios=[4, 2], target_bandwidths=[1.5], sampling_rate=2000,
    )  # fmt: skip
    model = transformers.EncodecModel(config)

    def step(sound: torch.Tensor) -> torch.Tensor:
        return model.decoder(model.encoder(sound)).square().mean()

    return Example(model, step, lambda rows, size: (torch.randn(rows, 1, 8 * size),), (16, 20))


def vits_like_hifigan() -> Example:
    config = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8, upsample_initial_channel=16, upsample_rates=[4, 2],
        upsample_kernel_sizes=[8, 4], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]],
    )  # fmt: skip
    model = transformers.SpeechT5HifiGan(config)
    return Example(
        model,
        lambda mel: model(mel).square().mean(),
        lambda rows, size: (torch.randn(rows, size, 8),),
        (8, 10),
    )


def conformer() -> Example:
    model = torchaudio.models.Conformer(16, 2, 32, 3, 3, dropout=0.0)

    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return model(x, lengths)[0].square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, size, 16), torch.full((rows,), size)

    return Example(model, step, draw, (8, 10))


def emformer() -> Example:
    model = torchaudio.models.Emformer(16, 2, 32, 3, segment_length=4, right_context_length=1)

    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return model(x, lengths)[0].square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, size + 1, 16), torch.full((rows,), size)

    return Example(model, step, draw, (8, 12))


def conv_tasnet() -> Example:
    model = torchaudio.models.ConvTasNet(2, 8, 16, 3, 8, 16, 2, 2)
    return Example(
        model,
        lambda x: model(x).square().mean(),
        lambda rows, size: (torch.randn(rows, 1, 8 * size),),
        (16, 20),
    )


def hdemucs() -> Example:
    model = torchaudio.models.HDemucs(["a", "b"], audio_channels=1, channels=8, nfft=64, depth=3)
    return Example(
        model,
        lambda x: model(x).square().mean(),
        lambda rows, size: (torch.randn(rows, 1, 16 * size),),
        (64, 64),
    )


def deepspeech() -> Example:
    model = torchaudio.models.DeepSpeech(n_feature=8, n_hidden=16, n_class=6, dropout=0.0)
    return Example(
        model,
        lambda x: model(x).square().mean(),
        lambda rows, size: (torch.randn(rows, 1, size, 8),),
        (8, 10),
    )


def wav2letter() -> Example:
    model = torchaudio.models.Wav2Letter(num_classes=6, input_type="mfcc", num_features=8)
    small = nn.Sequential(*[one for one in model.acoustic_model])
    for index, layer in enumerate(small):
        if isinstance(layer, nn.Conv1d):
            a, b = (8 if index == 0 else 16), 16
            small[index] = nn.Conv1d(a, b, min(3, layer.kernel_size[0]), padding=1)
    return Example(
        small,
        lambda x: small(x).square().mean(),
        lambda rows, size: (torch.randn(rows, 8, size),),
        (16, 20),
    )


def wavernn() -> Example:
    model = torchaudio.models.WaveRNN(
        upsample_scales=[2, 2], n_classes=8, hop_length=4, n_res_block=1, n_rnn=16, n_fc=16,
        kernel_size=3, n_freq=8, n_hidden=8, n_output=8,
    )  # fmt: skip

    def step(sound: torch.Tensor, mel: torch.Tensor) -> torch.Tensor:
        return model(sound, mel).square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 1, (size - 2) * 4), torch.randn(rows, 1, 8, size)

    return Example(model, step, draw, (8, 10))


def tacotron2() -> Example:
    model = torchaudio.models.Tacotron2(
        n_mels=8, n_symbol=WORDS, symbol_embedding_dim=16, encoder_embedding_dim=16,
        encoder_n_convolution=1, encoder_kernel_size=3, decoder_rnn_dim=16, decoder_max_step=20,
        decoder_dropout=0.0, attention_rnn_dim=16, attention_hidden_dim=8, attention_dropout=0.0,
        attention_location_n_filter=4, attention_location_kernel_size=3, prenet_dim=8,
        postnet_n_convolution=2, postnet_kernel_size=3, postnet_embedding_dim=8,
    )  # fmt: skip

    def step(tokens: torch.Tensor, lengths: torch.Tensor, mel: torch.Tensor, ends: torch.Tensor):
        found = model(tokens, lengths, mel, ends)
        return found[0].square().mean() + found[1].square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        full = torch.full((rows,), size)
        return words(rows, size), full, torch.randn(rows, 8, size), full.clone()

    return Example(model, step, draw, (6, 8))


def rnn_transducer() -> Example:
    model = torchaudio.models.emformer_rnnt_model(
        input_dim=8, encoding_dim=16, num_symbols=12, segment_length=4, right_context_length=2,
        time_reduction_input_dim=8, time_reduction_stride=2, transformer_num_heads=2,
        transformer_ffn_dim=16, transformer_num_layers=1, transformer_dropout=0.0,
        transformer_activation="gelu", transformer_left_context_length=4,
        transformer_max_memory_size=0, transformer_weight_init_scale_strategy="depthwise",
        transformer_tanh_on_mem=True, symbol_embedding_dim=8, num_lstm_layers=1,
        lstm_layer_norm=True, lstm_layer_norm_epsilon=1e-3, lstm_dropout=0.0,
    )  # fmt: skip

    def step(sound: torch.Tensor, lengths: torch.Tensor, text: torch.Tensor, ends: torch.Tensor):
        return model(sound, lengths, text, ends)[0].square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        text = torch.randint(12, (rows, 4), dtype=torch.int32)
        ends = torch.full((rows,), 4, dtype=torch.int32)
        return torch.randn(rows, size + 2, 8), torch.full((rows,), size), text, ends

    return Example(without_dropout(model), step, draw, (16, 24))


def spectrogram_net() -> Example:
    """Features by torchaudio inside of the step, complex numbers within."""
    features = nn.Sequential(
        torchaudio.transforms.MelSpectrogram(2000, n_fft=32, hop_length=16, n_mels=8),
        torchaudio.transforms.AmplitudeToDB(),
    )
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip
    model = nn.ModuleList([features, net])
    return Example(
        model,
        lambda x: net(features(x)[:, None]).square().mean(),
        lambda rows, size: (torch.randn(rows, 16 * size),),
        (16, 20),
    )


MODELS = {
    "wav2vec2_ctc": by_ctc("wav2vec2"),
    "wav2vec2": by_class("wav2vec2"),
    "wav2vec2_masked": masked_wav2vec2,
    "wav2vec2_conformer": by_class("wav2vec2-conformer", conv_depthwise_kernel_size=3,
                                   conformer_conv_dropout=0.0),
    "hubert": by_class("hubert"),
    "hubert_ctc": by_ctc("hubert"),
    "wavlm": by_class("wavlm", num_buckets=8),
    "sew": by_class("sew", squeeze_factor=2),
    "unispeech": by_class("unispeech"),
    "data2vec_audio": by_class("data2vec-audio", conv_pos_kernel_size=3),
    "ast": spectrogram_transformer,
    "encodec": encodec,
    "hifigan": vits_like_hifigan,
    "conformer": conformer,
    "emformer": emformer,
    "conv_tasnet": conv_tasnet,
    "hdemucs": hdemucs,
    "deepspeech": deepspeech,
    "wav2letter": wav2letter,
    "wavernn": wavernn,
    "tacotron2": tacotron2,
    "rnn_transducer": rnn_transducer,
    "mel_net": spectrogram_net,
}  # fmt: skip
