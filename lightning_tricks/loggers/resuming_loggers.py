"""CSVLogger and TensorBoardLogger that go on after a resume, with each step once; Lightning's delete or repeat steps.

Loggers open their files before the checkpoint is read, so a callback tells them the step at which training goes on.
"""

import csv
import math
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from lightning_tricks._trainer.lightning import Module, Trainer, pl, rank_zero_info, rank_zero_only
from lightning_tricks._trainer.loop import logging_step
from lightning_tricks._trainer.objects import trainer_of

__all__ = ["ResumingCSVLogger", "ResumingTensorBoardLogger"]


class ResumePoint(pl.Callback):
    """Call `resume_at(step)` of each logger that has it, once, when the first batch starts. Never changes training.

    The step is that of the first batch's metrics. Lightning corrects its count of steps only after `on_train_start`, so
    it is not known before the first batch. After the call this callback removes itself from the Trainer's list.
    """

    @classmethod
    def watch(cls, model: Any) -> None:
        """Put one in front of the callbacks of the Trainer that is about to fit `model`, if there is such a Trainer.

        Being the first, it runs before other callbacks write metrics at the first batch.
        """
        trainer = trainer_of(model)
        fits = trainer is not None and trainer.state.fn == "fit"
        if fits and not any(isinstance(callback, cls) for callback in trainer.callbacks):
            trainer.callbacks = [cls(), *trainer.callbacks]  # a new list: Lightning may be iterating over the old one

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Tell the loggers, and remove this callback."""
        trainer.callbacks = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        for logger in trainer.loggers:
            if hasattr(logger, "resume_at"):
                logger.resume_at(logging_step(trainer))


def is_before(row: dict[str, str], step: float) -> bool:
    """Whether a row of the file belongs to a step before `step`, or to none."""
    try:
        return float(row["step"]) < step
    except (KeyError, TypeError, ValueError):
        return True


class AppendingWriter(pl.loggers.csv_logs.ExperimentWriter):
    """Lightning's writer of `metrics.csv`, which keeps the existing rows."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self.used_before = bool(self._fs.isfile(self.metrics_file_path))
        if self.used_before:
            self.metrics_keys = self._read()[0]

    def _check_log_dir_exists(self) -> None:
        """Delete nothing."""

    def save(self) -> None:
        """As Lightning's; before, a last row that was cut short is removed, so that none is appended to its line."""
        file = self.metrics_file_path
        if self.metrics and self._fs.isfile(file) and self._fs.tail(file, 1) != b"\n":
            self._rewrite_with_new_header(self.metrics_keys)
        super().save()

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Names of the columns, and the rows; without the last row if it was cut short."""
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            lines = file.read().splitlines(keepends=True)
        reader = csv.DictReader(line for line in lines if line.endswith("\n"))
        return list(reader.fieldnames or []), list(reader)

    def _rewrite_with_new_header(self, fieldnames: list[str], end: float = math.inf) -> None:
        """Replace the file by its rows before step `end`, in one piece: a kill leaves the old file or the new one."""
        rows = [row for row in self._read()[1] if is_before(row, end)]
        temporary = self.metrics_file_path + ".tmp"
        with self._fs.open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=fieldnames)
            writer.writeheader()
            writer.writerows(rows)
        self._fs.mv(temporary, self.metrics_file_path)

    def drop_from(self, step: int) -> None:
        """Remove the rows of `step` and all later ones, if an earlier fit has written them."""
        if self.used_before:
            self._rewrite_with_new_header(self.metrics_keys, end=step)
        self.used_before = True


class ResumingCSVLogger(pl.loggers.csv_logs.CSVLogger):
    """Lightning's CSVLogger, which appends after a resume and has one row for each step. Never changes training.

    A run that was killed at step 140 and resumed from a checkpoint of step 100 trains steps 100 to 139 again: their
    rows are removed when the resumed run starts, and written again. The file is replaced in one piece, so a kill loses
    nothing. A last row that was cut short, as by a full disk, is removed before the next row is written. A fresh start
    in a folder that was used before removes all rows. New metrics get their columns.

    For that the resumed run must write into the same folder: give a `version`; `""` means no folder of its own.
    Without one each start gets a new `version_N`, as with Lightning.

    The logger learns of a fit through the Trainer's call of `log_graph`. With `enable_autolog_hparams=False`, or
    without a Trainer, call `resume_at` yourself before the first metrics.

    Its arguments are those of Lightning's CSVLogger.

    Example:
        >>> logger = ResumingCSVLogger("runs", name="small", version="")
    """

    @property
    def experiment(self) -> Any:
        """The writer on rank 0, as Lightning's."""
        if self._experiment is None and rank_zero_only.rank == 0:
            self._fs.makedirs(self.root_dir, exist_ok=True)
            self._experiment = AppendingWriter(log_dir=self.log_dir)
        return super().experiment

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Remove the rows of `step` and later ones.

        Args:
            step: step of the next metrics.
        """
        self.experiment.drop_from(step)

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Draws nothing. The Trainer calls it when a fit starts, and `resume_at` is then called at the first batch."""
        ResumePoint.watch(model)


