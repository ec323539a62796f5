"""DoctorMonitor warns once of each symptom while the run goes on, and says nothing of a run that is well."""

import itertools
import math

import lightning.pytorch as pl
import pytest
import torch
from harness import processes
from harness.models import Small, adamw, rows
from harness.runs import On, fit, warned
from torch.utils.data import DataLoader

from lightning_tricks import DoctorMonitor, GoodputMonitor, GradNormMonitor, LRMonitor
from lightning_tricks.monitors.doctor_monitor import MOST_POINTS, History, optimizer_steps


def data(batches=200):
    return DataLoader(list(rows(batches, 2, 4)), batch_size=None)


def loss_at(value):
    """A loss with the gradient of `Small`, and a value that is a function of the step."""

    def loss(module, batch):
        own = module(batch).square().mean()
        return own - own.detach() + value(module.trainer.fit_loop.epoch_loop.global_step)

    return loss


def healthy(step):
    return 3 + 3 * math.exp(-step / 60) + 0.05 * math.sin(37 * step)


def trained(monitor, value, *callbacks, steps=200, **options):
    """The warnings of the monitor in a run whose loss has that value at each step."""
    model = options.pop("model", None) or Small(loss=loss_at(value), logs=True, optimizer=adamw)
    with warned("DoctorMonitor: ") as lines:
        run = fit(model, monitor, *callbacks, max_steps=steps, data=data(steps), **{"log_every_n_steps": 1, **options})
    return lines, run


def test_a_run_that_is_well_gets_no_warning(recwarn):
    lines, run = trained(DoctorMonitor(), healthy)
    assert lines == []
    assert set(run.of("doctor/findings")) == {0.0}


def test_a_sick_run_gets_one_line_for_each_symptom_while_it_runs():
    monitor, at = DoctorMonitor(), []
    note = On(on_train_batch_end=lambda trainer, *_: at.append(len(monitor.found)))
    lines, run = trained(monitor, lambda step: math.nan if step >= 100 else healthy(step), note)
    assert len(lines) == 1
    assert "not_finite: train/loss is nan at step 100" in lines[0]
    assert "Remedy: " in lines[0]
    assert at[99] == 0
    assert at[101] == 1  # at once, and not when the run has grown by a twentieth
    assert run.at("doctor/findings")[100] == 1


def test_what_other_monitors_record_is_looked_at():
    model = Small(loss=lambda module, batch: 1e6 * module(batch).square().mean(), logs=True, optimizer=adamw)
    lines, _ = trained(DoctorMonitor(), None, GradNormMonitor(), model=model, gradient_clip_val=1.0)
    assert any("clip_pinned: 100% of the steps" in line for line in lines)


