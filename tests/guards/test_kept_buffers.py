"""Buffers of skipped steps: as they were before the step's first forward pass, of every kind, on the device."""

import math
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness.runs import fit
from test_step_guard import BAD, EARLY, OPTIMIZERS, STEPS, ByHand, batches, loss_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from lightning_tricks import EMA, StepGuard, TailAverage
from lightning_tricks.guards.step_guard import KeptBuffers

SKIP, MAKE = torch.tensor(1.0), torch.tensor(0.0)


class Statistics(nn.Module):
    """Buffers as user code writes them: a count, a new tensor each time, by `.data`; and one that nobody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("codebook", torch.ones(3, 8))
        self.register_buffer("table", torch.arange(8.0).cos(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.codebook.data.mul_(0.9).add_(x.detach()[:3], alpha=0.1)
        return x + 0.1 * self.table


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Statistics(), parametrizations.spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)
    )


class Buffered(pl.LightningModule):
    """The batches of some steps are NaN; of an accumulated step, its last one."""

    def __init__(self, bad: tuple[int, ...] = (BAD,), optimizer: str = "fused AdamW") -> None:
        super().__init__()
        self.net, self.bad, self.optimizer = network(), bad, optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        every = self.trainer.accumulate_grad_batches
        last = batch_idx % every == every - 1
        return loss_of(self.net, batch * (math.nan if last and self.global_step in self.bad else 1.0))

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.net.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(batches(STEPS * 4), batch_size=None)


def without_the_steps(bad: tuple[int, ...], accumulate: int = 1, optimizer: str = "fused AdamW") -> dict[str, Tensor]:
    """The state of a plain loop that never sees the batches of some steps."""
    net = network()
    stepper = OPTIMIZERS[optimizer](net.parameters())
    data = iter(batches(STEPS * 4))
    for step in range(STEPS):
        stepper.zero_grad()
        own = [next(data) for _ in range(accumulate)]
        if step not in bad:
            for batch in own:
                (loss_of(net, batch) / accumulate).backward()
            stepper.step()
    return net.state_dict()


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def quietly(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(*args, **{"max_steps": STEPS, **options})


@pytest.mark.parametrize(("optimizer", "accumulate"), [("fused AdamW", 2), ("momentum", 1)])
@pytest.mark.parametrize("bad", [(0,), (1, BAD, BAD + 1)], ids=["the first", "some"])
def test_a_skipped_step_leaves_the_buffers_of_a_run_without_it(bad, accumulate, optimizer):
    model = Buffered(bad, optimizer)
    averages = [EMA(decay=0.9), TailAverage(horizon_steps=4, validate=False)]
    callbacks = averages[0], StepGuard(**EARLY), averages[1]
    quietly(model, *callbacks, accumulate_grad_batches=accumulate, log_every_n_steps=3)
    assert_equal(model.net.state_dict(), without_the_steps(bad, accumulate, optimizer))
    kept = [tensor for average in averages for term in average.terms.values() for tensor in term]
    assert len(kept) == 3 * len(averages[0].weights.tensors)
    assert all(tensor.isfinite().all() for tensor in kept)


def test_a_healthy_run_and_a_graph_that_lives_on_see_no_write():
    net = network()
    kept = KeptBuffers(net)
    kept.save()
    loss = loss_of(net, batches(1)[0])
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    kept.put_back(MAKE)
    assert_equal(dict(net.named_buffers()), before)
    loss.backward()  # the graph has saved running statistics and tables


def test_by_hand_the_other_optimizers_forward_passes_stay():
    model = ByHand(network)
    quietly(model, StepGuard(**EARLY), max_steps=2 * STEPS)
    assert_equal(model.one.state_dict(), without_the_steps(()))
    assert_equal(model.two.state_dict(), without_the_steps((BAD,)))


def test_buffers_of_any_dtype_and_shape_come_back():
    module = nn.Module()
    dtypes = [torch.float64, torch.bfloat16, torch.complex128, torch.bool, torch.uint8, torch.float8_e4m3fn]
    for index, dtype in enumerate(dtypes):
        module.register_buffer(f"b{index}", torch.ones(3, 1, 2, dtype=torch.float32).to(dtype)[::2])
    kept = KeptBuffers(module)
    kept.save()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for buffer in module.buffers():
        buffer.copy_(torch.zeros_like(buffer))
    kept.put_back(MAKE)
    assert all(not buffer.to(torch.complex128).any() for buffer in module.buffers())
    kept.put_back(SKIP)
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer.view(torch.uint8), before[name].view(torch.uint8))


def test_caches_that_grow_and_buffers_that_come_later_are_not_in_the_way():
    module = nn.Module()
    module.register_buffer("cache", torch.zeros(2))
    module.register_buffer("later", None)
    module.register_buffer("expanded", torch.zeros(1).expand(3))
    module.register_buffer("sum", torch.zeros(2))
    kept = KeptBuffers(module)
    kept.save()
    module.cache, module.later = torch.ones(4), torch.ones(3)
    module.sum += 1
    kept.put_back(SKIP)
    assert (module.cache == 1).all()
    assert (module.sum == 0).all()
    kept.save()
    module.cache += 1
    module.later += 1
    kept.put_back(SKIP)
    assert (module.cache == 1).all()
    assert (module.later == 1).all()
