"""fp16 products; gradients unscaled before anyone looks at them; an overflowed step leaves no trace but its count."""

import copy
import math
import pickle
import warnings
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from harness import runs
from harness.models import Decoding, Small, batches
from harness.offloaded import on_device
from harness.processes import run
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import GradNormMonitor
from lightning_tricks.mixins import GradientClippingMixin
from lightning_tricks.optim.grad_scaler import unscale
from lightning_tricks.precision import BF16Mixed, FP16Mixed
from lightning_tricks.schedules import ScheduleLR, WarmupLinear

INF = math.inf
DATA = batches(torch.zeros(64, 1, 1))


sgd, fused_sgd = partial(torch.optim.SGD, lr=1.0), partial(torch.optim.SGD, lr=1.0, fused=True)
adamw = partial(torch.optim.AdamW, lr=1.0, eps=1e-12, weight_decay=0.0)
fused_adamw = partial(adamw, fused=True)


class Wrapper(torch.optim.Optimizer):
    """Wraps another optimizer as its attribute `optimizer`, as Lookahead does."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Model(pl.LightningModule):
    """Two weights whose gradients are 3 and 4 times the factor of the step; keeps what a hook sees."""

    def __init__(self, factors=(1.0, 2.0, 3.0), optimizer=sgd, scheduler=None, **config):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.factors, self.optimizer, self.scheduler, self.config = factors, optimizer, scheduler, config
        self.seen, self.lrs, self.scales = [], [], []

    def loss(self, factor):
        return (3 * self.first + 4 * self.second).sum() * factor

    def training_step(self, batch, batch_idx):
        self.log("seen", float(batch_idx))
        factor = self.factors[self.trainer.global_step]
        return None if factor is None else self.loss(factor)

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), **self.config}}

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(gradients(self))
        self.lrs.append(optimizer.param_groups[0]["lr"])
        if self.trainer.scaler is not None:
            self.scales.append(self.trainer.scaler.get_scale())


def gradients(model):
    return [None if p.grad is None else p.grad.item() for p in (model.first, model.second)]


def weights(model):
    return [model.first.item(), model.second.item()]


def fit(model, plugin, *callbacks, steps=None, **options):
    """One step for each of the model's factors."""
    options = {"plugins": [plugin], "max_steps": len(model.factors) if steps is None else steps, **options}
    return runs.fit(model, *callbacks, data=DATA, **options)


def scaled(**options):
    return FP16Mixed(**{"init_scale": 1024.0, **options})


class OneLinear(Small):
    """A product whose output gradient is the scale times `size`, in fp16."""

    def __init__(self, size=1.0):
        super().__init__(net=nn.Linear(2, 1, bias=False), optimizer=sgd)
        self.size, self.dtypes = size, set()
        nn.init.zeros_(self.net.weight)

    def loss_of(self, batch):
        out = self.net(torch.ones(1, 2))
        self.dtypes.add(out.dtype)
        return out.float().sum() * self.size


# --- what is computed in which type


def test_products_are_fp16_on_a_cpu_where_lightnings_flag_gives_bf16():
    ours, lightnings = OneLinear(), OneLinear()
    trainer = fit(ours, scaled(), steps=1).trainer
    fit(lightnings, MixedPrecision("bf16-mixed", "cpu"), steps=1)
    assert (ours.dtypes, lightnings.dtypes) == ({torch.float16}, {torch.bfloat16})
    assert ours.net.weight.dtype == ours.net.weight.grad.dtype == torch.float32
    assert trainer.precision == "16-mixed"
    assert isinstance(trainer.scaler, torch.amp.GradScaler)


def test_validation_is_in_fp16_too():
    with scaled().forward_context():
        assert (torch.ones(1, 2) @ torch.ones(2, 1)).dtype == torch.float16


