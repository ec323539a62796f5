"""bf16 exactly where the hardware multiplies it fast; a run trains and clips with a fused optimizer either way."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_tricks.precision import AutoPrecision, has_fast_bf16


@pytest.mark.parametrize(
    ("capabilities", "fast"),
    [
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"avx2": True}, False),
        ({"avx512_bf16": False}, False),
    ],
)
def test_a_cpu_is_fast_only_with_bf16_instructions(monkeypatch, capabilities, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert has_fast_bf16("cpu") is fast


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_is_fast_from_ampere_on(monkeypatch, capability, fast):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert has_fast_bf16("cuda") is fast


def test_other_devices_stay_in_fp32():
    assert not has_fast_bf16("mps")


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.seen: set[torch.dtype] = set()

    def training_step(self, batch, batch_idx):
        out = self.layer(batch)
        self.seen.add(out.dtype)
        return out.float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, fused=True)


@pytest.mark.parametrize(
    ("fast", "name", "dtype"), [(True, "bf16-mixed", torch.bfloat16), (False, "32-true", torch.float32)]
)
def test_products_run_in_the_chosen_type_and_weights_stay_fp32(monkeypatch, fast, name, dtype):
    monkeypatch.setattr("lightning_tricks.precision.auto_precision.has_fast_bf16", lambda _: fast)
    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, plugins=AutoPrecision(), max_steps=2, gradient_clip_val=1e-3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(torch.ones(8, 4), batch_size=4))
    assert trainer.precision == name
    assert model.seen == {dtype}
    assert model.layer.weight.dtype == model.layer.weight.grad.dtype == torch.float32
    assert sum(p.grad.square().sum() for p in model.parameters()).sqrt().item() == pytest.approx(1e-3, rel=1e-3)
