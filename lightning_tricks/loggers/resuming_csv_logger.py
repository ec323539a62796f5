"""A CSVLogger that goes on in the same file after a resume; Lightning's would delete the file."""

import csv
import math
from typing import Any

from lightning_tricks._trainer.lightning import pl, rank_zero_only
from lightning_tricks.loggers.resume_point import ResumePoint

__all__ = ["ResumingCSVLogger"]


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
        if self.metrics and self._fs.isfile(self.metrics_file_path) and self._is_cut_short():
            self._rewrite_with_new_header(self.metrics_keys)
        super().save()

    def _is_cut_short(self) -> bool:
        return bool(self._fs.tail(self.metrics_file_path, 1) != b"\n")

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
