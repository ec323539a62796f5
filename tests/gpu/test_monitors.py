"""The monitors of memory, activations, updates, attention logits and goodput on a CUDA device: no waiting."""

import time

import pytest
import torch
from gpu.bits import differences
from gpu.silence import Silence
from harness.models import batches
from harness.runs import fit

from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import ActivationMonitor, AttentionMonitor, GoodputMonitor, MemoryMonitor, UpdateMonitor
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.models import Llama
from lightning_tricks.models.attention import max_logit
from lightning_tricks.monitors._clock import device_wait_on
from lightning_tricks.monitors.memory_monitor import device_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = Llama(vocab_size=512, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=128)
FIRST, LAST = 1, 8  # steps between which no wait is allowed; 2, 4 and 6 are measured, nothing is read before


def train(*callbacks, compile_blocks=False, steps=10):
    torch.manual_seed(0)
    torch._dynamo.reset()
    tokens = (5 * torch.arange(129) + torch.arange(4)[:, None]) % 16
    batch = {"input_ids": tokens[:, :-1].contiguous().pin_memory(), "labels": tokens[:, 1:].contiguous().pin_memory()}
    model = LanguageModel(decoder=CONFIG, compile_blocks=compile_blocks)
    options = {"accelerator": "gpu", "precision": "bf16-mixed", "log_every_n_steps": 10, "logger": False}
    run = fit(model, *callbacks, data=batches([batch] * steps), max_steps=steps, **options)
    return run.model, run.trainer.callback_metrics


def monitors():
    return [ActivationMonitor(), AttentionMonitor(), GoodputMonitor(), MemoryMonitor(), UpdateMonitor()]


class Eager(pl.Callback):
    """Calls every second step a log step, though nothing is flushed there: what is measured must not wait either."""

    def on_train_start(self, trainer, pl_module):
        buffer = next(callback for callback in trainer.callbacks if type(callback).__name__ == "MetricBuffer")
        measured, flush = buffer.is_log_step, buffer.flush
        buffer.is_log_step = lambda: trainer.global_step % 2 == 0 or measured()
        # at the end of the last quiet batch `global_step` is LAST already
        buffer.flush = lambda: flush() if trainer.global_step > LAST else None


@pytest.mark.parametrize("compile_blocks", [False, True])
def test_measuring_waits_for_nothing(compile_blocks):
    silence = Silence(lambda _, batch_idx: FIRST <= batch_idx < LAST)
    _, metrics = train(*monitors(), Eager(), silence, compile_blocks=compile_blocks)
    assert silence.batches == LAST - FIRST
    assert {name.split("/")[0] for name in metrics} >= {"activations", "attention", "goodput", "memory", "updates"}


@pytest.mark.usefixtures("_same_order_of_sums")
@pytest.mark.parametrize("compile_blocks", [False, True])
def test_training_is_the_same_with_all_of_them(compile_blocks):
    plain, _ = train(compile_blocks=compile_blocks)
    watched, metrics = train(*monitors(), compile_blocks=compile_blocks)
    assert not differences(plain, watched)
    assert 0 < metrics["updates/ratio"] < 1
    assert metrics["memory/peak_allocated_gib"] >= metrics["memory/allocated_gib"] > 0
    assert metrics["memory/reserved_gib"] >= metrics["memory/allocated_gib"]  # memory of the peak may be given back


def test_a_gib_more_shows_as_a_gib_and_the_peak_starts_anew():
    device = torch.device("cuda")
    before = device_memory(device)["memory/allocated_gib"]
    block = torch.empty(2**28, device=device)
    assert device_memory(device)["memory/allocated_gib"] - before == pytest.approx(1.0, abs=0.01)
    del block
    assert device_memory(device)["memory/peak_allocated_gib"] - before == pytest.approx(1.0, abs=0.01)
    assert device_memory(device)["memory/peak_allocated_gib"] - before == pytest.approx(0.0, abs=0.01)


def test_the_maximum_of_logits_stays_within_its_slices():
    q = torch.randn(4, 16, 4096, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(4, 4, 4096, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = max_logit(q, k)
    # all products would take 2 GiB in bf16; a slice takes 32 MiB, a few times over
    assert torch.cuda.max_memory_allocated() - before < 256 * 2**20
    rows = (q[:, :, -1:].float().unflatten(1, (4, 4)) @ k.float().unsqueeze(2).mT).amax() / 8
    assert found >= rows * 0.99


def test_a_wait_for_data_counts_as_far_as_the_device_is_idle():
    wait = device_wait_on(torch.device("cuda"))
    torch.cuda.synchronize()

    def fetch(seconds):
        wait.begin()
        time.sleep(seconds)
        wait.end()

    fetch(0.05)
    torch.cuda.synchronize()
    assert wait.take() >= 0.045
    torch.cuda._sleep(2_000_000_000)  # cycles, about a second
    fetch(0.05)
    torch.cuda.synchronize()
    assert wait.take() < 0.01  # it had work all the time
