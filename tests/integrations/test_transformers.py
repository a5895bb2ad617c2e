"""Hugging Face's Trainer on ranks beside the same on one device."""

import shutil

import pytest
import torch
from logged import logged
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from examples.hf_trainer import sentences
from pfeife.integrations.transformers import pipelined

SCRIPT = "hf_trainer.py"


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The folder and the log of a run without Pfeife."""
    folder = tmp_path_factory.mktemp("one")
    return folder, logged(SCRIPT, "--one-device", "--save", folder)[0]


def same_files(folder, other):
    """The models and the optimizers' states of all checkpoints, bit for bit."""
    models = sorted(one.relative_to(folder) for one in folder.rglob("model.safetensors"))
    assert len(models) == 3
    for name in models:
        same(load_file(folder / name), load_file(other / name))
    for name in sorted(one.relative_to(folder) for one in folder.rglob("optimizer.pt")):
        mine, theirs = (torch.load(one / name, weights_only=True) for one in (folder, other))
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for number, state in mine["state"].items():
            same(state, theirs["state"][number])


def same(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder and the logs of a run on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    return folder, logged(SCRIPT, "--save", folder, ranks=2)


def test_two_ranks_log_and_save_what_one_device_does(one_device, two_ranks):
    """Losses, norms, evaluations and tokens on every rank."""
    folder, log = one_device
    other, logs = two_ranks
    assert logs[0] == logs[1]
    same_log(logs[0], log)
    assert apart(logs[0])[1] == [accumulated(folder / f"checkpoint-{at}") for at in (6, 12)]
    same_files(folder, other)


def accumulated(checkpoint, parts=4):
    """The loss of the evaluation where eager adds up the parts of each batch, as a step does. That
    of whole batches is the same to rounding, and on some processors to the bit."""
    model, rows, losses = GPT2LMHeadModel(GPT2Config.from_pretrained(checkpoint)), sentences(20), []
    model.eval().load_state_dict(load_file(checkpoint / "model.safetensors"))
    for batch in (rows[start : start + 8] for start in range(0, len(rows), 8)):
        each = len(batch) // parts
        cut = [default_data_collator(batch[at : at + each]) for at in range(0, len(batch), each)]
        count = default_data_collator(batch)["labels"].ne(-100).sum()
        with torch.no_grad():
            first, *others = [model(**one, num_items_in_batch=count).loss for one in cut]
        losses += [sum(others, first)] * len(batch)
    return torch.stack(losses).numpy().mean().item()


def same_log(mine, theirs):
    """All but the losses of evaluations bit for bit; these are `accumulated`."""
    (trained, evaluated), (expected, whole) = apart(mine), apart(theirs)
    assert trained == expected
    assert evaluated == pytest.approx(whole, rel=2**-22) and whole


def apart(log):
    """What a run has logged without the losses of evaluations, and these."""
    name = "eval_loss"
    rest = [{key: value for key, value in one.items() if key != name} for one in log]
    return rest, [one[name] for one in log if name in one]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("before", "ranks"), [("one_device", 2), ("two_ranks", 1), ("two_ranks", 3)]
)
def test_a_checkpoint_goes_on_elsewhere(request, one_device, tmp_path, before, ranks):
    """On as many ranks and stages as one likes, as if nobody had interrupted it."""
    folder, log = one_device
    saved, _ = request.getfixturevalue(before)
    shutil.copytree(saved / "checkpoint-6", tmp_path / "checkpoint-6")
    for again in logged(SCRIPT, "--save", tmp_path, "--resume", "--stages", ranks, ranks=ranks):
        same_log(again[:-1], log[:-1])  # the last line has the mean loss since the start
    same_files(folder, tmp_path)


@pytest.mark.whole
def test_an_adapter(tmp_path):
    """LoRA on a Llama: what is trained and saved is small, all else is read on every rank."""
    folders = tmp_path / "one", tmp_path / "two"
    (log,) = logged("hf_lora.py", "--one-device", "--save", folders[0])
    assert logged("hf_lora.py", "--save", folders[1], ranks=2) == [log, log]
    same(*(load_file(folder / "adapter_model.safetensors") for folder in folders))


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 2])
def test_autocast(ranks):
    """Evaluations too, but for rounding: one device does not cut their batches."""
    log = logged(SCRIPT, "--one-device", "--bf16")[0]
    for found in logged(SCRIPT, "--bf16", ranks=ranks):
        for mine, theirs in zip(found, log, strict=True):
            assert mine.pop("eval_loss", 0) == pytest.approx(theirs.get("eval_loss", 0), rel=1e-5)
            assert mine == {name: value for name, value in theirs.items() if name != "eval_loss"}


def model():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    config.update({"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "eos_token_id": 0})
    return GPT2LMHeadModel(config)


def trainer(folder, kind, data, **more):
    given = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(folder, per_device_eval_batch_size=4, **given, **more)
    return kind(model(), args, eval_dataset=data)


@pytest.mark.whole
def test_predictions_and_evaluations(tmp_path):
    """With labels and without, with smoothed ones, and with rows left over."""
    tokens = torch.randint(16, (6, 8))
    data = [{"input_ids": one, "labels": one} for one in tokens]
    kinds = Trainer, pipelined(Trainer, microbatches=2, stages=2)
    for more in ({}, {"label_smoothing_factor": 0.1}):
        plain, piped = (trainer(tmp_path, kind, data, **more) for kind in kinds)
        for one in (data, [{"input_ids": one} for one in tokens]):
            theirs, mine = plain.predict(one), piped.predict(one)
            torch.testing.assert_close(*map(torch.tensor, (mine.predictions, theirs.predictions)))
            assert mine.metrics.get("test_loss") == pytest.approx(theirs.metrics.get("test_loss"))


def test_what_else_compiles_the_model_is_refused(tmp_path):
    def compute_loss(self): ...

    compute_loss.__module__ = "trl.trainer.sft_trainer"
    theirs = type("SFTTrainer", (Trainer,), {"compute_loss": compute_loss})
    with pytest.raises(ValueError, match=r"class Own.SFTTrainer.: compute_loss = transformers"):
        pipelined(theirs)
    pipelined(type("Own", (theirs,), {"compute_loss": Trainer.compute_loss}))
    with pytest.raises(ValueError, match=r"batch='replica': a Trainer gives each rank all rows"):
        pipelined(Trainer, replicas=2, batch="replica")
    with pytest.raises(ValueError, match="torch_compile=True"):
        trainer(tmp_path, pipelined(Trainer), [], torch_compile=True)