def test_a_rate_of_zero_is_found_by_the_rate_that_is_recorded():
    frozen = Small(loss=loss_at(lambda step: 6.0), logs=True, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    lines, _ = trained(DoctorMonitor(), None, LRMonitor(), model=frozen)
    assert "plateau" in lines[0]
    assert "established" in lines[0]


@pytest.mark.parametrize(
    ("callbacks", "option"), [([], "lr"), ([type("SaveConfigCallback", (pl.Callback,), {})()], "--model.optimizer.lr")]
)
def test_a_remedy_names_options_where_the_command_line_runs_it_and_settings_in_a_script(callbacks, option):
    frozen = Small(loss=loss_at(lambda step: 6.0), logs=True, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    lines, _ = trained(DoctorMonitor(), None, LRMonitor(), *callbacks, model=frozen)
    assert f"Remedy: {option} 3e-4" in lines[0]


def test_validations_are_looked_at_in_the_module_that_logs_them_itself():
    class Overfits(Small):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", 5.0 + abs(self.trainer.global_step - 60) / 50)

    model = Overfits(loss=loss_at(lambda step: 5 * math.exp(-step / 60)), logs=True)
    monitor = DoctorMonitor()
    lines, _ = trained(monitor, None, model=model, val=data(1), val_check_interval=20, num_sanity_val_steps=1)
    assert any("overfitting: val/loss 5 at step 59, " in line for line in lines)
    assert "val/loss 5 at step 59, 7.8 at step 199" in monitor.found[0].evidence


def test_names_of_another_project_can_be_given():
    class Other(Small):
        def training_step(self, batch, batch_idx):
            self.log("my/loss", loss := self.loss_of(batch))
            return loss

    value = lambda step: math.nan if step >= 100 else healthy(step)  # noqa: E731
    lines, _ = trained(DoctorMonitor(names={"loss": "my/loss"}), None, model=Other(loss=loss_at(value)))
    assert "my/loss is nan" in lines[0]
    lines, _ = trained(DoctorMonitor(), None, model=Other(loss=loss_at(value)))
    assert "train/loss is nan" in lines[0]  # the loss of the step, whatever the module logs


def test_figures_of_an_interval_are_seen_wherever_their_monitor_stands():
    before, after = DoctorMonitor(), DoctorMonitor()
    for monitor, others in ((before, [before, GoodputMonitor()]), (after, [GoodputMonitor(), after])):
        fit(Small(logs=True), *others, max_steps=60, data=data(60), log_every_n_steps=10)
        assert len(monitor._history.series()["goodput/data"]) == 6


# ---- resumes


def resumed(tmp_path, change, after=healthy):
    """The lines of a run that goes on at step 100 from a changed checkpoint."""
    _, run = trained(DoctorMonitor(), healthy, steps=100)
    file = tmp_path / "a.ckpt"
    run.trainer.save_checkpoint(file)
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)
    return trained(DoctorMonitor(), after, ckpt_path=file)


def test_a_resume_of_the_whole_state_gets_no_warning(tmp_path):
    lines, run = resumed(tmp_path, lambda state: None)
    assert lines == []
    assert run.of("doctor/optimizer_step") == [100.0]


def test_a_resume_without_the_optimizers_state_is_named(tmp_path):
    lines, run = resumed(tmp_path, lambda state: state["optimizer_states"][0].update(state={}))
    assert run.of("doctor/optimizer_step") == [0.0]
    assert "the optimizer counts 0 steps of" in lines[0]


class Named(Small):
    """A module of another project, which logs its loss under a name of its own."""

    def training_step(self, batch, batch_idx):
        self.log("train_loss", loss := self.loss_of(batch))
        return loss


def test_a_resumed_run_is_judged_by_the_name_that_its_loss_has(tmp_path):
    monitor = DoctorMonitor()
    _, run = trained(monitor, None, steps=100, model=Named(loss=loss_at(healthy)))
    run.trainer.save_checkpoint(tmp_path / "a.ckpt")
    spoilt = loss_at(lambda step: math.nan if step >= 150 else healthy(step))
    lines, _ = trained(monitor, None, model=Named(loss=spoilt), ckpt_path=tmp_path / "a.ckpt")
    assert "not_finite: train/loss is nan at step 150" in lines[0]
    assert monitor._log()["loss"].steps.tolist() == list(range(80, 200))  # the last 20 losses before, and the new ones
    monitor.load_state_dict({"loss": {99: 3.0}})  # as a validation of that checkpoint does
    trained(monitor, None, steps=60, model=Named(loss=loss_at(healthy)))
    assert monitor._log().restarts == []
    assert monitor._log()["loss"].steps.tolist() == list(range(60))


def test_a_loss_that_jumps_at_a_resume_is_named(tmp_path):
    lines, _ = resumed(tmp_path, lambda state: None, lambda step: healthy(step) + 2 * math.exp(-(step - 100) / 20))
    assert any("restore: at the restart at step" in line and "before and" in line for line in lines)


def test_only_optimizers_of_adams_kind_are_asked_for_their_steps():
    weight = torch.nn.Parameter(torch.ones(1))
    sgd, adam = torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([weight], lr=0.1)
    assert (optimizer_steps(sgd), optimizer_steps(adam)) == (None, 0)
    weight.grad = torch.ones(1)
    adam.step()
    assert optimizer_steps(adam) == 1


# ---- the history


def test_a_long_history_is_thinned_out_evenly_and_keeps_what_is_not_finite():
    history = History()
    for step in range(4 * MOST_POINTS):
        history.add("a", step, math.nan if step == 777 else 1.0)
        if step % 100 == 99:
            history.thin_out()
    steps = history.series()["a"].steps.tolist()
    assert len(steps) <= MOST_POINTS + 100
    assert 777 in steps
    steps.remove(777)
    gaps = {later - step for step, later in itertools.pairwise(steps)}
    assert max(gaps) <= 8
    assert min(gaps) >= 2
    assert steps[0] == 0
    assert steps[-1] >= 4 * MOST_POINTS - 8


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_history_takes_16_bytes_a_point_and_some_4096_points_a_metric(value):
    history = History()
    for step in range(40 * MOST_POINTS):
        history.add("a", step, value)
        if step % 256 == 255:
            history.thin_out()
    (steps, values) = history.points["a"]
    assert steps.itemsize + values.itemsize == 16
    assert len(steps) == len(values) <= MOST_POINTS + 256
    assert (steps[0], steps[-1]) >= (0, 39 * MOST_POINTS)


def test_of_two_points_of_a_step_the_later_one_counts_also_where_steps_go_back():
    history = History()
    for step, value in ((0, 1.0), (1, 2.0), (1, 3.0), (0, 4.0)):
        history.add("a", step, value)
    series = history.series()["a"]
    assert (series.steps.tolist(), series.values.tolist()) == ([0, 1], [4.0, 3.0])


# ---- ranks


def two_ranks(rank, slow):
    """What a rank finds in a run of two ranks, of which the second waits in its forward pass."""
    import time

    def act(module, batch):
        if slow and module.trainer.global_rank == 1:
            time.sleep(0.1)  # far more than a busy machine adds

    monitor = DoctorMonitor()
    run = fit(
        Small(act=act, logs=True), monitor, max_steps=24, data=data(60), strategy="ddp", devices=2, log_every_n_steps=2
    )
    return [each.symptom for each in monitor.found], sorted(run.names())


@pytest.mark.long
def test_a_slow_rank_is_named_by_rank_0():
    (found, names), (others, _) = processes.run(two_ranks, True)
    assert "slow_rank" in found
    assert others == []
    assert {"ranks/0/own_seconds", "ranks/1/own_seconds"} <= set(names)
