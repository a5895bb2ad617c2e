"""Whole loops by `pfeife.compile` and `torch.compile`, beside the same loops in eager."""

import copy
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F

import pfeife
from gpu.beside_eager import (
    BITWISE,
    SUMMED,
    Rounding,
    Values,
    accumulated,
    alike,
    deterministic,
    error,
)
from gpu.cases import Case, case
from gpu.correctness import REPLICATED
from gpu.rows import Row, Setting, Skipped, Wrong

STEPS, MICROBATCHES = 3, 4


@attrs.frozen
class Loop:
    """How a case is trained: the options of its step, what is around it in the loop, its dtype."""

    options: dict[str, Any] = attrs.Factory(dict)
    amp: str = ""  # a dtype of autocast, inside of the step
    dtype: torch.dtype = torch.float32
    rounding: Rounding = BITWISE
    stages: int = 2
    rows: tuple[int, ...] = (8, 8, 8)  # of each batch
    plain: bool = False  # SGD, which carries on a rounding as it is


def _cast(one: Case, dtype: torch.dtype) -> Case:
    one.model.to(dtype)
    return one


def _step(one: Case, loop: Loop, setting: Setting) -> Callable[..., torch.Tensor]:
    if not loop.amp:
        return one.step
    kind, dtype = setting.device.partition(":")[0], getattr(torch, loop.amp)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(kind, dtype):
            return one.step(*batch)

    return step


