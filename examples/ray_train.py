"""Ray Train starts the processes, keeps the checkpoints and starts failed workers again; FSDP2Strategy shards.

`pip install -e '.[ray]'` in the clone, then `python examples/ray_train.py --epochs 2`. The same command with more
epochs goes on from the newest checkpoint that Ray has kept under `--storage`.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray.train
import torch
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from ray.train.torch import TorchTrainer

import lightning_tricks as lt


class Autoencoder(pl.LightningModule):
    """Four layers that reverse a vector; any module will do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Squared error, averaged over the epoch and the workers."""
        hidden = batch
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        loss = torch.nn.functional.mse_loss(hidden, batch.flip(-1))
        self.log("train/loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; it sees the shards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(settings: dict[str, Any]) -> None:
    """Run in each worker."""
    pl.seed_everything(0)
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    context = ray.train.get_context()
    trainer = pl.Trainer(
        accelerator="auto",
        devices=context.get_local_world_size(),
        num_nodes=context.get_world_size() // context.get_local_world_size(),
        strategy=lt.FSDP2Strategy(save_distributed_checkpoint=False),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        max_epochs=settings["epochs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = torch.utils.data.DataLoader(rows, batch_size=8)
    if (checkpoint := ray.train.get_checkpoint()) is None:
        trainer.fit(Autoencoder(), data)
        return
    with checkpoint.as_directory() as folder:
        trainer.fit(Autoencoder(), data, ckpt_path=str(Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--storage", default="ray_runs", help="a folder that all hosts share, or an address")
    given = parser.parse_args()
    result = TorchTrainer(
        train,
        train_loop_config={"epochs": given.epochs},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(
            name="autoencoder",
            storage_path=str(Path(given.storage).resolve()),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    ).fit()
    print(f"step {result.metrics['step']}, loss {result.metrics['train/loss']!r}, {result.checkpoint.path}")