def test_a_gradient_under_fp16s_smallest_number_is_kept_by_the_scale_and_lost_without():
    tiny = 2.0**-26  # fp16's smallest is 2**-24
    kept, lost = OneLinear(tiny), OneLinear(tiny)
    fit(kept, scaled(), steps=1)
    plugin = scaled(loss_scaling=False)
    fit(lost, plugin, steps=1)
    assert kept.net.weight.tolist() == [[-tiny, -tiny]]
    assert lost.net.weight.tolist() == [[0.0, 0.0]]
    assert plugin.scaler is None
    assert plugin.skipped_steps == 0


def test_a_scale_that_is_too_high_costs_a_step_and_is_halved():
    model, plugin = OneLinear(), FP16Mixed()
    fit(model, plugin, steps=2)  # 65536 is above 65504, fp16's largest number; 32768 is not
    assert plugin.skipped_steps == 1
    assert plugin.scaler.get_scale() == 32768.0
    assert model.net.weight.tolist() == [[-1.0, -1.0]]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_bit_for_bit_lightnings_own_where_nothing_overflows(accumulate):
    def trained(plugin):
        torch.manual_seed(0)
        return runs.fit(Decoding(), plugins=plugin, gradient_clip_val=0.5, accumulate_grad_batches=accumulate)

    options = {"init_scale": 256.0, "growth_interval": 2}
    ours = trained(FP16Mixed(**options))
    lightnings = trained(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options)))
    assert runs.same_training(ours, lightnings)


# --- gradients are unscaled before anyone looks at them


@pytest.mark.parametrize("optimizer", [sgd, fused_sgd, adamw, fused_adamw, lambda p: Wrapper(sgd(p))])
def test_hooks_and_the_clip_see_unscaled_gradients(optimizer):
    model = Model(optimizer=optimizer)
    fit(model, scaled(), gradient_clip_val=1.0)
    assert model.seen == [[3.0, 4.0], [6.0, 8.0], [9.0, 12.0]]
    assert gradients(model) == pytest.approx([0.6, 0.8], rel=1e-5)
    lr_times_steps = [-0.6 * 3, -0.8 * 3] if optimizer not in (adamw, fused_adamw) else [-3.0, -3.0]
    assert weights(model) == pytest.approx(lr_times_steps, rel=1e-5)


def test_an_optimizer_without_hooks_of_its_own_trains():
    from pytorch_optimizer import Lookahead

    model = Model(optimizer=lambda parameters: Lookahead(sgd(parameters), k=1, alpha=0.5))
    fit(model, scaled(), gradient_clip_val=1.0)
    # halfway to where each step leads
    assert weights(model) == pytest.approx([-0.3 * 3, -0.4 * 3], rel=1e-5)


@pytest.mark.parametrize("optimizer", [sgd, fused_sgd])
def test_clipping_by_value_sees_unscaled_gradients(optimizer):
    model = Model((1.0,), optimizer)
    fit(model, scaled(), gradient_clip_val=3.5, gradient_clip_algorithm="value")
    assert weights(model) == [-3.0, -3.5]


@pytest.mark.parametrize("optimizer", [sgd, fused_sgd])
def test_an_accumulated_gradient_is_unscaled_once(optimizer):
    model = Model((1.0, 2.0), optimizer)
    fit(model, scaled(), accumulate_grad_batches=4)
    assert model.seen == [[3.0, 4.0], [6.0, 8.0]]
    assert weights(model) == [-9.0, -12.0]


class Clipping(GradientClippingMixin, Model):
    pass


@pytest.mark.parametrize("optimizer", [sgd, fused_sgd, adamw, fused_adamw])
@pytest.mark.parametrize("kind", [Model, Clipping])
@pytest.mark.parametrize("clip", [1.0, None])
def test_the_monitor_logs_the_exact_norm(kind, optimizer, clip):
    model = kind(optimizer=optimizer)
    run = fit(model, scaled(growth_interval=1), GradNormMonitor(), log_every_n_steps=1, gradient_clip_val=clip)
    assert run.of("train/grad_norm") == [5.0, 10.0, 15.0]
    if kind is Clipping:
        assert model.grad_norm.item() == 15.0