def as_number(value: Any) -> float | None:
    """`value` as a float if it is one number (Python's, numpy's or a tensor of one element), else None."""
    if hasattr(value, "item"):
        count = value.numel() if hasattr(value, "numel") else value.size
        return float(value.item()) if count == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


class ResumingTensorBoardLogger(pl.loggers.TensorBoardLogger):
    """Lightning's TensorBoardLogger, which after a resume shows each step once. Never changes training.

    A run that was killed at step 140 and resumed from a checkpoint of step 100 trains steps 100 to 139 again. The
    resumed run first tells TensorBoard to forget all points from step 100 on, so that one curve goes on. Nothing is
    deleted from disk. A fresh start in a folder that was used before hides all curves of the earlier run.

    For that the resumed run must write into the same folder: give a `version`; `""` means no folder of its own.
    Without one each start gets a new `version_N`, as with Lightning; a resume then says so in one line.

    All numbers of one `log_metrics` call become one event, which is less work; TensorBoard shows them as any scalar.

    The logger learns of a fit through the Trainer's call of `log_graph`. With `enable_autolog_hparams=False`, or
    without a Trainer, call `resume_at` yourself before the first metrics.

    Its arguments are those of Lightning's TensorBoardLogger.

    Example:
        >>> logger = ResumingTensorBoardLogger("runs", name="small", version="")

    Source: the events that make TensorBoard forget, in `_CheckForRestartAndMaybePurge` of
    https://github.com/tensorflow/tensorboard/blob/master/tensorboard/backend/event_processing/plugin_event_accumulator.py
    """

    takes_wall_time = True
    _new_folder_each_start = False
    _used_before = False
    _held_back: tuple[tuple[Any, Any], ...] = ()

    @property
    def version(self) -> int | str:
        """The given version, else the next free one."""
        self._new_folder_each_start |= self._version is None  # Lightning's getter sets it
        return super().version

    @property
    def experiment(self) -> Any:
        """Torch's SummaryWriter on rank 0, as Lightning's."""
        if self._experiment is None and rank_zero_only.rank == 0 and self._fs.isdir(self.log_dir):
            names = (os.path.basename(path) for path in self._fs.ls(self.log_dir, detail=False))
            self._used_before = any("tfevents" in name for name in names)
        return super().experiment

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Make TensorBoard forget all points from `step` on that are in the folder already.

        Args:
            step: step of the next metrics.
        """
        writer = self.experiment._get_file_writer()
        if self._used_before:
            for _ in range(2):  # a folder's first START only marks its beginning; one after it purges
                writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)
        elif step > 0 and self._new_folder_each_start:
            rank_zero_info(
                f"{type(self).__name__}: step {step} starts the new folder {self.log_dir}; to go on in the folder "
                'of the run before, give the logger a version, such as ""'
            )
        self._used_before = True  # for a following fit
        self._write_held_back(step)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None, wall_time: float | None = None) -> None:
        """Write all numbers in `metrics` as one event, and the rest as Lightning does.

        Args:
            metrics: numbers, tensors of one element, or dicts of numbers.
            step: of all of them.
            wall_time: seconds since 1970 at which they were measured; None for now.
        """
        prefix = f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        numbers = {name: as_number(value) for name, value in metrics.items()}
        values = [Summary.Value(tag=prefix + name, simple_value=x) for name, x in numbers.items() if x is not None]
        if values:
            self.experiment._get_file_writer().add_summary(Summary(value=values), step, wall_time)
        rest = {name: metrics[name] for name, number in numbers.items() if number is None}
        if rest:
            super().log_metrics(rest, step)

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, metrics: dict[str, Any] | None = None, step: int | None = None
    ) -> None:
        """As Lightning's, but in a folder that was used before, values without a step wait for `resume_at`."""
        _ = self.experiment  # sets `_used_before`
        if step is None and self._used_before:
            self._held_back += ((params, metrics),)  # at step 0 they would be shown twice, or forgotten
        else:
            super().log_hyperparams(params, metrics, step)

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """As Lightning's. The Trainer calls it when a fit starts, and `resume_at` is then called at the first batch."""
        ResumePoint.watch(model)
        super().log_graph(model, input_array)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """As Lightning's."""
        self._write_held_back(None)
        super().finalize(status)

    def _write_held_back(self, step: int | None) -> None:
        held_back, self._held_back = self._held_back, ()
        for params, metrics in held_back:
            super().log_hyperparams(params, metrics, step)
