"""SpikeRollback: a destroyed run comes back, its bad data are passed over, and a resume passes over them again."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness.processes import run
from harness.runs import On, trainer_with
from spiking_run import Data, Model, States, batch_of, fit, huge_at, nan_at, rollbacks, same, state_of
from test_no_sync import Counts
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_tricks import (
    EMA,
    ExactResume,
    FP16Mixed,
    FSDP2Strategy,
    SafeCheckpoint,
    SpikeRollback,
    StepGuard,
    TailAverage,
)
from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.tensors import local
from lightning_tricks.guards.earlier_states import TrainingState
from lightning_tricks.guards.outlier_window import SpikeDetector
from lightning_tricks.guards.spike_rollback import Rollback, is_good

EVILS = {"NaN batch": nan_at(120), "ruined moments": huge_at(120)}


class Validated(Data):
    def val_dataloader(self) -> Any:
        return DataLoader([batch_of(9)], batch_size=None)


@pytest.fixture(scope="module")
def clean() -> float:
    return fit(Data()).final_loss()


@pytest.mark.parametrize("evil", EVILS)
def test_a_destroyed_run_ends_within_5_percent_of_the_clean_one_and_without_it_does_not(evil, clean):
    lost = fit(Data(EVILS[evil])).final_loss()
    assert not lost < 10 * clean
    brought_back = fit(Data(EVILS[evil]), rollbacks())
    assert brought_back.final_loss() < 1.05 * clean
    assert len(brought_back.lines) == 1


def test_a_healthy_run_is_unchanged():
    plain, guarded = fit(Data(), steps=60), fit(Data(), rollbacks(), steps=60)
    assert same(state_of(plain.trainer), state_of(guarded.trainer))
    assert guarded.lines == []
    assert [row["guard/rollbacks"] for _, row in guarded.rows if "guard/rollbacks" in row] == [0.0] * 6


@pytest.mark.parametrize("optimizer", ["AdamW", "fused", "momentum"])
def test_weights_buffers_and_optimizer_go_back_and_all_else_goes_on(optimizer):
    states, model = States(), Model(optimizer, 100)
    found = fit(Data(nan_at(45)), rollbacks(), states, model=model, steps=70)
    assert found.lines == [
        "SpikeRollback: step 50: loss not finite, out of bounds since step 45: weights and optimizer are those of step "
        "40 again, from memory; skipped: steps 40 to 49, samples [[640, 799]]. Rollback 1 of at most 5"
    ]
    assert same(states.at[50], states.at[40])
    assert not same(states.at[51], states.at[41])  # the next batch is another
    assert model.lrs == [pytest.approx(0.03 * (1 - 0.9 * step / 100)) for step in range(70)]
    assert found.trainer.global_step == 70
    counts = [(step, row["guard/rollbacks"]) for step, row in found.rows if "guard/rollbacks" in row]
    assert counts == [(step, float(step >= 49)) for step in range(9, 70, 10)]


class Averages(pl.Callback):
    """The average's numbers before each step."""

    def __init__(self, average: Any) -> None:
        self.average, self.at = average, dict[int, Any]()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        numbers = tree_leaves(self.average.terms)
        self.at[trainer.global_step] = torch.cat([number.flatten() for number in numbers])


@pytest.mark.parametrize("copies", [2, 0], ids=["from memory", "from a checkpoint"])
@pytest.mark.parametrize(
    ("make", "in_front"), [(lambda: EMA(0.9), True), (lambda: TailAverage(horizon_steps=500), False)]
)
def test_an_average_goes_back_with_the_weights_and_on_from_there(make, in_front, copies, tmp_path):
    average = make()
    averages, saves = Averages(average), [] if copies else [saver(tmp_path)]
    pair = [average, rollbacks(keep_snapshots=copies)]
    found = fit(Data(nan_at(45)), *(pair if in_front else reversed(pair)), *saves, averages, steps=60, folder=tmp_path)
    assert "weights and optimizer are those of step 40 again" in found.lines[0]
    assert torch.equal(averages.at[50], averages.at[40])
    assert not torch.equal(averages.at[51], averages.at[50])
    assert averages.at[59].isfinite().all()


