"""Lay out TensorBoard for a pretraining run: the charts to watch, the recipe, the planned curve and the result."""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import fsspec
import yaml
from torch.utils.tensorboard.summary import hparams as hparams_summaries

from lightning_tricks._core.quote import html_text, markdown_block, markdown_text, say, shell_word, yaml_text
from lightning_tricks._core.tensors import whole_numel
from lightning_tricks._trainer.lightning import BACKEND, Module, Trainer, pl
from lightning_tricks._trainer.loop import logging_step
from lightning_tricks._trainer.objects import folder_of_run, is_a, shows_hp_metric
from lightning_tricks._trainer.run_length import run_length
from lightning_tricks.loggers.resuming_loggers import ResumingTensorBoardLogger
from lightning_tricks.metrics.metric_buffer import MetricBuffer
from lightning_tricks.metrics.row import Row
from lightning_tricks.metrics.step_loss import LOGGED
from lightning_tricks.schedules import ScheduleLR, chosen_steps, planned_groups

__all__ = ["TensorBoardDashboard"]

PAGE = "dashboard.html"
PLAN = "plan/lr"
CLIP_NORM, RESULT = "train/clip_norm", "hp/val_loss"
INSIDE = ("activations", "updates", "attention", "experts")
# Charts of metrics that only some precisions record.
OF_LOSS_SCALING = {"loss scale": ["precision/loss_scale"], "skipped steps": ["precision/skipped_steps"]}
OF_FP8 = {"fp8: share": ["precision/fp8_share"]}


def layout(train_loss: str, val_loss: str, names: Iterable[str]) -> dict[str, dict[str, list]]:
    """The layout of the custom-scalars tab: charts that every run has, and those for which `names` has a metric.

    It maps category -> chart -> `["Multiline", [regular expression, ...]]`, as torch's `add_custom_scalars` takes it.
    """
    names = list(names)
    charts = {
        "loss": [re.escape(train_loss), re.escape(val_loss)],
        "gradient norm before the clip": ["train/grad_norm", CLIP_NORM],
        "learning rate": [r"train/lr(/\d+)?", PLAN],
        "tokens per second": ["throughput/tokens_per_second"],
        "MFU": ["throughput/[mh]fu"],
        "memory, GiB": ["memory/.*_gib"],
        **_recorded(OF_LOSS_SCALING, names),
    }
    kinds = sorted({(name.split("/")[0], name.split("/")[-1]) for name in names if name.split("/")[0] in INSIDE})
    inside = {f"{part}: {kind}": [f"{part}/(.*/)?{re.escape(kind)}"] for part, kind in kinds}
    inside |= _recorded(OF_FP8, names)
    of_sources = sorted({name.split("/")[-1] for name in names if name.startswith("sources/")})
    sources = {kind.replace("_", " "): [f"sources/.*/{re.escape(kind)}"] for kind in of_sources}
    categories = {"Run": charts, "Sources of data": sources, "Inside the model": inside}
    return {
        category: {title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in content.items()}
        for category, content in categories.items()
        if content
    }


def _recorded(charts: dict[str, list[str]], names: Iterable[str]) -> dict[str, list[str]]:
    """The charts that show at least one of `names`."""
    return {title: tags for title, tags in charts.items() if any(re.fullmatch("|".join(tags), name) for name in names)}


def pinned_link(tags: Iterable[str], port: int = 6006) -> str:
    """Address of TensorBoard's first page with the cards of `tags` pinned on top, their curves not smoothed.

    Source: `dashboard_deeplink_provider.ts`,
    https://github.com/tensorflow/tensorboard/blob/master/tensorboard/webapp/routes/dashboard_deeplink_provider.ts
    """
    cards = json.dumps([{"plugin": "scalars", "tag": tag} for tag in tags], separators=(",", ":"))
    return f"http://localhost:{port}/?pinnedCards={quote(cards, safe='')}&smoothing=0#timeseries"


def redirect_page(address: str) -> str:
    """An HTML page that leads a browser to an address which is too long to print."""
    target = html_text(address)
    return (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">\n'
        f'<title>TensorBoard</title><a href="{target}">The run in TensorBoard</a>, once TensorBoard is started\n'
    )


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