def test_a_step_without_a_loss_changes_nothing_even_as_the_first_of_a_run():
    model, plugin = Model((None, 1.0, None)), scaled()
    fit(model, plugin)
    assert model.seen == [[None, None], [3.0, 4.0], [None, None]]
    assert weights(model) == [-3.0, -4.0]
    assert plugin.skipped_steps == 0


# --- an overflowed step


@pytest.mark.parametrize("optimizer", [sgd, fused_sgd, adamw, fused_adamw])
@pytest.mark.parametrize("clip", [1.0, None])
def test_an_overflowed_step_changes_no_weight_is_counted_and_halves_the_scale(optimizer, clip):
    model, plain, plugin = Model((INF, 1.0, math.nan, INF, 1.0), optimizer), Model((1.0, 1.0), optimizer), scaled()
    fit(model, plugin, gradient_clip_val=clip)
    fit(plain, scaled(), gradient_clip_val=clip)
    assert weights(model) == weights(plain)
    assert type(plugin.skipped_steps) is int
    assert plugin.skipped_steps == 3
    assert model.scales == [1024.0, 512.0, 512.0, 256.0, 128.0]


def test_the_scale_doubles_after_growth_interval_steps_in_a_row():
    model = Model((1.0, 1.0, INF, 1.0, 1.0, 1.0))
    fit(model, scaled(growth_interval=2))
    assert model.scales == [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    assert weights(model) == [-15.0, -20.0]


def test_the_halved_scale_and_the_count_are_there_when_the_batch_ends():
    plugin, seen = scaled(), []
    note = runs.On(on_train_batch_end=lambda *_: seen.append((plugin.scaler.get_scale(), plugin.skipped_steps)))
    fit(Model((1.0, INF, 1.0)), plugin, note)
    assert seen == [(1024.0, 0), (512.0, 1), (512.0, 1)]


def test_an_overflow_in_one_micro_batch_skips_the_whole_step():
    class Odd(Model):
        def training_step(self, batch, batch_idx):
            return self.loss(INF if batch_idx == 1 else 1.0)

    model, plugin = Odd((1.0,) * 2), scaled()
    fit(model, plugin, accumulate_grad_batches=4)
    assert weights(model) == [-3.0, -4.0]
    assert plugin.skipped_steps == 1


def lr_by_step(optimizer):
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def low(optimizer):
    return LambdaLR(optimizer, lambda step: 0.25)


SCHEDULES = {
    "lambda": lr_by_step,
    "ours": lambda optimizer: ScheduleLR(optimizer, WarmupLinear(warmup_steps=4), total_steps=8),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=4),
    "sequential": lambda optimizer: SequentialLR(optimizer, [lr_by_step(optimizer), low(optimizer)], [2]),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_overflowed_step_does_not_advance_the_schedule(name, accumulate):
    def trained(*factors):
        model = Model(factors, scheduler=SCHEDULES[name], interval="step")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
            trainer = fit(model, scaled(), accumulate_grad_batches=accumulate).trainer
        return model, trainer.lr_scheduler_configs[0]

    model, config = trained(INF, 1.0, INF, INF, 1.0, 1.0, INF)
    plain, plain_config = trained(1.0, 1.0, 1.0)
    one, two, three = plain.lrs
    assert len({one, two, three}) == 3
    assert model.lrs[:6] == [one, one, two, two, two, three]
    assert weights(model) == weights(plain)
    state, plain_state = config.scheduler.state_dict(), plain_config.scheduler.state_dict()
    assert state.keys() == plain_state.keys()
    assert state["last_epoch"] == plain_state["last_epoch"] == 3
    assert config.frequency == 1  # given back when training ends


def test_a_modules_own_way_to_step_its_schedule_is_not_called_for_an_overflow():
    class Own(Model):
        calls = 0

        def lr_scheduler_step(self, scheduler, metric):
            self.calls += 1
            scheduler.step()

    model = Own((1.0, INF, 1.0), scheduler=lr_by_step, interval="step")
    fit(model, scaled())
    assert model.calls == 2


def test_a_schedule_of_every_second_step_keeps_its_frequency_after_an_overflow():
    model = Model((1.0, INF, 1.0, 1.0, INF, 1.0, 1.0), scheduler=lr_by_step, interval="step", frequency=2)
    fit(model, scaled())  # it would advance after steps 2, 4 and 6, of which step 2 overflows
    assert model.lrs == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 1 / 3]


