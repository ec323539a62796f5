"""Runs given in epochs: the schedule ends with the run, whatever its data, accumulation, ranks and resumes are."""

import itertools
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from harness import processes, runs
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks._trainer.run_length import run_length, steps_of_epochs
from lightning_tricks.callbacks import BatchSizeWarmup, ExactResume
from lightning_tricks.data import ShardWriter, TokenData
from lightning_tricks.mixins import OptimizerMixin
from lightning_tricks.precision import FP16Mixed
from lightning_tricks.schedules import WarmupConstant, WarmupCosine, WarmupLinear

SCHEDULE = WarmupLinear(warmup_steps=1)


class Model(OptimizerMixin, pl.LightningModule):
    """A table of logits, by token or by the first number of a row; notes the lr of each step."""

    def __init__(self, schedule=SCHEDULE, manual=False):
        super().__init__(optimizer=partial(torch.optim.SGD, lr=1.0), schedule=schedule)
        self.automatic_optimization = not manual
        self.table = torch.nn.Embedding(64, 64)
        self.lrs, self.lengths, self.begun = [], [], False

    def on_train_start(self):
        """A module may have this hook without calling super()."""

    def training_step(self, batch, _):
        ids = batch["input_ids"] if isinstance(batch, dict) else batch.long()
        return self.table(ids).square().mean()

    def validation_step(self, batch, _):
        pass

    def on_before_optimizer_step(self, optimizer):
        self.lrs.append(float(optimizer.param_groups[0]["lr"]))

    def on_train_epoch_start(self):
        self.lengths.append(run_length(self.trainer))

    def on_train_batch_start(self, batch, batch_idx):
        if not self.begun:
            self.lengths.append(run_length(self.trainer))
        self.begun = True


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.repeat(torch.ones(2))


def loader(batches=7):
    return DataLoader(torch.arange(batches * 2).view(-1, 2) % 64)


def fit(data, *callbacks, resume=None, model=None, val=None, **options):
    torch.manual_seed(0)
    options = {"log_every_n_steps": 1, "max_steps": -1, "logger": False, **options}
    run = runs.fit(model or Model(), *callbacks, data=data, val=val, ckpt_path=resume, **options)
    return run.trainer, run.model


def planned(steps, schedule=SCHEDULE):
    """The lr of each step of a run of so many."""
    return [schedule.lr(1.0, step, steps) for step in range(steps)]


# ---- loaders with a length


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 3}, 21),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 6),  # 3 and 3 and 1 batches
        ({"max_epochs": 2, "limit_train_batches": 4}, 8),
        ({"max_epochs": 2, "limit_train_batches": 0.5, "accumulate_grad_batches": 2}, 4),
        ({"max_epochs": 2, "max_steps": 9}, 9),
        ({"max_epochs": 1, "max_steps": 9}, 7),
        ({"max_epochs": 3, "overfit_batches": 2}, 6),
    ],
)
def test_the_schedule_ends_with_the_last_epoch(options, steps):
    trainer, model = fit(loader(), **options)
    assert trainer.global_step == steps
    assert model.lrs == planned(steps)
    assert set(model.lengths) == {steps}
    assert trainer.estimated_stepping_batches == steps
    assert trainer.callbacks == []  # as they were before the fit


def test_an_accumulation_that_changes_with_the_epoch_counts_in_each():
    scheduler = GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})
    trainer, model = fit(loader(6), scheduler, max_epochs=3)
    assert model.lrs == planned(6 + 3 + 2)
    assert set(model.lengths) == {trainer.global_step}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("exact", [False, True])