def trained(one: Case, loop: Loop, setting: Setting, compiled: bool) -> Values:
    """The losses of some steps, and the state after them."""
    step = _step(one, loop, setting)
    if compiled:
        places = {} if "replicas" in loop.options else {"devices": [setting.device] * loop.stages}
        options = {"microbatches": MICROBATCHES, "stages": loop.stages, "progress": False}
        step = pfeife.compile(step, **{**options, **places, **loop.options})
    kind = torch.optim.SGD if loop.plain else torch.optim.AdamW
    optimizer = kind(one.model.parameters(), lr=1e-2 if loop.plain else 1e-3)
    losses = {}
    for index, rows in enumerate(loop.rows):
        batch = one.batch(rows, seed=index)
        if compiled:
            loss = step(*batch)
            loss.backward()
        else:
            loss = _accumulate(step, batch)
        torch.nn.utils.clip_grad_norm_(one.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[f"loss {index}"] = loss.detach()
    return losses | {name: one.detach() for name, one in one.model.state_dict().items()}


def _accumulate(step: Callable[..., torch.Tensor], batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    rows = len(batch[0])  # microbatches of two rows, where so many do not divide it
    count = MICROBATCHES if rows % MICROBATCHES == 0 else rows // 2
    parts = list(zip(*(tensor.chunk(count) for tensor in batch), strict=True))
    losses = []
    for part in parts:
        loss = step(*part)
        (loss / len(parts)).backward()
        losses.append(loss.detach() / len(parts))
    return sum(losses[1:], losses[0])


def beside_eager(setting: Setting, name: str, loop: Loop) -> dict[str, Any]:
    deterministic()
    one = _cast(case(name, setting), loop.dtype)
    runs = [trained(one.copy(), loop, setting, compiled=False) for _ in range(2)]
    return alike(trained(one.copy(), loop, setting, compiled=True), runs[0], loop.rounding, runs[1])


def beside_one_stage(setting: Setting, name: str, loop: Loop) -> dict[str, Any]:
    """Where the numbers are not eager's: those of a single stage."""
    deterministic()
    one = _cast(case(name, setting), loop.dtype)
    single = attrs.evolve(loop, stages=1, options={**loop.options, "schedule": "1f1b"})
    wanted = trained(one.copy(), single, setting, compiled=True)
    return alike(trained(one.copy(), loop, setting, compiled=True), wanted, loop.rounding)


def scaled(setting: Setting) -> dict[str, Any]:
    """float16 with a GradScaler whose first scale overflows: the same steps are left out."""
    deterministic()
    one, kind = case("GPT", setting), setting.device.partition(":")[0]
    loop = Loop(amp="float16")

    def run(mine: Case, compiled: bool) -> Values:
        step = _step(mine, loop, setting)
        if compiled:
            step = pfeife.compile(
                step, microbatches=MICROBATCHES, stages=2, devices=setting.twice, progress=False
            )
        optimizer = torch.optim.SGD(mine.model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**24, growth_interval=2)
        found: dict[str, torch.Tensor] = {}
        for index in range(2 * STEPS + 8):
            batch = mine.batch(seed=index)
            if compiled:
                loss = step(*batch)
                scaler.scale(loss).backward()
            else:
                parts = zip(*(tensor.chunk(MICROBATCHES) for tensor in batch), strict=True)
                losses = [_scaled(step, part, scaler) for part in parts]
                loss = sum(losses[1:], losses[0])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found |= {
                f"loss {index}": loss.detach(),
                f"scale {index}": torch.tensor(scaler.get_scale()),
            }
        return found | {name: value.detach() for name, value in mine.model.state_dict().items()}

    wanted = run(one.copy(), compiled=False)
    scales = [value.item() for name, value in wanted.items() if name.startswith("scale")]
    figures = alike(run(one.copy(), compiled=True), wanted)
    return {**figures, "scales": f"{scales[0]:g} to {scales[-1]:g}"}


def _scaled(step: Callable, part: tuple, scaler: torch.amp.GradScaler) -> torch.Tensor:
    loss = step(*part)
    scaler.scale(loss / MICROBATCHES).backward()
    return loss.detach() / MICROBATCHES


def evaluated(setting: Setting, name: str) -> dict[str, Any]:
    """Logits without gradients, in evaluation mode, of the same microbatches."""
    deterministic()
    one = case(name, setting)
    trained(one, Loop(), setting, compiled=False)  # statistics that are not the first ones
    one.model.eval()
    step = pfeife.compile(
        lambda x: one.model(x), microbatches=4, stages=2, devices=setting.twice, progress=False
    )
    x = one.batch()[0]
    with torch.no_grad():
        wanted = torch.cat([one.model(part) for part in x.chunk(4)])
        return alike({"logits": step(x)}, {"logits": wanted})


def loss_outside(setting: Setting) -> dict[str, Any]:
    """The model alone is compiled; its backward comes from autograd's own threads."""
    deterministic()
    one = case("GPT", setting)
    tokens, targets = one.batch()
    model = pfeife.compile(
        lambda given: one.model(given),
        microbatches=MICROBATCHES,
        stages=2,
        devices=setting.twice,
        loss="outside",
        progress=False,
    )

    def gradients(logits: torch.Tensor) -> Values:
        one.model.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        found = {f"gradient of {n}": p.grad.clone() for n, p in one.model.named_parameters()}
        return {"logits": logits.detach(), **found}

    parts = torch.cat([one.model(part) for part in tokens.chunk(MICROBATCHES)])
    wanted = gradients(parts)
    return alike(
        gradients(model(tokens)), wanted, Rounding(1e-5, "eager adds them in autograd's order")
    )


def named_backend(setting: Setting) -> dict[str, Any]:
    """torch.compile(backend="pfeife") with a batch that is symbolic."""
    deterministic()
    one = case("GPT", setting)
    batch = one.batch()
    wanted = accumulated(one, list(zip(*(t.chunk(MICROBATCHES) for t in batch), strict=True)))
    options = {"microbatches": MICROBATCHES, "stages": 2, "progress": False}
    step = torch.compile(
        one.step, backend=pfeife.backend(**options, devices=setting.twice), dynamic=True
    )
    loss = step(*batch)
    loss.backward()
    found = {f"gradient of {n}": p.grad for n, p in one.model.named_parameters()}
    return alike({"loss": loss.detach(), **found}, wanted)


def side_stream(setting: Setting) -> dict[str, Any]:
    """All of a step inside of a stream of the user's, whose inputs come late on it: who computes
    on another stream reads them before they are there."""
    deterministic()
    one = case("GPT", setting)
    step = pfeife.compile(one.step, microbatches=4, stages=2, devices=setting.twice, progress=False)
    first = one.batch()
    step(*first).backward()
    wrong = 0
    late = torch.randn(4096, 4096, device=setting.device)
    for seed in range(5):
        batch = one.batch(seed=seed)
        parts = list(zip(*(tensor.chunk(4) for tensor in batch), strict=True))
        wanted = accumulated(one, parts)["loss"]
        torch.cuda.synchronize()
        mine = tuple(torch.zeros_like(tensor) for tensor in batch)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                late = (late @ late).clamp(-1, 1)
            for slot, tensor in zip(mine, batch, strict=True):
                slot.copy_(tensor)
            loss = step(*mine)
            torch.cuda.current_stream().synchronize()
        wrong += bool(error(loss, wanted))
    if wrong:
        raise Wrong(f"{wrong} of 5 steps have read their batch before it was there")
    return {"steps": 5}


def hugging_face(setting: Setting, half: bool) -> dict[str, Any]:
    """transformers' Trainer in two lines beside the plain one, which accumulates as often."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    except ImportError as error:
        raise Skipped(str(error)) from error
    from pfeife.integrations.transformers import pipelined

    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 96, "n_positions": 32}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(0)
    tokens = torch.randint(96, (48, 32))
    data = [{"input_ids": one, "labels": one} for one in tokens]

    def state(kind: type, **more: Any) -> Values:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=6,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                use_cpu=not setting.cuda,
                bf16=half,
                optim="sgd",  # which carries on a rounding as it is
                learning_rate=0.1,
                **more,
            )
            trainer = kind(GPT2LMHeadModel(config), arguments, train_dataset=data)
            trainer.train()
        return {n: value.detach().clone() for n, value in trainer.model.state_dict().items()}

    many = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": MICROBATCHES}
    places = [setting.devices[0]] * 2
    ours = pipelined(Trainer, microbatches=MICROBATCHES, stages=2, devices=places, progress=False)
    rounding = Rounding(1e-2 if half else 1e-4, "losses are sums over tokens, divided at the end")
    return alike(
        state(ours, per_device_train_batch_size=2 * MICROBATCHES), state(Trainer, **many), rounding
    )


def from_cpu(setting: Setting) -> dict[str, Any]:
    """A model that is on the CPU before its first call, as one that fits no GPU would be."""
    deterministic()
    one = case("GPT", setting)
    batch = one.batch()
    wanted = accumulated(one, list(zip(*(t.chunk(4) for t in batch), strict=True)))
    model = copy.deepcopy(one.model).cpu()
    step = pfeife.compile(
        lambda *rows: one.loss(model, *rows),
        microbatches=4,
        stages=2,
        devices=[setting.devices[0], setting.devices[-1]],
        progress=False,
    )
    step(*batch).backward()
    places = {str(parameter.device) for parameter in model.parameters()}
    found = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    return {
        "places": ", ".join(sorted(places)),
        **alike({"loss": step(*batch).detach(), **found}, wanted),
    }


def all_devices(setting: Setting, name: str) -> dict[str, Any]:
    """A stage a GPU."""
    count = len(setting.devices)
    places = {"devices": list(setting.devices)}
    rounding, plain = (TIED, True) if name == "tied" else (BITWISE, False)
    return beside_eager(setting, name, Loop(places, stages=count, rounding=rounding, plain=plain))


def row(what: str, name: str, loop: Loop, run: Callable = beside_eager) -> Row:
    return Row(f"{name}, {what}", functools.partial(run, name=name, loop=loop), 90)


TIED = Rounding(1e-5, SUMMED)
HALF = torch.bfloat16
ROWS = [
    row("two stages", "GPT", Loop()),
    row("autocast to bfloat16", "GPT", Loop(amp="bfloat16")),
    Row("GPT, float16 with a GradScaler", scaled, 90),
    row("two stages", "UNet", Loop()),
    row("two stages", "tied", Loop(rounding=TIED, plain=True)),
    row("two stages", "BatchNorm", Loop()),
    row("two stages beside one", "dropout", Loop(), beside_one_stage),
    Row("GPT, inside of a stream of the user's", side_stream, cuda=True),
    row("everything recomputed", "GPT", Loop({"recompute": "always"})),
    row("dropout recomputed", "dropout", Loop({"recompute": "always"}), beside_one_stage),
    row("zb-h1", "UNet", Loop({"schedule": "zb-h1"})),
    row("bfloat16 parameters", "GPT", Loop(dtype=HALF)),
    row(
        "bfloat16 parameters, sums in float32, beside one stage",
        "GPT",
        Loop({"accumulate": "float32"}, dtype=HALF),
        beside_one_stage,
    ),
    row(
        "master weights, beside one stage",
        "GPT",
        Loop({"param_dtype": "bfloat16"}),
        beside_one_stage,
    ),
    row("two stages", "channels_last", Loop()),
    *(
        Row(f"{name}, evaluation", functools.partial(evaluated, name=name))
        for name in ("BatchNorm", "channels_last")
    ),
    Row("GPT, the loss outside", loss_outside),
    row("batches of other sizes", "GPT", Loop(rows=(8, 4, 8, 6, 8), options={})),
    row("replicas", "GPT", Loop({"replicas": 2}, rounding=Rounding(1e-5, REPLICATED), plain=True)),
    row("traced", "UNet", Loop({"capture": "trace"})),
    Row("GPT, torch.compile(backend='pfeife')", named_backend),
    Row("GPT, from the CPU", from_cpu),
    Row("GPT-2 by Trainer", functools.partial(hugging_face, half=False), 90),
    Row("GPT-2 by Trainer, bf16", functools.partial(hugging_face, half=True), 90),
    row("measured costs", "GPT", Loop({"costs": "measure"})),
    *(
        Row(f"{name} on all devices", functools.partial(all_devices, name=name), 90, devices=2)
        for name in ("GPT", "UNet", "tied", "BatchNorm")
    ),
]
