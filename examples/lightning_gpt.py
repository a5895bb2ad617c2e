"""Trains a small GPT with Lightning's Trainer on pipeline ranks; two lines are Pfeife's.

torchrun --nproc-per-node 2 examples/lightning_gpt.py    two pipeline ranks
python examples/lightning_gpt.py --one-device            without Pfeife: the same model, to the bit
"""

import argparse
import json

import torch
import torch.nn.functional as F
from gpt import GPT
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from pfeife.integrations.lightning import PipelineStrategy  # one


class Language(LightningModule):
    def __init__(self):
        super().__init__()
        self.gpt, self.lines = GPT(context=16, words=64, width=32, depth=2), []

    def training_step(self, text, index):
        found = self.gpt(text[:, :-1])
        loss = F.cross_entropy(found.flatten(0, 1), text[:, 1:].flatten())
        self.log_dict({"loss": loss, "hits": (found.argmax(-1) == text[:, 1:]).float().mean()})
        return loss

    def validation_step(self, text, index):
        found = self.gpt(text[:, :-1])
        self.log("eval", F.cross_entropy(found.flatten(0, 1), text[:, 1:].flatten()))

    def on_train_batch_end(self, *_):
        self.lines.append({name: one.item() for name, one in self.trainer.logged_metrics.items()})

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


if __name__ == "__main__":
    told = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told.add_argument("--one-device", action="store_true", help="accumulates what is cut otherwise")
    told.add_argument("--save", help="a folder for checkpoints")
    told.add_argument("--resume", help="a checkpoint")
    told.add_argument("--lengths", action="store_true", help="each batch has a length of its own")
    options = told.parse_args()
    torch.set_num_threads(1)  # the same kernels, and so the same bits
    torch.manual_seed(0)
    module, text, cut = Language(), torch.randint(64, (32, 17)), 4 if options.one_device else 1
    ends = (17, 13, 16, 9) if options.lengths else (17,) * 4  # of 8 rows each
    rows = [row[: ends[index // 8]] for index, row in enumerate(text)]
    trainer = Trainer(
        strategy="auto" if cut > 1 else PipelineStrategy(microbatches=4, stages=2),  # two
        accelerator="cpu", devices=1, max_epochs=3, gradient_clip_val=0.5, log_every_n_steps=1,
        accumulate_grad_batches=cut, enable_progress_bar=False, logger=False,
        callbacks=[ModelCheckpoint(options.save, save_top_k=-1 if options.save else 0)],
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, 8 // cut), DataLoader(rows, 8), ckpt_path=options.resume)
    print(f"rank {trainer.global_rank} has logged {json.dumps(module.lines)}")
