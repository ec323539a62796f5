"""Runs given in tokens: they are the runs of as many steps, and end at the same tokens whatever a resume changes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import runs
from harness.processes import run as in_processes
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import pl
from lightning_tricks.callbacks import BatchSizeWarmup, TotalTokens
from lightning_tricks.data import ShardWriter, TokenData
from lightning_tricks.mixins import OptimizerMixin
from lightning_tricks.parallel.dims import ParallelDims
from lightning_tricks.schedules import WarmupCosine, WarmupLinear
from lightning_tricks.strategies import FSDP2Strategy

SCHEDULE = WarmupLinear(warmup_steps=1)


class Model(OptimizerMixin, pl.LightningModule):
    """A table of logits; notes the lr of each step, and fails when it is told to."""

    def __init__(self, schedule=SCHEDULE, fails_at=None, manual=False):
        super().__init__(optimizer=lambda groups: torch.optim.AdamW(groups, lr=1.0), schedule=schedule)
        self.automatic_optimization = not manual
        self.blocks = torch.nn.ModuleList(torch.nn.Embedding(64, 64) for _ in range(2))
        self.lrs, self.fails_at = [], fails_at

    def training_step(self, batch, _):
        if self.global_step == self.fails_at:
            raise ZeroDivisionError
        return sum(block(batch["input_ids"]).square().mean() for block in self.blocks)

    def on_before_optimizer_step(self, optimizer):
        self.lrs.append(float(optimizer.param_groups[0]["lr"]))


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    with ShardWriter(folder, "train", 64) as writer:
        writer.append(np.arange(1000) % 64)
    return folder / "train_000000.bin"


def fit(shard, total=None, *callbacks, model=None, resume=None, data=None, **options):
    """Train on micro-batches of 2 rows of 8 tokens."""
    torch.manual_seed(0)
    model, data = model or Model(), data or TokenData(train=str(shard), seq_len=8, micro_batch_size=2, seed=3)
    own = [TotalTokens(total)] if total is not None else []
    options = {"max_epochs": -1, "max_steps": -1, "log_every_n_steps": 1, "logger": False, **options}
    return runs.fit(model, *own, *callbacks, data=data, ckpt_path=resume, **options).trainer, model


def planned(steps):
    """The lr of each step of a run of so many."""
    return [SCHEDULE.lr(1.0, step, steps) for step in range(steps)]


def saver(folder):
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# ---- the run


@pytest.mark.parametrize(
    ("total", "accumulate", "steps"), [(96, 1, 6), (97, 1, 7), (1e2, 1, 7), (96, 3, 2), (100, 3, 3), (17, 1, 2)]
)
def test_it_is_the_run_of_as_many_steps_as_reach_the_tokens(shard, total, accumulate, steps):
    trainer, model = fit(shard, total, accumulate_grad_batches=accumulate)
    same, other = fit(shard, max_steps=steps, accumulate_grad_batches=accumulate)
    assert trainer.global_step == same.global_step == steps
    assert model.lrs == other.lrs == planned(steps)
    assert same_weights(model, other)


def test_the_trainer_has_its_own_limit_back_after_the_fit_and_after_an_error(shard):
    trainer, _ = fit(shard, 64)
    assert trainer.max_steps == -1
    model = Model(fails_at=2)
    with pytest.raises(ZeroDivisionError):
        fit(shard, 64, model=model)
    assert model.trainer.max_steps == -1


def test_fast_dev_run_is_as_long_as_it_says(shard):
    trainer, _ = fit(shard, 64, fast_dev_run=2)
    assert trainer.global_step == 2


# ---- a resume


def test_a_resume_from_any_step_is_the_run_without_one(shard, tmp_path):
    _, whole = fit(shard, 96, saver(tmp_path))
    for step in range(1, 6):
        trainer, model = fit(shard, 96, resume=tmp_path / f"step={step}.ckpt")
        assert trainer.global_step == 6
        assert model.lrs == whole.lrs[step:]
        assert same_weights(model, whole)


def test_tokens_of_another_batch_count_as_what_they_were(shard, tmp_path, caplog):
    fit(shard, 160, saver(tmp_path))
    trainer, model = fit(
        shard, 160, saver(tmp_path / "again"), resume=tmp_path / "step=4.ckpt", accumulate_grad_batches=3
    )
    assert trainer.global_step == 4 + 2  # 64 tokens, then 48 in a step
    assert "total_tokens=160: 64 seen at step 4, 48 in a step, ends with step 6" in caplog.text
    assert model.lrs == planned(6)[4:]
    state = torch.load(tmp_path / "again" / "step=5.ckpt", weights_only=True)["callbacks"]["TotalTokens"]
    assert state == {"tokens": 64 + 48}
    trainer, model = fit(shard, 160, resume=tmp_path / "again" / "step=5.ckpt")
    assert trainer.global_step == 5 + 3
    assert model.lrs == planned(8)[5:]


def test_a_checkpoint_of_a_run_in_steps_tells_its_tokens_by_its_position(shard, tmp_path):
    fit(shard, None, saver(tmp_path), max_steps=4)
    twice = {"resume": tmp_path / "step=4.ckpt", "accumulate_grad_batches": 2}
    fit(shard, None, saver(tmp_path / "twice"), max_steps=6, **twice)
    trainer, model = fit(shard, 256, resume=tmp_path / "twice" / "step=6.ckpt")
    assert trainer.global_step == 6 + (256 - 4 * 16 - 2 * 32) // 16
    assert model.lrs == planned(14)[6:]


def test_a_resume_with_more_tokens_goes_on_and_one_with_fewer_ends_at_once(shard, tmp_path, caplog):
    fit(shard, 64, saver(tmp_path))
    trainer, model = fit(shard, 96, resume=tmp_path / "step=4.ckpt")
    assert trainer.global_step == 6
    assert model.lrs == planned(6)[4:]
    trainer, model = fit(shard, 48, resume=tmp_path / "step=4.ckpt")
    assert trainer.global_step == 4
    assert model.lrs == []
    assert "total_tokens=48: the checkpoint has seen 64; give more to go on" in caplog.text


# ---- a batch that grows


def test_each_step_counts_with_its_own_batch_and_a_resume_from_any_of_them_too(shard, tmp_path, caplog):
    def growing(total, *others, **options):  # steps of 16, 16, 32, 32, ... tokens
        pair = [TotalTokens(total), BatchSizeWarmup({0: 1, 32: 2}, unit="tokens")]
        return fit(shard, None, *pair, *others, accumulate_grad_batches=2, **options)

    trainer, whole = growing(100, saver(tmp_path))
    assert trainer.global_step == 5  # 16 + 16 + 32 + 32 = 96
    assert whole.lrs == planned(5)
    assert "total_tokens=100: 16 to 32 in a step, ends with step 5" in caplog.text
    _, same = fit(shard, None, BatchSizeWarmup({0: 1, 2: 2}), max_steps=5, accumulate_grad_batches=2)
    assert same_weights(whole, same)
    for step in range(1, 5):
        trainer, model = growing(100, resume=tmp_path / f"step={step}.ckpt")
        assert trainer.global_step == 5
        assert model.lrs == whole.lrs[step:]
        assert same_weights(model, whole)
    trainer, model = fit(shard, 100, resume=tmp_path / "step=3.ckpt")  # 64 seen, then 16 in a step
    assert trainer.global_step == 3 + 3
    assert model.lrs == planned(6)[3:]


# ---- ranks


def _fit_on_two_ranks(rank, folder, shard):
    for name, strategy in (("ddp", lambda: "ddp"), ("fsdp2", FSDP2Strategy)):

        def run(*callbacks, accumulate=2, resume=None, strategy=strategy):
            options = {"devices": 2, "strategy": strategy(), "accumulate_grad_batches": accumulate, "resume": resume}
            return fit(shard, 320, *callbacks, **options)

        trainer, model = run(saver(folder / name))
        assert trainer.global_step == 5  # 64 tokens in a step
        assert model.lrs == planned(5)
        checkpoint = folder / name / "step=3.ckpt"
        assert run(resume=checkpoint)[1].lrs == planned(5)[3:]
        trainer, model = run(resume=checkpoint, accumulate=1)
        assert trainer.global_step == 3 + 4
        assert model.lrs == planned(7)[3:]
        trainer, model = run(BatchSizeWarmup({0: 2, 2: 4}))
        assert trainer.global_step == 2 + 4  # 32 tokens in each of two steps
        assert model.lrs == planned(6)


@pytest.mark.long
def test_two_ranks_see_the_tokens_together_and_a_resume_on_one_rank_counts_them(shard, tmp_path):
    in_processes(_fit_on_two_ranks, tmp_path, shard)
    trainer, model = fit(shard, 320, resume=tmp_path / "ddp" / "step=3.ckpt")
    assert trainer.global_step == 3 + (320 - 192) // 16
    assert model.lrs == planned(11)[3:]


# ---- other data


def rows(count=40):
    return DataLoader([{"input_ids": torch.arange(8) % 64} for _ in range(count)], batch_size=2)


def test_data_that_do_not_tell_their_tokens_are_refused_unless_they_are_given(shard):
    trainer, model = fit(None, None, TotalTokens(100, micro_batch_tokens=16), data=rows())
    assert trainer.global_step == 7
    assert model.lrs == planned(7)
    with pytest.raises(
        UsageError, match=r"^total_tokens=100: the data do not tell .* give TotalTokens\(micro_batch_tokens=[^\n]*$"
    ):
        fit(None, 100, data=rows())


def test_a_checkpoint_of_data_that_tell_no_position_counts_its_steps_at_this_runs_batch(tmp_path, caplog):
    fit(None, None, saver(tmp_path), data=rows(), max_steps=4)
    total = TotalTokens(160, micro_batch_tokens=16)
    trainer, _ = fit(None, None, total, data=rows(), resume=tmp_path / "step=3.ckpt", accumulate_grad_batches=2)
    assert "total_tokens=160: 96 seen at step 3, 32 in a step, ends with step 5" in caplog.text
    assert trainer.global_step == 5


# ---- refusals


def test_what_it_cannot_do_is_refused_in_one_line(shard):
    with pytest.raises(UsageError, match=r"^total_tokens=64 and trainer\.max_steps=3: give one of them$"):
        fit(shard, 64, max_steps=3)
    with pytest.raises(UsageError, match=r"^total_tokens=64: with GradientAccumulationScheduler [^\n]*$"):
        fit(shard, 64, GradientAccumulationScheduler({1: 2}))
    with pytest.raises(UsageError, match=r"^BatchSizeWarmup\.stages=\{0: 1, 2: 2\}: the last stage must be [^\n]*$"):
        fit(shard, 64, BatchSizeWarmup({0: 1, 2: 2}))
    with pytest.raises(UsageError, match=r"^total_tokens=64: the steps of manual optimization [^\n]*$"):
        fit(shard, 64, model=Model(manual=True))


def test_a_warmup_as_long_as_the_tokens_is_refused_before_the_data_unless_a_checkpoint_tells_more(shard):
    total, model = TotalTokens(64), Model(WarmupCosine(warmup_steps=4))
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, max_epochs=-1, callbacks=[total])
    data = TokenData(train="none.bin", seq_len=8, micro_batch_size=2)
    with pytest.raises(UsageError, match=r"^total_tokens=64 makes 4 steps: WarmupCosine\.warmup_steps=4 is not below"):
        model.check_run(trainer, data, "fit")
    total.resumes = True
    model.check_run(trainer, data, "fit")
    with pytest.raises(UsageError, match=r"^total_tokens=64 makes 4 steps: WarmupCosine\.warmup_steps=4 is not below"):
        fit(shard, 64, model=model)


def test_the_planned_length_counts_the_rows_that_tensor_ranks_share_once():
    def steps(strategy):
        trainer = SimpleNamespace(
            strategy=strategy, num_devices=4, num_nodes=1, max_steps=-1, accumulate_grad_batches=1, callbacks=[]
        )
        return TotalTokens(6400).planned_steps(trainer, SimpleNamespace(micro_batch_size=2, seq_len=8))

    assert steps("ddp") == 6400 // (4 * 16)
    assert steps(FSDP2Strategy(mesh=ParallelDims(tensor=2))) == 6400 // (2 * 16)
