"""Print one line per logging interval: step, loss, gradient norm, lr, speed, memory and time left."""

import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning_tricks._core.terminal import ERASE_LINE
from lightning_tricks._trainer.lightning import Module, Trainer, pl
from lightning_tricks._trainer.loop import is_accumulating, logging_step
from lightning_tricks._trainer.run_length import run_length
from lightning_tricks.logs.table import human
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.step_loss import LOGGED

__all__ = ["TrainingProgressBar"]


def hours_minutes_seconds(seconds: float) -> str:
    """A duration for the line: 3725 -> '1:02:05'; '?' if it is not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, secs = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{secs:02d}"


def decimals(value: float, most: int) -> str:
    """Five significant digits, at most so many decimals; an exponent from 1e5 on, and where two would not be left."""
    if value and not 10 ** (1 - most) <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.{min(most, 4 - math.floor(math.log10(abs(value) or 1)))}f}"


def _loss(value: float) -> str:
    return f"loss {decimals(value, 4)}"


# for each part of the line: the metrics that it may show, with their formats; the first that was logged is shown
Parts = tuple[dict[str, Callable[[float], str]], ...]
TRAIN: Parts = (
    dict.fromkeys((LOGGED, "train_loss", "loss"), _loss),
    dict.fromkeys(("train/grad_norm", "train/grad_norm/0"), lambda value: f"norm {decimals(value, 3)}"),
    dict.fromkeys(("train/lr", "train/lr/0"), lambda value: f"lr {value:.1e}"),
    {
        "throughput/tokens_per_second": lambda value: f"{human(value)} tokens/s",
        "throughput/samples_per_second": lambda value: f"{human(value)} samples/s",
    },
    {"throughput/mfu": lambda value: f"MFU {value:.1%}"},
    {f"memory/{kind}_gib": lambda value: f"{value:.1f} GiB" for kind in ("peak_allocated", "rss", "peak_rss")},
)
VALIDATION: Parts = (
    dict.fromkeys(("val/loss", "val_loss"), _loss),
    {"val/bits_per_byte": lambda value: f"bits/byte {value:.4f}"},
    dict.fromkeys(("val/accuracy", "val_accuracy", "val/acc", "val_acc"), lambda value: f"accuracy {value:.4f}"),
)
_LEAST_FIRST = (" GiB", "MFU ", "lr ", "norm ", "/s", "ETA ")  # what a narrow terminal goes without


def fitted(parts: list[str], columns: int) -> str:
    """The line of so many parts as a terminal holds, with what matters most."""
    for word in _LEAST_FIRST:
        if len("  ".join(parts)) < columns:
            break
        parts = [part for part in parts if word not in part]
    return "  ".join(parts)[: columns - 1]  # what wraps cannot be redrawn


def shown(metrics: Mapping[str, Any], parts: Parts) -> list[str]:
    """The parts that have a value. A tensor on a device is read from it."""
    found = ((next((name for name in part if metrics.get(name) is not None), None), part) for part in parts)
    return [part[name](float(metrics[name])) for name, part in found if name is not None]


class TrainingProgressBar(pl.callbacks.ProgressBar):
    """Print one line every `log_every_n_steps`. Never changes training.

    A log file keeps each line. On a terminal the line is redrawn, and one stays at each tenth of the run.

    Shows the loss of the step over all its micro-batches and ranks, see `StepLoss`, and what the monitors logged by
    then: gradient norm, lr, tokens/s (or samples/s), MFU and memory, each where it has a value. Then the time left: the
    steps until `max_steps` or `max_epochs` at the pace since the line before, and, after the first validation, those to
    come, each as long and as many steps apart as the last. A line that a terminal cannot hold goes without memory, then
    MFU, lr, norm and speed. The device is read for these lines only, and only for values that the module logged with
    `self.log`: the others are on the host by then.
    With `log_every_n_steps=0` there is only the line of each validation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._redraw = sys.stdout.isatty()
        self._open = False  # the cursor stands at the end of a line that is to be redrawn

    def enable(self) -> None:
        """Print again, after `disable`."""
        self._enabled = True

    def disable(self) -> None:
        """Print nothing; Lightning calls it on every rank but the first."""
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the redrawn line."""
        self._write(" ".join(map(str, args)), "\n")

    def _write(self, line: str, end: str) -> None:
        if self._enabled:
            print((ERASE_LINE if self._redraw else "") + line, end=end, flush=True)
            self._open = not end

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Ask for the loss of each step."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._loss = MetricBuffer.of(trainer).step_loss()

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Start the clock, and forget an earlier run."""
        self._due = False
        self._seconds, self._started, self._last_step = 0.0, time.perf_counter(), trainer.global_step
        self._validation_seconds, self._validation_steps, self._validated = 0.0, 1, 0  # duration, distance, step
        self._max_steps = trainer.max_steps
        self._total: int | None = None  # known with the first batch: other callbacks may still move the position

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Find the end: an epoch may bring other data than the one before."""
        self._total = run_length(trainer) or 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Print the finished interval: only now has the module logged its own metrics."""
        if self._total is None:
            self._total = run_length(trainer) or 0
        elif trainer.max_steps != self._max_steps:
            self._total = trainer.max_steps  # a callback has moved the end of the run
        self._max_steps = trainer.max_steps
        self._show(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """See whether a logging interval ends."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and not is_accumulating(trainer):
            # Lightning's count for its loggers: with two optimizers, global_step counts each
            step = logging_step(trainer) + 1
            # the step at 100 % of the shown total, which is known beforehand: a wish to stop ends training earlier, and
            # `on_train_end` says so; `_trainer.LastStep` tells that step too, but has no total
            self._due = step % every == 0 or trainer.global_step == self._total

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Stop the clock."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._show(trainer)
            self._validation_started = time.perf_counter()
            self._seconds += self._validation_started - self._started

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Print the validation's figures on a line of their own, and go on."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            line = "  ".join(shown(trainer.callback_metrics, VALIDATION))
            step = trainer.global_step
            if line:
                self.print(f"step {step}  validation  {line}")
            self._started = time.perf_counter()
            self._validation_seconds = self._started - self._validation_started
            # of a resumed run, the first distance is that to step 0: rather too long than that to the resume, too short
            self._validation_steps, self._validated = max(step - self._validated, 1), step

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Print the last interval, and why training ends before the step that it was to reach."""
        self._show(trainer)
        self._end_line()
        step, total = trainer.global_step, self._total or 0
        if step < total:
            reason = "a callback or a signal stopped it" if trainer.should_stop else "the data ended"
            self.print(f"training ended at step {step} of {total}: {reason}")

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """End the redrawn line, so that the error starts on its own."""
        self._end_line()

    def _end_line(self) -> None:
        if self._open:
            print(flush=True)
            self._open = False

    def _show(self, trainer: Trainer) -> None:
        due, self._due = self._due, False
        if not due or not self._enabled:
            return
        step, total = trainer.global_step, self._total or 0
        position = f"step {step}/{total} ({step / total:.0%})" if total else f"step {step}"
        metrics = {**trainer.callback_metrics, LOGGED: self._loss.latest}
        begins_tenth = total > 0 and 10 * step // total > 10 * self._last_step // total
        parts = [position, *shown(metrics, TRAIN), *self._time_left(step, total)]
        line = fitted(parts, shutil.get_terminal_size().columns) if self._redraw else "  ".join(parts)
        self._write(line, "" if self._redraw and step != total and not begins_tenth else "\n")

    def _time_left(self, step: int, total: int) -> list[str]:
        """The time for the steps and validations that are left; restarts the clock."""
        now = time.perf_counter()
        seconds, steps = self._seconds + now - self._started, step - self._last_step
        self._seconds, self._started, self._last_step = 0.0, now, step
        validations = (total - self._validated) // self._validation_steps * self._validation_seconds
        left = seconds / max(steps, 1) * (total - step) + validations if step < total else 0.0
        return [f"ETA {hours_minutes_seconds(left)}"] if total and steps else []
