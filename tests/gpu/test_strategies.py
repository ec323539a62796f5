"""FSDP2 and DeepSpeed on one CUDA device: the run of a single device, in values, memory and waits."""

from importlib.util import find_spec

import pytest
import torch
from gpu.bits import differences
from gpu.silence import Silence
from harness.runs import trainer_with
from torch.utils.data import DataLoader

from lightning_tricks._trainer.lightning import pl
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import Llama
from lightning_tricks.precision import BF16Mixed, Float8
from lightning_tricks.strategies import DeepSpeedZeROStrategy, FSDP2Strategy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
has_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 products"
)
# Plugin, and how far the losses of two runs may lie apart: products in fewer bits, of weights rounded elsewhere.
FORMATS = {
    "fp32": (lambda: None, 1e-5),
    "bf16": (BF16Mixed, 1e-2),
    "fp8": (lambda: Float8("tensorwise", convert_small=True), 5e-2),
}
every_format = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=has_fp8 if name == "fp8" else ()) for name in FORMATS]
)


@pytest.fixture(autouse=True)
def _fresh_start():
    torch._dynamo.reset()


def batches(count=4):
    tokens = (5 * torch.arange(129) + torch.arange(count * 4)[:, None]) % 64
    rows = [{"input_ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in tokens.split(4)]
    return DataLoader(rows, batch_size=None, pin_memory=True)


class Record(pl.Callback):
    """The gradient norm of each step, on the device until the end."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        squares = [p.grad.float().square().sum() for p in pl_module.parameters()]
        self.norms.append(sum(s.full_tensor() if hasattr(s, "full_tensor") else s for s in squares).sqrt())


class Model(LanguageModel):
    """Keeps the loss of each step, on the device until the end."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses = [*getattr(self, "losses", []), loss.detach()]
        return loss


def fit(strategy="auto", *callbacks, plugin=None, compiled=True, steps=8, ckpt_path=None, **options):
    torch.manual_seed(0)
    decoder = Llama(vocab_size=64, d_model=128, n_layers=2, n_heads=4, d_ff=256, max_seq_len=128)
    optimizer = {"optimizer": lambda groups: torch.optim.AdamW(groups, lr=3e-3, fused=True)}
    model = Model(decoder=decoder, compile_blocks=compiled, **optimizer)
    trainer = trainer_with(
        *callbacks, max_steps=steps, max_epochs=-1, plugins=plugin, strategy=strategy, gradient_clip_val=0.5,
        accelerator="gpu", use_distributed_sampler=False, **{"logger": False, "log_every_n_steps": 4, **options},
    )  # fmt: skip
    trainer.fit(model, batches(), ckpt_path=ckpt_path)
    return trainer, model


def values(tensors):
    return torch.stack(tensors).double().cpu()


@every_format
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fsdp2_on_one_device_has_the_losses_and_norms_of_one_device(name, compiled):
    plugin, digits = FORMATS[name]
    if name == "fp8" and not compiled:
        pytest.skip("fp8 without torch.compile is refused")
    seen = []
    for strategy in ("auto", FSDP2Strategy()):
        record = Record()
        _, model = fit(strategy, record, plugin=plugin(), compiled=compiled)
        seen.append((values(model.losses), values(record.norms)))
    (losses, norms), (sharded_losses, sharded_norms) = seen
    torch.testing.assert_close(sharded_losses, losses, rtol=digits, atol=0)
    torch.testing.assert_close(sharded_norms[0], norms[0], rtol=max(digits, 1e-5), atol=0)
    torch.testing.assert_close(sharded_norms, norms, rtol=20 * digits, atol=0)


def test_offloaded_shards_rest_on_the_host_and_train_the_same():
    _, here = fit(FSDP2Strategy(), compiled=False)
    trainer, there = fit(FSDP2Strategy(cpu_offload=True), compiled=False)
    assert {parameter.device.type for parameter in there.parameters()} == {"cpu"}
    state = [value for entry in trainer.optimizers[0].state.values() for value in entry.values() if value.ndim]
    assert {value.device.type for value in state} == {"cpu"}
    torch.testing.assert_close(values(there.losses), values(here.losses), rtol=1e-4, atol=0)


@pytest.mark.usefixtures("_same_order_of_sums")
@pytest.mark.parametrize("as_folder", [True, False], ids=["folder", "file"])
def test_a_resume_is_bitwise_and_opens_without_the_strategy(as_folder, tmp_path):
    from lightning_tricks.checkpoints import AtomicCheckpointIO

    def saver():
        return pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)

    def strategy():
        return FSDP2Strategy(save_distributed_checkpoint=as_folder)

    _, straight = fit(strategy(), saver())
    _, resumed = fit(strategy(), ckpt_path=tmp_path / "step=4.ckpt")
    assert torch.equal(values(resumed.losses), values(straight.losses)[4:])
    assert not differences(straight, resumed)
    _, alone = fit(plugin=AtomicCheckpointIO(), ckpt_path=tmp_path / "step=4.ckpt")
    torch.testing.assert_close(values(alone.losses), values(straight.losses)[4:], rtol=1e-4, atol=0)


def test_nothing_waits_for_the_device_between_log_steps():
    silence = Silence(lambda trainer, _: trainer.global_step in (5, 6))  # steps 4 and 8 are logged
    fit(FSDP2Strategy(), silence)
    assert silence.batches == 2


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_on_one_device_has_the_losses_of_one_device(stage):
    _, alone = fit(compiled=False)
    _, engine = fit(DeepSpeedZeROStrategy(stage=stage), compiled=False)
    torch.testing.assert_close(values(engine.losses), values(alone.losses), rtol=1e-4, atol=0)
