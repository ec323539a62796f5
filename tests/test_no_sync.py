"""Between two logged steps nothing reads the device: with every monitor on, no value goes to the host."""

from contextlib import ExitStack

import lightning.pytorch as pl
import pytest
import torch
from harness import runs
from harness.device_reads import watching_reads
from harness.models import batches

from lightning_tricks import Llama
from lightning_tricks.callbacks import (
    EMA,
    ActivationMonitor,
    AttentionMonitor,
    BatchSizeWarmup,
    DoctorMonitor,
    GCControl,
    GoodputMonitor,
    GradNormMonitor,
    HangWatchdog,
    MemoryMonitor,
    RunLedger,
    StepGuard,
    TailAverage,
    TensorBoardDashboard,
    TrainingProgressBar,
    UpdateMonitor,
)
from lightning_tricks.language_model import LanguageModel
from lightning_tricks.loggers import ResumingTensorBoardLogger
from lightning_tricks.schedules import WarmupStableDecay


class Counts(pl.Callback):
    """Notes what reads a tensor on the host, from the start of one batch to the start of another."""

    def __init__(self, first, last):
        self.first, self.last, self.reads, self.steps = first, last, [], 0
        self._watching = ExitStack()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.first:
            self._watching.enter_context(watching_reads(lambda call, _: self.reads.append(call)))
        if batch_idx == self.last:
            self._watching.close()
        self.steps += self.first <= batch_idx < self.last

    def on_exception(self, *_):
        self._watching.close()


def fit(folder, accumulate, *callbacks):
    adamw = lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True)  # noqa: E731
    model = LanguageModel(
        decoder=Llama(
            vocab_size=64, d_model=32, n_layers=2, n_heads=2, max_seq_len=16, n_experts=4, d_expert=16, dense_layers=1
        ), optimizer=adamw,
        schedule=WarmupStableDecay(warmup_steps=1, decay_steps=2),
    )  # fmt: skip
    batch = {name: torch.randint(0, 64, (2, 16)) for name in ("input_ids", "labels")}
    runs.fit(
        model, *callbacks, GoodputMonitor(), GradNormMonitor(per="block"), MemoryMonitor(), ActivationMonitor(),
        UpdateMonitor(), AttentionMonitor(), TensorBoardDashboard(), TrainingProgressBar(), StepGuard(), EMA(),
        TailAverage(validate=False), RunLedger(), HangWatchdog(), GCControl(), DoctorMonitor(),
        BatchSizeWarmup(stages={0: accumulate}, lr_rule="sqrt"), data=batches([batch] * (22 * accumulate)),
        max_steps=22, accumulate_grad_batches=accumulate, gradient_clip_val=1.0, log_every_n_steps=10,
        logger=ResumingTensorBoardLogger(folder),
    )  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 2])
def test_between_logged_steps_no_tensor_is_read_on_the_host(tmp_path, accumulate):
    counts = Counts(10 * accumulate + 1, 19 * accumulate)
    fit(tmp_path, accumulate, counts)
    assert counts.steps == 9 * accumulate - 1
    assert counts.reads == []


def test_a_logged_step_reads_the_buffer_once_and_the_ledger_once(tmp_path):
    counts = Counts(12, 21)  # the twentieth step is logged
    fit(tmp_path, 1, counts)
    assert counts.reads.count(".tolist()") == 2  # the ledger has integers of 64 bits, the buffer floats
    assert set(counts.reads) <= {".tolist()", "float()", ".item()"}  # of values on the host already, for the line