def test_schedules_of_an_epoch_or_on_a_plateau_go_on():
    epoch = Model((INF, INF), scheduler=lr_by_step, interval="epoch")
    fit(epoch, scaled(), limit_train_batches=1)
    assert epoch.lrs == [1.0, 0.5]

    def plateau(optimizer):
        return ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    model = Model((INF, INF, INF), scheduler=plateau, interval="step", monitor="seen")
    fit(model, scaled())
    assert model.lrs == [1.0, 1.0, 0.5]


def test_whether_to_skip_is_the_only_read_of_the_device(monkeypatch):
    reads = []

    def count(name):
        real = getattr(torch.Tensor, name)

        def read(tensor, *args):
            reads.append(name)
            return real(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, read)

    class Quiet(Model):
        def on_before_optimizer_step(self, optimizer):
            pass

        def on_train_start(self):
            for name in ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"):
                count(name)

        def training_step(self, batch, batch_idx):
            return self.loss(self.factors[self.trainer.global_step])

        def on_train_end(self):
            monkeypatch.undo()

    fit(Quiet((1.0, INF, 1.0), fused_adamw), scaled(), gradient_clip_val=1.0)
    assert reads == ["__bool__"] * 3


# --- checkpoints


def at(step, path):
    """Save after a number of optimizer steps."""
    save = lambda trainer, *_: trainer.global_step == step and trainer.save_checkpoint(path)  # noqa: E731
    return runs.On(on_train_batch_end=save)


RESUMED = (1.0, INF, 1.5, INF, 2.0, INF, 0.5, 1.25)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", ["lambda", "ours"])
def test_resume_is_bitwise_also_right_after_an_overflow(tmp_path, step, name):
    def built():
        return Model(RESUMED, fused_adamw, SCHEDULES[name], interval="step"), scaled(growth_interval=2)

    (straight, plugin), path = built(), str(tmp_path / "mid.ckpt")
    fit(straight, plugin, at(step, path), gradient_clip_val=1.0)
    resumed, again = built()
    fit(resumed, again, ckpt_path=path, gradient_clip_val=1.0)
    assert weights(resumed) == weights(straight)
    assert again.state_dict() == plugin.state_dict()
    assert plugin.skipped_steps == 3
    assert resumed.lrs == straight.lrs[step:]
    assert resumed.scales == straight.scales[step:]


def test_what_the_checkpoint_holds(tmp_path):
    path = str(tmp_path / "end.ckpt")
    fit(Model((1.0, INF, 1.0)), scaled(), at(3, path))
    kept = torch.load(path, weights_only=True)["FP16Mixed"]
    assert kept == {"scale": 512.0, "_growth_tracker": 1, "skipped_steps": 1}


def test_the_growth_interval_is_the_recipes_and_not_the_checkpoints(tmp_path):
    path = str(tmp_path / "end.ckpt")
    fit(Model((1.0,) * 5), scaled(growth_interval=100), at(5, path))
    model = Model((1.0,) * 9)
    fit(model, scaled(growth_interval=2), ckpt_path=path)  # it has stood for 5 steps: longer than 2
    assert model.scales == [1024.0, 2048.0, 2048.0, 4096.0]


@pytest.mark.parametrize(
    ("one", "other"),
    [(BF16Mixed, scaled), (scaled, BF16Mixed), (scaled, lambda: scaled(loss_scaling=False)),
     (lambda: scaled(loss_scaling=False), scaled)],
)  # fmt: skip
def test_a_checkpoint_opens_in_another_format(tmp_path, one, other):
    path, factors, plugin = str(tmp_path / "mid.ckpt"), (1.0, 2.0, 3.0, 4.0), other()
    fit(Model(factors), one(), at(2, path), steps=2)
    model = Model(factors)
    fit(model, plugin, ckpt_path=path)
    assert weights(model) == [-30.0, -40.0]
    if getattr(plugin, "scaler", None) is not None:
        assert plugin.scaler.get_scale() == 1024.0