def test_a_spike_before_the_second_copy_goes_back_to_the_first_step():
    states = States()
    found = fit(Data(nan_at(3), positions=False), rollbacks(), states, steps=12)
    assert "those of step 0 again, from memory; skipped: steps 0 to 9. Rollback" in found.lines[0]
    assert same(states.at[10], states.at[0])  # the optimizer has no state again


def test_each_repeat_goes_back_further_and_after_the_last_one_the_run_stops():
    spoil = nan_at(*range(65, 200))
    with pytest.raises(UsageError) as stopped:
        fit(Data(spoil), rollbacks(max_rollbacks=2))
    line = str(stopped.value)
    assert line.startswith(
        "SpikeRollback.max_rollbacks=2: loss not finite, out of bounds since step 80, after rollbacks that undid steps "
        "60 to 69, samples [[960, 1119]]; steps 40 to 79, samples [[640, 1279]]. Go on from"
    )
    with pytest.raises(UsageError, match=r"^SpikeRollback.keep_snapshots=2: loss not finite, .* no folder is from"):
        fit(Data(spoil), rollbacks(keep_snapshots=2))


def test_a_copy_is_made_only_while_the_loss_is_within_bounds(monkeypatch):
    made, copy_state = [], SpikeRollback._copy
    monkeypatch.setattr(SpikeRollback, "_copy", lambda *args: made.append(args[1].global_step) or copy_state(*args))
    fit(Data(nan_at(45)), rollbacks(patience_steps=60, snapshot_every_n_steps=15), steps=100)
    assert made == [0, 20, 40]


