"""Lightning's Trainer on ranks beside the same on one device. Batches have many lengths."""

import json

import pytest
import torch
from logged import logged
from processes import bounded

SCRIPT = "lightning_gpt.py"
LAST = "epoch=2-step=12.ckpt"


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The folder and the log of a run without Pfeife, in which four batches are one."""
    folder = tmp_path_factory.mktemp("one")
    (log,) = logged(SCRIPT, "--lengths", "--one-device", "--save", folder)
    return folder, [together(log[at : at + 4]) for at in range(0, len(log), 4)]


def together(lines):
    """What a batch logs, by what its parts have."""
    return {name: sum(one[name] for one in lines) / len(lines) for name in lines[0]}


def same_checkpoints(folder, other):
    """The model's and the optimizer's states, bit for bit."""
    mine, theirs = (torch.load(one / LAST, weights_only=True) for one in (folder, other))
    assert mine["global_step"] == theirs["global_step"]
    assert mine["lr_schedulers"] == theirs["lr_schedulers"]
    torch.testing.assert_close(mine["state_dict"], theirs["state_dict"], rtol=0, atol=0)
    pairs = zip(mine["optimizer_states"], theirs["optimizer_states"], strict=True)
    for one, another in pairs:
        assert one["param_groups"] == another["param_groups"]
        torch.testing.assert_close(one["state"], another["state"], rtol=0, atol=0)


def close(found, log):
    for line, expected in zip(found, log, strict=True):
        assert line == pytest.approx({name: expected[name] for name in line}, rel=1e-5)


def test_two_ranks_log_and_save_what_one_device_does(one_device, tmp_path):
    """The logs within rounding: one device logs the parts of a batch."""
    folder, log = one_device
    for found in logged(SCRIPT, "--lengths", "--save", tmp_path, ranks=2):
        close(found, log)
    same_checkpoints(folder, tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_one_device(one_device, tmp_path, ranks):
    """As if nobody had interrupted it."""
    folder, log = one_device
    first = folder / "epoch=0-step=4.ckpt"
    for found in logged(SCRIPT, "--lengths", "--save", tmp_path, "--resume", first, ranks=ranks):
        close(found, log[4:])
    same_checkpoints(folder, tmp_path)


AVERAGING = """
import json
import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from pfeife.integrations.lightning import PipelineStrategy
from torch import nn


class Small(LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        self.net, self.seen = nn.Sequential(*layers, nn.Linear(8, 1)), []

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def validation_step(self, batch):
        self.log("val", self.net(batch).square().mean())

    def on_validation_epoch_end(self):
        self.seen.append(self.trainer.callback_metrics["val"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


how, path = sys.argv[1:]
average = {
    "EMAWeightAveraging": lambda one: one(decay=0.8),
    "StochasticWeightAveraging": lambda one: one(swa_lrs=0.02, swa_epoch_start=1),
}[how](getattr(callbacks, how))
torch.manual_seed(0)
torch.set_num_threads(1)
model, rows = Small().double(), torch.randn(32, 8).double()
ranks = "RANK" in os.environ
trainer = Trainer(
    strategy=PipelineStrategy(microbatches=2) if ranks else "auto",
    accelerator="cpu",
    devices=1,
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    num_sanity_val_steps=0,
    callbacks=[average],
)
batches = torch.utils.data.DataLoader(rows, batch_size=8)
trainer.fit(model, batches, batches)
trainer.save_checkpoint(path)
if os.environ.get("RANK", "0") == "0":
    saved = torch.load(path, weights_only=False)["state_dict"]
    print(json.dumps([model.seen, {name: one.tolist() for name, one in saved.items()}]))
"""


@pytest.mark.whole
@pytest.mark.parametrize("how", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_averages_are_those_of_one_device(tmp_path, how):
    """What is validated with them, and what is saved; within rounding, as a microbatch is half of
    what one device takes at once."""
    script = tmp_path / "averaging.py"
    script.write_text(AVERAGING)
    found = []
    for words in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        command = [*words, str(script), how, str(tmp_path / f"saved{len(found)}.ckpt")]
        code, out, error = bounded(command, 200)
        assert code == 0, error[-3000:]
        found.append(json.loads(out.strip().splitlines()[-1]))
    (seen, saved), (other_seen, other_saved) = found
    assert other_seen == pytest.approx(seen, rel=1e-6)
    for name, one in saved.items():
        torch.testing.assert_close(
            torch.tensor(other_saved[name]), torch.tensor(one), rtol=1e-6, atol=1e-9
        )