def test_skipped_steps_go_on_where_a_run_without_a_scale_takes_over():
    plugin = scaled(loss_scaling=False)
    plugin.load_state_dict({"scale": 4.0, "_growth_tracker": 1, "skipped_steps": 7})
    assert plugin.state_dict() == {"skipped_steps": 7}


# --- manual optimization


class Manual(Model):
    """Each weight has its own optimizer; `order` says when they step."""

    def __init__(self, factors, order, clip=None, optimizer=sgd):
        super().__init__(factors, optimizer)
        self.automatic_optimization, self.order, self.clip = False, order, clip

    def configure_optimizers(self):
        return [self.optimizer([self.first]), self.optimizer([self.second])]

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(optimizer.param_groups[0]["params"][0].grad.item())

    def training_step(self, batch, batch_idx):
        factor, optimizers = self.factors[self.trainer.global_step // 2], self.optimizers()
        losses = [(3 * self.first).sum() * factor, (4 * self.second).sum()]
        if self.order == "backwards first":
            for loss in losses:
                self.manual_backward(loss)
            steps = [(optimizer, None) for optimizer in optimizers]
        else:
            steps = list(zip(optimizers, losses, strict=True))
        for optimizer, loss in steps:
            if loss is not None:
                self.manual_backward(loss)
            if self.clip:
                self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", [sgd, fused_sgd])
@pytest.mark.parametrize("order", ["one by one", "backwards first"])
def test_two_optimizers_are_unscaled_by_the_scale_that_scaled_them(order, optimizer):
    model = Manual((1.0, 2.0, 3.0), order, optimizer=optimizer)
    fit(model, scaled(growth_interval=1), steps=6)  # the scale changes each time it is updated
    assert model.seen == [3.0, 4.0, 6.0, 4.0, 9.0, 4.0]
    assert weights(model) == [-18.0, -12.0]


@pytest.mark.parametrize("order", ["one by one", "backwards first"])
def test_only_the_optimizer_that_overflowed_is_skipped(order):
    model, plugin = Manual((1.0, 1.0, INF), order), scaled()
    fit(model, plugin, steps=6)
    assert weights(model) == [-6.0, -12.0]
    assert plugin.skipped_steps == 1
    assert plugin.scaler.get_scale() == 512.0  # the update that was due is done when training ends


def test_a_checkpoint_of_two_optimizers_holds_the_updated_scale(tmp_path):
    path = str(tmp_path / "mid.ckpt")
    fit(Manual((INF,), "backwards first"), scaled(), at(2, path), steps=2)
    assert torch.load(path, weights_only=True)["FP16Mixed"]["scale"] == 512.0


@pytest.mark.parametrize("optimizer", [sgd, fused_sgd])
def test_in_manual_optimization_the_modules_clip_sees_unscaled_gradients(optimizer):
    model = Manual((1.0, 2.0), "one by one", clip=1.0, optimizer=optimizer)
    run = fit(model, scaled(growth_interval=1), GradNormMonitor(), steps=4, log_every_n_steps=1)
    assert model.seen == pytest.approx([1.0] * 4, rel=1e-5)
    assert weights(model) == pytest.approx([-2.0, -2.0], rel=1e-5)
    assert run.of("train/grad_norm/0") == [3.0, 6.0]


def test_one_optimizer_with_a_closure_or_unscaled_by_the_module_itself():
    class Closure(Model):
        automatic_optimization = False

        def configure_optimizers(self):
            self.automatic_optimization = False
            return sgd(self.parameters())

        def training_step(self, batch, batch_idx):
            optimizer, factor = self.optimizers(), self.factors[self.trainer.global_step]

            def closure():
                optimizer.zero_grad()
                self.manual_backward(self.loss(factor))

            if factor == 2.0:
                optimizer.step(closure=closure)
                return
            closure()
            self.trainer.scaler.unscale_(optimizer.optimizer)
            optimizer.step()

    model, plugin = Closure((2.0, 1.0, INF, 2.0)), scaled(growth_interval=1)
    fit(model, plugin)
    assert model.seen == [[6.0, 8.0], [3.0, 4.0], [INF, INF], [6.0, 8.0]]
    assert weights(model) == [-15.0, -20.0]
    assert plugin.skipped_steps == 1


# --- several processes


class Wide(pl.LightningModule):
    """Each gradient is the mean over ranks of `factor`: one row a rank and step, four numbers in a row."""

    def __init__(self, rows, optimizer, plain):
        super().__init__()
        self.layer = Times()
        self.rows, self.optimizer, self.plain_factor = rows, optimizer, plain
        self.plain = nn.Parameter(torch.zeros(2)) if plain else None
        self.dtypes, self.autocast = set(), set()

    def training_step(self, batch, batch_idx):
        step, rank = self.trainer.global_step, self.trainer.global_rank
        out = self.layer(torch.tensor(self.rows[step][rank]))
        self.dtypes.add(out.dtype)
        self.autocast.add(torch.is_autocast_enabled("cpu"))
        loss = out.float().sum()
        if self.plain is not None:
            overflows = step == 1 and rank == 1
            loss = loss + (self.plain * self.plain_factor).sum() * (INF if overflows else 1.0)
        return loss

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        return [optimizer], [{"scheduler": lr_by_step(optimizer), "interval": "step"}]


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * self.weight


class Sharded(Wide):
    def configure_model(self):
        policy = self.trainer.precision_plugin.fsdp2_policy
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"], mp_policy=policy)


CALM = ((1.0, 2.0, 3.0, 4.0), (3.0, 2.0, 1.0, 0.0))  # in the mean 2 2 2 2
BURST = ((INF, 2.0, 3.0, 4.0), (3.0, 2.0, 1.0, 0.0))  # one element, so one rank's shard of it, is infinite


def two_ranks(rank, kind, optimizer, plain, clip, path):
    rows = (CALM, CALM if plain else BURST, CALM)
    strategies = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    }

    def trained(*callbacks, **settings):
        model, plugin = (Sharded if kind == "fsdp2" else Wide)(rows, optimizer, plain), scaled()
        settings |= {"devices": 2, "strategy": strategies[kind](), "gradient_clip_val": clip}
        fit(model, plugin, *callbacks, steps=len(rows), use_distributed_sampler=False, **settings)
        weight = model.layer.weight.detach()
        weights = [weight.full_tensor() if kind == "fsdp2" else weight, *([] if not plain else [model.plain])]
        return model, {"weights": [each.tolist() for each in weights], **plugin.state_dict()}

    model, straight = trained(at(2, path))
    _, resumed = trained(ckpt_path=path)
    return straight, resumed, model.dtypes, model.autocast


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "optimizer", "plain", "clip"),
    [
        ("ddp", fused_sgd, 0.0, 1.0),
        ("fsdp2", fused_adamw, 0.0, 1.0),
        ("fsdp2", sgd, 5.0, None),  # torch's fused kernels and its clip take no plain weights beside sharded ones
    ],
)
def test_all_ranks_skip_together_whoever_has_the_overflow_and_resume_as_one(kind, optimizer, plain, clip, tmp_path):
    # two steps of three, at learning rates 1 and 1/2; the clip makes 2 2 2 2, of norm 4, a quarter of it
    size = 1.0 if optimizer is fused_adamw else 2.0 if clip is None else 0.5
    for straight, resumed, dtypes, autocast in run(two_ranks, kind, optimizer, plain, clip, tmp_path / "two.ckpt"):
        weight, *plains = straight["weights"]
        assert weight == pytest.approx([-1.5 * size] * 4, rel=1e-5)
        assert plains == ([[-7.5, -7.5]] if plain else [])
        assert (straight["skipped_steps"], straight["scale"]) == (1, 512.0)
        assert resumed == straight
        if kind == "fsdp2":
            assert dtypes == {torch.float16}
            assert autocast == {bool(plain)}  # FSDP2 casts, unless it does not hold every weight


