"""Loss scale and skipped steps worked out by hand; the share in fp8."""

import math

import lightning.pytorch as pl
import pytest
import torch
from harness.models import LLAMA
from harness.runs import fit, warned
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks.callbacks import PrecisionMonitor
from lightning_tricks.precision import BF16Mixed, FP16Mixed

SCALE, SKIPPED = "precision/loss_scale", "precision/skipped_steps"
SHARE = "precision/fp8_share"


# ----------------------------------------------------------------------------------------------------- the loss's scale


class Overflowing(pl.LightningModule):
    """One weight; the micro-batches named in `bad` have an infinite gradient."""

    def __init__(self, bad=(), fused=False, manual=False) -> None:
        super().__init__()
        torch.manual_seed(0)  # its loader draws a seed
        self.weight = nn.Parameter(torch.zeros(2))
        self.bad, self.fused = bad, fused
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        loss = (self.weight * (math.inf if batch_idx in self.bad else 1.0)).sum()
        if self.automatic_optimization:
            return loss
        for index, optimizer in enumerate(self.optimizers()):
            factor = math.inf if (batch_idx, index) in self.bad else 1.0
            optimizer.zero_grad()
            self.manual_backward((self.weight * factor).sum())
            optimizer.step()
        return None

    def configure_optimizers(self):
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters(), lr=0.1, fused=self.fused)
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    def train_dataloader(self):
        return DataLoader(torch.zeros(64, 1), batch_size=1)


def scaling(**options):
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 2, **options})
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


class Counting(MixedPrecision):
    """Says by itself how many steps it skipped."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
        self.skipped_steps = 40

    def optimizer_step(self, *args, **kwargs):
        result = super().optimizer_step(*args, **kwargs)
        self.skipped_steps += 1
        return result


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("plugin", [scaling, lambda: FP16Mixed(init_scale=8.0, growth_interval=2)])
def test_each_step_has_the_scale_that_it_used_and_the_steps_skipped_so_far(plugin, fused):
    # it doubles after two good steps in a row, halves after a bad one: 8 8 | 16 bad | 8 8 | 16 bad | 8 bad | 4
    run = fit(Overflowing((2, 5, 6), fused), PrecisionMonitor(), plugins=[plugin()], max_steps=8, log_every_n_steps=3)
    assert [step for step, _ in run.rows] == list(range(8))
    assert run.of(SCALE) == [8, 8, 16, 8, 8, 16, 8, 4]
    assert run.of(SKIPPED) == [0, 0, 1, 1, 1, 2, 3, 3]
    assert run.names() == {SCALE, SKIPPED}


def test_with_accumulation_there_is_one_figure_a_step():
    # micro-batch 3 is in the second step of two
    options = {"plugins": [scaling()], "max_steps": 3, "accumulate_grad_batches": 2, "log_every_n_steps": 1}
    run = fit(Overflowing((3,)), PrecisionMonitor(), **options)
    assert (run.of(SCALE), run.of(SKIPPED)) == ([8, 8, 4], [0, 1, 1])


@pytest.mark.parametrize("plugin", [scaling, lambda: FP16Mixed(init_scale=8.0, growth_interval=2)])
def test_two_optimizers_in_one_batch_are_two_steps(plugin):
    # batch 0: 8 good, 8 good; batch 1: 16 bad, 8 good; batch 2: 8 good, 16 bad; batch 3: 8, 8
    model = Overflowing(((1, 0), (2, 1)), manual=True)
    run = fit(model, PrecisionMonitor(), plugins=[plugin()], max_steps=8, log_every_n_steps=1)
    assert (run.of(SCALE), run.of(SKIPPED)) == ([8, 8, 16, 8], [0, 1, 2, 2])


def test_a_plugin_that_counts_by_itself_is_believed():
    run = fit(Overflowing((1,)), PrecisionMonitor(), plugins=[Counting()], max_steps=3, log_every_n_steps=1)
    assert (run.of(SCALE), run.of(SKIPPED)) == ([8, 8, 4], [41, 42, 43])
    assert PrecisionMonitor().state_dict() == {}


def test_a_resumed_run_goes_on_counting(tmp_path):
    def resuming(last, ckpt_path=None):
        saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        model, options = Overflowing((0, 2, 4, 7)), {"plugins": [scaling()], "log_every_n_steps": 1}
        trainer = fit(model, PrecisionMonitor(), saving, max_steps=last, ckpt_path=ckpt_path, **options).trainer
        return trainer.callback_metrics[SKIPPED].item()

    assert resuming(6) == 3
    assert resuming(9, tmp_path / "step=3.ckpt") == 4  # 0 and 2 before, 4 and 7 after
    saved = torch.load(tmp_path / "step=9.ckpt", weights_only=True)["callbacks"]["PrecisionMonitor"]
    assert saved == {"skipped_steps": 4}
    assert resuming(1) == 1  # a new run starts anew
    stepless = PrecisionMonitor()
    stepless.load_state_dict(saved)
    assert stepless.state_dict() == saved


def test_a_second_fit_counts_anew():
    monitor = PrecisionMonitor()
    runs = [fit(Overflowing((0,)), monitor, plugins=[scaling()], max_steps=2, log_every_n_steps=1) for _ in range(2)]
    assert runs[0].of(SKIPPED) == runs[1].of(SKIPPED) == [1, 1]
    monitor.setup(runs[1].trainer, runs[1].model, "validate")  # and the checkpoint that is saved afterwards has it
    assert monitor.state_dict() == {"skipped_steps": 1}


@pytest.mark.parametrize(
    "plugin", [None, MixedPrecision("bf16-mixed", "cpu"), scaling(enabled=False)], ids=["none", "bf16", "disabled"]
)
def test_a_plugin_without_anything_to_say_gets_one_line(plugin):
    with warned("PrecisionMonitor") as lines:
        run = fit(Overflowing(), PrecisionMonitor(), plugins=[plugin] if plugin else None)
    name = "Precision" if plugin is None else "MixedPrecision"
    assert lines == [f"PrecisionMonitor records nothing: {name} neither scales the loss nor multiplies in fp8"]
    assert run.names() == set()


# ------------------------------------------------------------------------------------------------------------- in fp8


class InFp8(Precision):
    """Says that three quarters of the products are in fp8."""

    converted_share = 0.75
    fp8_layers: dict = {}


def test_each_log_step_has_the_share_in_fp8():
    run = fit(Overflowing(), PrecisionMonitor(), plugins=[InFp8()], accumulate_grad_batches=2)
    assert run.names() == {SHARE}
    assert run.of(SHARE) == [0.75, 0.75]


def test_our_model_brings_it_where_the_plugin_has_something_to_say():
    from lightning_tricks.language_model import LanguageModel

    def brought(*plugins, callbacks=()):
        trainer = pl.Trainer(accelerator="cpu", logger=False, plugins=[*plugins], callbacks=[*callbacks])
        model = LanguageModel(LLAMA)
        model._trainer = trainer
        return [type(callback).__name__ for callback in model.configure_callbacks()].count("PrecisionMonitor")

    plugin = InFp8()
    assert brought(plugin) == brought(FP16Mixed()) == brought(scaling()) == 1
    assert brought() == brought(BF16Mixed()) == brought(FP16Mixed(loss_scaling=False)) == 0
    assert brought(FP16Mixed(), callbacks=[PrecisionMonitor()]) == 0
