"""The logged norm: every step's own, before the clip, of the whole gradient, however it is accumulated or sharded."""

import math
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from harness.runs import On, fit, same_training
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_tricks.callbacks import GradNormMonitor
from lightning_tricks.mixins import GradientClippingMixin
from lightning_tricks.monitors.grad_norm_monitor import interval_figures, parameters_by_block


class Net(pl.LightningModule):
    """A small residual network whose gradients differ much from step to step."""

    def __init__(self, optimizer=torch.optim.SGD, **kwargs):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.optimizer_class, self.kwargs = optimizer, kwargs

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self(x) - y).square().mean()

    def configure_optimizers(self):
        return self.optimizer_class(self.parameters(), **{"lr": 0.05, **self.kwargs})


class Clipping(GradientClippingMixin, Net):
    pass


class Sharded(Net):
    def configure_model(self):
        for part in (*self.blocks, self):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


class Reference(pl.Callback):
    """torch's norm of the gradients just before the clip, step by step."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad.clone() for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())


def data(batch_size, rank=None):
    """Sixteen batches of four; on a rank of two, its half of each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator) * torch.linspace(0.1, 2, 64)[:, None]
    rows = TensorDataset(x, x.sum(-1, keepdim=True) ** 2)
    sampler = None if rank is None else DistributedSampler(rows, num_replicas=2, rank=rank, shuffle=False)
    return DataLoader(rows, batch_size=batch_size, sampler=sampler)


def train(model, *callbacks, batch_size=4, rank=None, **options):
    return fit(model, *callbacks, data=data(batch_size, rank), **{"max_steps": 6, "log_every_n_steps": 4, **options})


CLIPS = [
    {"gradient_clip_val": 0.5},
    {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    {"gradient_clip_val": None},
]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("clip", CLIPS, ids=["norm", "value", "none"])
@pytest.mark.parametrize("kind", [Net, Clipping])
def test_every_steps_norm_is_torchs_before_the_clip(kind, clip, accumulate):
    reference = Reference()
    options = {**clip, "accumulate_grad_batches": accumulate, "max_steps": 4}
    run = train(kind(), reference, GradNormMonitor(), **options)
    assert run.at("train/grad_norm") == dict(enumerate(reference.norms))
    assert len(set(reference.norms)) == 4  # a stale value would repeat
    assert all(norm > 0.5 for norm in reference.norms)


def test_the_clip_gets_the_norm_and_needs_no_second_pass():
    real = torch.nn.utils.get_total_norm
    measuring, clipping = (
        patch("torch.nn.utils.get_total_norm", side_effect=real),
        patch("torch.nn.utils.clip_grad_norm_"),
    )
    with measuring as measured, clipping as lightnings:
        train(Net(), GradNormMonitor(), gradient_clip_val=0.5)
    assert measured.call_count == 6
    lightnings.assert_not_called()


def test_what_the_interval_says_together():
    assert interval_figures([1.0, 3.0, 2.0, 0.5], 1.5) == {
        "train/nonfinite_grad_norms": 0.0,
        "train/clipped_fraction": 0.5,
    }
    nan, inf = math.nan, math.inf
    assert interval_figures([nan, inf, 2.0], 1.5) == {"train/nonfinite_grad_norms": 2.0, "train/clipped_fraction": 1.0}
    assert interval_figures([nan], 1.5) == {"train/nonfinite_grad_norms": 1.0}
    assert interval_figures([2.0], None) == {"train/nonfinite_grad_norms": 0.0}


@pytest.mark.parametrize("kind", [Net, Clipping])
def test_the_fraction_of_clipped_steps_belongs_to_its_interval(kind):
    run = train(kind(), GradNormMonitor(), gradient_clip_val=1.0)
    norms = run.at("train/grad_norm")
    share = lambda steps: sum(norms[step] > 1.0 for step in steps) / len(steps)  # noqa: E731
    assert run.at("train/clipped_fraction") == {3: share(range(4)), 5: share((4, 5))}


@pytest.mark.parametrize("kind", [Net, Clipping])
@pytest.mark.parametrize("clip", [CLIPS[1], CLIPS[2]], ids=["value", "none"])
def test_without_a_clip_by_norm_no_fraction_is_claimed(kind, clip):
    run = train(kind(), GradNormMonitor(), **clip)
    assert not run.at("train/clipped_fraction")
    assert run.at("train/nonfinite_grad_norms") == {3: 0.0, 5: 0.0}


def test_a_step_with_a_nan_is_counted_and_logged():
    class Poisoned(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 5 else 1.0)

    run = train(Poisoned(), GradNormMonitor(), gradient_clip_val=1.0)
    assert math.isnan(run.at("train/grad_norm")[5])
    assert run.at("train/nonfinite_grad_norms") == {3: 0.0, 5: 1.0}


def fp16(scale):
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3))