def test_a_resume_from_any_checkpoint_has_the_learning_rates_of_the_run_without_one(tmp_path, accumulate, exact):
    """Also within an epoch, at its end, and within a step."""

    def parts():
        return [ExactResume()] if exact else []

    saver = ModelCheckpoint(tmp_path, filename="{epoch}-{step}", every_n_train_steps=1, save_top_k=-1)
    ends = ModelCheckpoint(tmp_path, filename="end-{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    trainer, whole = fit(loader(4), *parts(), saver, ends, **options)
    assert whole.lrs == planned(trainer.global_step)
    places = sorted(tmp_path.iterdir())
    assert len(places) >= 3 + trainer.global_step - 1
    for place in places:
        done = torch.load(place, weights_only=True)["global_step"]
        resumed, model = fit(loader(4), *parts(), resume=place, **options)
        assert resumed.global_step == trainer.global_step, place
        assert model.lrs == whole.lrs[done:], place
        assert set(model.lengths) <= {trainer.global_step}, place


def test_a_second_fit_of_a_trainer_which_counts_its_steps_on_goes_on_in_the_schedule():
    trainer, _ = fit(loader(4), max_epochs=1)
    trainer.fit_loop.max_epochs, second = 3, Model()
    trainer.fit(second, loader(4))
    assert trainer.global_step == 12
    assert second.lrs == planned(12)[4:]


def test_a_run_without_a_schedule_goes_on_in_the_step_of_one(tmp_path):
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(loader(8), save, model=Model(schedule=None), max_epochs=1)
    resumed = Model()
    fit(loader(8), resume=tmp_path / "step=5.ckpt", model=resumed, max_epochs=1)
    assert resumed.lrs == planned(8)[5:]


def test_a_run_whose_steps_have_all_overflowed_so_far_resumes_at_the_start_of_its_schedule(tmp_path):
    class Large(Model):
        def training_step(self, batch, batch_idx):
            return 64 * super().training_step(batch, batch_idx)

    def run(resume=None, *callbacks):
        plugin = FP16Mixed(init_scale=2.0**127)  # 64 times it is infinite until it is 2**121, after 6 steps
        return fit(loader(10), *callbacks, resume=resume, model=Large(), max_epochs=1, plugins=[plugin])[1].lrs

    lrs = run(None, ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1))
    assert lrs == [planned(10)[0]] * 6 + planned(10)[:4]
    assert run(tmp_path / "step=3.ckpt") == lrs[3:]


# ---- refusals


@pytest.mark.parametrize("warmup", [[], [BatchSizeWarmup(stages={0: 1, 2: 4})]])
def test_a_loader_without_a_length_is_refused_in_one_line_before_the_first_step(warmup):
    model = Model()
    with pytest.raises(UsageError, match=r"^WarmupLinear needs .*, which loaders without a length [^\n]*\(now None\)"):
        fit(DataLoader(Endless()), *warmup, model=model, max_epochs=2, accumulate_grad_batches=4)
    assert model.lrs == []


def test_a_schedule_without_an_end_needs_no_length():
    stop = runs.On(on_train_batch_end=lambda t, *_: setattr(t, "should_stop", t.global_step == 3))
    _, model = fit(DataLoader(Endless()), stop, model=Model(WarmupConstant(warmup_steps=2)), max_epochs=2)
    assert model.lrs == [0.5, 1.0, 1.0]


def test_a_run_too_short_for_its_warmup_is_named_by_its_epochs():
    model = Model(WarmupCosine(warmup_steps=8))
    with pytest.raises(UsageError, match=r"^trainer\.max_epochs=1 makes 7 steps: WarmupCosine\.warmup_steps=8 [^\n]*$"):
        fit(loader(), model=model, max_epochs=1)
    assert model.lrs == []


def test_before_the_data_all_is_refused_that_can_be_known():
    def check(model=None, **options):
        (model or Model()).check_run(pl.Trainer(accelerator="cpu", logger=False, **options), None, "fit")

    check(max_epochs=3)
    check(max_epochs=3, model=Model(WarmupConstant(warmup_steps=2), manual=True))
    with pytest.raises(UsageError, match=r"manual optimization do not tell: set trainer\.max_steps \(now None\)"):
        check(max_epochs=3, model=Model(manual=True))
    with pytest.raises(UsageError, match=r"set trainer\.max_steps \(now -1\), trainer\.max_epochs or total_tokens"):
        check()
    with pytest.raises(UsageError, match=r"trainer\.max_steps \(now -1\)"):
        check(max_epochs=-1)
    with pytest.raises(UsageError, match=r"warmup_steps=1 is not below trainer\.max_steps=1"):
        check(max_epochs=3, max_steps=1)


# ---- our own data, whose epochs are passes


