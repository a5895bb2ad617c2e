"""Models that we did not write, tiny and random: the same numbers on three stages."""

import pytest
import torch
from share import whole

import pfeife
from pfeife.testing import assert_same, eager_accumulation, own_gradients

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")


def language_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)

    def step(tokens):  # in which transformers warns that no kind of loss is set
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return model, step, lambda rows: (torch.randint(50, (rows, 6)),)


def gpt2():
    return language_model(
        transformers.GPT2Config(
            vocab_size=50, n_positions=8, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def llama():
    return language_model(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        )
    )  # fmt: skip


def unet():
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=2,
        block_out_channels=(4, 8), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip

    def step(x, times):
        return (model(x, times).sample - x).square().mean()

    return model, step, lambda rows: (torch.randn(rows, 1, 8, 8), torch.randint(9, (rows,)))


def vit():
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
            image_size=8, patch_size=4, num_channels=1, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip

    def step(x):
        return model(x).logits.square().mean()

    return model, step, lambda rows: (torch.randn(rows, 1, 8, 8),)


@pytest.mark.parametrize("build", [gpt2, whole(llama), whole(unet), whole(vit)])
def test_the_same_numbers(build):
    model, step, draw = build()
    torch.manual_seed(1)
    batch = draw(6)
    parts = list(zip(*(x.chunk(3) for x in batch), strict=True))
    # transformers takes other branches under torch.compile, and AOTAutograd computes some
    # gradients by other operations: plain torch.compile gives our bits, eager agrees to rounding.
    # diffusers does not, and plain torch.compile takes its interpolation apart, which we do not.
    compiled = torch.compile(step, backend="aot_eager", dynamic=False)
    expected = eager_accumulation(step if build is unet else compiled, model, parts)
    loss = pfeife.compile(step, microbatches=3, stages=3)(*batch)
    loss.backward()
    found = pfeife.Result(
        loss.detach(),
        ({},) * 3,
        own_gradients(model),
        {},
    )
    tied = [name for name in expected.gradients if "wte" in name]
    assert_same(expected, found, tied)
    assert_same(eager_accumulation(step, model, parts), found, None)