@pytest.mark.parametrize("clip", [{"gradient_clip_val": 0.5}, {}], ids=["clip", "free"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_under_fp16_the_norm_is_that_of_unscaled_gradients(optimizer, clip):
    reference = Reference()  # Lightning has unscaled by then
    run = train(Net(optimizer, lr=1e-3), reference, GradNormMonitor(), plugins=[fp16(16.0)], **clip)
    assert run.at("train/grad_norm") == dict(enumerate(reference.norms))
    assert same_training(run, train(Net(optimizer, lr=1e-3), plugins=[fp16(16.0)], **clip))


def test_under_fp16_with_a_fused_optimizer_which_unscales_in_its_step():
    kwargs = {"optimizer": torch.optim.AdamW, "fused": True, "lr": 0.0}
    run = train(Net(**kwargs), GradNormMonitor(per="block"), plugins=[fp16(16.0)])
    plain = train(Net(**kwargs), GradNormMonitor(per="block"), plugins=[fp16(1.0)])
    for name in ("train/grad_norm", "grad_norms/head"):
        assert plain.at(name)
        assert run.at(name) == pytest.approx(plain.at(name), rel=2e-3)  # fp16's ten bits, not 16


def test_blocks_and_groups_are_named_and_make_up_the_whole():
    class Grouped(Net):
        def configure_optimizers(self):
            matrices = [p for p in self.parameters() if p.dim() > 1]
            rest = [p for p in self.parameters() if p.dim() < 2]
            return torch.optim.SGD([{"params": matrices, "name": "decay"}, {"params": rest}], lr=0.05)

    for per, names in (("block", ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]), ("group", ["decay", "1"])):
        run = train(Grouped(), GradNormMonitor(per=per), gradient_clip_val=0.5)
        for step in (3, 5):
            parts = {name: norm for name, norm in run.rows[step][1].items() if name.startswith("grad_norms/")}
            assert list(parts) == [f"grad_norms/{name}" for name in names]
            assert math.hypot(*parts.values()) == pytest.approx(run.at("train/grad_norm")[step], rel=1e-6)
        assert not any(name.startswith("grad_norms/") for name in run.rows[4][1])  # on log steps only


class Adversaries(Net):
    """Two optimizers in manual optimization; one clips through Lightning, the other does not."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.seen = {0: [], 1: []}

    def training_step(self, batch, batch_idx):
        for index, (optimizer, part) in enumerate(zip(self.optimizers(), (self.blocks, self.head), strict=True)):
            optimizer.zero_grad()
            self.manual_backward(Net.training_step(self, batch, batch_idx))
            self.seen[index].append(torch.nn.utils.get_total_norm([p.grad for p in part.parameters()]).item())
            if index == 0:
                self.clip_gradients(optimizer, 0.01, "norm")
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.blocks, self.head)]


def test_several_optimizers_in_manual_optimization_have_a_norm_each():
    model = Adversaries()
    run = train(model, GradNormMonitor(per="group"), max_steps=12)
    for index in (0, 1):
        assert run.at(f"train/grad_norm/{index}") == dict(enumerate(model.seen[index]))
    assert list(run.at("grad_norms/1/0")) == [3, 5]  # each fourth step, and the last
    assert not run.at("train/grad_norm")
    assert same_training(run, train(Adversaries(), max_steps=12))


class Critic(Net):
    """Steps one optimizer three times in a batch, as a WGAN-GP's critic does."""

    factors = (0.1, 0.4, 0.2)

    def __init__(self, clips=False):
        super().__init__()
        self.automatic_optimization, self.clips, self.seen = False, clips, []

    def training_step(self, batch, batch_idx):
        optimizer, norms = self.optimizers(), []
        for factor in self.factors:
            optimizer.zero_grad()
            self.manual_backward(factor * super().training_step(batch, batch_idx))
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())
            if self.clips:
                self.clip_gradients(optimizer, 0.01, "norm")
            optimizer.step()
        self.seen.append(max(norms))


