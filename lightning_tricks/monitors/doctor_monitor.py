"""Ask during a run what `doctor` asks of its log, and print a line for each new finding."""

import math
import time
from array import array
from collections.abc import Mapping
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_tricks._trainer.lightning import Module, Trainer, WarnOnce, pl
from lightning_tricks._trainer.loop import is_accumulating, logging_step
from lightning_tricks._trainer.objects import is_run_by_cli
from lightning_tricks.logs.finding import MIN_POINTS, Finding, in_words
from lightning_tricks.logs.loss_symptoms import RESTORE_POINTS
from lightning_tricks.logs.run_log import RunLog, Series
from lightning_tricks.logs.scalars import ROLES, check_roles
from lightning_tricks.logs.symptoms import findings
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.metrics.step_loss import LOGGED, LOSS

__all__ = ["DoctorMonitor"]

GROWTH = 1.05  # of the steps done, after which the questions are asked again: some 200 times in a million steps
MOST_POINTS = 4096  # of one metric; a metric with more keeps every second point, from the run's start to its end
MOST_RANKS = 64  # whose own seconds are logged one by one


class History:
    """The points of each metric over a whole run, evenly thinned out: 16 bytes a point, some `MOST_POINTS` a metric.

    A value that is not finite stays as long as there are fewer than `MOST_POINTS` of them.
    """

    def __init__(self) -> None:
        self.points: dict[str, tuple[array[int], array[float]]] = {}  # steps and values
        self._strides: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def add(self, name: str, step: int, value: float) -> None:
        """Add a point, unless it is thinned out; a second one of a step replaces the first."""
        seen = self._seen[name] = self._seen.get(name, -1) + 1
        if seen % self._strides.get(name, 1) == 0 or not math.isfinite(value):
            steps, values = self.points.setdefault(name, (array("q"), array("d")))
            if steps and steps[-1] == step:
                values[-1] = value
            else:
                steps.append(step)
                values.append(value)

    def ends_at(self, name: str, step: int) -> bool:
        """Whether a metric's last point is of a step."""
        return name in self.points and self.points[name][0][-1] == step

    def thin_out(self) -> None:
        """Halve each metric that has too many points."""
        for name, (steps, values) in self.points.items():
            if len(steps) > MOST_POINTS:
                kept = ~np.isfinite(values)
                if kept.sum() > MOST_POINTS:
                    kept[np.flatnonzero(kept)[1::2]] = False
                kept[::2] = True
                self.points[name] = array("q", compress(steps, kept)), array("d", compress(values, kept))
                self._strides[name] = 2 * self._strides.get(name, 1)
                self._seen[name] = -1

    def series(self) -> dict[str, Series]:
        """All metrics."""
        return {name: Series.of(dict(zip(*points, strict=True))) for name, points in self.points.items()}


def optimizer_steps(optimizer: Any) -> int | None:
    """Number of steps that an optimizer of Adam's kind has counted, 0 if its state is empty; None for other kinds."""
    if not any("betas" in group for group in optimizer.param_groups):
        return None
    if not optimizer.state:
        return 0
    counts = (state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state)
    first = next(counts, None)
    return None if first is None else int(first)


