"""Lay out TensorBoard for a pretraining run: the charts to watch, the recipe, the planned curve and the result."""

import contextlib
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from lightning_tricks._core.quote import markdown_block, markdown_text, say, shell_word, yaml_text
from lightning_tricks._core.tensors import whole_numel
from lightning_tricks._trainer.lightning import BACKEND, Module, Trainer, pl
from lightning_tricks._trainer.loop import logging_step
from lightning_tricks._trainer.objects import is_a, shows_hp_metric
from lightning_tricks._trainer.run_length import run_length
from lightning_tricks.loggers.resuming_loggers import ResumingTensorBoardLogger
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.metrics.step_loss import LOSS as STEP_LOSS
from lightning_tricks.schedules import ScheduleLR, chosen_steps, planned_groups

__all__ = ["TensorBoardDashboard"]

# The group of charts that TensorBoard shows first: it sorts names, "_" before letters.
OVERVIEW = "_overview"
LOSS, GRAD_NORM, LR = (f"{OVERVIEW}/{name}" for name in ("1_loss", "2_gradient_norm", "3_learning_rate"))
OVERVIEW_METRICS = {
    LOSS: (STEP_LOSS,),
    GRAD_NORM: ("train/grad_norm",),
    LR: ("train/lr", "train/lr/0"),
    f"{OVERVIEW}/4_tokens_per_second": ("throughput/tokens_per_second",),
    f"{OVERVIEW}/5_mfu": ("throughput/mfu",),
}
CLIP_NORM, RESULT = "train/clip_norm", "hp/val_loss"
INSIDE = ("activations", "updates", "attention", "experts")
# Charts of metrics that only some precisions record.
OF_PRECISION = {
    "loss scale": ["precision/loss_scale"],
    "skipped steps": ["precision/skipped_steps"],
    "fp8: share": ["precision/fp8_share"],
}


def layout(names: Iterable[str]) -> dict[str, dict[str, list]]:
    """The layout of the custom-scalars tab: charts of many series, for which `names` has a metric.

    It maps category -> chart -> `["Multiline", [regular expression, ...]]`, as torch's `add_custom_scalars` takes it.
    """
    names = list(names)
    kinds = sorted({(name.split("/")[0], name.split("/")[-1]) for name in names if name.split("/")[0] in INSIDE})
    inside = {f"{part}: {kind}": [f"{part}/(.*/)?{re.escape(kind)}"] for part, kind in kinds}
    inside |= _recorded(OF_PRECISION, names)
    of_sources = sorted({name.split("/")[-1] for name in names if name.startswith("sources/")})
    sources = {kind.replace("_", " "): [f"sources/.*/{re.escape(kind)}"] for kind in of_sources}
    charts = _recorded({"memory, GiB": ["memory/.*_gib"]}, names)
    categories = {"Sources of data": sources, "Inside the model": inside, "Machine": charts}
    return {
        category: {title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in content.items()}
        for category, content in categories.items()
        if content
    }


def _recorded(charts: dict[str, list[str]], names: Iterable[str]) -> dict[str, list[str]]:
    """The charts that show at least one of `names`."""
    return {title: tags for title, tags in charts.items() if any(re.fullmatch("|".join(tags), name) for name in names)}


def how_to_open(logdir: str) -> str:
    """The command that starts TensorBoard on a folder, and the address, where no curve is smoothed."""
    return f"tensorboard --logdir {shell_word(logdir)}   then open http://localhost:6006/#scalars&_smoothingWeight=0"


def facts(trainer: Any, pl_module: Any) -> dict[str, Any]:
    """Settings that every run has, for the recipe text."""
    # a lazy parameter has no size yet
    sizes = [(whole_numel(p), p.requires_grad) for p in pl_module.parameters() if not hasattr(p, "materialize")]
    return {
        "module": type(pl_module).__name__,
        "parameters": f"{sum(size for size, _ in sizes):,}",
        "trainable parameters": f"{sum(size for size, trained in sizes if trained):,}",
        "max_steps": trainer.max_steps,
        "precision": trainer.precision,
        "strategy": type(trainer.strategy).__name__,
        "devices": trainer.num_devices * trainer.num_nodes,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        BACKEND: pl.__version__,
    }


