"""A run that cannot start is refused by its parts while there is one process, and no data are prepared."""

from types import SimpleNamespace

import pytest
import torch
from harness import runs
from harness.models import Small, adamw
from lightning.pytorch import strategies

from lightning_tricks import FSDP2Strategy, LanguageModel, Llama
from lightning_tricks._core.errors import UsageError
from lightning_tricks.callbacks import (
    EMA,
    BatchSizeWarmup,
    GradNormMonitor,
    InitFrom,
    SafeCheckpoint,
    SampleText,
    StepGuard,
)
from lightning_tricks.cli.before_launch import check_before_launch
from lightning_tricks.parallel.dims import ParallelDims


def trainer_with(strategy, callback):
    """As far as the checks go: no process of it is started."""
    return SimpleNamespace(
        strategy=strategy, callbacks=[callback], num_devices=2, num_nodes=1, precision_plugin=None, accelerator=None,
        is_global_zero=True, checkpoint_callbacks=[], optimizers=[], log_every_n_steps=50, fast_dev_run=False,
        lightning_module=torch.nn.Identity(),
    )  # fmt: skip


def tensor_ranks():
    return FSDP2Strategy(mesh=ParallelDims(tensor=2))


DEEPSPEED = object.__new__(strategies.DeepSpeedStrategy)  # Lightning's own, whose package need not be there
FLAT = object.__new__(strategies.FSDPStrategy)


@pytest.mark.parametrize(
    ("make", "strategy", "line"),
    [
        (SampleText, tensor_ranks(), "SampleText: tensor, context and pipeline ranks"),
        (EMA, FLAT, "EMA: FSDPStrategy keeps weights"),
        (lambda: InitFrom("a.ckpt"), FLAT, "init_from=a.ckpt: FSDPStrategy takes no weights"),
        (lambda: GradNormMonitor(per="block"), DEEPSPEED, "GradNormMonitor: per='block' under DeepSpeedStrategy"),
        (StepGuard, FLAT, "StepGuard: FSDPStrategy holds flat parts of parameters"),
        (SafeCheckpoint, DEEPSPEED, "SafeCheckpoint: DeepSpeedStrategy writes checkpoints by itself"),
        (lambda: BatchSizeWarmup({0: 1}), DEEPSPEED, "BatchSizeWarmup: DeepSpeedStrategy has a fixed number"),
    ],
)
def test_a_callback_that_does_not_work_under_a_strategy_is_refused_before_launch(make, strategy, line):
    trainer = trainer_with(strategy, make())
    with pytest.raises(UsageError) as refused:
        check_before_launch(trainer, Small(), object(), "fit", "cpu")
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)
    trainer.strategy = strategies.SingleDeviceStrategy()
    trainer.num_devices = 1
    check_before_launch(trainer, Small(), object(), "fit", "cpu")


def test_a_module_that_stages_cannot_share_out_is_refused_before_launch():
    strategy = FSDP2Strategy(mesh=ParallelDims(pipeline=2), layers_per_stage=[1, 1])
    trainer = runs.trainer_with(strategy=strategy, devices=2)
    model = LanguageModel(Llama(vocab_size=64, d_model=16, n_layers=3, n_heads=2, max_seq_len=8), optimizer=adamw)
    with pytest.raises(UsageError, match=r"layers_per_stage=\[1, 1\]: give 2 numbers"):
        check_before_launch(trainer, model, SimpleNamespace(), "fit", "cpu")
