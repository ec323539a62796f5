"""No monitor or output changes training: alone or with all others, in each situation of `battery.py`.

A callback class in `lightning_tricks.monitors` or `outputs` is under the battery at once. Weights, optimizers, losses
and random states are equal to the bit; no object, class or hook is left changed; nothing waits for a device between log
steps.
"""

import copy
import functools
import inspect
import itertools
import pickle

import lightning.pytorch as pl
import pytest
import torch
from battery import (
    ALONE,
    LOG_EVERY,
    SEVERAL_FITS,
    TOGETHER,
    Fails,
    Model,
    Trial,
    accumulates_with_a_short_last_window,
    all_of,
    changes_in_two_processes,
    clips_by_norm,
    clips_by_value,
    compiled_network,
    differences_of,
    fails_and_fits_again,
    fits_three_times,
    groups_of,
    monitors_in,
    own_methods,
    play,
    scales_the_loss,
    without,
)
from harness import processes
from harness.arguments import arguments_to_try
from harness.runs import On

import lightning_tricks.monitors
import lightning_tricks.outputs

MONITORS = monitors_in(lightning_tricks.monitors) | monitors_in(lightning_tricks.outputs)
MEASURED = ("throughput/", "memory/", "goodput/")  # logged values that no two runs share
CASES = {
    "-".join([name, *map(str, options.values())]): functools.partial(cls, **options)
    for name, cls in MONITORS.items()
    for options in arguments_to_try(cls)
}
GROUPS = groups_of(CASES)

case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


def named(situations):
    return pytest.mark.parametrize("situation", situations, ids=lambda situation: situation.__name__)


@functools.cache
def outcome(situation, make):
    without(situation)  # before it, as torch changes some of its classes when a process plays for the first time
    return play(situation, make)


def test_each_monitor_has_a_case_but_those_that_need_more_than_this_machine_has():
    cases = {make.func.__name__ for make in CASES.values()}
    assert set(MONITORS) - cases == {"LMEval"}  # tests/outputs/test_lm_eval.py


@named(ALONE)
@case
def test_a_monitor_changes_nothing(make, situation):
    assert without(situation).differences(outcome(situation, make)) == {}


@functools.cache
def outcome_of_many(situation, group):
    """Of the group of that number; see `outcome`."""
    return outcome(situation, all_of(GROUPS[group]))


groups = pytest.mark.parametrize("group", range(len(GROUPS)), ids=[f"{len(group)} monitors" for group in GROUPS])


@named(TOGETHER)
@groups
def test_many_monitors_change_nothing(group, situation):
    assert differences_of(situation, GROUPS[group], outcome_of_many(situation, group)) == {}


@named(SEVERAL_FITS)
@groups
def test_a_later_fit_knows_nothing_of_an_earlier_one(group, situation):
    assert kept(situation, all_of(GROUPS[group]), outcome_of_many(situation, group)) == []


def kept(situation, make, played=None):
    """The rows that callbacks log in the last fit, where others of the same classes log other rows."""
    played = played or play(situation, make)
    rows, anew = (comparable(each.logged[-1]) for each in (played, play(situation, make, fresh=True)))
    return [pair for pair in itertools.zip_longest(rows, anew) if pair[0] != pair[1]]


def comparable(rows):
    return [(step, {n: None if n.startswith(MEASURED) else v for n, v in values.items()}) for step, values in rows]


@case
def test_a_monitor_is_at_work(make):
    """A battery over callbacks that do nothing would prove nothing."""
    assert any(outcome(at, make).evidence - without(at).evidence for at in (clips_by_norm, scales_the_loss))


@case
@pytest.mark.parametrize("fails", [False, True], ids=["", "after a failure"])
def test_a_monitor_and_its_trainer_can_be_pickled_and_copied_after_a_fit(make, fails, tmp_path, monkeypatch):
    """As a launcher does that starts the next fit in processes of its own (`ddp_spawn`)."""
    monkeypatch.chdir(tmp_path)
    trial, module = Trial(make, fresh=True), Fails() if fails else Model()
    monitor = make()
    bar, logger = isinstance(monitor, pl.callbacks.ProgressBar), pl.loggers.TensorBoardLogger("logs")
    trainer = trial.trainer(logger=logger, callbacks=monitor, enable_progress_bar=bar)
    trial.fit(module, trainer)
    for held in (monitor, trainer):
        copied, back = copy.deepcopy(held), pickle.loads(pickle.dumps(held))
        assert type(copied) is type(back) is type(held)
    trial.fit(module, back)
    assert back.global_step == LOG_EVERY * 2 or fails


def in_two_processes(groups):
    """What each group changes on each rank, where it changes something."""
    ranks = processes.run(changes_in_two_processes, groups)
    return {name: changes for name in ranks[0] if any(changes := [rank[name] for rank in ranks])}


