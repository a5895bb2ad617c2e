"""UNets, transformers and autoencoders of images: diffusers and others."""

from collections.abc import Callable

import diffusers
import torch
from denoising_diffusion_pytorch import Unet
from torch import nn
from vector_quantize_pytorch import FSQ, LFQ, VectorQuantize

from coverage_models.example import Example
from coverage_models.small import image


def denoiser(
    model: nn.Module, channels: int, side: int, *more: Callable[[int], torch.Tensor]
) -> Example:
    """Predicts the noise of an image at a time, from what else it is given."""

    def step(x: torch.Tensor, times: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        found = model(x, times, *others)
        found = found if isinstance(found, torch.Tensor) else found.sample
        return (found[:, :channels] - x).square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        times = torch.randint(9, (rows,))
        return torch.randn(rows, channels, size, size), times, *(one(rows) for one in more)

    return Example(model, step, draw, (side, side))


def unet() -> Example:
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=2,
        block_out_channels=(4, 8), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    return denoiser(model, 1, 8)


def unet_condition() -> Example:
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=2,
        block_out_channels=(4, 8), cross_attention_dim=8, attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return denoiser(model, 4, 8, lambda rows: torch.randn(rows, 3, 8))


def unet_1d() -> Example:
    model = diffusers.UNet1DModel(
        sample_size=16, in_channels=2, out_channels=2, block_out_channels=(32, 64),
        down_block_types=("DownBlock1DNoSkip", "AttnDownBlock1D"), extra_in_channels=64,
        up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip"),
    )  # fmt: skip
    return Example(
        model,
        lambda x, times: (model(x, times).sample - x).square().mean(),
        lambda rows, size: (torch.randn(rows, 2, size), torch.randint(9, (rows,))),
        (16, 32),
    )


def unet_3d() -> Example:
    model = diffusers.UNet3DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=2,
        block_out_channels=(4, 8), cross_attention_dim=8, attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    )  # fmt: skip

    def step(x: torch.Tensor, times: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return (model(x, times, words).sample - x).square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return (
            torch.randn(rows, 4, 2, size, size),
            torch.randint(9, (rows,)),
            torch.randn(rows, 3, 8),
        )

    return Example(model, step, draw, (8, 8))


def dit() -> Example:
    """Its classes are not dropped: `class_dropout_prob` of 0 draws nothing."""
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8,
        patch_size=2, norm_num_groups=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    return denoiser_of_labels(model)


def denoiser_of_labels(model: nn.Module) -> Example:
    def step(x: torch.Tensor, times: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (model(x, times, labels).sample - x).square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        labels = torch.randint(9, (rows,))
        return torch.randn(rows, 4, 8, 8), torch.randint(9, (rows,)), labels

    return Example(model, step, draw)


def pixart() -> Example:
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=3,
        sample_size=8, patch_size=2, cross_attention_dim=16, caption_channels=8,
        num_embeds_ada_norm=10, use_additional_conditions=False,
    )  # fmt: skip

    def step(x: torch.Tensor, times: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return (model(x, words, timestep=times).sample - x).square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 4, 8, 8), torch.randint(9, (rows,)), torch.randn(rows, size, 8)

    return Example(model, step, draw, (3, 5))


def sd3() -> Example:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=8, caption_projection_dim=16,
        pooled_projection_dim=8, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip

    def step(x: torch.Tensor, words: torch.Tensor, pooled: torch.Tensor, times: torch.Tensor):
        return (model(x, words, pooled, times).sample - x).square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        words, pooled = torch.randn(rows, size, 8), torch.randn(rows, 8)
        return torch.randn(rows, 4, 8, 8), words, pooled, torch.randint(9, (rows,))

    return Example(model, step, draw, (3, 5))


def flux() -> Example:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    places, marks = torch.randn(16, 3), torch.zeros(3, 3)

    def step(x: torch.Tensor, words: torch.Tensor, pooled: torch.Tensor, times: torch.Tensor):
        found = model(
            hidden_states=x, encoder_hidden_states=words, pooled_projections=pooled,
            timestep=times, img_ids=places, txt_ids=marks,
        )  # fmt: skip
        return (found.sample - x).square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return (
            torch.randn(rows, 16, 4),
            torch.randn(rows, 3, 8),
            torch.randn(rows, 8),
            torch.rand(rows),
        )

    return Example(model, step, draw)


def vae() -> Example:
    model = diffusers.AutoencoderKL(
        block_out_channels=(4, 8), norm_num_groups=2, latent_channels=2, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip

    def step(x: torch.Tensor) -> torch.Tensor:
        found = model.encode(x).latent_dist
        return (model.decode(found.mean).sample - x).square().mean() + found.kl().mean()

    return Example(model, step, image(), (16, 16))


def vq_vae() -> Example:
    model = diffusers.VQModel(
        block_out_channels=(4, 8), norm_num_groups=2, latent_channels=2, num_vq_embeddings=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return Example(model, lambda x: (model(x).sample - x).square().mean(), image(), (16, 16))


def autoencoder_tiny() -> Example:
    model = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1), latent_channels=2,
        upsampling_scaling_factor=2,
    )  # fmt: skip
    return Example(model, lambda x: model(x).sample.square().mean(), image(), (16, 16))


def consistency() -> Example:
    model = diffusers.ConsistencyDecoderVAE(
        encoder_block_out_channels=(4, 8), encoder_down_block_types=("DownEncoderBlock2D",) * 2,
        encoder_layers_per_block=1, encoder_norm_num_groups=2, latent_channels=2,
        decoder_block_out_channels=(8, 8),
        decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
        decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2, decoder_layers_per_block=1,
        decoder_norm_num_groups=2, decoder_num_train_timesteps=8, decoder_in_channels=5,
        decoder_out_channels=6,
    )  # fmt: skip
    return Example(model.encoder, lambda x: model.encoder(x).square().mean(), image(), (16, 16))


def controlnet() -> Example:
    model = diffusers.ControlNetModel(
        in_channels=4, layers_per_block=1, norm_num_groups=2, block_out_channels=(4, 8),
        cross_attention_dim=8, attention_head_dim=2, conditioning_embedding_out_channels=(4, 8),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    )  # fmt: skip
    for one in [*model.controlnet_down_blocks, model.controlnet_mid_block]:
        nn.init.normal_(one.weight)  # they begin with zeros, of which nothing has a gradient

    def step(x: torch.Tensor, times: torch.Tensor, words: torch.Tensor, hint: torch.Tensor):
        found = model(x, times, words, hint)
        downs = [one.square().mean() for one in found.down_block_res_samples]
        return torch.stack(downs).sum() + found.mid_block_res_sample.square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        hint = torch.randn(rows, 3, 16, 16)
        return torch.randn(rows, 4, 8, 8), torch.randint(9, (rows,)), torch.randn(rows, 3, 8), hint

    return Example(model, step, draw)


def lucidrains_unet() -> Example:
    return denoiser(Unet(dim=8, dim_mults=(1, 2), flash_attn=False), 3, 16)


def quantized(make: Callable[[], nn.Module]) -> Callable[[], Example]:
    """An autoencoder with a codebook between; moving averages of codes are its state."""

    def build() -> Example:
        encoder, quantizer, decoder = nn.Linear(8, 16), make(), nn.Linear(16, 8)

        def step(x: torch.Tensor) -> torch.Tensor:
            found, *more = quantizer(encoder(x).tanh())
            extra = more[1].sum() if len(more) > 1 else 0.0
            return (decoder(found) - x).square().mean() + extra

        whole = nn.ModuleList([encoder, quantizer, decoder])
        return Example(whole, step, lambda rows, size: (torch.randn(rows, size, 8),), (6, 8))

    return build


def gan() -> Example:
    """A generator with spectral norms behind it, which keep a vector as they run."""

    def block(a: int, b: int) -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(nn.Conv2d(a, b, 4, 2, 1))

    make = nn.Sequential(
        nn.ConvTranspose2d(8, 8, 4), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    judge = nn.Sequential(
        block(3, 8), nn.LeakyReLU(0.2), block(8, 8), nn.Flatten(), nn.Linear(32, 1)
    )

    def step(noise: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(-judge(make(noise))).mean()

    whole = nn.ModuleList([make, judge])
    return Example(whole, step, lambda rows, size: (torch.randn(rows, 8, 1, 1),))


def wan() -> Example:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
        out_channels=4, text_dim=8, freq_dim=16, ffn_dim=32, num_layers=3, rope_max_seq_len=32,
    )  # fmt: skip

    def step(x: torch.Tensor, times: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return (model(x, times, words).sample - x).square().mean()

    def draw(rows: int, size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 4, 2, 8, 8), torch.randint(9, (rows,)), torch.randn(rows, size, 8)

    return Example(model, step, draw, (3, 5))


MODELS = {
    "unet": unet,
    "unet_condition": unet_condition,
    "unet_1d": unet_1d,
    "unet_3d": unet_3d,
    "dit": dit,
    "pixart": pixart,
    "sd3": sd3,
    "flux": flux,
    "wan": wan,
    "vae": vae,
    "vq_vae": vq_vae,
    "autoencoder_tiny": autoencoder_tiny,
    "consistency_encoder": consistency,
    "controlnet": controlnet,
    "lucidrains_unet": lucidrains_unet,
    "vq_codebook": quantized(lambda: VectorQuantize(dim=16, codebook_size=8, decay=0.9)),
    "fsq": quantized(lambda: FSQ(levels=[4, 4, 4], dim=16)),
    "lfq": quantized(lambda: LFQ(dim=16, codebook_size=16)),
    "spectral_gan": gan,
}
