"""The mean over tokens across ranks: two processes with ragged rows take the step that one process takes."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from harness import processes, runs
from harness.models import batches
from harness.offloaded import on_device

from lightning_tricks._core.errors import UsageError
from lightning_tricks.mixins import TokenMeanMixin

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


def fit(parts: list[torch.Tensor], **options) -> tuple[torch.Tensor, float]:
    """Its weights after a step, and the step's mean."""
    model = Foreign()
    runs.fit(model, data=batches(parts), max_steps=1, use_distributed_sampler=False, **options)
    return model.table.weight.detach(), model.mean


def one_of_two(rank: int) -> tuple[torch.Tensor, float]:
    parts = TARGETS[4 * rank : 4 * rank + 4].split(2)
    return fit(parts, devices=2, strategy="ddp", accumulate_grad_batches=2)


@pytest.mark.long
def test_two_ragged_ranks_with_accumulation_take_the_step_of_one_process():
    whole, whole_mean = fit([TARGETS])
    for weight, mean in processes.run(one_of_two):
        torch.testing.assert_close(weight, whole, rtol=1e-6, atol=1e-7)
        assert mean == pytest.approx(whole_mean, rel=1e-6)


def test_gradients_on_the_host_are_scaled_by_tokens_that_were_counted_on_the_device():
    """As under FSDP2 with cpu_offload: 12 of capacity x 2 micro-batches by 4 tokens are a factor of 6."""
    model = Foreign()
    reduce = lambda value, reduce_op: value  # noqa: E731
    model._trainer = SimpleNamespace(  # type: ignore[assignment]
        accumulate_grad_batches=2, world_size=1, strategy=SimpleNamespace(reduce=reduce)
    )
    model._capacity, model._step_sums = 12, (on_device(1.0), on_device(4.0))
    model.table.weight.grad = torch.ones(6, 5)
    model._scale()
    assert torch.equal(model.table.weight.grad, torch.full((6, 5), 6.0))


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
    options = {"max_epochs": 1, "max_steps": -1, "accumulate_grad_batches": 2, **options}
    runs.fit(model, data=batches(torch.tensor(tokens)), **options)
    return model.gradients


def fail(model: Counter) -> None:
    raise RuntimeError("power cut")


def stop(model: Counter) -> torch.Tensor:
    model.trainer.should_stop = True
    return model.weight * 0.0


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
    skip = lambda model: None  # noqa: E731
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


def test_a_strategy_that_lets_nobody_scale_the_gradients_is_refused():
    model = Counter()
    strategy = type("DeepSpeedStrategy", (), {})()
    model._step_sums = model.weight, model.weight
    model._trainer = SimpleNamespace(strategy=strategy, accumulate_grad_batches=1, world_size=1)
    model._scale()  # one micro-batch on one device has the plain mean
    model._trainer.accumulate_grad_batches = 2
    with pytest.raises(UsageError, match=r"^TokenMeanMixin: DeepSpeedStrategy leaves .*: take DeepSpeedZeROStrategy$"):
        model._scale()


def test_manual_optimization_with_several_ranks_is_refused(monkeypatch):
    model = Foreign()
    model.automatic_optimization = False
    monkeypatch.setattr(model, "_splits", lambda: 2)
    with pytest.raises(UsageError, match="automatic_optimization=False: token_mean cannot tell where a step of 2"):
        model.token_mean(torch.ones(()), torch.ones(()), capacity=1)
