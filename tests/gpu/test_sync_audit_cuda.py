"""sync-audit on a CUDA device: torch's own words for a wait, in any thread, and none for what does not wait."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks import sync_audit
from lightning_tricks._device_waits import watching_waits
from lightning_tricks._lightning import pl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def if_positive(x):
    return 1 if x[0] > 0 else 2


CALLS = {
    "item": (lambda x: x[0].item(), ".item()"),
    "float": (lambda x: float(x[0]), "float()"),
    "if": (if_positive, "bool()"),
    "format": (lambda x: f"{x[0]:.2f}", "format()"),
    "tolist": (lambda x: x.tolist(), ".tolist()"),
    "cpu": (lambda x: x.cpu(), ".cpu()"),
    "to the host": (lambda x: x.to("cpu"), ".to()"),
    "from pageable memory": (lambda x: torch.ones(3).to(x.device), ".to()"),
    "of numbers": (lambda x: torch.tensor([1.0, 2.0], device=x.device), "torch.tensor()"),
    "synchronize": (lambda x: torch.cuda.synchronize(), "synchronize()"),
    "a stream": (lambda x: torch.cuda.current_stream().synchronize(), "synchronize()"),
    "arithmetic": (lambda x: (x * 2).sum(), None),
    "from pinned memory": (lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True), None),
}


@pytest.mark.parametrize(("call", "name"), CALLS.values(), ids=CALLS)
def test_a_wait_is_noted_by_its_name(call, name):
    x, found = torch.ones(3, device="cuda"), []
    with watching_waits(lambda call, frame: found.append((call, frame.f_code.co_name)), x.device):
        call(x)
    assert {word for word, _ in found} == ({name} if name else set())
    assert {place for _, place in found} <= {"<lambda>", "if_positive"}
    assert torch.cuda.get_sync_debug_mode() == 0


class Module(pl.LightningModule):
    def __init__(self, waits):
        super().__init__()
        self.net, self.waits = nn.Linear(4, 1), waits

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        if self.waits:
            loss.register_hook(lambda gradient: (gradient.item(), None)[1])
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


class Careless(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        outputs["loss"].item()
        thread = threading.Thread(target=outputs["loss"].item, name="writer")
        thread.start()
        thread.join()


def audit(waits, *callbacks):
    options = {
        "accelerator": "gpu", "devices": 1, "max_steps": 20, "log_every_n_steps": 4, "callbacks": list(callbacks),
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return sync_audit(Module(waits), DataLoader(torch.ones(40, 4), batch_size=2, pin_memory=True), options, steps=8)


def test_waits_of_a_callback_of_autograds_thread_and_of_another_one_are_told_apart():
    report = audit(True, Careless())
    found = {(wait.call, wait.hook, wait.thread) for wait in report.waits if report.how_often(wait) == "each step"}
    assert (".item()", "Careless.on_train_batch_end", "") in found
    assert (".item()", "SingleDeviceStrategy.backward", "") in found
    assert {wait.thread for wait in report.waits} == {"", "writer"}
    assert report.between_log_steps == 2 * 5


def test_a_quiet_module_waits_for_nothing():
    assert audit(False).between_log_steps == 0
