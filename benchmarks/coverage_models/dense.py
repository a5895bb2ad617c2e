"""Detection and segmentation: a prediction a pixel, a box or a query."""

from collections.abc import Callable
from typing import Any

import segmentation_models_pytorch as smp
import torch
import torchvision
import transformers
from torch import nn

from coverage_models.example import Example
from coverage_models.small import image, square
from coverage_models.vision import VIT, without_dropout


def segmented(
    model: nn.Module, read: Callable[[Any], torch.Tensor], side: int = 32, stride: int = 1
) -> Example:
    def step(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(read(model(pixels)), labels)

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        labels = torch.randint(4, (rows, size // stride, size // stride))
        return torch.randn(rows, 3, size, size), labels

    return Example(without_dropout(model), step, draw, (side, side))


def by_smp(kind: str, **sizes: Any) -> Callable[[], Example]:
    def build() -> Example:
        model = getattr(smp, kind)(
            "resnet18", encoder_weights=None, encoder_depth=3, classes=4, **sizes
        )
        return segmented(model, lambda found: found, 64)

    return build


def by_torchvision(kind: str) -> Callable[[], Example]:
    def build() -> Example:
        model = getattr(torchvision.models.segmentation, kind)(
            weights=None, weights_backbone=None, num_classes=4
        )
        return segmented(model, lambda found: found["out"])

    return build


def segformer() -> Example:
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16, num_labels=4, hidden_dropout_prob=0.0, drop_path_rate=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.SegformerForSemanticSegmentation(config)
    return segmented(model, lambda found: found.logits, 32, 4)


def dpt() -> Example:
    config = transformers.DPTConfig(
        **({**VIT, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
           "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8, "num_labels": 4,
           "use_auxiliary_head": False, "semantic_classifier_dropout": 0.0,
           "image_size": 32, "patch_size": 8})
    )  # fmt: skip
    model = transformers.DPTForDepthEstimation(config)

    def step(pixels: torch.Tensor) -> torch.Tensor:
        return model(pixels).predicted_depth.sub(1).square().mean()

    return Example(model, step, image(), (32, 32))


def queries(kind: str, **sizes: Any) -> Callable[[], Example]:
    """A DETR's heads without its matching: the mean square of logits and boxes."""

    def build() -> Example:
        return _detr(kind, False, sizes)

    return build


def matched(kind: str, **sizes: Any) -> Callable[[], Example]:
    """A DETR with its own loss: Hungarian matching of its boxes to the labels, by scipy."""

    def build() -> Example:
        return _detr(kind, True, sizes)

    return build


def _detr(kind: str, own: bool, sizes: dict[str, Any]) -> Example:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"] if "deformable" in kind else ["stage4"],
    )  # fmt: skip
    config = transformers.AutoConfig.for_model(
        kind, backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False,
        d_model=32, num_queries=5, num_labels=4, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, **sizes,
    )  # fmt: skip
    model = transformers.AutoModelForObjectDetection.from_config(config)

    def free(pixels: torch.Tensor) -> torch.Tensor:
        found = model(pixel_values=pixels)
        return found.logits.square().mean() + found.pred_boxes.square().mean()

    def labelled(pixels: torch.Tensor, boxes: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        labels = [
            {"class_labels": k, "boxes": b}
            for k, b in zip(kinds.unbind(), boxes.unbind(), strict=True)
        ]
        return model(pixel_values=pixels, labels=labels).loss

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        pixels = torch.randn(rows, 3, size, size)
        if not own:
            return (pixels,)
        return pixels, 0.2 + 0.3 * torch.rand(rows, 3, 4), torch.randint(4, (rows, 3))

    return Example(model, labelled if own else free, draw, (64, 64))


def yolos() -> Example:
    config = transformers.YolosConfig(
        **(dict(VIT) | {"image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 5})
    )
    model = transformers.YolosForObjectDetection(config)

    def step(pixels: torch.Tensor) -> torch.Tensor:
        found = model(pixel_values=pixels)
        return found.logits.square().mean() + found.pred_boxes.square().mean()

    return Example(model, step, image(), (32, 32))


def small_backbone() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 4, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 32, 3, 2, 1), nn.ReLU()
    )
    model.out_channels = 32  # type: ignore[assignment]
    return model


def detector(kind: str, side: int = 64) -> Callable[[], Example]:
    """One of torchvision's detectors with its own losses, on two boxes an image."""

    def build() -> Example:
        shapes = 1 if kind == "FCOS" else 3
        anchors = torchvision.models.detection.anchor_utils.AnchorGenerator(
            ((16,),), ((0.5, 1.0, 2.0)[:shapes],)
        )
        model = getattr(torchvision.models.detection, kind)(
            small_backbone(), 4, anchor_generator=anchors, min_size=side, max_size=side
        )

        def step(pixels: torch.Tensor, boxes: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
            targets = [
                {"boxes": b, "labels": k}
                for b, k in zip(boxes.unbind(), kinds.unbind(), strict=True)
            ]
            return torch.stack(list(model(list(pixels.unbind()), targets).values())).sum()

        def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
            corner = torch.rand(rows, 2, 2) * size / 2
            boxes = torch.cat([corner, corner + 8 + torch.rand(rows, 2, 2) * size / 4], -1)
            return torch.rand(rows, 3, size, size), boxes, torch.randint(1, 4, (rows, 2))

        return Example(model, step, draw, (side, side))

    return build


def mask2former_like() -> Example:
    """Per-pixel masks by queries: an einsum of queries with features."""
    features = torchvision.models.resnet18(weights=None)
    body = nn.Sequential(*list(features.children())[:6], nn.Conv2d(128, 16, 1))
    layer = nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 2)
    query = nn.Embedding(5, 16)

    def step(pixels: torch.Tensor) -> torch.Tensor:
        found = body(pixels)
        memory = found.flatten(2).mT
        asked = decoder(query.weight.expand(len(pixels), -1, -1), memory)
        return square(torch.einsum("bqc,bchw->bqhw", asked, found))

    return Example(nn.ModuleList([body, decoder, query]), step, image(), (64, 96))


MODELS = {
    "smp_unet": by_smp("Unet", decoder_channels=(16, 8, 8)),
    "smp_linknet": by_smp("Linknet"),
    "smp_pspnet": by_smp("PSPNet", psp_dropout=0.0),
    "smp_deeplabv3plus": by_smp("DeepLabV3Plus", decoder_channels=16),
    "tv_lraspp": by_torchvision("lraspp_mobilenet_v3_large"),
    "segformer": segformer,
    "dpt": dpt,
    "detr": queries("detr"),
    "detr_matched": matched("detr"),
    "conditional_detr": queries("conditional_detr"),
    "deformable_detr": queries(
        "deformable_detr", num_feature_levels=3, disable_custom_kernels=True
    ),
    "yolos": yolos,
    "tv_fcos": detector("FCOS"),
    "tv_retinanet": detector("RetinaNet"),
    "mask_queries": mask2former_like,
}  # fmt: skip