@pytest.mark.parametrize("clips", [True, False])
def test_of_several_steps_of_one_optimizer_in_a_batch_the_largest_norm_is_logged(clips):
    model = Critic(clips)
    run = train(model, GradNormMonitor(), max_steps=12)
    assert len(model.seen) == 4
    assert list(run.at("train/grad_norm").values()) == pytest.approx(model.seen, rel=1e-6)
    assert same_training(run, train(Critic(clips), max_steps=12))


def test_a_norm_that_is_not_finite_is_the_batchs_whichever_step_has_it():
    class Bad(Critic):
        factors = (1.0, math.nan, 0.0)

    run = train(Bad(), GradNormMonitor(), max_steps=3)
    assert math.isnan(run.at("train/grad_norm")[0])


def test_of_the_gradients_that_lbfgs_asks_for_in_a_step_the_largest_norm_is_logged():
    reference, seen = Reference(), []
    net = Net(torch.optim.LBFGS, lr=0.1, max_iter=3)

    def keep_largest(*_):
        seen.append(max(reference.norms))
        reference.norms.clear()

    run = train(net, reference, GradNormMonitor(), On(on_train_batch_end=keep_largest))
    assert list(run.at("train/grad_norm").values()) == pytest.approx(seen, rel=1e-6)


@pytest.mark.parametrize("clips", [True, False])
def test_in_manual_optimization_what_is_still_scaled_is_logged_unscaled(clips):
    class Manual(Net):
        def __init__(self):
            super().__init__(torch.optim.AdamW, lr=0.0, fused=not clips)  # a fused one unscales in its step
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            if clips:
                self.clip_gradients(optimizer, 1e9, "norm")
            optimizer.step()

    run = train(Manual(), GradNormMonitor(), plugins=[fp16(16.0)])
    plain = train(Manual(), GradNormMonitor(), plugins=[fp16(1.0)])
    assert run.at("train/grad_norm") == pytest.approx(plain.at("train/grad_norm"), rel=2e-3)


def test_a_compiled_block_keeps_its_name():
    model = Net()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    parts = parameters_by_block(model, model.parameters())
    assert list(parts) == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [len(part) for part in parts.values()] == [2, 4, 4, 4, 2]


STRATEGIES = {
    "ddp": (Net, lambda: DDPStrategy(process_group_backend="gloo")),
    "fsdp2": (Sharded, lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)),
}


CASES = [(clip, accumulate) for clip in (CLIPS[0], CLIPS[2]) for accumulate in (1, 4)]


def rows_of_a_rank(rank, kind):
    model, strategy = STRATEGIES[kind]
    options = {"devices": 2, "max_steps": 4, "use_distributed_sampler": False}
    per, found = "block" if kind == "fsdp2" else None, []
    for clip, accumulate in CASES:
        own = {"strategy": strategy(), "accumulate_grad_batches": accumulate, **clip, **options}
        found.append(train(model(), GradNormMonitor(per=per), batch_size=2, rank=rank, **own).rows)
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", STRATEGIES)
def test_two_processes_log_the_norms_of_one(kind):
    for (clip, accumulate), found in zip(CASES, processes.run(rows_of_a_rank, kind)[0], strict=True):
        rows = dict(found)
        reference = Reference()
        train(Net(), reference, max_steps=4, accumulate_grad_batches=accumulate, **clip)
        norms = [rows[step]["train/grad_norm"] for step in range(4)]
        rel = 1e-6 if clip.get("gradient_clip_val") else 1e-5  # without a clip this run grows, and its rounding with it
        assert norms == pytest.approx(reference.norms, rel=rel), (clip, accumulate)
        if kind == "fsdp2":
            parts = [norm for name, norm in rows[3].items() if name.startswith("grad_norms/")]
            assert len(parts) == 5
            assert math.hypot(*parts) == pytest.approx(norms[3], rel=1e-6)
