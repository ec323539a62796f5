"""The logged norm, and the clip itself, beside clips, hooks and overrides of the user's own; nothing is left behind."""

import functools

import lightning.pytorch as pl
import pytest
import torch
from harness.runs import On, fit, same_training
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from lightning_tricks.callbacks import GradNormMonitor
from lightning_tricks.mixins import GradientClippingMixin
from lightning_tricks.precision import BF16Mixed


class Slope(pl.LightningModule):
    """Batch n has the gradient n * (3, 4), whatever the weights: its norm is 5 n."""

    def __init__(self, automatic=True):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.zeros(2))
        self.automatic_optimization = automatic

    def loss(self, batch):
        return (self.weight * torch.tensor([3.0, 4.0])).sum() * batch.sum()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def train_dataloader(self):
        return DataLoader([1.0, 2.0, 3.0, 4.0], batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def steps_by_hand(self, *clips):
        """One optimizer step in manual optimization, after `clips` of Lightning's."""

        def step(batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            for clip in clips:
                self.clip_gradients(optimizer, *clip)
            optimizer.step()

        self.training_step = step
        return self


def replaced_methods(trainer):
    """What an instance holds in place of its class's methods."""
    return {name for part in (trainer.precision_plugin, trainer.lightning_module) for name in vars(part)} & {
        "clip_grad_by_norm", "clip_grad_by_value", "configure_gradient_clipping",
    }  # fmt: skip


NORMS = [5.0, 10.0, 15.0, 20.0]
UNIT_STEPS = pytest.approx([-0.6 * 4, -0.8 * 4], rel=1e-5)  # of four steps whose gradients were clipped to norm 1


def watched(make, *callbacks, monitor=None, **options):
    """Fit with the monitor in front of `callbacks`; it has changed nothing, and nothing of it is left."""
    run = fit(make(), monitor or GradNormMonitor(), *callbacks, **options)
    assert same_training(run, fit(make(), *callbacks, **options))
    assert not replaced_methods(run.trainer)
    return run


def by_torch(module, optimizer):
    clip_grad_norm_(module.parameters(), 1.0)


def by_lightning(module, optimizer):
    module.clip_gradients(optimizer, 1.0, "norm")


def by_data(module, optimizer):  # leaves no trace in the gradient's version
    module.weight.grad.data.div_(module.weight.grad.norm())


HOW = [by_torch, by_lightning, by_data]


@pytest.mark.parametrize("clip_val", [None, 1.0])
@pytest.mark.parametrize("clip", HOW)
def test_a_clip_in_the_modules_own_hook_has_its_own_steps_norm_and_so_has_the_log(clip, clip_val):
    class Own(Slope):
        def on_before_optimizer_step(self, optimizer):
            clip(self, optimizer)

    run = watched(Own, gradient_clip_val=clip_val)
    assert run.of("train/grad_norm") == NORMS
    assert run.weights[0].tolist() == UNIT_STEPS


@pytest.mark.parametrize("mixin", [True, False])
def test_a_clip_in_a_callback_comes_before_the_logged_norm(mixin):
    clips = On(on_before_optimizer_step=lambda trainer, pl_module, optimizer: by_data(pl_module, optimizer))

    class Mixed(GradientClippingMixin, Slope):
        pass

    run = watched(Mixed if mixin else Slope, clips, gradient_clip_val=1.0)
    assert run.of("train/grad_norm") == [1.0] * 4
    assert run.weights[0].tolist() == UNIT_STEPS


@pytest.mark.parametrize("clip", HOW)
@pytest.mark.parametrize("place", ["class", "object", "wrapped"])
def test_a_clip_of_the_modules_own_is_called_and_stays(clip, place):
    calls = []

    def own(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        calls.append(gradient_clip_val)
        self.weight.grad.mul_(0.5)
        clip(self, optimizer)

    def make():
        if place == "class":
            return type("Own", (Slope,), {"configure_gradient_clipping": own})()
        model = Slope()
        model.configure_gradient_clipping = lambda *args, **kwargs: own(model, *args, **kwargs)
        if place == "wrapped":  # has the name and the module of Lightning's
            functools.update_wrapper(model.configure_gradient_clipping, pl.LightningModule.configure_gradient_clipping)
        return model

    run = fit(make(), GradNormMonitor(), gradient_clip_val=1.0)
    assert calls == [1.0] * 4
    assert run.of("train/grad_norm") == NORMS
    assert run.weights[0].tolist() == UNIT_STEPS
    assert replaced_methods(run.trainer) == (set() if place == "class" else {"configure_gradient_clipping"})
    assert same_training(run, fit(make(), gradient_clip_val=1.0))


class Halves(Precision):
    """A user's plugin, whose clip by norm is not Lightning's."""

    def clip_grad_by_norm(self, optimizer, clip_val):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)


@pytest.mark.parametrize("place", ["class", "object"])
@pytest.mark.parametrize("automatic", [True, False])
def test_a_clip_of_the_users_plugin_is_called_and_stays(automatic, place):
    plugin = Halves() if place == "class" else Precision()
    if place == "object":
        plugin.clip_grad_by_norm = functools.partial(Halves.clip_grad_by_norm, plugin)
    before = dict(vars(plugin))
    model = Slope() if automatic else Slope(automatic=False).steps_by_hand((1.0, "norm"))
    run = fit(model, GradNormMonitor(), plugins=[plugin], gradient_clip_val=1.0 if automatic else None)
    assert run.of("train/grad_norm") == NORMS
    assert run.weights[0].tolist() == [-15.0, -20.0]  # half of 10 * (3, 4)
    assert vars(plugin) == before


@pytest.mark.parametrize("clips", [[], [(1.0, "norm")], [(1.0, "value")]], ids=["none", "norm", "value"])
def test_in_manual_optimization_the_norm_and_its_parts_are_from_before_the_clip(clips):
    run = watched(lambda: Slope(automatic=False).steps_by_hand(*clips), monitor=GradNormMonitor(per="group"))
    assert run.of("train/grad_norm") == NORMS
    assert run.of("grad_norms/0") == [10.0, 20.0]  # on log steps
    assert run.weights[0].tolist() == {
        "none": [-30.0, -40.0], "norm": UNIT_STEPS, "value": [-4.0, -4.0],
    }["none" if not clips else clips[0][1]]  # fmt: skip


def test_in_manual_optimization_a_clip_without_a_step_is_no_later_steps_norm():
    class EveryOther(Slope):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            if batch_idx % 2 == 0:
                self.clip_gradients(optimizer, 1.0, "norm")
            else:
                optimizer.step()

    run = watched(lambda: EveryOther(automatic=False), max_steps=2)
    assert run.of("train/grad_norm") == [10.0, 20.0]


def test_in_manual_optimization_an_optimizer_that_the_trainer_does_not_know_is_clipped_as_ever():
    class Private(Slope):
        def training_step(self, batch, batch_idx):
            self.private = getattr(self, "private", None) or torch.optim.SGD(self.parameters(), lr=1.0)
            self.private.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(self.private, 1.0, "norm")
            self.private.step()

        def configure_optimizers(self):
            return [torch.optim.SGD([nn.Parameter(torch.zeros(1))]) for _ in range(2)]

    run = fit(Private(automatic=False), GradNormMonitor(), max_epochs=1)
    assert run.weights[0].tolist() == UNIT_STEPS
    assert not run.names()


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("in the clip"), KeyboardInterrupt()])
def test_what_fails_in_the_clip_leaves_nothing_behind(monkeypatch, automatic, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", fail)
    monitor, plugin = GradNormMonitor(), BF16Mixed()
    before = dict(vars(plugin))
    model = Slope() if automatic else Slope(automatic=False).steps_by_hand((1.0, "norm"))
    with pytest.raises((RuntimeError, SystemExit)):
        fit(model, monitor, plugins=[plugin], gradient_clip_val=1.0 if automatic else None)
    assert vars(plugin) == before
    monkeypatch.undo()
    assert fit(Slope(), monitor, plugins=[plugin], gradient_clip_val=1.0).of("train/grad_norm") == NORMS


def test_an_epoch_that_the_module_ends_early_leaves_nothing_behind():
    class Ends(Slope):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

        def on_train_end(self):
            assert not replaced_methods(self.trainer)

    run = watched(lambda: Ends(automatic=False).steps_by_hand(), max_epochs=1, max_steps=-1)
    assert run.of("train/grad_norm") == [5.0, 10.0]
