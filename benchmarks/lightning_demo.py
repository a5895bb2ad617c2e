"""An ordinary Lightning script: its own demo's Transformer on a file of text. `scripts.py` runs it
as it is and on pipeline ranks."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2
from torch.utils.data import DataLoader


class Demo(LightningTransformer):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def prepare_data(self):
        """There is nothing to download."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.print("loss", self.trainer.callback_metrics["loss"].item())


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = WikiText2(Path(sys.argv[1]), download=False)
    model = Demo(vocab_size=data.vocab_size)
    for module in model.modules():  # no two ways to run a model draw alike
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(module, torch.nn.MultiheadAttention):
            module.dropout = 0.0
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=30, logger=False)
    trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True, drop_last=True))
