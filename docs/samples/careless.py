"""A module and callbacks with waits for the device, as docs/sync_audit.md shows them."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_tricks import sync_audit


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = torch.nn.Linear(8, 1), []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class StopAtNaN(pl.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if any(p.grad.isnan().any() for p in pl_module.parameters()):
            trainer.should_stop = True


class LossLine(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % 10 == 0:
            print(f"step {trainer.global_step}: loss {outputs['loss']:.3f}")


def audit():
    data = DataLoader(torch.ones(100, 8), batch_size=2)
    options = {"accelerator": "cpu", "max_steps": 50, "log_every_n_steps": 10, "callbacks": [StopAtNaN(), LossLine()]}
    return sync_audit(Model(), data, options)


if __name__ == "__main__":
    print(audit())
