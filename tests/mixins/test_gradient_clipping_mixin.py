"""Clipping in a Trainer: the same training as Lightning's own clip, with the norm kept."""

from unittest.mock import Mock

import pytest
import torch
from harness import runs
from harness.models import batches
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from lightning_tricks._core.errors import UsageError
from lightning_tricks.mixins import GradientClippingMixin
from lightning_tricks.precision import FP16Mixed


class Plain(LightningModule):
    """Two weights whose gradients are the batch: (3, 4) times its number."""

    def __init__(self, fused=False, lr=1.0):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(1))
        self.second = torch.nn.Parameter(torch.zeros(1))
        self.fused, self.lr = fused, lr
        self.norms, self.gradients = [], []

    def training_step(self, batch, _):
        return (3 * self.first + 4 * self.second).sum() * batch.mean()

    def configure_optimizers(self):
        if self.fused:
            return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if self.first.grad is not None:
            self.gradients.append((self.first.grad.item(), self.second.grad.item()))
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class Model(GradientClippingMixin, Plain):
    def on_before_zero_grad(self, optimizer):
        if self.grad_norm is not None:
            self.norms.append(self.grad_norm.item())


def fit(model, steps=3, **settings):
    return runs.fit(model, data=batches(torch.arange(1.0, 13.0)), max_steps=steps, **settings).model


def weights(model):
    return [model.first.item(), model.second.item()]


def test_the_norm_is_each_steps_own_before_the_clip():
    model = Model()
    assert model.grad_norm is None
    fit(model, gradient_clip_val=1.0)
    assert weights(model) == pytest.approx([-0.6 * 3, -0.8 * 3], rel=1e-5)
    assert model.norms[-2:] == [5.0, 10.0]  # read before the next step's gradients are cleared
    assert model.grad_norm.item() == 15.0
    assert model.grad_norm.shape == ()


def test_training_is_bit_for_bit_lightnings_own():
    for settings in ({"gradient_clip_val": 1.0}, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, {}):
        assert weights(fit(Model(), **settings)) == weights(fit(Plain(), **settings))


@pytest.mark.parametrize("value", [None, 0, 0.0])
def test_without_a_clip_value_it_measures_all_the_same(value):
    model = fit(Model(), gradient_clip_val=value)
    assert model.grad_norm.item() == 15.0
    assert weights(model) == [-18.0, -24.0]


@pytest.mark.parametrize("options", [{"precision": "bf16-mixed"}, {"plugins": FP16Mixed(init_scale=1024.0)}])
def test_a_fused_optimizer_is_clipped_under_bf16_and_where_its_gradients_are_unscaled_before(options):
    model = fit(Model(fused=True), gradient_clip_val=1.0, **options)
    assert model.grad_norm.item() == 15.0
    assert model.gradients[-1] == pytest.approx((0.6, 0.8), rel=1e-5)


def scaled():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))


@pytest.mark.parametrize("value", [1.0, None])
def test_a_fused_optimizer_under_fp16_is_refused_in_one_line(value):
    with pytest.raises(
        UsageError, match=r"^GradientClippingMixin: fused AdamW under fp16 \(trainer\.precision=16-mixed\)[^\n]*$"
    ):
        fit(Model(fused=True), plugins=[scaled()], gradient_clip_val=value)


def on_strategy(kind):
    """A model whose Trainer says that it runs on a strategy that this machine could not start."""
    model = Model()
    model._trainer = Mock(strategy=type(kind.__name__, (), {"model": model})(), precision_plugin=Mock(scaler=None))
    for parameter in model.parameters():
        parameter.grad = torch.ones(1)
    model.configure_gradient_clipping(model.configure_optimizers(), 1e-3)
    return model


def test_fsdp1_is_refused():
    with pytest.raises(
        UsageError, match=r"^GradientClippingMixin: FSDPStrategy holds flat .*shard with FSDP2Strategy$"
    ):
        on_strategy(FSDPStrategy)


def test_deepspeed_clips_by_itself_and_leaves_no_norm():
    model = on_strategy(DeepSpeedStrategy)
    assert model.grad_norm is None
    assert model.first.grad.item() == 1.0