# --- bad input


OUT_OF_RANGE = [("growth_interval", 0), ("growth_interval", -1)]
OUT_OF_RANGE += [("init_scale", value) for value in (0, 0.0, -1.0, INF, math.nan, 1e39)]


@pytest.mark.parametrize(("option", "value"), OUT_OF_RANGE)
def test_an_option_out_of_its_range_is_refused(option, value):
    with pytest.raises(UsageError, match=rf"^{option}=[^\n]*: give a [^\n]*$"):
        FP16Mixed(**{option: value})


def test_lbfgs_is_refused_but_for_a_run_without_a_scale():
    with pytest.raises(UsageError, match=r"^optimizer: LBFGS [^\n]*$"):
        fit(Model((1.0,), torch.optim.LBFGS), scaled())
    fit(Model((1.0,), torch.optim.LBFGS), scaled(loss_scaling=False))


def test_weights_in_fp16_are_refused_by_name_but_not_for_validation_or_where_they_are_frozen():
    class Half(Model):
        def __init__(self, trained=True):
            super().__init__((1.0,))
            self.half = nn.Linear(2, 2, bias=False).half().requires_grad_(trained)

        def configure_optimizers(self):
            return sgd([p for p in self.parameters() if p.requires_grad])

        def validation_step(self, batch, batch_idx):
            pass

    with pytest.raises(UsageError, match=r"^plugins: FP16Mixed [^\n]*half\.weight \(1 of 3\) is float16: [^\n]*$"):
        fit(Half(), scaled())
    fit(Half(trained=False), scaled())
    runs.trainer_with(plugins=[scaled()]).validate(Half(), DATA, verbose=False)