def table(values: Mapping[str, Any]) -> str:
    """`values` as a Markdown table."""
    rows = (f"| {markdown_text(name)} | {markdown_text(value)} |" for name, value in values.items())
    return "\n".join(["| | |", "|---|---|", *rows])


def flat(values: Any, before: str = "") -> dict[str, Any]:
    """Numbers and short strings of nested mappings, by dotted name."""
    found: dict[str, Any] = {}
    for name, value in dict(values).items():
        if hasattr(value, "items"):
            found |= flat(value, f"{before}{name}.")
        elif isinstance(value, (bool, int, float, str)) and len(str(value)) < 100:
            found[before + str(name)] = value
    return found


def recipe_of(trainer: Any) -> tuple[str, Any] | None:
    """The YAML and the parsed values of the recipe if LightningCLI runs it: its SaveConfigCallback holds them."""
    for callback in trainer.callbacks:
        if hasattr(callback, "parser") and hasattr(callback, "config"):
            text = callback.parser.dump(callback.config, skip_none=False)  # as in config.yaml
            return yaml_text(_given(yaml.safe_load(text))) + "\n", callback.config.as_dict()
    return None


def _given(values: Any) -> Any:
    """Nested settings without those that are null."""
    if isinstance(values, dict):
        return {name: _given(value) for name, value in values.items() if value is not None}
    return [_given(value) for value in values] if isinstance(values, list) else values


def planned_lrs(scheduler: ScheduleLR, steps: int, points: int = 600) -> list[tuple[int, float]]:
    """(step, lr) of the first parameter group, as `train/lr` has it, at up to `points` of a run's `steps`."""
    chosen = chosen_steps(steps, points)
    return list(zip(chosen, planned_groups(scheduler, chosen)[0].unscaled_lr, strict=True))


def nested_run(folder: str, name: str, step: int) -> ResumingTensorBoardLogger:
    """A run inside a run's folder, by which TensorBoard draws a curve in another colour; its points from `step` go."""
    run = ResumingTensorBoardLogger(folder, name=name, version="")
    run.resume_at(step)
    return run


