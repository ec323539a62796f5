"""Lay out TensorBoard for a pretraining run: the charts to watch, the recipe, the schedule and the result."""

import contextlib
import os
import shlex
from typing import Any

import fsspec
from torch.utils.tensorboard.summary import hparams as hparams_summaries

from lightning_tricks._lightning import Module, Trainer, pl
from lightning_tricks._trainer import is_a, logging_step, run_length, shows_hp_metric
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.monitors.dashboard import parts
from lightning_tricks.monitors.dashboard.lr_curve import draw_curve, planned_lrs

PAGE = "dashboard.html"


class TensorBoardDashboard(pl.Callback):
    """Make TensorBoard a dashboard of the run: charts, recipe, schedule and result. Never changes training.

    For each TensorBoardLogger of the Trainer, Lightning's or ours, it writes

    - the custom-scalars tab: training and validation loss in one chart, the gradient norm before the clip with the
      clip's line (`train/clip_norm`), learning rate, tokens/s, MFU, memory, and what monitors record of loss scaling,
      activations, updates, attention and fp8;
    - the text `recipe`: the facts of the run, the module's hyper-parameters, and the YAML where LightningCLI runs it;
    - the image `schedule`: the learning rate from the first step to the last, where it is known beforehand;
    - the HParams tab: the hyper-parameters, and `hp/val_loss`, the last validation's loss, also if training fails.

    At fit start it prints the command that starts TensorBoard, and the name of a page to open in a browser, which leads
    to the five charts to watch: `dashboard.html`, written beside the logger's files with the first batch. It records
    nothing else: the curves are those that the monitors and your module log.

    Args:
        train_loss: name under which the training loss is logged.
        val_loss: name under which the validation loss is logged.
    """

    def __init__(self, train_loss: str = "train/loss", val_loss: str = "val/loss") -> None:
        self.train_loss = train_loss
        self.val_loss = val_loss
        self._loggers: list[Any] = []
        self._clip: float | None = None
        self._result: float | None = None
        self._started = self._laid_out = False
        self._first = 0

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Find the TensorBoardLoggers, and print how to open the dashboard."""
        found: list[Any] = [logger for logger in trainer.loggers if is_a(logger, "TensorBoardLogger")]
        self._loggers = found if trainer.is_global_zero else []
        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        self._clip = trainer.gradient_clip_val if by_norm and found else None
        self._result, self._started, self._laid_out = None, False, False
        MetricBuffer.of(trainer).at_flush(self._clip_line)
        if trainer.is_global_zero and not self._loggers and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            print("TensorBoardDashboard: the Trainer has no TensorBoardLogger, so there is no dashboard")
        for logger in self._loggers:
            page = shlex.quote(os.path.join(logger.log_dir, PAGE))
            print(f"TensorBoard: tensorboard --logdir {shlex.quote(str(logger.root_dir))}   then open {page}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Write the cards at the run's first step, and the layout an interval later: then the metrics are known."""
        step = logging_step(trainer)
        if not self._started:
            self._started, self._first = True, step
            for logger in self._loggers:
                self._write_cards(logger, trainer, pl_module, step)
        elif not self._laid_out and step >= self._first + trainer.log_every_n_steps:  # type: ignore[attr-defined]
            self._write_layout(trainer)

    def _write_cards(self, logger: Any, trainer: Any, pl_module: Any, step: int) -> None:
        writer = logger.experiment
        tags = [self.train_loss, self.val_loss, "train/grad_norm", "train/lr", "throughput/tokens_per_second"]
        with fsspec.open(os.path.join(logger.log_dir, PAGE), "w", encoding="utf-8") as file:
            file.write(parts.redirect_page(parts.pinned_link(tags)))
        recipe, hparams = parts.recipe_of(trainer), dict(getattr(pl_module, "hparams", {}))
        text = [parts.table(parts.facts(trainer, pl_module)), *([parts.table(hparams)] if hparams else [])]
        writer.add_text("recipe", "\n\n".join([*text, *([f"```yaml\n{recipe[0]}\n```"] if recipe else [])]), step)
        for index, config in enumerate(trainer.lr_scheduler_configs):
            length = (run_length(trainer) if config.interval == "step" else trainer.max_epochs) or 0
            steps = length // config.frequency
            points = [(at * config.frequency, lr) for at, lr in planned_lrs(config.scheduler, steps)]
            if points:
                name = "schedule" if len(trainer.lr_scheduler_configs) == 1 else f"schedule/{index}"
                picture = draw_curve(points, f"learning rate over {config.interval}s")
                writer.add_image(name, picture, step, dataformats="HWC")
        known = parts.flat(recipe[1] if recipe else {"module": type(pl_module).__name__, **hparams})
        for summary in hparams_summaries(known, {parts.RESULT: 0.0})[:2]:  # the third says how it ended
            writer._get_file_writer().add_summary(summary, step)
        if self._clip:
            logger.log_metrics({parts.CLIP_NORM: float(self._clip)}, step)

    def _write_layout(self, trainer: Any) -> None:
        self._laid_out = True
        for logger in self._loggers:
            logger.experiment.add_custom_scalars(parts.layout(self.train_loss, self.val_loss, trainer.callback_metrics))

    def _clip_line(self, rows: list[Row]) -> dict[str, float]:
        return {parts.CLIP_NORM: float(self._clip)} if self._clip else {}

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Remember the loss."""
        value = trainer.callback_metrics.get(self.val_loss)
        if value is not None and not trainer.sanity_checking:
            self._result = float(value)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Write the result."""
        self._finish(trainer)
        for logger in self._loggers:
            logger.experiment._get_file_writer().add_summary(hparams_summaries({}, {})[2])  # the status: success
            logger.save()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Write the result so far; an error here must not keep other callbacks from saving theirs."""
        with contextlib.suppress(Exception):
            self._finish(trainer)

    def _finish(self, trainer: Any) -> None:
        if not self._started:
            return
        self._started = False
        if not self._laid_out:
            self._write_layout(trainer)
        step = max(logging_step(trainer) - 1, 0)
        for logger in self._loggers:
            if self._result is not None:
                # where Lightning has written the module's hyper-parameters itself, it is `hp_metric` that is shown
                names = [parts.RESULT, "hp_metric"] if shows_hp_metric(logger) else [parts.RESULT]
                logger.log_metrics(dict.fromkeys(names, self._result), step)
            logger.save()
