"""The mean over tokens across ranks: two processes with ragged rows take the step that one process takes."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import two_processes
from torch.utils.data import DataLoader

from lightning_tricks._errors import UsageError
from lightning_tricks.mixins import TokenMeanMixin
from lightning_tricks.mixins.token_mean_mixin import scale_gradients

TARGETS = torch.randint(0, 5, (8, 6), generator=torch.Generator().manual_seed(3))
for _row in range(8):
    TARGETS[_row, 1 + (_row * 5) % 6 :] = -100


class Foreign(TokenMeanMixin, pl.LightningModule):
    """A module that is none of ours."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(6, 5)

    def training_step(self, batch, batch_idx):
        logits = self.table(torch.arange(6)).expand(len(batch), 6, 5)
        nats = F.cross_entropy(logits.reshape(-1, 5), batch.flatten(), ignore_index=-100, reduction="sum")
        return self.token_mean(nats, (batch != -100).sum(), capacity=batch.numel())

    def on_train_batch_end(self, *_):
        self.mean = self.step_mean().item()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(batches: list[torch.Tensor], **kwargs) -> Foreign:
    model = Foreign()
    pl.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, **kwargs,
    ).fit(model, DataLoader(batches, batch_size=None))  # fmt: skip
    return model


def save_two(rank: int, folder: str) -> None:
    model = fit([TARGETS[4 * rank : 4 * rank + 2], TARGETS[4 * rank + 2 : 4 * rank + 4]],
                devices=2, strategy="ddp", accumulate_grad_batches=2)  # fmt: skip
    torch.save((model.table.weight.detach(), model.mean), Path(folder) / f"{rank}.pt")


@pytest.mark.slow
def test_two_ragged_ranks_with_accumulation_take_the_step_of_one_process(tmp_path):
    whole = fit([TARGETS], devices=1)
    two_processes.run(save_two, str(tmp_path))
    for rank in range(2):
        weight, mean = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(weight, whole.table.weight.detach(), rtol=1e-6, atol=1e-7)
        assert mean == pytest.approx(whole.mean, rel=1e-6)


def test_sums_start_anew_with_each_step():
    one = fit([TARGETS[:2], TARGETS[2:4]], devices=1, accumulate_grad_batches=2)
    assert one._step_over
    one.token_mean(torch.tensor(3.0), torch.tensor(2), 10)
    assert one._step_nats.item() == 3.0
    one.token_mean(torch.tensor(4.0), torch.tensor(1), 10)
    assert (one._step_nats.item(), one._step_tokens.item()) == (7.0, 3)
    one._step_over = True
    one.token_mean(torch.tensor(5.0), torch.tensor(1), 10)
    assert one._step_nats.item() == 5.0


def test_behind_the_lightning_module_it_is_refused():
    with pytest.raises(UsageError, match="put TokenMeanMixin before the LightningModule"):
        type("Late", (pl.LightningModule, TokenMeanMixin), {})


def test_gradients_are_scaled_in_place():
    gradients = [torch.ones(2), torch.full((3,), 2.0)]
    scale_gradients(gradients, torch.tensor(0.5))
    assert gradients[0].tolist() == [0.5, 0.5]
    assert gradients[1].tolist() == [1.0, 1.0, 1.0]
    scale_gradients([], torch.tensor(0.5))