class TensorBoardDashboard(pl.Callback):
    """Make TensorBoard a dashboard of the run: charts, recipe, schedule and result. Never changes training.

    For each TensorBoardLogger of the Trainer, Lightning's or ours, it writes

    - the group `_overview`, which TensorBoard shows first: loss of the step and validation loss, the gradient norm
      before the clip and the clip, the learning rate and its plan from the first step to the last (where a schedule of
      this collection gives it), tokens/s and MFU. Validation, clip and plan are runs inside the run's folder, so that
      each curve has its own colour;
    - the custom-scalars tab: charts of many series, from what monitors record of activations, updates, attention,
      experts, precision and memory, and of the sources of a mixture;
    - the text `recipe`: the facts of the run, the module's hyper-parameters, and the YAML where LightningCLI runs it;
    - the HParams tab: the hyper-parameters, and `hp/val_loss`, the last validation's loss, also if training fails.

    At fit start it prints the command that starts TensorBoard, and the address to open. It logs `train/loss` unless the
    module does, and `train/clip_norm`; the other curves are those that monitors log.

    Args:
        val_loss: name under which the module logs the validation loss.
    """

    def __init__(self, val_loss: str = "val/loss") -> None:
        self.val_loss = val_loss
        self._loggers: list[Any] = []
        self._curves: list[tuple[Any, Any]] = []  # of validation and of the clip, for each logger
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
        self._result, self._started, self._laid_out, self._curves = None, False, False, []
        self._buffer = MetricBuffer.of(trainer)
        self._buffer.step_loss().log()
        if trainer.is_global_zero and not self._loggers and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            print("TensorBoardDashboard: the Trainer has no TensorBoardLogger, so there is no dashboard")
        for logger in self._loggers:
            say(f"TensorBoard: {how_to_open(str(logger.root_dir))}")

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Show each interval, also figures that monitors derive from it: they registered before."""
        self._buffer.at_flush(self._show)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Write the cards at the run's first step, and the layout an interval later: then the metrics are known."""
        step = logging_step(trainer)
        if not self._started:
            self._started, self._first = True, step
            for logger in self._loggers:
                validation, clip = (nested_run(logger.log_dir, name, step) for name in ("validation", "clip"))
                self._curves.append((validation, clip))
                self._write_cards(logger, trainer, pl_module, step)
            if self._clip:  # by the buffer, in which the first step may be the last of an interval as well
                self._buffer.record(CLIP_NORM, float(self._clip))
        elif not self._laid_out and step >= self._first + trainer.log_every_n_steps:  # type: ignore[attr-defined]
            self._write_layout(trainer)

    def _write_cards(self, logger: Any, trainer: Any, pl_module: Any, step: int) -> None:
        writer = logger.experiment
        recipe, hparams = recipe_of(trainer), dict(getattr(pl_module, "hparams", {}))
        text = [table(facts(trainer, pl_module)), *([table(hparams)] if hparams else [])]
        writer.add_text(
            "recipe", "\n\n".join([*text, *([markdown_block(recipe[0].strip(), "yaml")] if recipe else [])]), step
        )
        by_step = (
            each.scheduler for each in trainer.lr_scheduler_configs if (each.interval, each.frequency) == ("step", 1)
        )
        scheduler = next((each for each in by_step if isinstance(each, ScheduleLR)), None)
        lrs = planned_lrs(scheduler, run_length(trainer) or 0) if scheduler is not None else []
        if lrs:
            plan = nested_run(logger.log_dir, "plan", 0)
            for at, lr in lrs:
                plan.log_metrics({LR: lr}, at)
            plan.finalize("written")
        known = flat(recipe[1] if recipe else {"module": type(pl_module).__name__, **hparams})
        from torch.utils.tensorboard.summary import hparams as hparams_summaries  # imported late, as it loads slowly

        for summary in hparams_summaries(known, {RESULT: 0.0})[:2]:  # the third says how it ended
            writer._get_file_writer().add_summary(summary, step)

    def _write_layout(self, trainer: Any) -> None:
        self._laid_out = True
        for logger in self._loggers:
            logger.experiment.add_custom_scalars(layout(trainer.callback_metrics))

    def _show(self, rows: list[Row]) -> dict[str, float]:
        """Write the overview of an interval; the clip is a metric as well."""
        for row, logger in itertools.product(rows, self._loggers):
            values = {
                tag: row.values[name] for tag, names in OVERVIEW_METRICS.items() for name in names if name in row.values
            }
            if values:
                logger.log_metrics(values, row.step)
        for _, clip in self._curves if self._clip else ():
            clip.log_metrics({GRAD_NORM: float(self._clip or 0)}, rows[-1].step)
            clip.save()
        return {CLIP_NORM: float(self._clip)} if self._clip else {}

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Show the loss, and remember it."""
        value = trainer.callback_metrics.get(self.val_loss)
        if value is not None and not trainer.sanity_checking:
            self._result = float(value)
            for validation, _ in self._curves:
                validation.log_metrics({LOSS: self._result}, logging_step(trainer))
                validation.save()

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Write the result."""
        from torch.utils.tensorboard.summary import hparams as hparams_summaries

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
                names = [RESULT, "hp_metric"] if shows_hp_metric(logger) else [RESULT]
                logger.log_metrics(dict.fromkeys(names, self._result), step)
            logger.save()
        for curve in itertools.chain(*self._curves):
            curve.finalize("written")
        self._curves = []  # after a failure, the buffer flushes later: a write would open a file again