# --- a plugin as an object


def test_after_an_exception_in_the_middle_of_a_step_it_can_be_pickled():
    class Fails(Model):
        def on_before_optimizer_step(self, optimizer):
            raise ArithmeticError

    plugin = scaled()
    with pytest.raises(ArithmeticError):
        fit(Fails(), plugin)
    assert pickle.loads(pickle.dumps(plugin)).state_dict() == plugin.state_dict()


def test_it_survives_a_copy_and_a_pickle_and_says_what_it_is():
    plugin = scaled(growth_interval=7)
    fit(Model((1.0, INF)), plugin)
    for other in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert repr(other) == "FP16Mixed(init_scale=1024.0, growth_interval=7, loss_scaling=True)"
        assert other.state_dict() == plugin.state_dict() == {"scale": 512.0, "_growth_tracker": 0, "skipped_steps": 1}


def test_the_scaler_moves_to_the_device_of_the_model(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        plugin = scaled()
    assert plugin.device == "cuda"
    fit(Model((1.0, 1.0)), plugin)
    assert plugin.scaler.is_enabled()
    assert plugin.scaler._device == "cpu"
    assert plugin.scaler.scale(torch.ones(())).device.type == "cpu"
    assert plugin.state_dict() == {"scale": 1024.0, "_growth_tracker": 2, "skipped_steps": 0}


def test_gradients_on_the_host_are_divided_by_a_scale_that_has_arrived_there(monkeypatch):
    """As under FSDP2 with cpu_offload, where the scale lies on the device: torch copies it without a wait."""
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    scaler, seen = torch.amp.GradScaler("cpu"), []

    def unscale_(optimizer):
        seen.append(scaler._scale)
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {}

    monkeypatch.setattr(scaler, "unscale_", unscale_)
    scaler._scale = there = on_device(4.0)
    unscale(scaler, sgd([weight]))
    assert type(seen[0]) is torch.Tensor
    assert seen[0] == 4
    assert scaler._scale is there
