"""Every number format on a CUDA device: real fp8 products, bitwise resume, and no waiting between log steps."""

import pytest
import torch
import torch.nn.functional as F
from gpu.bits import differences
from gpu.silence import Silence
from harness.runs import trainer_with
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import GradNormMonitor, PrecisionMonitor
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import Llama
from lightning_tricks.precision import BF16Mixed, BF16True, Float8, FP16Mixed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
has_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 products"
)
DEVICE = torch.device("cuda")
PLUGINS = {
    "bf16_mixed": BF16Mixed,
    "fp16_mixed": FP16Mixed,
    "bf16_true": BF16True,
    "fp8_tensorwise": lambda: Float8("tensorwise", convert_small=True),
    "fp8_rowwise": lambda: Float8("rowwise", convert_small=True),
    "fp8_rowwise_with_gw_hp": lambda: Float8("rowwise_with_gw_hp", convert_small=True),
    "fp8_over_bf16_true": lambda: Float8("tensorwise", base="bf16-true", convert_small=True),
}
every_plugin = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=has_fp8 if "fp8" in name else ()) for name in PLUGINS]
)


@pytest.fixture(autouse=True)
def _fresh_start():
    torch.manual_seed(0)
    torch._dynamo.reset()


def batches(count=3):
    tokens = (5 * torch.arange(129) + torch.arange(count * 4)[:, None]) % 64
    rows = [{"input_ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in tokens.split(4)]
    return DataLoader(rows, batch_size=None, pin_memory=True)


def fit(plugin, *callbacks, compiled=True, epochs=20, data=None, ckpt_path=None, **options):
    decoder = Llama(vocab_size=64, d_model=128, n_layers=2, n_heads=4, d_ff=256, max_seq_len=128)
    fused = {"optimizer": lambda groups: torch.optim.AdamW(groups, lr=3e-3, fused=True)}
    model = LanguageModel(decoder=decoder, compile_blocks=compiled, **fused)
    trainer = trainer_with(
        *callbacks, max_epochs=epochs, max_steps=-1, plugins=plugin, gradient_clip_val=1.0, accelerator="gpu",
        **{"logger": False, "log_every_n_steps": 10, **options},
    )  # fmt: skip
    trainer.fit(model, batches() if data is None else data, ckpt_path=ckpt_path)
    return trainer, model


@every_plugin
def test_a_compiled_model_learns(name):
    trainer, _ = fit(PLUGINS[name]())
    assert trainer.callback_metrics["train/loss"] < 0.5  # from log(64) = 4.2


@pytest.mark.usefixtures("_same_order_of_sums")
@every_plugin
def test_a_resume_is_bitwise(name, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    plugin, again = PLUGINS[name](), PLUGINS[name]()
    _, straight = fit(plugin, saver, epochs=2)
    _, resumed = fit(again, epochs=2, ckpt_path=tmp_path / "step=3.ckpt")
    assert not differences(straight, resumed)
    assert again.state_dict() == plugin.state_dict()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=has_fp8 if "fp8" in name else ())
        for name in PLUGINS
        if name != "fp16_mixed"  # reads once a step whether it overflowed
    ],
)
def test_nothing_waits_for_the_device_between_log_steps(name):
    # no wait in the steps 12 to 18 and 22 to 28: steps 10, 20 and 30 are logged
    silence = Silence(lambda _, batch_idx: batch_idx > 10 and batch_idx % 10 in range(1, 8))
    fit(PLUGINS[name](), PrecisionMonitor(), silence, epochs=1, data=batches(30))  # the end of an epoch reads, too
    assert silence.batches == 14


def test_fp16_with_a_fused_optimizer_is_clipped_by_the_unscaled_norm():
    class Reference(pl.Callback):
        norms = []

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters()]).item())

    trainer, _ = fit(FP16Mixed(), Reference(), GradNormMonitor(), epochs=4, log_every_n_steps=1)
    assert trainer.callback_metrics["train/grad_norm"].item() == pytest.approx(Reference.norms[-1], rel=1e-6)
    assert trainer.precision_plugin.scaler.get_scale() > 1


@has_fp8
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_real_fp8_products_are_the_emulated_ones(recipe):
    class One(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(256, 512, bias=False), nn.Linear(512, 8)

        def forward(self, x):
            return self.layer(x)

    torch.manual_seed(0)
    weights, x = One().state_dict(), torch.randn(64, 256, device=DEVICE, dtype=torch.bfloat16)
    results = []
    for emulate in (False, True):
        module = One().to(DEVICE)
        module.load_state_dict(weights)
        plugin = Float8(recipe, convert_small=True, emulate=emulate, allow_eager=True)
        plugin.convert_module(module)
        inputs = x.clone().requires_grad_()
        with plugin.forward_context():
            module(inputs).float().square().mean().backward()
        results.append((inputs.grad.float(), module.layer.weight.grad.float()))
    exact = F.linear(x.float(), weights["layer.weight"].to(DEVICE))
    assert exact.isfinite().all()
    for real, emulated in zip(*results, strict=True):
        assert (real - emulated).norm() / emulated.norm() < 0.02


@has_fp8
def test_fp8_without_compile_is_refused_unless_it_is_wanted():
    with pytest.raises(UsageError, match=r"torch\.compile"):
        fit(Float8(convert_small=True), compiled=False, epochs=1)
    fit(Float8(convert_small=True, allow_eager=True), compiled=False, epochs=1)


@has_fp8
def test_what_is_compiled_multiplies_in_fp8():
    plugin = Float8(convert_small=True)
    fit(plugin, epochs=1)
    torch._dynamo.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fit(Float8(convert_small=True), epochs=2)
    assert plugin.converted_share == pytest.approx(1.0 - plugin_head_share())
    assert "aten::_scaled_mm" in {event.key for event in profile.key_averages()}


def plugin_head_share():
    """Of the multiply-adds in linear layers, those of the head, which stays in bf16."""
    layers = 2 * (4 * 128 * 128 + 3 * 128 * 256)
    return 64 * 128 / (layers + 64 * 128)
