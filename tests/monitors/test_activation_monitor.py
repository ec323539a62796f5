"""Activations: the figures worked out by hand, of the right run of the right micro-batch, and nothing else changed."""

import math
from collections import OrderedDict

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from harness.models import Decoding
from harness.runs import decoding, fit, same_training, warned
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import ActivationMonitor, AttentionMonitor
from lightning_tricks.monitors.activation_monitor import activation_stats, first_tensor

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_figures_of_six_numbers(dtype):
    # squares 9 + 16 + 0 + 0 + 0 + 144 = 169; 13 / sqrt(6)
    stats = activation_stats(torch.tensor([[3.0, 4.0, 0.0], [0.0, -0.0, -12.0]], dtype=dtype))
    torch.testing.assert_close(stats, torch.tensor([13 / 6**0.5, 12.0, 0.5, 0.0]))
    assert stats.dtype == torch.float32


def test_half_precision_is_summed_in_fp32():
    # 1000 squared times 4 overflows fp16; 4096 ones add up to 256 in bf16
    assert activation_stats(torch.full((4,), 1000.0, dtype=torch.float16))[0] == 1000.0
    assert activation_stats(torch.ones(4096, dtype=torch.bfloat16))[0] == 1.0


@pytest.mark.parametrize(
    ("numbers", "rms", "max_abs", "share"),
    [
        ([1.0, NAN, INF, -INF], NAN, NAN, 0.75),
        ([1.0, -INF, 1.0, 1.0], INF, INF, 0.25),
        ([1.0, 1.0, 1.0, NAN], NAN, NAN, 0.25),
    ],
)
def test_non_finite_numbers_are_counted_and_show_in_the_size(numbers, rms, max_abs, share):
    found = activation_stats(torch.tensor(numbers)).tolist()
    assert found == pytest.approx([rms, max_abs, 0.0, share], nan_ok=True)


X = torch.ones(2)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (X, X),
        ((torch.tensor([1]), None, X), X),
        ([torch.empty(0), X], X),
        (OrderedDict(loss=None, hidden=((X, torch.zeros(2)),)), X),
        (torch.tensor([1]), None),
        (None, None),
        ("text", None),
        ((), None),
        (torch.nested.nested_tensor([X, X]), None),
        (torch.ones(2).to_sparse(), None),
    ],
)
def test_the_first_floating_point_tensor_of_an_output(output, expected):
    found = first_tensor(output)
    assert (found is None) if expected is None else torch.equal(found, expected)


