"""The mean over tokens across ranks: two processes with ragged rows take the step that one process takes."""

from pathlib import Path
from typing import Any

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


class Counter(TokenMeanMixin, pl.LightningModule):
    """Each token of a batch costs `weight` nats, so the gradient of every step is exactly 1, whatever the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.0))
        self.gradients: list[float] = []
        self.batches = 0
        self.at: dict[int, Any] = {}

    def training_step(self, batch, batch_idx):
        self.batches += 1
        loss = self.token_mean(self.weight * batch.sum(), batch.sum().long(), capacity=9)
        return loss if self.batches not in self.at else self.at[self.batches](self)

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.gradients.append(self.weight.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def count(model: Counter, tokens: list[float], **options) -> list[float]:
    """Gradients of the steps of one fit, two batches each where nothing ends them earlier."""
    model.gradients, model.batches = [], 0
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    pl.Trainer(
        accelerator="cpu", accumulate_grad_batches=2, enable_model_summary=False, **quiet,
        **{"max_epochs": 1, **options},
    ).fit(model, DataLoader(torch.tensor(tokens), batch_size=None))  # fmt: skip
    return model.gradients


def fail(model: Counter) -> None:
    raise RuntimeError("power cut")


def stop(model: Counter) -> torch.Tensor:
    model.trainer.should_stop = True
    return model.weight * 0.0


def skip(model: Counter) -> None:
    return None


def test_a_window_that_an_exception_cut_short_leaves_nothing_to_the_next_fit():
    model = Counter()
    for at in (2, 3):  # in a window's second batch, and in its first
        model.at = {at: fail}
        with pytest.raises(RuntimeError, match="power cut"):
            count(model, [1, 2, 3, 4])
        model.at = {}
        assert count(model, [2, 1, 5, 3]) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("cut", [{"limit_train_batches": 3}, {"max_steps": 1}, {"max_time": "00:00:00:00"}])
def test_the_first_step_of_a_second_fit_is_right_after_a_first_one_that_was_cut(cut):
    model = Counter()
    count(model, [1, 2, 3, 4], **cut)
    assert all(gradient == pytest.approx(1.0) for gradient in model.gradients)
    assert count(model, [2, 1, 5, 3]) == pytest.approx([1.0, 1.0])


def test_a_fit_that_was_told_to_stop_in_mid_window_leaves_nothing():
    model = Counter()
    model.at = {1: stop}
    assert count(model, [1, 2, 3, 4]) == []
    model.at = {}
    assert count(model, [2, 1, 5, 3]) == pytest.approx([1.0, 1.0])


def test_a_micro_batch_that_the_training_step_skips_does_not_count():
    model = Counter()
    model.at = {1: skip, 4: skip}  # a window's first batch, and one that is its last
    assert count(model, [1, 2, 3, 4]) == pytest.approx([1.0, 1.0])


def test_a_loss_that_is_no_token_mean_is_left_as_it_is():
    class Plain(Counter):
        def training_step(self, batch, batch_idx):
            return self.weight * batch

    assert count(Plain(), [1, 2, 3, 5]) == [1.5, 4.0]  # Lightning's mean over the micro-batches


def test_another_number_of_tokens_to_a_batch_in_a_second_fit_is_as_right_as_the_first():
    model = Counter()
    assert count(model, [1, 2]) == pytest.approx([1.0])
    assert model.step_mean().item() == 0.0
    assert count(model, [900, 100]) == pytest.approx([1.0])


def test_behind_the_lightning_module_it_is_refused():
    with pytest.raises(UsageError, match="put TokenMeanMixin before the LightningModule"):
        type("Late", (pl.LightningModule, TokenMeanMixin), {})


def test_gradients_are_scaled_in_place():
    gradients = [torch.ones(2), torch.full((3,), 2.0)]
    scale_gradients(gradients, torch.tensor(0.5))
    assert gradients[0].tolist() == [0.5, 0.5]
    assert gradients[1].tolist() == [1.0, 1.0, 1.0]
    scale_gradients([], torch.tensor(0.5))
