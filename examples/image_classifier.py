"""A small convolutional network on images of stripes, under a plain Trainer: three lines are added to watch the run.

    python examples/image_classifier.py
    tensorboard --logdir lightning_logs

It takes seconds on a CPU and downloads nothing: the class of an image is the direction of its stripes. The progress
line shows loss, gradient norm, learning rate, samples/s and MFU; TensorBoard has the same as curves.
"""

import math

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt  # added: 1 of 3

CLASSES, SIZE = 8, 32


def stripes(n: int, seed: int) -> TensorDataset:
    """Noisy stripes, (n, 1, SIZE, SIZE), and the index of their direction, (n,)."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=rng)
    angle = (math.pi / CLASSES * labels)[:, None, None]
    phase = 2 * math.pi * torch.rand(n, 1, 1, generator=rng)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    images = torch.sin(0.8 * (x * angle.cos() + y * angle.sin()) + phase)
    return TensorDataset((images + torch.randn(n, SIZE, SIZE, generator=rng))[:, None], labels)


class ImageClassifier(pl.LightningModule):
    """Two convolutions and a linear layer."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 6 * 6, CLASSES),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        """Cross-entropy of a batch."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        """Cross-entropy and accuracy."""
        images, labels = batch
        logits = self.net(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        """AdamW, warmed up over 20 steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def main() -> None:
    """Train for four epochs."""
    pl.seed_everything(0)
    watch = [lt.TrainingProgressBar(), lt.GradNormMonitor(), lt.LRMonitor(), lt.MFUMonitor(), lt.MemoryMonitor()]  # 2
    trainer = pl.Trainer(
        max_epochs=4,
        log_every_n_steps=10,
        gradient_clip_val=1.0,
        accelerator="cpu",
        devices=1,
        callbacks=[*watch, lt.TensorBoardDashboard("val_loss")],  # 3
    )
    training = DataLoader(stripes(2048, seed=0), batch_size=64, shuffle=True)
    trainer.fit(ImageClassifier(), training, DataLoader(stripes(512, seed=1), batch_size=64))


if __name__ == "__main__":
    main()
