"""Save checkpoints that survive a kill, a full disk and a run of NaN; at a resume, put back the random state."""

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast
from uuid import uuid4
from weakref import proxy

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_tricks._core.errors import UsageError
from lightning_tricks._core.random_state import saved_random_states, set_random_state_of
from lightning_tricks._host.address import ask, is_address
from lightning_tricks._trainer.lightning import BACKEND, Module, Trainer, WarnOnce, pl, rank_zero_warn
from lightning_tricks._trainer.loop import batch_progress, logging_step
from lightning_tricks._trainer.objects import has_default_checkpoint_io, is_a, unwrapped
from lightning_tricks._trainer.refusals import Refusal
from lightning_tricks._trainer.run_facts import random_rank, reduce_over_all, weights_layout
from lightning_tricks._trainer.run_length import is_last_step
from lightning_tricks._trainer.saves import may_save, save_whole_step
from lightning_tricks.checkpoints import AtomicCheckpointIO, verify_checkpoint
from lightning_tricks.checkpoints.bucket import mirror
from lightning_tricks.checkpoints.find_checkpoint import newest_whole
from lightning_tricks.checkpoints.record import KEY, Record, record_of
from lightning_tricks.guards.bucket_folder import BucketFolder
from lightning_tricks.guards.checkpoint_content import (
    FreshScore,
    content,
    not_finite,
    numbers_of,
    refusing_other_modules,
)
from lightning_tricks.guards.checkpoint_folder import (
    LAST,
    CheckpointFolder,
    Records,
    Retention,
    best_first,
    last_of,
    report_writes,
)
from lightning_tricks.optim.keep_settings_on_load import layers_of

__all__ = ["SafeCheckpoint"]

_REFUSED = Refusal(
    ("foreign engine", "flat", "foreign shards"),
    "{strategy} writes checkpoints itself, and cannot show whether they are complete: take FSDP2Strategy or "
    "DeepSpeedZeROStrategy, or save with ModelCheckpoint",
)

# What ModelCheckpoint shows of its checkpoints, on every rank.
_SHOWN = (
    "best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "kth_value", "current_score",
    "last_model_path",
)  # fmt: skip


# ---- when a checkpoint is due


def passes_multiple(before: int, step: int, every: int | None) -> bool:
    """Whether a multiple of `every` lies after `before` and not after `step`; never where `every` is None."""
    return every is not None and step // every > before // every


def passes_power_of_two(before: int, step: int) -> bool:
    """Whether 1, 2, 4, 8, ... lies after `before` and not after `step`."""
    return step.bit_length() > before.bit_length()


class SaveClock:
    """Whether a checkpoint is due, and whether it shall stay for ever, by SafeCheckpoint's options of these names."""

    def __init__(
        self,
        every_n_train_steps: int | None,
        every_n_minutes: float | None,
        permanent_steps: int | Literal["powers_of_two"] | None,
    ) -> None:
        self.every_n_train_steps, self.every_n_minutes = every_n_train_steps, every_n_minutes
        self.permanent_steps = permanent_steps
        self.due = self.permanent = False
        self._step, self._saved_at = 0, 0.0

    def start(self, step: int) -> None:
        """Begin to count at a step whose checkpoint, if any, there is already."""
        self._step = step
        self.saved()

    def saved(self) -> None:
        """A checkpoint was saved now, or it was tried."""
        self.due = self.permanent = False
        self._saved_at = time.monotonic()

    def advance(self, step: int) -> bool:
        """Take note of the optimizer steps done so far; returns whether there are more than at the last call."""
        before, self._step = self._step, step
        if self.permanent_steps == "powers_of_two":
            self.permanent |= passes_power_of_two(before, step)
        else:
            self.permanent |= passes_multiple(before, step, self.permanent_steps)
        self.due |= self.permanent or passes_multiple(before, step, self.every_n_train_steps)
        return step != before

    def minutes_are_over(self) -> bool:
        """Whether the interval in minutes has passed on this process's clock."""
        return self.every_n_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_n_minutes


# ---- the callback


