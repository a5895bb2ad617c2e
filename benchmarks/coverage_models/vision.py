"""Classifiers of images: timm, torchvision, vit-pytorch and transformers."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import timm
import torch
import torchvision
import transformers

from coverage_models.example import Example
from coverage_models.small import classified, image


def by_timm(kind: str, side: int = 32, **sizes: Any) -> Callable[[], Example]:
    def build() -> Example:
        model = timm.create_model(kind, pretrained=False, num_classes=5, **sizes)
        return classified(without_dropout(model), image(), sizes=(side, side))

    return build


def by_class(make: Callable[..., torch.nn.Module], side: int, *given: Any, **sizes: Any):
    def build() -> Example:
        model = make(*given, num_classes=5, **sizes)
        return classified(without_dropout(model), image(), sizes=(side, side))

    return build


def checkpointed(make: Callable[..., torch.nn.Module], **sizes: Any) -> Callable[[], Example]:
    """A net that recomputes its insides, batch norms too, beside one that does not."""

    def build() -> Example:
        example = by_class(make, 32, memory_efficient=True, **sizes)()
        return attrs.evolve(example, reference=by_class(make, 32, **sizes))

    return build


def by_torchvision(kind: str, side: int = 32, **sizes: Any) -> Callable[[], Example]:
    return by_class(getattr(torchvision.models, kind), side, **sizes)


def small_vgg(num_classes: int) -> torch.nn.Module:
    plan: list[str | int] = [8, "M", 16, "M", 16, "M", 16, "M"]
    layers = torchvision.models.vgg.make_layers(plan, batch_norm=True)
    head = torch.nn.Linear(16, num_classes)
    return torch.nn.Sequential(layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), head)


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout | torchvision.ops.StochasticDepth):
            module.p = 0.0
        if isinstance(module, timm.layers.DropPath):
            module.drop_prob = 0.0
    return model


NONE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 5}
VIT: Mapping[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
    "image_size": 16, "patch_size": 4, **NONE,
}  # fmt: skip


def by_transformers(
    kind: str, side: int = 16, base: Mapping[str, Any] = NONE, **sizes: Any
) -> Callable[[], Example]:
    def build() -> Example:
        config = transformers.AutoConfig.for_model(kind, **(dict(base) | sizes))
        model = transformers.AutoModelForImageClassification.from_config(config)
        return classified(model, image(), read=lambda found: found.logits, sizes=(side, side))

    return build


def masked_autoencoder() -> Example:
    """Its noise is an argument, as its authors provide for."""
    config = transformers.ViTMAEConfig(
        **VIT, decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )  # fmt: skip
    model = transformers.ViTMAEForPreTraining(config)

    def step(pixels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return model(pixel_values=pixels, noise=noise).loss

    return Example(model, step, lambda n, size: (torch.randn(n, 3, 16, 16), torch.rand(n, 16)))


def clip() -> Example:
    """A contrastive loss: the rows of a batch depend on one another."""
    text = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 32, "eos_token_id": 2}  # fmt: skip
    sight = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "image_size": 16, "patch_size": 4}  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=sight, projection_dim=8)
    model = transformers.CLIPModel(config)

    def step(tokens: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss

    return Example(
        model,
        step,
        lambda n, size: (torch.randint(3, 50, (n, size)), torch.randn(n, 3, 16, 16)),
        (8, 10),
    )


SMALL_VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
MODELS = {
    "timm_vit": by_timm("vit_tiny_patch16_224", 16, **SMALL_VIT),
    "timm_deit_distilled": by_timm("deit_tiny_distilled_patch16_224", 16, **SMALL_VIT),
    "timm_beit": by_timm("beit_base_patch16_224", 16, **SMALL_VIT),
    "timm_cait": by_timm("cait_xxs24_224", 16, img_size=16, patch_size=4, embed_dim=16, depth=2,
                         num_heads=2, depth_token_only=1),
    "timm_swin": by_timm("swin_tiny_patch4_window7_224", 32, img_size=32, embed_dim=8,
                         depths=(2, 2), num_heads=(2, 2), window_size=4),
    "timm_swinv2": by_timm("swinv2_tiny_window8_256", 32, img_size=32, embed_dim=8,
                           depths=(2, 2), num_heads=(2, 2), window_size=4),
    "timm_convnext": by_timm("convnext_atto", 32, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "timm_mixer": by_class(timm.models.MlpMixer, 16, img_size=16, patch_size=4, embed_dim=16,
                           num_blocks=3),
    "timm_convmixer": by_class(timm.models.ConvMixer, 16, 8, 3, kernel_size=3, patch_size=4),
    "timm_efficientnet": by_timm("efficientnet_lite0", 32),
    "timm_densenet_checkpointed": checkpointed(
        timm.models.DenseNet, growth_rate=4, block_config=(2, 2, 2)),
    "timm_resnet": by_timm("resnet10t", 32),
    "timm_resnetv2": by_timm("resnetv2_50", 32, layers=(1, 1, 1, 1), channels=(16, 16, 32, 32),
                             stem_chs=8),
    "timm_resnest": by_timm("resnest14d", 32),
    "timm_mobilenetv3": by_timm("mobilenetv3_small_050", 32),
    "timm_mobilevit": by_timm("mobilevit_xxs", 32),
    "timm_regnet": by_timm("regnetx_002", 32),
    "timm_ghostnet": by_timm("ghostnet_050", 32, drop_rate=0.0),
    "timm_crossvit": by_timm("crossvit_tiny_240", 240, embed_dim=(8, 16), depth=((1, 1, 0),),
                             num_heads=(2, 2)),
    "timm_levit": by_timm("levit_128s", 64, img_size=64, embed_dim=(16, 16, 16), key_dim=8,
                          depth=(1, 1, 1), num_heads=(2, 2, 2)),
    "timm_pvt": by_timm("pvt_v2_b0", 32, depths=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16),
                        num_heads=(1, 1, 2, 2)),
    "timm_xcit": by_timm("xcit_nano_12_p16_224", 32, img_size=32, embed_dim=16, depth=2,
                         num_heads=2, patch_size=8),
    "timm_tnt": by_timm("tnt_s_legacy_patch16_224", 32, img_size=32, embed_dim=16, inner_dim=4,
                        depth=2, num_heads_inner=2, num_heads_outer=2),
    "timm_eva": by_timm("eva02_tiny_patch14_224", 28, img_size=28, embed_dim=24, depth=2,
                        num_heads=2),
    "tv_resnet18": by_torchvision("resnet18"),
    "tv_vgg": by_class(small_vgg, 32),
    "tv_densenet_checkpointed": checkpointed(
        torchvision.models.DenseNet, growth_rate=4, block_config=(2, 2, 2), num_init_features=8),
    "tv_squeezenet": by_torchvision("squeezenet1_1", 48),
    "tv_googlenet": by_torchvision("googlenet", 32, aux_logits=False, init_weights=False),
    "tv_shufflenet": by_torchvision("shufflenet_v2_x0_5"),
    "tv_mnasnet": by_torchvision("mnasnet0_5"),
    "tv_mobilenet_v2": by_torchvision("mobilenet_v2", width_mult=0.25),
    "vit": by_transformers("vit", base=VIT),
    "dinov2": by_transformers("dinov2", base=VIT, mlp_ratio=2),
    "swin": by_transformers("swin", 32, image_size=32, embed_dim=8, depths=[1, 1], num_heads=[2, 2],
                            window_size=4, drop_path_rate=0.0),
    "convnextv2": by_transformers("convnextv2", 32, depths=[1, 1, 1, 1], drop_path_rate=0.0,
                                  hidden_sizes=[8, 8, 16, 16]),
    "poolformer": by_transformers("poolformer", 32, depths=[1, 1, 1, 1], drop_path_rate=0.0,
                                  hidden_sizes=[8, 8, 16, 16]),
    "pvt": by_transformers("pvt", 32, image_size=32, depths=[1, 1, 1, 1],
                           hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 2, 2, 2]),
    "focalnet": by_transformers("focalnet", 32, image_size=32, embed_dim=8, depths=[1, 1],
                                hidden_sizes=[8, 16], focal_levels=[2, 2], focal_windows=[3, 3],
                                drop_path_rate=0.0),
    "vit_mae": masked_autoencoder,
    "clip": clip,
}  # fmt: skip