class Doubling(pl.LightningModule):
    """Two blocks: the first doubles its input, the second sends it through a ReLU; batch b is filled with b + 1."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        for block, sign in zip(self.blocks, (2.0, -1.0), strict=True):
            nn.init.eye_(block.weight)
            block.weight.data.mul_(sign)
        self.again = again

    def training_step(self, batch, batch_idx):
        first = checkpoint(self.blocks[0], batch, use_reentrant=False)
        if self.again:
            self.blocks[0](100 * batch)
        second = self.blocks[1](first)
        return (first + second).sum()

    def validation_step(self, batch, batch_idx):
        self.blocks[0](1000 * batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self):
        batches = torch.arange(1.0, 13.0)[:, None, None].expand(-1, 3, 2).contiguous()
        return DataLoader(list(batches), batch_size=None)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("again", [False, True])
def test_log_steps_show_the_last_micro_batch_and_the_first_run_of_the_block(again):
    # batches are filled with 1, 2, 3, ...; a step takes 3 and every second step is logged: batches 6 and 12
    run = fit(
        Doubling(again), ActivationMonitor(), accumulate_grad_batches=3, val_check_interval=6, limit_val_batches=1
    )
    assert [step for step, _ in run.rows] == [1, 3]
    assert run.of("activations/blocks.0/rms") == [12.0, 24.0]
    assert run.of("activations/blocks.1/max_abs") == [12.0, 24.0]
    assert run.of("activations/blocks.1/zero_fraction") == [0.0, 0.0]
    assert run.of("activations/blocks.0/nonfinite_fraction") == [0.0, 0.0]
    assert len(run.names()) == 8


def test_nothing_is_computed_but_in_the_last_micro_batch_of_log_steps(monkeypatch):
    import lightning_tricks.monitors.activation_monitor as module

    calls = []
    monkeypatch.setattr(module, "activation_stats", lambda x: calls.append(x) or activation_stats(x))
    fit(Doubling(), ActivationMonitor(), max_steps=7, log_every_n_steps=3, accumulate_grad_batches=2)
    assert len(calls) == 2 * 3  # two blocks; steps 3 and 6, and the last; the second micro-batch


def test_named_submodules_are_watched_instead_of_the_blocks():
    run = decoding(ActivationMonitor([r"model\.blocks\.1\.mlp", "model.embed"]))
    stats = ("rms", "max_abs", "zero_fraction", "nonfinite_fraction")
    assert run.names() == {f"activations/model.{m}/{s}" for m in ("blocks.1.mlp", "embed") for s in stats}


def test_a_pattern_that_matches_nothing_ends_the_fit_in_one_line():
    with pytest.raises(UsageError, match=r"ActivationMonitor\.blocks: pattern 'layers' matches no submodule"):
        decoding(ActivationMonitor(["layers"]))


def test_a_block_that_did_not_run_has_no_figures():
    class Skipping(Doubling):
        def training_step(self, batch, batch_idx):
            return self.blocks[0](batch).sum()

    names = fit(Skipping(), ActivationMonitor()).names()
    assert {name.split("/")[1] for name in names} == {"blocks.0"}
    assert len(names) == 4


def test_blocks_inside_a_compiled_whole_give_one_line_a_monitor_and_one_graph():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with warned("records nothing") as lines, torch._dynamo.config.patch(error_on_recompile=True):
        run = decoding(ActivationMonitor(), AttentionMonitor(), compiled="whole", backend="eager", max_steps=6)
    assert sorted(lines) == [
        "ActivationMonitor records nothing: its blocks are inside a model that is compiled as a whole; "
        "if you use torch.compile, compile each block",
        "AttentionMonitor records nothing: its blocks are inside a model that is compiled as a whole; "
        "compile each block instead",
    ]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert run.names() == set()


def test_blocks_inside_a_compiled_function_give_one_line_and_train_the_same():
    class Hidden(Decoding):
        def __init__(self):
            super().__init__()
            self.forward = torch.compile(self.model.forward, backend="eager")

        def training_step(self, batch, batch_idx):
            return self.forward(batch).square().mean()

    torch.compiler.reset()
    plain = fit(Hidden(), max_steps=6)
    with warned("records nothing") as lines:
        watched = fit(Hidden(), ActivationMonitor(), AttentionMonitor(), max_steps=6)
    assert same_training(plain, watched)
    assert watched.names() == set()
    assert len(lines) == 2
    assert any("no block (model.blocks.0, ...) ran where it can be seen" in line for line in lines)


class Ranks(Doubling):
    """Rank 1 alone divides by zero."""

    def training_step(self, batch, batch_idx):
        x = batch.clone()
        x[0] = x[0] / (1 - self.global_rank)
        with torch.no_grad():  # so that the weights stay finite
            self.blocks[0](x)
        return self.blocks[1](batch).sum() + 0 * self.blocks[0].weight.sum()


def trouble_on_one_rank(rank):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    run = fit(Ranks(), ActivationMonitor(), devices=2, strategy="ddp", use_distributed_sampler=False)
    whole = torch.arange(4.0)
    shards = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    assert torch.equal(first_tensor((shards,)), whole[2 * rank : 2 * rank + 2])
    return run.of("activations/blocks.0/nonfinite_fraction"), run.of("activations/blocks.0/rms")


@pytest.mark.long
def test_trouble_on_any_rank_shows():
    (lost, sizes), (also_lost, _) = processes.run(trouble_on_one_rank)
    assert lost == also_lost == pytest.approx([1 / 3, 1 / 3])  # rank 1 lost one of three rows
    assert sizes == [4.0, 8.0]
