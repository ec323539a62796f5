"""A run that cannot start is refused by its parts while there is one process, and no data are prepared."""

from types import SimpleNamespace

import lightning.pytorch as pl
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
    CompressionBaseline,
    ExactResume,
    GradNormMonitor,
    InitFrom,
    PredictionWriter,
    RunLedger,
    SafeCheckpoint,
    SampleText,
    StepGuard,
    TotalTokens,
)
from lightning_tricks.cli.before_launch import check_before_launch
from lightning_tricks.parallel.dims import ParallelDims


class Module(torch.nn.Identity):
    automatic_optimization = True


class OwnIO(pl.plugins.TorchCheckpointIO):
    """A user's own."""


def trainer_with(strategy, callback):
    """As far as the checks go: no process of it is started."""
    return SimpleNamespace(
        strategy=strategy, callbacks=[callback], num_devices=2, num_nodes=1, precision_plugin=None, accelerator=None,
        is_global_zero=True, checkpoint_callbacks=[], optimizers=[], log_every_n_steps=50, fast_dev_run=False,
        lightning_module=Module(), max_steps=-1, accumulate_grad_batches=1, reload_dataloaders_every_n_epochs=0,
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
        (SafeCheckpoint, DEEPSPEED, "SafeCheckpoint: DeepSpeedStrategy writes checkpoints itself"),
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


@pytest.mark.parametrize(
    ("callback", "settings", "line"),
    [
        (PredictionWriter(), {"strategy": tensor_ranks()}, "predict: tensor and context ranks"),
        (CompressionBaseline(), {}, "CompressionBaseline needs a data module with validation_text"),
        (ExactResume(), {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1: ExactResume"),
        (BatchSizeWarmup({0: 1, 9: 4}), {"accumulate_grad_batches": 2}, "BatchSizeWarmup.stages={0: 1, 9: 4}: 2 proc"),
        (BatchSizeWarmup({0: 2, 9: 8}), {"accumulate_grad_batches": 2}, "BatchSizeWarmup.stages={0: 2, 9: 8}: the las"),
        (
            BatchSizeWarmup({0: 2}),
            {"lightning_module": Small(manual=True)},
            "BatchSizeWarmup: Small optimizes manual",
        ),
        (TotalTokens(64, 4), {"lightning_module": Small(manual=True)}, "total_tokens=64: the steps of manual optimiz"),
        (TotalTokens(64), {}, "total_tokens=64: the data do not tell the tokens of a micro-batch"),
        (RunLedger(), {"callbacks": [RunLedger(), RunLedger()]}, "RunLedger.path=None: the Trainer has two that write"),
        (SafeCheckpoint("gopher://a/b"), {}, "gopher://a/b: Protocol not known: gopher; check the URL"),
        (
            SafeCheckpoint(),
            {"strategy": strategies.DDPStrategy(checkpoint_io=OwnIO())},
            "plugins=OwnIO: SafeCheckpoin",
        ),
        (SafeCheckpoint(), {"checkpoint_callbacks": [SafeCheckpoint()]}, "SafeCheckpoint: dirpath=None: another SafeC"),
    ],
)
def test_settings_that_a_callback_cannot_have_are_refused_before_launch(callback, settings, line):
    trainer = trainer_with(strategies.DDPStrategy(), callback)
    vars(trainer).update(settings)
    command = "predict" if line.startswith("predict") else "fit"
    module = Small()
    module.predict_dataloader = module.train_dataloader
    with pytest.raises(UsageError) as refused:
        check_before_launch(trainer, module, object(), command, "cpu")
    assert str(refused.value).startswith(line)


def test_a_decoder_under_a_strategy_that_leaves_the_sharding_to_it_is_refused_before_launch():
    model = LanguageModel(Llama(vocab_size=64, d_model=16, n_layers=2, n_heads=2, max_seq_len=8), optimizer=adamw)
    trainer = runs.trainer_with(strategy=strategies.ModelParallelStrategy(), devices=2)
    with pytest.raises(UsageError, match=r"^strategy=ModelParallelStrategy leaves the sharding to the module"):
        check_before_launch(trainer, model, SimpleNamespace(), "fit", "cpu")


def test_a_module_that_stages_cannot_share_out_is_refused_before_launch():
    strategy = FSDP2Strategy(mesh=ParallelDims(pipeline=2), layers_per_stage=[1, 1])
    trainer = runs.trainer_with(strategy=strategy, devices=2)
    model = LanguageModel(Llama(vocab_size=64, d_model=16, n_layers=3, n_heads=2, max_seq_len=8), optimizer=adamw)
    with pytest.raises(UsageError, match=r"layers_per_stage=\[1, 1\]: give 2 numbers"):
        check_before_launch(trainer, model, SimpleNamespace(), "fit", "cpu")