@pytest.mark.long
def test_no_monitor_changes_anything_in_two_processes():
    if found := in_two_processes(GROUPS):
        found |= in_two_processes([{name: make} for name, make in CASES.items()])  # which of them it is
    assert found == {}


# --------------------------------------------------------------------- the battery's own test: callbacks that must fail


def on(**hooks):
    return lambda: On(**hooks)


def halve_gradients(trainer, pl_module, optimizer):
    pl_module.net.head.bias.grad.mul_(0.5)


halves_gradients = on(on_before_optimizer_step=halve_gradients)


def leave_a_patch(trainer, pl_module):
    plugin = trainer.precision_plugin
    clip = plugin.clip_grad_by_norm
    plugin.clip_grad_by_norm = functools.wraps(clip)(lambda *args, **kwargs: clip(*args, **kwargs))


def branch_on_a_tensor(trainer, pl_module, optimizer):
    if pl_module.net.head.bias.grad.isnan().any():
        print("NaN")


class HooksIntoAGraph(pl.Callback):
    """The compiler takes its hook into the graph, and compiles again whenever the list is longer."""

    def on_fit_start(self, trainer, pl_module):
        calls = []
        self.hook = pl_module.net.blocks[0].register_forward_hook(lambda *_: calls.append(1))

    def on_fit_end(self, *_):
        self.hook.remove()


def patches_a_class(patch):
    """It is given pytest's `patch`, by which the test takes the change back."""
    zero_grad = torch.optim.Optimizer.zero_grad
    another = lambda *args, **kwargs: zero_grad(*args, **kwargs)  # noqa: E731
    return On(on_train_start=lambda *_: patch.setattr(torch.optim.Optimizer, "zero_grad", another))


ROGUES = {
    "draws from torch": (
        on(on_train_batch_end=lambda *_: torch.rand(())), clips_by_norm,
        ["weight net.head.bias", "module.losses", "torch's random state"],
    ),
    "halves gradients": (halves_gradients, clips_by_value, ["weight net.head.bias", "'exp_avg'"]),
    "leaves a patch over the user's": (on(on_train_start=leave_a_patch), own_methods, ["that are gone"]),
    "leaves an attribute": (
        on(on_train_start=lambda _, module: setattr(module.net.blocks[1], "watched_by", "me")), clips_by_norm,
        ["watched_by"],
    ),
    "leaves a module's hook": (
        on(on_train_start=lambda _, module: module.net.blocks[0].register_forward_hook(lambda *_: None)), clips_by_norm,
        ["_forward_hooks"],
    ),
    "patches a class": (patches_a_class, clips_by_norm, ["attributes of Optimizer"]),
    "reads each step": (
        on(on_train_batch_end=lambda trainer, module, outputs, *_: outputs["loss"].item()),
        accumulates_with_a_short_last_window, ["reads"],
    ),
    "branches on a tensor": (on(on_before_optimizer_step=branch_on_a_tensor), clips_by_norm, ["reads"]),
    "logs under the user's name": (
        on(on_train_batch_end=lambda trainer, *_: trainer.logger.log_metrics({"train/loss": 0.0}, 0)), clips_by_norm,
        ["user's metrics"],
    ),
    "hooks into a graph": (HooksIntoAGraph, compiled_network, ["module.graphs"]),
}  # fmt: skip


@pytest.mark.parametrize(("rogue", "situation", "places"), ROGUES.values(), ids=ROGUES)
def test_the_battery_notices(rogue, situation, places, monkeypatch):
    patching = "patch" in inspect.signature(rogue).parameters
    played = play(situation, functools.partial(rogue, monkeypatch)) if patching else outcome(situation, rogue)
    found = without(situation).differences(played)
    monkeypatch.undo()
    for where in places:
        assert any(where in name for name in found), (where, list(found)[:20])


class KeepsSums(pl.Callback):
    """Logs the number of micro-batches of a step; one that fails is counted to the next fit's first step."""

    sums = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.sums += 1
        if not trainer.fit_loop._should_accumulate():
            trainer.logger.log_metrics({"micro_batches": self.sums}, trainer.global_step)
            self.sums = 0


class CountsOn(pl.Callback):
    """Never forgets a fit."""

    steps = 0

    def on_train_batch_end(self, trainer, *_):
        self.steps += 1
        trainer.logger.log_metrics({"steps": self.steps}, trainer.global_step)


@pytest.mark.parametrize(("rogue", "situation"), [(KeepsSums, fails_and_fits_again), (CountsOn, fits_three_times)])
def test_the_battery_notices_what_is_kept_from_an_earlier_fit(rogue, situation):
    group = {"idle": pl.Callback, "rogue": rogue}
    assert differences_of(situation, group) == {}
    assert kept(situation, all_of(group))