def test_steps_of_epochs_by_hand():
    assert steps_of_epochs(epochs=3, left=4, whole=5, limit=5) == 4 + 5 + 5
    assert steps_of_epochs(epochs=0, left=4, whole=5, limit=5) == 0
    assert steps_of_epochs(epochs=1, left=4, whole=5, limit=3) == 3
    assert steps_of_epochs(epochs=2, left=4, whole=5, limit=3) == 3 + 1
    assert steps_of_epochs(epochs=5, left=4, whole=5, limit=3) == 4 + (3 + 2) + 3


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """24 windows of 8 tokens."""
    folder = tmp_path_factory.mktemp("shards")
    with ShardWriter(folder, "train", 64) as writer:
        writer.append(np.arange(8 * 25 + 1) % 64)
    return folder / "train_000000.bin"


def tokens(path, val=None):
    return TokenData(train=str(path), val=val, seq_len=8, micro_batch_size=2, seed=3)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 2}, 24),  # 24 rows by two
        ({"max_epochs": 2, "accumulate_grad_batches": 5}, 4),
        ({"max_epochs": 3, "limit_train_batches": 5}, 5 + 5 + 2),
        ({"max_epochs": 5, "max_steps": 30}, 30),  # the loader goes on to max_steps
    ],
)
def test_epochs_of_our_data_are_passes_over_them(shards, options, steps):
    trainer, model = fit(tokens(shards), **options)
    assert trainer.global_step == steps
    assert model.lrs == planned(steps)
    assert set(model.lengths) == {steps}


@pytest.mark.parametrize("accumulate", [2, 6])
def test_a_resume_of_our_data_with_another_batch_ends_its_schedule_with_its_last_step(shards, tmp_path, accumulate):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}-{step}", every_n_train_steps=1, save_top_k=-1)
    fit(tokens(shards), saver, max_epochs=2, accumulate_grad_batches=3)
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    for place in sorted(tmp_path.iterdir()):
        done = torch.load(place, weights_only=True)["global_step"]
        resumed, model = fit(tokens(shards), resume=place, **options)
        assert model.lrs == planned(resumed.global_step)[done:], place


# ---- two ranks


def _fit_on_two_ranks(rank, folder, shard):
    two = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 3}
    trainer, plain = fit(loader(), max_epochs=2, **two)
    assert trainer.global_step == 4  # seven rows are four batches a rank, which are two steps
    assert plain.lrs == planned(4)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer, ours = fit(tokens(shard), saver, max_epochs=3, **two)
    assert trainer.global_step == 6  # 24 rows by 12, three times
    assert ours.lrs == planned(6)
    resumed, again = fit(tokens(shard), resume=folder / "step=3.ckpt", max_epochs=3, **two)
    assert again.lrs == planned(6)[3:]
    assert resumed.global_step == 6


@pytest.mark.long
def test_two_ranks_end_together_and_a_resume_on_one_ends_with_its_own_last_step(shards, tmp_path):
    processes.run(_fit_on_two_ranks, tmp_path, shards)
    trainer, model = fit(tokens(shards), resume=tmp_path / "step=3.ckpt", max_epochs=3, accumulate_grad_batches=3)
    # Three steps of 12 rows are done. Now a pass has four steps of 6: one ends the running pass, then comes another.
    assert trainer.global_step == 3 + 1 + 4
    assert model.lrs == planned(8)[3:]


def lines_of(caught, *parts):
    return [str(one.message) for one in caught if all(part in str(one.message) for part in parts)]


@pytest.mark.parametrize("schedule", [WarmupCosine(warmup_steps=1), SCHEDULE])
def test_a_learning_rate_that_jumps_at_a_resume_is_named_with_both_values(tmp_path, schedule):
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=6, save_top_k=-1)
    fit(loader(8), save, model=Model(schedule), max_steps=8)
    for steps, jumps in ((8, False), (80, True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = {"resume": tmp_path / "step=6.ckpt", "max_steps": steps, "limit_train_batches": 8}
            _, model = fit(loader(8), model=Model(schedule), **options)
        found = lines_of(caught, "in the checkpoint's run")
        assert len(found) == jumps
        if jumps:
            before, now = (schedule.lr(1.0, 6, total) for total in (8, 80))
            assert found[0].startswith(
                f"step 6: lr is {now:.4g}, and was {before:.4g} in the checkpoint's run: the schedule"
            )
            assert model.lrs[0] == now
            assert "\n" not in found[0]