def write_plan(folder: str, lrs: list[tuple[int, float]]) -> None:
    """Write a curve to the run `plan` in a run's folder, where no resume drops its points; it replaces the last one."""
    plan = ResumingTensorBoardLogger(folder, name="plan", version="")
    plan.resume_at(0)
    for step, lr in lrs:
        plan.log_metrics({PLAN: lr}, step)
    plan.finalize("written")


class TensorBoardDashboard(pl.Callback):
    """Make TensorBoard a dashboard of the run: charts, recipe, schedule and result. Never changes training.

    For each TensorBoardLogger of the Trainer, Lightning's or ours, it writes

    - the custom-scalars tab: training and validation loss in one chart, the gradient norm before the clip with the
      clip's line (`train/clip_norm`), learning rate, tokens/s, MFU, memory, and what monitors record of loss scaling,
      activations, updates, attention, experts and fp8, and of the sources of a mixture;
    - the text `recipe`: the facts of the run, the module's hyper-parameters, and the YAML where LightningCLI runs it;
    - the series `plan/lr`, in a run of its own beside it: the learning rate from the first step to the last, where a
      schedule of this collection gives it (`ScheduleLR`);
    - the HParams tab: the hyper-parameters, and `hp/val_loss`, the last validation's loss, also if training fails.

    At fit start it prints the command that starts TensorBoard, and the name of a page to open in a browser, which leads
    to the five charts to watch: `dashboard.html`, written into the run's folder with the first batch. It records
    nothing else: the curves are those that the monitors and your module log.

    Args:
        train_loss: name under which the training loss is logged, by the module; `train/loss` else by the dashboard, see
            `StepLoss`.
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
        self._buffer = MetricBuffer.of(trainer)
        self._buffer.at_flush(self._clip_line)
        if self.train_loss == LOGGED:
            self._buffer.step_loss().log()
        if trainer.is_global_zero and not self._loggers and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            print("TensorBoardDashboard: the Trainer has no TensorBoardLogger, so there is no dashboard")
        for logger in self._loggers:
            page = shell_word(os.path.join(folder_of_run(trainer), PAGE))
            say(f"TensorBoard: tensorboard --logdir {shell_word(str(logger.root_dir))}   then open {page}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Write the cards at the run's first step, and the layout an interval later: then the metrics are known."""
        step = logging_step(trainer)
        if not self._started:
            self._started, self._first = True, step
            if self._loggers:
                self._write_page(folder_of_run(trainer))
            for logger in self._loggers:
                self._write_cards(logger, trainer, pl_module, step)
            if self._clip:  # by the buffer, in which the first step may be the last of an interval as well
                self._buffer.record(CLIP_NORM, float(self._clip))
        elif not self._laid_out and step >= self._first + trainer.log_every_n_steps:  # type: ignore[attr-defined]
            self._write_layout(trainer)

    def _write_page(self, folder: str) -> None:
        tags = [self.train_loss, self.val_loss, "train/grad_norm", "train/lr", "throughput/tokens_per_second"]
        fs, path = fsspec.core.url_to_fs(folder)
        fs.makedirs(path, exist_ok=True)
        with fs.open(os.path.join(path, PAGE), "w", encoding="utf-8") as file:
            file.write(redirect_page(pinned_link(tags)))

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
            write_plan(logger.log_dir, lrs)
        known = flat(recipe[1] if recipe else {"module": type(pl_module).__name__, **hparams})
        for summary in hparams_summaries(known, {RESULT: 0.0})[:2]:  # the third says how it ended
            writer._get_file_writer().add_summary(summary, step)

    def _write_layout(self, trainer: Any) -> None:
        self._laid_out = True
        for logger in self._loggers:
            logger.experiment.add_custom_scalars(layout(self.train_loss, self.val_loss, trainer.callback_metrics))

    def _clip_line(self, rows: list[Row]) -> dict[str, float]:
        return {CLIP_NORM: float(self._clip)} if self._clip else {}

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
                names = [RESULT, "hp_metric"] if shows_hp_metric(logger) else [RESULT]
                logger.log_metrics(dict.fromkeys(names, self._result), step)
            logger.save()
