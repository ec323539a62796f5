"""No monitor or output changes training: alone or with all others, in each situation of `battery.py`.

A callback class in `lightning_tricks.monitors` or `outputs` is under the battery at once. Weights, optimizers, losses
and random states are equal to the bit; no object, class or hook is left changed; nothing waits for a device between log
steps.
"""

import copy
import functools
import inspect
import itertools
import os
import pathlib
import pickle
import random
import sys
import types

import lightning.pytorch as pl
import numpy as np
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
    report_of_two_processes,
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
    """(what it changes on each rank, evidence of it on rank 0) of each group."""
    ranks = processes.run(report_of_two_processes, groups)
    return {name: ([rank[name][0] for rank in ranks], ranks[0][name][1]) for name in ranks[0]}


@pytest.mark.long
def test_no_monitor_changes_anything_in_two_processes():
    alone = {name: {name: make} for name, make in CASES.items()}
    found = in_two_processes(GROUPS)
    if any(any(changes) for changes, _ in found.values()):
        found |= in_two_processes(list(alone.values()))
    assert {name: changes for name, (changes, _) in found.items() if any(changes)} == {}


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


def take_it_back(trainer, pl_module):
    del trainer.precision_plugin.clip_grad_by_norm


class PassesTheUsersMethodBy(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        self.users = vars(pl_module)["configure_gradient_clipping"]
        del pl_module.configure_gradient_clipping

    def on_train_end(self, trainer, pl_module):
        pl_module.configure_gradient_clipping = self.users


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


def sets(hook, owner, name, value):
    """A callback that is given pytest's `patch`, by which the test takes the change back."""
    return lambda patch: On(**{hook: lambda *_: patch.setattr(owner, name, value)})


ZERO_GRAD = torch.optim.Optimizer.zero_grad
ROGUES = {
    "draws from torch": (
        on(on_train_batch_end=lambda *_: torch.rand(())), clips_by_norm,
        ["weight net.head.bias", "module.losses", "torch's random state"],
    ),
    "draws from numpy": (on(on_validation_end=lambda *_: np.random.rand()), clips_by_norm, ["numpy's random state"]),
    "draws from Python": (on(on_train_start=lambda *_: random.random()), clips_by_norm, ["python's random state"]),
    "halves gradients": (halves_gradients, clips_by_value, ["weight net.head.bias", "'exp_avg'"]),
    "leaves a patch": (on(on_train_start=leave_a_patch), clips_by_norm, ["clip_grad_by_norm"]),
    "leaves a patch over the user's": (on(on_train_start=leave_a_patch), own_methods, ["that are gone"]),
    "leaves a patch after a failure": (
        on(on_train_start=leave_a_patch, on_train_end=take_it_back), fails_and_fits_again, ["clip_grad_by_norm"],
    ),
    "deletes the user's method": (
        on(on_train_end=lambda trainer, _: delattr(trainer, "save_checkpoint")), own_methods, ["that are gone"],
    ),
    "passes the user's method by": (PassesTheUsersMethodBy, own_methods, ["calls of the user's"]),
    "leaves an attribute": (
        on(on_train_start=lambda _, module: setattr(module.net.blocks[1], "watched_by", "me")), clips_by_norm,
        ["watched_by"],
    ),
    "leaves a module's hook": (
        on(on_train_start=lambda _, module: module.net.blocks[0].register_forward_hook(lambda *_: None)), clips_by_norm,
        ["_forward_hooks"],
    ),
    "leaves a tensor's hook": (
        on(on_train_start=lambda _, module: module.net.head.weight.register_hook(lambda grad: None)), clips_by_norm,
        ["net.head.weight.hooks"],
    ),
    "patches a class": (
        sets("on_train_start", torch.optim.Optimizer, "zero_grad", lambda *args, **kwargs: ZERO_GRAD(*args, **kwargs)),
        clips_by_norm, ["attributes of Optimizer"],
    ),
    "patches a function": (
        sets("on_train_start", torch.nn.utils, "clip_grad_norm_", lambda *args: None), clips_by_norm,
        ["functions of torch.nn.utils"],
    ),
    "sets the environment": (
        lambda patch: On(on_train_start=lambda *_: patch.setitem(os.environ, "WATCHED", "1")), clips_by_norm,
        ["environment"],
    ),
    "leaves an except hook": (sets("on_exception", sys, "excepthook", print), fails_and_fits_again, ["except hooks"]),
    "reads each step": (
        on(on_train_batch_end=lambda trainer, module, outputs, *_: outputs["loss"].item()),
        accumulates_with_a_short_last_window, ["reads"],
    ),
    "branches on a tensor": (on(on_before_optimizer_step=branch_on_a_tensor), clips_by_norm, ["reads"]),
    "copies to the host": (
        on(on_train_batch_start=lambda trainer, module, batch, _: batch.to(device="cpu")), clips_by_norm, ["reads"],
    ),
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


def test_the_battery_takes_a_callback_that_does_nothing_for_harmless():
    for situation in (clips_by_norm, own_methods, fails_and_fits_again):
        assert without(situation).differences(play(situation, pl.Callback)) == {}


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


def test_the_battery_names_the_one_among_many_that_changes_something():
    group = {"idle": pl.Callback, "rogue": halves_gradients}
    assert list(differences_of(clips_by_value, group)) == ["rogue"]


def test_a_class_stands_once_in_a_group():
    first, second = functools.partial(HooksIntoAGraph), HooksIntoAGraph
    groups = groups_of({"a": first, "b": second, "c": pl.Callback})
    assert [sorted(group) for group in groups] == [["a", "c"], ["b"]]


NEWCOMER = '''
from typing import Literal
import lightning.pytorch as pl

class Newcomer(pl.Callback):
    """Watch.

    Example:
        >>> newcomer = Newcomer(3, names=["a"])
    """

    def __init__(self, depth: int, names: list[str], mode: Literal["fast", "slow"] | None = None, seed: int = 0):
        pass
'''


def test_a_newcomer_is_found_and_its_arguments_come_from_its_example_and_its_options(tmp_path, monkeypatch):
    (tmp_path / "package" / "corner").mkdir(parents=True)
    for path, text in {"__init__.py": "", "corner/__init__.py": "", "corner/newcomer.py": NEWCOMER}.items():
        (tmp_path / "package" / pathlib.Path(path)).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = monitors_in(types.SimpleNamespace(__name__="package", __path__=[str(tmp_path / "package")]))
    assert list(found) == ["Newcomer"]
    example, newcomer = {"depth": 3, "names": ["a"]}, found["Newcomer"]
    assert arguments_to_try(newcomer) == [example, example | {"mode": "fast"}, example | {"mode": "slow"}]
    newcomer.__doc__ = newcomer.__doc__.replace('["a"])', '["a"])  # doctest: +SKIP')
    assert arguments_to_try(newcomer) == []
    newcomer.__doc__ = "Watch."
    with pytest.raises(TypeError, match="missing a required argument: 'depth'"):
        arguments_to_try(newcomer)
