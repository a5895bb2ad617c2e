"""State of members: checkpoints, scalers, adapters, models that are made later; as one device has
them."""

import contextlib
import copy
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from rows import row
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import pfeife
from distributed.members import PLAN, Loop, Words, alike, compiled_of, trained
from pfeife.runtime.distributed.process_group import join_world


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """One of all ranks."""
    join_world(torch.device("cpu"))
    folder = Path(tempfile.gettempdir(), f"pfeife-members-{os.environ['MASTER_PORT']}")
    yield folder
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)


@row(ranks=(4,), whole=(4,))
def checkpoints_between_members_and_stages() -> None:
    """From two stages of two members to four stages, to four members of one, and back; and as files
    for others."""
    make = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
    stages, one_stage = {"members": 1, "parallel": "auto"}, {"members": 4, "parallel": "cut"}
    with shared_folder() as folder:
        plain, states = Loop(make).plain.state_dict(), None
        for saved, options in enumerate([{}, stages, one_stage, {}]):
            loop = Loop(make, **options)
            checkpoints = pfeife.Checkpoints(folder, loop.model, loop.optimizers[0])
            assert checkpoints.load() == saved
            loop.plain.load_state_dict(plain)
            if states is not None:
                loop.optimizers[1].load_state_dict(states)
            loop.train()
            checkpoints.save(saved + 1)
            plain, states = loop.plain.state_dict(), loop.optimizers[1].state_dict()
        pfeife.save_safetensors(loop.model, folder / "files")
        files = map(load_file, (folder / "files").glob("*.safetensors"))
        state = {name: value for file in files for name, value in file.items()}
        for name, value in plain.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


@row(ranks=(2, 4), whole=(4,))
def gradients_of_members_that_overflow() -> None:
    """A GradScaler leaves a step out on all members, where few gradients are infinite."""
    loop = Loop(functools.partial(torch.optim.SGD, lr=0.1))
    loop.plain(loop.tokens).backward()
    largest = [float(parameter.grad.abs().max()) for parameter in loop.plain.parameters()]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0) for _ in range(2)]
    for factor in (1.0, torch.finfo(torch.float64).max / max(largest), 1.0):
        for model, step, optimizer, scaler in zip(
            (loop.model, loop.plain), (loop.step, loop.plain), loop.optimizers, scalers, strict=True
        ):
            optimizer.zero_grad()
            scaler.scale(step(loop.tokens) * factor).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        alike(loop.model, loop.plain)
    assert min(largest) < max(largest) / 2, "not all are infinite"
    assert [scaler.get_scale() for scaler in scalers] == [1.0, 1.0]


@row(ranks=(2, 4), whole=(2, 4))
def adapters_over_members() -> None:
    """LoRA by peft on matrices that are cut, or gathered: a few are trained, all are shared out."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    for parallel in ("cut", "gathered"):
        torch.manual_seed(0)
        adapters = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4)
        plain = get_peft_model(LlamaForCausalLM(config), adapters).double()
        model = copy.deepcopy(plain)

        def step(tokens, model=model):
            return model(input_ids=tokens, labels=tokens).loss

        options = {"members": 2, "microbatches": 2, "parallel": parallel}
        compiled = pfeife.compile(step, loss_reduction="mean", **options)
        torch.manual_seed(1)
        batches = torch.randint(32, (3, 8, 6))
        alone = functools.partial(step, model=plain)
        figures = trained(compiled, model, batches), trained(alone, plain, batches)
        # transformers computes rotations and norms in float32.
        torch.testing.assert_close(*map(list, figures), rtol=1e-6, atol=0)
        state = pfeife.full_state_dict(model)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)


@row(ranks=(2, 4), whole=(4,))
def a_model_of_members_that_is_made_later() -> None:
    """deferred_init: each rank makes what it keeps, with the values of one device."""
    for parallel in (PLAN, "gathered"):
        torch.manual_seed(0)
        plain = Words(dropout=0.0)
        torch.manual_seed(0)
        with pfeife.deferred_init():
            model = Words(dropout=0.0)
        step = compiled_of(model, parallel=parallel)
        batches = [torch.randint(24, (8, 6)) for _ in range(2)]
        torch.testing.assert_close(
            [*trained(step, model, batches)], [*trained(plain, plain, batches)], rtol=1e-5, atol=0
        )
        state = pfeife.full_state_dict(model)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