class DoctorMonitor(pl.Callback):
    """Print a line for each symptom of a sick run once, while it runs. Never changes training.

    The questions are those of the command `doctor`, asked of what the monitors and the module log: NaN, divergence, a
    plateau, the clip, spikes, overfitting, a validation leak, what a resume has lost, speed, loader, ranks, the loss
    scale, dead units, attention logits. They are asked at a log step when the run has grown by a twentieth, at once
    when a loss is not finite, and at the end. A warning names the symptom, its evidence, the likely cause and the
    remedy; notes are left to the command.

    It reads values that are on the host already: each interval's from the MetricBuffer, the loss of the whole step,
    and those of `self.log` after validations, when Lightning reads them too. Rank 0 alone keeps them, thinned out to
    some 4,096 points of 16 bytes a metric, and finds something. It logs `train/loss` where the module does not, and
    records `doctor/findings`, the number of findings
    above a note; in the first step of a resumed run `doctor/optimizer_step`, the steps that an optimizer of Adam's
    kind has counted; and with 2 to 64 processes `ranks/<n>/own_seconds`, the mean time on the host from the end of the
    batch before to the backward pass. A checkpoint holds the last 20 losses, to see a jump after the restore.

    Args:
        names: the name under which a metric is logged, by its role: `{"loss": "my/loss", "val_loss": "my/val"}`.
            Default: those of this collection, of Lightning's monitors and other usual ones.

    Raises:
        UsageError: `names` has an unknown role.

    Source: thresholds and their reasons are the constants of `loss_symptoms.py` and `symptoms.py` in `logs/`.
    """

    def __init__(self, names: dict[str, str] | None = None) -> None:
        check_roles(names or {})
        self.names = names
        self.found: list[Finding] = []
        self._restored: dict[int, float] = {}
        self._reset()

    def _reset(self) -> None:
        self._history = History()
        self._restarts: list[int] = []
        self._before: dict[int, float] = {}  # the last losses of the checkpoint from which this fit goes on
        self._asked, self._ranks = 0, 0
        self._own_seconds: list[float] = []
        self._mark: float | None = None
        self._settings: dict[str, Any] = {}
        self._asks = False
        self._warn_once = WarnOnce()

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Find the buffer."""
        if stage == "fit":
            self._trainer: Any = trainer
            self._buffer = MetricBuffer.of(trainer)
            self._has_own_loss = "loss" in (self.names or {})
            if not self._has_own_loss:
                self._buffer.step_loss().log()

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Note the settings, and the losses before a resume."""
        self._reset()
        self._settings = {
            "trainer.gradient_clip_val": trainer.gradient_clip_val,
            "trainer.gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            "trainer.max_steps": trainer.max_steps,
            "trainer.precision": str(trainer.precision),
            "trainer.callbacks": ", ".join(type(each).__name__ for each in self._trainer.callbacks),
            "trainer.accelerator": trainer.strategy.root_device.type,
        }
        self._ranks = trainer.world_size if 1 < trainer.world_size <= MOST_RANKS else 0
        self._before, self._restored = self._restored, {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """In the first step, note where a resumed run begins, and record what its optimizer has counted."""
        if self._asks:
            return
        self._buffer.at_flush(self._ask)  # by now every other monitor has registered, whose figures come before
        self._asks = True
        if start := logging_step(trainer):
            self._restarts = [start]
            counts = [count for each in trainer.optimizers if (count := optimizer_steps(each)) is not None]
            if counts:
                self._buffer.record("doctor/optimizer_step", float(min(counts)))
        else:  # the checkpoint was that of a validation before this fit
            self._before = {}

    def on_before_backward(self, trainer: Trainer, pl_module: Module, loss: Tensor) -> None:
        """Note the time that this rank needed by itself."""
        if self._mark is not None:
            self._own_seconds.append(time.perf_counter() - self._mark)
            self._mark = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """On log steps, record the ranks' own seconds, and a mark with which the buffer asks even without a monitor."""
        ends = not is_accumulating(trainer) and self._buffer.is_log_step()
        if ends:
            self._buffer.record("_doctor/log_step", 1.0)
        if not self._ranks:
            return
        if ends:
            own = torch.zeros(self._ranks, dtype=torch.float64)
            own[trainer.global_rank] = sum(self._own_seconds) / max(len(self._own_seconds), 1)
            names = tuple(f"ranks/{rank}/own_seconds" for rank in range(self._ranks))
            self._buffer.record_all(names, own, "sum")
            self._own_seconds = []
        self._mark = None if ends else time.perf_counter()  # after a log step come the transfer and perhaps a save

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """A validation is no part of a rank's step."""
        self._mark = None

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Note the validation loss."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._note_logged("val_loss", logging_step(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Ask for the last time."""
        self._report()

    def state_dict(self) -> dict[str, Any]:
        """The last losses, to see a jump after a restore."""
        loss = self._log()["loss"].finite()
        last = zip(loss.steps[-RESTORE_POINTS:].tolist(), loss.values[-RESTORE_POINTS:].tolist(), strict=True)
        return {"loss": dict(last)} if len(loss) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from these losses."""
        self._restored = {int(step): float(value) for step, value in state_dict.get("loss", {}).items()}

    def _ask(self, rows: list[Row]) -> Mapping[str, float]:
        sick = False
        for row in rows:
            values = row.values
            if LOSS in values and not self._has_own_loss:
                values = {**values, LOGGED: values[LOSS]}  # also where the module records another number under the name
            for name, value in values.items():
                if not name.startswith("_"):
                    self._keep(name, row.step, value)
                    sick |= name in ROLES["loss"] and not math.isfinite(value)
        if self._has_own_loss and not self._buffer.failed and self._buffer.is_log_step():
            sick |= not math.isfinite(self._note_logged("loss", rows[-1].step))
        done = rows[-1].step + 1
        if not sick and (done < MIN_POINTS or done < GROWTH * self._asked):
            return {}
        self._asked = done
        self._report()
        self._history.thin_out()
        return {"doctor/findings": float(len(self.found))}

    def _note_logged(self, role: str, step: int) -> float:
        """Note a value that the module logs by itself; 0 where it logs none."""
        logged = self._trainer.callback_metrics
        own = (self.names or {}).get(role)
        name = next((name for name in ([own] if own else ROLES[role]) if name in logged), None)
        if name is None or self._history.ends_at(name, step):
            return 0.0
        value = float(logged[name])
        self._keep(name, step, value)
        return value

    def _keep(self, name: str, step: int, value: float) -> None:
        if self._trainer.is_global_zero:  # which alone reports
            self._history.add(name, step, value)

    def _log(self) -> RunLog:
        metrics = self._history.series()
        names = {role: name for role, name in (self.names or {}).items() if name in metrics}
        log = RunLog(metrics, names, list(self._restarts), {}, self._settings)
        if self._before:  # under the name that the loss has in this fit
            name = log.names.setdefault("loss", ROLES["loss"][0])
            own = metrics.get(name, Series.of({}))
            metrics[name] = Series.of(self._before | dict(zip(own.steps.tolist(), own.values.tolist(), strict=True)))
        return log

    def _report(self) -> None:
        """Warn of each symptom that is new."""
        if not self._trainer.is_global_zero:
            return
        self.found = [finding for finding in findings(self._log()) if finding.severity != "note"]
        if not is_run_by_cli(self._trainer):  # a script has no options of a command line
            self.found = [replace(finding, remedy=in_words(finding.remedy)) for finding in self.found]
        for finding in self.found:
            self._warn_once(finding.symptom, f"DoctorMonitor: {finding.symptom}: {finding.line()}")
