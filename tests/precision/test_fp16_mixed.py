"""fp16 products; gradients unscaled before anyone looks at them; an overflowed step leaves no trace but its count."""

import math
import pickle
import warnings
from contextlib import ExitStack
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from harness import runs
from harness.device_reads import watching_reads
from harness.models import Decoding, Small, Wrapper, batches
from harness.offloaded import on_device
from harness.processes import run
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import GradNormMonitor
from lightning_tricks.mixins import GradientClippingMixin
from lightning_tricks.optim.grad_scaler import has_overflowed, unscale
from lightning_tricks.precision import FP16Mixed
from lightning_tricks.schedules import ScheduleLR, WarmupLinear

INF = math.inf
DATA = batches(torch.zeros(64, 1, 1))


sgd, fused_sgd = partial(torch.optim.SGD, lr=1.0), partial(torch.optim.SGD, lr=1.0, fused=True)
adamw = partial(torch.optim.AdamW, lr=1.0, eps=1e-12, weight_decay=0.0)
fused_adamw = partial(adamw, fused=True)


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


def test_clipping_by_value_sees_unscaled_gradients():
    model = Model((1.0,), fused_sgd)
    fit(model, scaled(), gradient_clip_val=3.5, gradient_clip_algorithm="value")
    assert weights(model) == [-3.0, -3.5]


class Clipping(GradientClippingMixin, Model):
    pass


@pytest.mark.parametrize("optimizer", [sgd, fused_adamw])
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


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_overflowed_step_does_not_advance_the_schedule(name):
    def trained(*factors):
        model = Model(factors, scheduler=SCHEDULES[name], interval="step")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
            trainer = fit(model, scaled()).trainer
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


def test_whether_to_skip_is_the_only_read_of_the_device():
    reads, stack = [], ExitStack()

    class Quiet(Model):
        def on_before_optimizer_step(self, optimizer):
            pass

        def training_step(self, batch, batch_idx):
            return self.loss(self.factors[self.trainer.global_step])

    watch = runs.On(
        on_train_start=lambda *_: stack.enter_context(watching_reads(lambda call, _: reads.append(call))),
        on_train_end=lambda *_: stack.close(),
    )
    fit(Quiet((1.0, INF, 1.0), fused_adamw), scaled(), watch, gradient_clip_val=1.0)
    assert reads == ["bool()"] * 3


# --- checkpoints


def at(step, path):
    """Save after a number of optimizer steps."""
    save = lambda trainer, *_: trainer.global_step == step and trainer.save_checkpoint(path)  # noqa: E731
    return runs.On(on_train_batch_end=save)


RESUMED = (1.0, INF, 1.5, INF, 2.0, INF, 0.5, 1.25)


@pytest.mark.parametrize("step", [2, 3])
def test_resume_is_bitwise_also_right_after_an_overflow(tmp_path, step):
    def built():
        return Model(RESUMED, fused_adamw, SCHEDULES["ours"], interval="step"), scaled(growth_interval=2)

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


# --- several processes


def one_infinite_number(rank, beside):
    """Whether each of two ranks finds the overflow of one number, which one of them has in its shard."""
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    found = []
    for first in (4.0, INF):
        sharded = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
        sharded.grad = distribute_tensor(torch.tensor([first, 8.0, 12.0, 16.0]), mesh, [Shard(0)])
        plain = nn.Parameter(torch.zeros(1))
        plain.grad = torch.tensor([20.0])
        optimizer = sgd([plain, sharded] if beside else [sharded])
        unscale(scaler, optimizer)
        found.append((has_overflowed(scaler, optimizer), sharded.grad.full_tensor().tolist(), plain.grad.item()))
        scaler.update()
    return found


@pytest.mark.long
@pytest.mark.parametrize("beside", [False, True])  # a plain weight beside the sharded ones
def test_all_ranks_know_of_an_overflow_whoever_has_it(beside):
    last = 5.0 if beside else 20.0
    for calm, burst in run(one_infinite_number, beside):
        assert calm == (False, [1.0, 2.0, 3.0, 4.0], last)
        assert burst == (True, [INF, 2.0, 3.0, 4.0], last)


# --- bad input


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: scaled(growth_interval=0), "growth_interval=0: give a number of steps"),
        *((lambda bad=bad: scaled(init_scale=bad), "init_scale=.*: give a finite") for bad in (0, INF, math.nan, 1e39)),
        (lambda: fit(Model((1.0,), torch.optim.LBFGS), scaled()), "optimizer: LBFGS "),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(call, words):
    with pytest.raises(UsageError, match=rf"^{words}[^\n]*$"):
        call()


# --- a plugin as an object


def test_after_an_exception_in_the_middle_of_a_step_it_can_be_pickled():
    class Fails(Model):
        def on_before_optimizer_step(self, optimizer):
            raise ArithmeticError

    plugin = scaled()
    with pytest.raises(ArithmeticError):
        fit(Fails(), plugin)
    assert pickle.loads(pickle.dumps(plugin)).state_dict() == plugin.state_dict()


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