class SafeCheckpoint(pl.callbacks.ModelCheckpoint):
    """Saves checkpoints so that a whole one always exists. Use it in place of `ModelCheckpoint`.

    It saves whole training states as `step=N.ckpt`, where N is `trainer.global_step` (with several optimizers Lightning
    counts the steps of each), and lets `last.ckpt`, a relative link, lead to the newest one. The last step of a run is
    always saved. `trainer.checkpoint_callback`, `best_model_path`, `ckpt_path="last"` and `"best"` work as usual.

    It promises:

    - A kill at any moment leaves a whole checkpoint, and `last.ckpt` leads to one: nothing is deleted, and the link is
      not moved, before the new checkpoint has its name on the disk.
    - Neither retention nor a full disk ever costs the newest checkpoint whose weights are finite. One with NaN or
      infinities in weights or running statistics is saved and marked, which is said once, and `last.ckpt` does not lead
      to it.
    - Only checkpoints of this run are counted, deleted or replaced. Each record names its run, whose identifier is made
      at its start and kept when it is resumed. Others stay, which is said in one line when a run begins.
    - On a full disk the checkpoint that would go next is deleted and the save tried again. If that fails too, training
      goes on without this checkpoint, and one line says so.
    - It saves at the end of an accumulation window, and after the validation and the epoch's end that are due at that
      step, so a resumed run neither repeats nor loses a validation.
    - A resumed run takes the random numbers of the unbroken one, on each rank. With batches that depend on their
      position alone, as those of `TextData` and `TokenData` do, it is that run to the bit.
    - A checkpoint of another class or of other weights is refused by `fit` in one line.

    Where the Trainer has Lightning's own CheckpointIO, it gets `AtomicCheckpointIO`.

    Args:
        dirpath: the folder; by default that of ModelCheckpoint, `checkpoints` in the run's folder. Files of other
            programs in it are never touched. With an address (`s3://...`), checkpoints are saved to a folder of this
            host, from which a thread uploads them, see BucketFolder.
        every_n_train_steps: optimizer steps between saves, as `trainer.global_step` counts them.
        every_n_minutes: minutes between saves on rank 0's clock, which is asked every `log_every_n_steps` steps. With
            neither interval, it saves after each validation and at the end of each epoch, as ModelCheckpoint does.
        keep_last: how many of the newest checkpoints stay; 2, so that one is left if a disk damages the other.
        monitor: a logged metric, `epoch` or `step`; without one, none is the best. Only a value logged for the saved
            weights counts, so for a metric of validation the steps between saves should divide those between
            validations.
        mode: whether the lowest value is the best one, "min", or the highest, "max".
        keep_best: how many of the best checkpoints stay, with `monitor`.
        permanent_steps: save at each multiple of it as well, or at steps 1, 2, 4, 8, ..., and never delete these.
        asynchronous: write in a thread while training goes on, at the price of a copy in the host's memory.

    Raises:
        UsageError: an option out of range; another one, or a ModelCheckpoint, in the same folder; a folder that cannot
            be written, or without symbolic links; a bucket that is not there or refuses; a Trainer of the other
            Lightning package; another CheckpointIO than AtomicCheckpointIO and Lightning's default; FSDP1, Lightning's
            ModelParallelStrategy or DeepSpeedStrategy, which write by themselves; `monitor` is not logged; at a resume,
            a checkpoint of another class or of other weights; at a save, another process that writes a checkpoint of
            the same name.

    Source: https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.callbacks.ModelCheckpoint.html
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        every_n_train_steps: int | None = None,
        every_n_minutes: float | None = None,
        keep_last: int = 2,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep_best: int = 1,
        permanent_steps: int | Literal["powers_of_two"] | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.every_n_train_steps, self.every_n_minutes = every_n_train_steps, every_n_minutes
        self.keep_last, self.keep_best, self.mode = keep_last, keep_best, mode
        self.permanent_steps, self.asynchronous = permanent_steps, asynchronous
        self._check_options()
        self.address = str(dirpath).rstrip("/") if is_address(dirpath) else None  # of a bucket
        super().__init__(
            mirror(self.address) if self.address else dirpath,
            monitor=monitor, mode=mode, save_top_k=0, every_n_train_steps=every_n_train_steps or 0,
        )  # fmt: skip
        self._given_dirpath = self.address or self.dirpath
        self._clock = SaveClock(every_n_train_steps, every_n_minutes, permanent_steps)
        self._score = FreshScore(monitor)  # of one fit
        self._refusals = ExitStack()
        self._folder: CheckpointFolder
        self._io: AtomicCheckpointIO | None = None
        self._number = 0  # of the newest checkpoint
        self._run = ""  # identifier of the run
        self._is_new_run = False
        self._saving: Record | None = None
        self._rng: list[Any] | None = None  # of each rank, to put back
        self._resumes = True  # what is loaded; False: it is evaluated
        self._loggers_outdated = False  # there is a checkpoint that they do not know
        self._warn_once = WarnOnce()
        self._reserves = False  # host memory for the first save in the background, after the next step

    def _check_options(self) -> None:
        for name, least, words in (
            ("every_n_train_steps", 1, (None,)),
            ("permanent_steps", 1, (None, "powers_of_two")),
            ("keep_last", 1, ()),
            ("keep_best", 0, ()),
        ):
            value = getattr(self, name)
            if value not in words and (not isinstance(value, int) or value < least):
                raise UsageError(f"SafeCheckpoint: {name}={value!r}: give a whole number of at least {least}")
        if self.every_n_minutes is not None and not self.every_n_minutes > 0:
            raise UsageError(f"SafeCheckpoint: every_n_minutes={self.every_n_minutes!r}: give a number above 0")
        if self.mode not in ("min", "max"):
            raise UsageError(f"SafeCheckpoint: mode={self.mode!r}: give 'min' or 'max'")

    @property
    def state_key(self) -> str:
        """Tells several of them apart in a checkpoint. Intervals may change between runs."""
        return self._generate_state_key(dirpath=str(self._given_dirpath), monitor=self.monitor, mode=self.mode)

    # ---- start and end

    def check_run(self, trainer: Any, datamodule: Any, stage: str) -> None:
        """Refuse what the options tell, before any process is started: a strategy, a bucket's library, other saves."""
        if stage == "fit":
            _REFUSED.check(trainer.strategy, "SafeCheckpoint:")
            self._refuse_shared_folder(trainer)
        if self.address:
            ask(self.address, lambda fs, path: None)  # refuses where the library is missing
        io = trainer.strategy.checkpoint_io
        if not (has_default_checkpoint_io(trainer) or isinstance(io, AtomicCheckpointIO)):
            raise UsageError(
                f"plugins={type(io).__name__}: SafeCheckpoint's promises need AtomicCheckpointIO: leave the plugin out "
                "(in the background SafeCheckpoint(asynchronous=True) writes), or take ModelCheckpoint"
            )

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Find the folder and put it in order; give the Trainer a CheckpointIO that loses nothing."""
        if self not in trainer.checkpoint_callbacks:
            other = {"lightning": "pytorch_lightning", "pytorch_lightning": "lightning"}[BACKEND]
            raise UsageError(
                f"SafeCheckpoint: the Trainer is of {other}, and lightning_tricks builds on {BACKEND}, so the Trainer "
                f"does not know it: import {other} before lightning_tricks, or set LIGHTNING_TRICKS_BACKEND={other}"
            )
        super().setup(trainer, pl_module, stage)  # finds the folder
        if is_address(self.dirpath):  # of the Trainer or its logger
            self.address, self.dirpath = str(self.dirpath), str(mirror(str(self.dirpath)))
        self.check_run(trainer, None, stage)
        if has_default_checkpoint_io(trainer):
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        self._io = io = cast("AtomicCheckpointIO", trainer.strategy.checkpoint_io)
        io.asynchronous |= self.asynchronous
        if stage != "fit":
            return
        retention = Retention(self.keep_last, self.keep_best, "max" if self.mode == "max" else "min")
        self._last_global_step_saved = -1  # so that `save_now` saves step 0 as well
        self._rng = None  # also that of a search for a learning rate, which restores in the middle of a fit
        self._score = FreshScore(self.monitor)
        self._find_run(trainer)
        if self.address:
            self._folder = BucketFolder(self.address, retention, self._run, self._on_update, trainer.is_global_zero)
        else:
            self._folder = CheckpointFolder(Path(str(self.dirpath)), retention, self._run, self._on_update)
        problem = ""
        if trainer.is_global_zero and not (problem := self._folder.problem()):
            self._folder.sweep()
            self._number = self._folder.largest_number()
        self._number, problem = trainer.strategy.broadcast((self._number, problem))
        if problem and not self._is_off(trainer):
            raise UsageError(f"SafeCheckpoint: dirpath={problem}")
        self._refusals.enter_context(refusing_other_modules(trainer, pl_module))
        report_writes(io, [saver._folder for saver in _savers_of(trainer) if hasattr(saver, "_folder")])

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Refuse a shared folder anew: every callback knows by now which folder it has by default."""
        self._refuse_shared_folder(trainer)

    def _refuse_shared_folder(self, trainer: Any) -> None:
        """Refuse a folder to which another callback saves."""
        for other in trainer.checkpoint_callbacks:
            if other is self or not is_a(other, "ModelCheckpoint"):
                continue
            if os.path.realpath(str(other.dirpath)) == os.path.realpath(str(self.dirpath)):
                raise UsageError(
                    f"SafeCheckpoint: dirpath={self.address or self.dirpath}: another {type(other).__name__} saves to "
                    "this folder too, and each would delete checkpoints that the other counts on: give one of them "
                    "another dirpath"
                )

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """For Lightning's `ckpt_path="last"`; a bucket has no link."""
        if not self.address:
            return super()._find_last_checkpoints(trainer)
        found = newest_whole([self.address], verify_checkpoint)
        return {str(found.chosen.place)} if found.chosen else set()

    def _find_run(self, trainer: Trainer) -> None:
        """Begin a run, unless the Trainer goes on with its last one; all savers of a Trainer name the same run."""
        first = _savers_of(trainer)[0]
        if first is not self:
            self._run, self._is_new_run = first._run, first._is_new_run
        elif not self._run or trainer.global_step == 0:
            self._run, self._is_new_run = trainer.strategy.broadcast(uuid4().hex), True  # moves no random state
        else:
            self._is_new_run = False

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Take note of the checkpoint that the run goes on from; put its random state back before a loader draws."""
        self._refusals.close()
        self._resumes = trainer.state.fn == "fit"
        if not self._resumes:
            return
        self._last_global_step_saved = int(checkpoint["global_step"])
        if run := record_of(checkpoint).run:
            self._run = self._folder.run = run
            self._is_new_run = False
        self._rng = saved_random_states(checkpoint)
        if self._rng:
            set_random_state_of(random_rank(trainer), self._rng)
        if trainer.ckpt_path:
            path = trainer.ckpt_path
            self._folder.protect(mirror(path) if is_address(path) else Path(path))

    def state_dict(self) -> dict[str, Any]:
        """The best checkpoint so far; everything else is in the records of the folder."""
        return {"best_model_path": self.best_model_path, "best_model_score": self.best_model_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Know the best checkpoint of the run that is gone on with, also from another folder.

        A checkpoint that is evaluated names the best one before it was itself written, so it is not asked.
        """
        if not self._resumes:
            return
        self.best_model_path, self.best_model_score = state_dict["best_model_path"], state_dict["best_model_score"]

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Begin to count; put the random state back, which the loaders' start may have moved."""
        self._refusals.close()
        if self._rng and not batch_progress(trainer).is_last_batch:  # else the next pass begins, with a draw of its own
            set_random_state_of(random_rank(trainer), self._rng)
        self._rng = None
        self._clock.start(trainer.global_step)
        self._reserves = self._io is not None and self._io.asynchronous and _savers_of(trainer)[0] is self
        if not trainer.is_global_zero or self._is_off(trainer):
            return
        self._folder.start()
        if self._is_new_run and (line := self._folder.line_on_others()):
            rank_zero_warn(line)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Save the last step, unless it is saved; wait for what is being written."""
        if self._is_off(trainer):
            return
        self.save_now(trainer)
        if self._io:
            self._io.wait()
        self._folder.wait()
        shown = {name: getattr(self, name) for name in _SHOWN}
        vars(self).update(trainer.strategy.broadcast(shown))
        self._update_loggers(trainer)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Wait for what is being written."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Wait for what is being written."""
        self._refusals.close()
        io, self._io = self._io, None
        if io is None:
            return
        try:
            io.wait()
        except Exception as error:
            rank_zero_warn(f"SafeCheckpoint: the last checkpoint was not saved: {error}")
        if folder := vars(self).get("_folder"):
            folder.wait()
        io.on_commit = io.on_error = None

    # ---- when to save

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Raise the error of a failed write in the background; tell the loggers of a new checkpoint."""
        if self._io:
            self._io.raise_if_failed()
        self._update_loggers(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if it is due, when an optimizer step is done: at the end of an accumulation window."""
        if self._is_off(trainer) or not self._clock.advance(trainer.global_step):
            return
        every = trainer.log_every_n_steps or 50  # type: ignore[attr-defined]
        if self.every_n_minutes is not None and (logging_step(trainer) + 1) % every == 0:
            self._clock.due |= trainer.strategy.broadcast(self._clock.minutes_are_over())
        self._clock.due |= is_last_step(trainer)
        if self._clock.due and may_save(trainer):
            self._save(trainer)
        elif self._reserves:
            _reserve(self._io, trainer, pl_module)
        self._reserves = False

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Save if it was due at this step."""
        if self._is_off(trainer):
            return
        self._score.after_validation(trainer)
        self._clock.due |= self._has_no_interval or is_last_step(trainer)
        if self._clock.due and may_save(trainer):
            self.save_now(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Save, where there is no interval, and if it was due at the last step: a resume calls no hook of it anew."""
        if self._has_no_interval or self._clock.due:
            self.save_now(trainer)

    def save_now(self, trainer: Trainer) -> None:
        """Save, unless the state after this step is saved already; every rank must call.

        Call it where a step is whole: in a callback's `on_train_batch_end` behind the last micro-batch of a step, or in
        `on_validation_end` where a validation is due at that step.
        """
        if not self._is_off(trainer) and self._last_global_step_saved != trainer.global_step:
            self._save(trainer)

    @property
    def _has_no_interval(self) -> bool:
        return self.every_n_train_steps is None and self.every_n_minutes is None

    def _is_off(self, trainer: Trainer) -> bool:
        return bool(trainer.fast_dev_run or trainer.sanity_checking or trainer.state.fn != "fit")  # type: ignore

    # ---- saving

    def _save(self, trainer: Trainer) -> None:
        record = self._new_record(trainer, self._clock.permanent)
        own = self._folder.path_of(record).name if trainer.is_global_zero else ""
        path = self._folder.path / trainer.strategy.broadcast(own)
        self._last_global_step_saved = trainer.global_step  # on each rank, also where rank 0 finds the disk full
        self._clock.saved()
        self._saving = record
        try:
            trainer.save_checkpoint(path, weights_only=False)
        finally:
            self._saving = None
        self._update_loggers(trainer)

    def _new_record(self, trainer: Trainer, permanent: bool) -> Record:
        weights = not_finite(numbers_of(trainer.lightning_module)).to(trainer.strategy.root_device)
        finite = float(reduce_over_all(trainer.strategy, weights, "sum")) == 0
        if finite:
            self._warn_once.again("not finite")
        else:
            self._warn_once(
                "not finite",
                f"SafeCheckpoint: at step {trainer.global_step} some weights or running statistics are NaN or "
                f"infinite: its checkpoint is marked, and {LAST} links to the newest finite one",
            )
        self._number += 1
        score = self._score.read(trainer)
        return Record(trainer.global_step, self._number, finite, score, permanent, run=self._run or None)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Add the record, the random states, the recipe and versions; a save by other hands stays for ever.

        A run that is stopped within a step, as by `max_time`, goes on from that step's start.
        """
        if KEY not in checkpoint:
            saving = next((one._saving for one in _savers_of(trainer) if one._saving), None)
            checkpoint[KEY] = content(trainer, pl_module, saving or self._new_record(trainer, permanent=True))
        save_whole_step(checkpoint, trainer)

    def _on_update(self, records: Records) -> None:
        """Show Lightning and the loggers what is in the folder; on rank 0, in the thread that wrote a checkpoint."""
        best = best_first(records, self.mode, self.keep_best)
        scores = {self._folder.shown(name): torch.tensor(records[name].score) for name in best}
        self.best_k_models, self.last_model_path = scores, str(self._folder.path / LAST)
        newest = self._folder.shown(max(records, key=lambda name: records[name].number))
        self.current_score = scores.get(newest, self.current_score)
        if len(best) == self.keep_best > 0:
            worst = (max if self.mode == "min" else min)(scores.values())
            self.kth_best_model_path, self.kth_value = next(item for item in scores.items() if item[1] == worst)
        if self.monitor is None:
            self.best_model_path = self._folder.shown(str(last_of(records)))
        elif best:
            self.best_model_path, self.best_model_score = next(iter(scores.items()))
        self._loggers_outdated = True

    def _update_loggers(self, trainer: Trainer) -> None:
        """Tell loggers that upload checkpoints that there is a new one."""
        if self._loggers_outdated:
            self._loggers_outdated = False
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))


def _savers_of(trainer: Any) -> list[SafeCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, SafeCheckpoint)]


def _reserve(io: Any, trainer: Any, pl_module: Any) -> None:
    """Get the host's memory for the first save ahead of it, where this rank will copy what it holds."""
    strategy = trainer.strategy
    is_whole = weights_layout(strategy) == "whole"
    if strategy.is_global_zero if is_whole else getattr(strategy, "_save_distributed_checkpoint", False):
        states = [layer.state for optimizer in trainer.optimizers for layer in layers_of(unwrapped(optimizer))]
        leaves = tree_leaves([dict(state) for state in states])
        held = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        io.reserve([*pl_module.parameters(), *pl_module.buffers(), *held])
