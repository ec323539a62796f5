"""The line that a person watches: step, loss, norm, lr, tokens/s and time left, one per logging interval."""

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_tricks._lightning import pl, pl_import

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import ProgressBar
else:
    ProgressBar = pl_import("callbacks").ProgressBar


def human(value: float) -> str:
    """Three digits and an SI suffix: 12345 -> '12.3k'."""
    for suffix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.3g}P"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 3725 -> '1:02:05'; '?' for what is not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, secs = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{secs:02d}"


def tokens_in(batch: Any) -> int:
    """Positions in the batch's first tensor of two or more dimensions: (B, T, ...) counts B*T. 0 if there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] * batch.shape[1] if batch.dim() >= 2 else 0
    children = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((count for count in map(tokens_in, children) if count), 0)


class TrainingProgressBar(ProgressBar):
    """Print one line every `log_every_n_steps`, redrawn on a terminal, kept in a log file. Never changes training.

    Shows what was logged under the collection's names (`train/loss`, `train/grad_norm`, `train/lr`, `val/...`), and
    nothing for a module that logs none of them. Metrics are read from the device on those steps only. The rate leaves
    out validation.
    """

    TRAIN = {"train/loss": "loss {:.4f}", "train/grad_norm": "norm {:.3f}", "train/lr": "lr {:.1e}"}
    VALIDATION = {"val/loss": "loss {:.4f}", "val/bits_per_byte": "bits/byte {:.4f}"}

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._redraw = sys.stdout.isatty()
        self._due = False
        self._clear_rate()

    def enable(self) -> None:
        """Print."""
        self._enabled = True

    def disable(self) -> None:
        """Stay silent: what Lightning asks of every rank but the first."""
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the redrawn line."""
        if self._enabled:
            print(("\r\x1b[2K" if self._redraw else "") + " ".join(map(str, args)), flush=True)

    def _clear_rate(self) -> None:
        self._tokens = self._seconds = 0.0
        self._steps = 0
        self._started: float | None = None
        self._tokens_per_second = self._seconds_per_step = math.nan

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Forget the rate of an earlier run."""
        self._clear_rate()
        self._due = False

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Print the finished interval: only now has the module logged its own metrics."""
        self._flush(trainer)
        if self._started is None:
            self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count; no device is read here."""
        self._tokens += tokens_in(batch) * trainer.world_size
        if trainer.fit_loop._should_accumulate():
            return
        self._steps += 1
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._due = trainer.global_step == trainer.max_steps or (every > 0 and trainer.global_step % every == 0)

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Close the running interval, so that validation does not count as training time."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._flush(trainer)
            self._pause()

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Print the validation's figures on a line of their own."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            line = self._format(trainer, self.VALIDATION)
            if line:
                self.print(f"step {trainer.global_step}  validation  {line}")

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Print the last interval."""
        self._flush(trainer)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """End the redrawn line, so that the error starts on its own."""
        if self._enabled and self._redraw:
            print(flush=True)

    def _pause(self) -> None:
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None

    def _format(self, trainer: "pl.Trainer", fields: dict[str, str]) -> str:
        metrics = trainer.callback_metrics
        return "  ".join(text.format(float(metrics[name])) for name, text in fields.items() if name in metrics)

    def _flush(self, trainer: "pl.Trainer") -> None:
        if not self._due:
            return
        self._due = False
        metrics = self._format(trainer, self.TRAIN)  # reads the device, so the clock below sees finished work
        self._pause()
        if self._seconds > 0 and self._steps:
            self._tokens_per_second = self._tokens / self._seconds
            self._seconds_per_step = self._seconds / self._steps
        self._tokens, self._seconds, self._steps = 0.0, 0.0, 0
        if self._enabled:
            last = trainer.global_step == trainer.max_steps
            end = "" if self._redraw and not last else "\n"
            print(("\r\x1b[2K" if self._redraw else "") + self._line(trainer, metrics), end=end, flush=True)

    def _line(self, trainer: "pl.Trainer", metrics: str) -> str:
        step, total = trainer.global_step, trainer.max_steps
        parts = [f"step {step}/{total} ({step / total:.0%})" if total > 0 else f"step {step}", metrics]
        if self._tokens_per_second == self._tokens_per_second:
            parts.append(f"{human(self._tokens_per_second)} tokens/s")
        if total > 0:
            parts.append(f"ETA {clock(self._seconds_per_step * (total - step))}")
        return "  ".join(part for part in parts if part)