def test_manual_optimization_with_two_optimizers_and_accumulation_work():
    class ByHand(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.two = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, net in zip(self.optimizers(), (self.net, self.two), strict=True):
                optimizer.zero_grad()
                self.manual_backward((net(batch[0]) - batch[1]).square().mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(net.parameters(), lr=0.03) for net in (self.net, self.two)]

    states = States()
    found = fit(Data(nan_at(45)), rollbacks(), states, model=ByHand(), steps=120)  # each batch counts as two
    assert "out of bounds since step 90: weights and optimizer are those of step 80 again" in found.lines[0]
    assert same(states.at[100], states.at[80])
    states = States()
    found = fit(Data(nan_at(45)), rollbacks(), states, steps=52, accumulate_grad_batches=2)
    assert same(states.at[50], states.at[40])


@pytest.mark.parametrize("copies", [2, 0], ids=["from memory", "from a checkpoint"])
def test_the_loss_scale_goes_back(copies, tmp_path):
    at: dict[int, float] = {}
    scale = On(
        on_train_batch_start=lambda trainer, *_: at.update(
            {trainer.global_step: trainer.precision_plugin.scaler.get_scale()}
        )
    )
    found = fit(
        Data(nan_at(*range(45, 50))), rollbacks(keep_snapshots=copies), scale, saver(tmp_path),
        plugins=[FP16Mixed(init_scale=256.0)], steps=52, folder=tmp_path,
    )  # fmt: skip
    (line,) = found.lines
    assert f"those of step 40 again, from {'memory' if copies else tmp_path / 'step=40.ckpt'}; skipped" in line
    assert at[49] < at[40] == at[50]


def test_beside_step_guard_weights_that_an_accepted_step_destroyed_come_back():
    class Destroyed(Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 1e5 if self.trainer.global_step == 75 else 1  # no loss and no norm tells

    early = {"window_steps": 32, "active_after_steps": 16, "max_skipped_steps": 5}
    with pytest.raises(UsageError, match=r"^StepGuard.max_skipped_steps=5"):
        fit(Data(), StepGuard(**early), model=Destroyed(), steps=120)
    for callbacks in ([StepGuard(**early), rollbacks()], [rollbacks(), StepGuard(**early)]):
        found = fit(Data(), *callbacks, model=Destroyed(), steps=120)
        assert "out of bounds since step 76: weights and optimizer are those of step 60 again" in found.lines[0]
        assert found.trainer.global_step == 120
        assert found.final_loss() < 1.0


class LostError(Exception):
    """What a loader raises that cannot read its next batch."""


def test_an_error_in_a_spike_changes_no_weight_and_asks_no_other_process():
    def spoil(step: int, x: Any, y: Any) -> Any:
        if step == 47:
            trainer.strategy.broadcast = trainer.strategy.reduce = trainer.strategy.barrier = asked.append
            states.at[47] = state_of(trainer)
            raise LostError
        return huge_at(*range(40, 47))(step, x, y)

    states, asked = States(), []
    trainer = trainer_with(rollbacks(), max_steps=60, log_every_n_steps=10, max_epochs=-1)
    with pytest.raises(LostError):
        trainer.fit(Model(), Data(spoil))
    assert same(state_of(trainer), states.at[47])
    assert asked == []


# ---- from the disk


def saver(folder: Path, every: int = 10) -> SafeCheckpoint:
    return SafeCheckpoint(folder, every_n_train_steps=every, keep_last=100)


@pytest.mark.parametrize("ours", [True, False], ids=["SafeCheckpoint", "ModelCheckpoint"])
def test_without_copies_it_goes_back_to_the_newest_finite_checkpoint_from_before_the_spike(tmp_path, ours):
    lightnings = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)
    states, model = States(), Model("fused", 100)
    found = fit(
        Data(nan_at(45)), rollbacks(keep_snapshots=0), saver(tmp_path) if ours else lightnings, states, model=model,
        steps=70, folder=tmp_path, log_every_n_steps=20,
    )  # fmt: skip
    assert (
        f"of step 40 again, from {tmp_path}/step=40.ckpt; skipped: steps 40 to 49, samples [[640, 799]]"
        in (found.lines[0])
    )
    assert same(states.at[50], states.at[40])
    assert model.lrs == [pytest.approx(0.03 * (1 - 0.9 * step / 100)) for step in range(70)]


def test_checkpoints_of_an_earlier_run_in_the_folder_are_left_alone(tmp_path):
    fit(Data(), saver(tmp_path), steps=20, folder=tmp_path)
    with pytest.raises(UsageError, match=r"no copy in memory nor finite checkpoint in .* is from before it"):
        fit(Data(nan_at(25)), rollbacks(keep_snapshots=0), saver(tmp_path, 50), steps=60, folder=tmp_path)


def test_a_run_that_began_without_it_goes_back_to_the_checkpoints_of_its_beginning(tmp_path):
    fit(Data(), saver(tmp_path), steps=20, folder=tmp_path)
    path, states = tmp_path / "step=20.ckpt", States()
    callbacks = rollbacks(keep_snapshots=0), saver(tmp_path, 50), states
    found = fit(Data(nan_at(23)), *callbacks, ckpt_path=path, steps=40, folder=tmp_path)
    assert found.lines == [
        "SpikeRollback: step 30: loss not finite, out of bounds since step 23: weights and optimizer are those of step "
        f"20 again, from {path}; skipped: steps 20 to 29. Rollback 1 of at most 5"
    ]
    assert same(states.at[30], states.at[20])


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    def damage(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 42:
            newest = tmp_path / "step=40.ckpt"
            newest.write_bytes(newest.read_bytes()[:-500])

    evil = On(on_train_batch_start=damage)
    found = fit(Data(nan_at(45)), rollbacks(keep_snapshots=0), saver(tmp_path), evil, steps=60, folder=tmp_path)
    assert "of step 30 again, from" in found.lines[0]


# ---- saved and resumed


def resumed(data: Any, path: Path, *callbacks: Any, **options: Any) -> Any:
    return fit(data, *callbacks, ckpt_path=path, folder=path.parent, **{"steps": 80, **options})


@pytest.mark.parametrize("kind", ["SafeCheckpoint", "ModelCheckpoint and ExactResume"])
@pytest.mark.parametrize("log", [10, 20], ids=["found at a log step", "found by a validation"])
def test_the_run_is_saved_behind_a_rollback_and_a_resume_from_there_is_the_same_run_to_the_bit(kind, log, tmp_path):
    def savers() -> list[Any]:
        if kind == "SafeCheckpoint":
            return [SafeCheckpoint(tmp_path, every_n_train_steps=1000, keep_last=9)]
        return [ExactResume(), pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1000)]

    def averages() -> list[Any]:
        return [EMA(decay=0.9), TailAverage(horizon_steps=10, validate=False)]

    options = {"log_every_n_steps": log, "val_check_interval": 50, "num_sanity_val_steps": 0}
    data, kept, model = Validated(nan_at(45)), averages(), Model()
    model.validation_step = lambda batch, batch_idx: model.net(batch[0])
    found = fit(data, kept[0], rollbacks(), *kept[1:], *savers(), model=model, steps=80, folder=tmp_path, **options)
    end = {10: 50, 20: 51}[log]  # a step later, where the loss was read by the validation after step 50
    (path,) = [one for one in tmp_path.glob("*.ckpt") if torch.load(one)["global_step"] == end and not one.is_symlink()]
    assert path.name == ("last.ckpt" if kind != "SafeCheckpoint" else f"step={end}.ckpt")
    again, later = averages(), Model()
    later.validation_step = lambda batch, batch_idx: later.net(batch[0])
    back = resumed(Validated(nan_at(45)), path, again[0], rollbacks(), *again[1:], *savers(), model=later, **options)
    assert back.lines == []
    assert same(state_of(back.trainer), state_of(found.trainer))
    assert same(*([[one.terms, one.progress()] for one in ones] for ones in (again, kept)))
    assert [row["guard/rollbacks"] for _, row in back.rows if "guard/rollbacks" in row][-1] == 1.0


@pytest.mark.parametrize("step", [30, 45], ids=["from before the spike", "from within it"])
def test_a_resume_from_an_earlier_checkpoint_comes_to_the_spike_and_rolls_back_again(step, tmp_path):
    first = fit(Data(nan_at(44)), rollbacks(), saver(tmp_path, 5), steps=60, folder=tmp_path)
    for other in tmp_path.glob("step=*.ckpt"):
        if int(other.stem.partition("=")[2]) > step:
            other.unlink()
    again = resumed(Data(nan_at(44)), tmp_path / f"step={step}.ckpt", rollbacks(), saver(tmp_path, 5))
    (line,) = again.lines
    assert line.startswith(
        "SpikeRollback: step 50: loss not finite, out of bounds since step 44: weights and optimizer"
    )
    assert f"step {40 if step == 45 else 30} again, from" in line
    assert len(first.lines) == 1
    assert again.final_loss() < 2


def test_no_saver_no_save_and_a_full_disk_costs_a_line_and_not_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(Data(nan_at(45)), rollbacks(), steps=60)
    assert not list(tmp_path.rglob("*.ckpt"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    fills = On(on_train_start=lambda trainer, _: monkeypatch.setattr(trainer.strategy, "save_checkpoint", full))
    savers = fills, pl.callbacks.OnExceptionCheckpoint(tmp_path)
    found = fit(Data(nan_at(45)), rollbacks(), *savers, steps=60, folder=tmp_path)
    assert found.trainer.global_step == 60
    assert found.lines[1:] == [
        "SpikeRollback: the state behind the rollback is not saved ([Errno 28] No space left on device): a run that "
        "goes on from an earlier checkpoint comes to the spike again"
    ]


def test_a_state_that_was_loaded_is_saved_as_it_is_until_training_starts():
    callback, state = rollbacks(), {"rollbacks": []}
    assert callback.state_dict() == {}
    callback.load_state_dict(state)
    assert callback.state_dict() == state


def test_states_that_a_rollback_undid_are_no_good():
    once = [Rollback(40, 45, 60, "memory")]
    good = [step for step in range(0, 90, 10) if is_good(step, 80, once)]
    assert good == [0, 10, 20, 30, 60, 70]


# ---- the detector


def after(losses: list[float], **options: Any) -> SpikeDetector:
    detector = SpikeDetector(**{"patience_steps": 3, "sigmas": 6.0, "window_steps": 8, **options})
    for step, loss in enumerate(losses):
        detector.take(step, loss)
    return detector


def test_a_spike_is_a_loss_out_of_bounds_for_all_steps_of_the_patience():
    quiet = [1.0, 1.1, 0.9, 1.0] * 4
    assert after([*quiet, 5, 5, 5]).spiking
    assert after([*quiet, 5, 5, 5]).first_step == 16
    assert not after([*quiet, 5, 5]).spiking
    assert not after([*quiet, 5, 5, 1, 5, 5]).spiking
    assert after([*quiet, *[50.0] * 100]).limit == after(quiet).limit  # outliers never enter


def test_a_loss_that_is_not_finite_is_out_of_bounds_from_the_first_step_on():
    assert after([math.nan, math.inf, -math.inf]).spiking
    assert not after([9.0, 99.0, 999.0]).spiking  # finite ones once the window is half full


def test_a_slow_rise_does_not_lift_its_own_bound():
    slow = [1 + 0.05 * (step % 4) for step in range(64)] + [1.1 + 0.04 * step for step in range(40)]
    assert after(slow, window_steps=32).spiking


def test_a_detector_goes_on_from_its_state():
    one = after([1.0, 1.1, 0.9, 1.0, 1.2, 9.0])
    two = after([])
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert two.state_dict()["limits"] == one.state_dict()["limits"]
    assert (two.limit, two.in_a_row, two.first_step) == (one.limit, 1, 5)
    other = after([], window_steps=16)
    other.load_state_dict(one.state_dict())
    assert other.limit == math.inf


# ---- two processes


class Wide(Model):
    """Even sizes, and no BatchNorm, whose running means differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.register_buffer("batches", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


def test_a_spike_that_a_validation_reads_within_a_step_is_undone_behind_that_step():
    options = {"accumulate_grad_batches": 2, "val_check_interval": 101, "log_every_n_steps": 100}
    found = fit(Validated(nan_at(45)), rollbacks(), model=Wide(), steps=60, **options)
    assert found.lines[0].startswith("SpikeRollback: step 51: ")
    assert all(parameter.isfinite().all() for parameter in found.model.parameters())


def train_as_rank(rank: int, strategy: str, copies: int, folder: Path) -> None:
    """Only rank 1 gets the bad batch.

    With copies in memory the losses are read by the validation after step 49, which gathers FSDP2's shards.
    """
    states, source = States(), 30 if copies else 40
    options = {"log_every_n_steps": 30, "val_check_interval": 25} if copies else {"limit_val_batches": 0}
    found = fit(
        Validated(nan_at(45) if rank == 1 else None), rollbacks(keep_snapshots=copies), states,
        *([] if copies else [saver(folder, 5)]), model=Wide(), steps=56, folder=None if copies else folder, devices=2,
        strategy=FSDP2Strategy() if strategy == "fsdp2" else strategy, use_distributed_sampler=False, **options,
    )  # fmt: skip
    assert len(found.lines) == (rank == 0)
    for line in found.lines:
        assert "step 50: loss not finite, out of bounds since step 45: weights and optimizer are those of" in line
        assert f"step {source} again, from " + ("memory" if copies else str(folder)) in line
    assert same(states.at[50], states.at[source])
    assert all(local(parameter).isfinite().all() for parameter in found.model.parameters())


def train_as_ranks(rank: int, folder: Path) -> None:
    for strategy, copies in (("ddp", 3), ("fsdp2", 3), ("fsdp2", 0)):
        train_as_rank(rank, strategy, copies, folder)


@pytest.mark.long
def test_all_ranks_go_back_together_each_with_its_own_shards_from_memory_or_a_checkpoint(tmp_path):
    run(train_as_ranks, tmp_path)


# ---- costs and refusals


def test_between_logged_steps_nothing_is_read_on_the_host():
    counts = Counts(21, 29)
    fit(Data(), rollbacks(snapshot_every_n_steps=1), counts, model=Model("fused"), steps=32)
    assert counts.steps == 8
    assert counts.reads == []


def test_a_copy_restores_each_of_the_optimizers_that_wrap_one_another():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            super().__init__(optimizer.param_groups, {})
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    weight = torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    outer, module = Wrapper(inner), torch.nn.Module()
    trainer = SimpleNamespace(callbacks=[], optimizers=[outer], precision_plugin=None)
    inner.state[weight]["momentum_buffer"] = torch.ones(1)
    outer.state[weight]["slow_params"] = torch.ones(1)
    state = TrainingState(trainer, module)
    inner.state[weight]["momentum_buffer"].zero_()
    outer.state[weight]["slow_params"].zero_()
    outer.param_groups[0].update(lr=0.2, momentum=0.5)
    state.restore(trainer, module)
    assert inner.state[weight]["momentum_buffer"] == outer.state[weight]["slow_params"] == 1
    assert (inner.param_groups[0]["lr"], inner.param_groups[0]["momentum"]) == (0.2, 0.5)  # they are the recipe's


def test_a_copy_restores_nested_state_in_place_and_drops_what_came_later():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer, module = torch.optim.SGD([weight], lr=0.1), torch.nn.Module()
    module.register_buffer("cache", torch.ones(2))
    trainer = SimpleNamespace(callbacks=[], optimizers=[optimizer], precision_plugin=None)
    history, scale, resized = torch.ones(2), torch.ones(1), torch.ones(3)
    state = optimizer.state[weight]
    state.update(history=[history, (4, "a")], inner={"scale": scale}, resized=resized)
    optimizer.state["line_search"] = {"tries": 1}
    copied = TrainingState(trainer, module)

    history.zero_()
    scale.zero_()
    state["resized"] = torch.zeros(5)
    state["history"].append(torch.zeros(2))
    state["since"] = torch.zeros(2)
    optimizer.state["line_search"]["tries"] = 7
    module.cache = torch.zeros(4)
    copied.restore(trainer, module)

    assert state.keys() == {"history", "inner", "resized"}
    assert state["history"][0] is history
    assert torch.equal(history, torch.ones(2))
    assert state["history"][1:] == [(4, "a")]
    assert state["inner"]["scale"] is scale
    assert scale == 1
    assert torch.equal(state["resized"], torch.ones(3))
    assert optimizer.state["line_search"] == {"tries": 1}
    assert torch.equal(module.cache, torch.zeros(4))  # a cache that has grown stays


def test_a_copy_from_before_a_finetuning_added_parameters_is_put_back():
    first, later = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer, module = torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.nn.ParameterList([first, later])
    trainer = SimpleNamespace(callbacks=[], optimizers=[optimizer], precision_plugin=None)
    optimizer.state[first]["momentum_buffer"] = torch.ones(1)
    copied = TrainingState(trainer, module)

    optimizer.add_param_group({"params": [later], "lr": 0.2})
    for parameter in (first, later):
        optimizer.state[parameter]["momentum_buffer"] = torch.full((1,), 2.0)
        parameter.data.fill_(3.0)
    copied.restore(trainer, module)

    assert [parameter.item() for parameter in (first, later)] == [0, 0]
    assert optimizer.state[first]["momentum_buffer"] == 1
    assert later not in optimizer.state
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_runs_that_could_not_be_brought_back_are_refused():
    class LBFGS(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(UsageError, match=r"^trainer.log_every_n_steps=0: SpikeRollback reads the losses at log steps"):
        fit(Data(), rollbacks(), log_every_n_steps=0)
    with pytest.raises(UsageError, match=r"^SpikeRollback: LBFGS computes several losses"):
        fit(Data(), rollbacks(), model=LBFGS())
    with pytest.raises(UsageError, match=r"^SpikeRollback.keep_snapshots=0: there are no checkpoints either"):
        fit(Data(), rollbacks(keep_snapshots=0))
    with pytest.raises(UsageError, match=r"^SpikeRollback.patience_steps=20: StepGuard stops .* max_skipped_steps=10 "):
        fit(Data(), StepGuard(), rollbacks(patience_steps=20))
    with pytest.raises(UsageError, match=r"^SpikeRollback: EMAWeightAveraging would keep in its average the weights"):
        fit(Data(), pl.callbacks.EMAWeightAveraging(), rollbacks())
    for name in ("DeepSpeedStrategy", "FSDPStrategy"):
        trainer: Any = SimpleNamespace(log_every_n_steps=1, strategy=type(name, (), {})())
        with pytest.raises(UsageError, match=f"^SpikeRollback: {name} keeps weights"):
            rollbacks().on_fit_start(trainer, Model())
