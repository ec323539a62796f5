"""The buffer that all monitors record into: values stay on their device until a logging interval ends."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_tricks._core.errors import UsageError
from lightning_tricks._trainer.lightning import Module, Trainer, WarnOnce, only_warn, pl, rank_zero_warn
from lightning_tricks._trainer.loop import hooks_have_batch, is_accumulating, logged_in_training, logging_step
from lightning_tricks._trainer.objects import steps_between_saves
from lightning_tricks._trainer.run_facts import is_alone, stage_groups
from lightning_tricks._trainer.run_length import LastStep
from lightning_tricks.metrics.row import (
    COUNT,
    TOTAL,
    Names,
    Row,
    join_over_ranks,
    join_over_stages,
    not_finite_line,
    to_host,
)
from lightning_tricks.metrics.step_loss import StepLoss
from lightning_tricks.metrics.step_norm import StepNorm

__all__ = ["MetricBuffer"]

OverRanks = Literal["sum", "max"]
SAVE_SECONDS = 1.0  # least time between two `logger.save()`, which waits for the disk; Lightning calls it at the end


def _check_single(name: str, value: Tensor) -> None:
    if value.numel() != 1:
        raise UsageError(f"{name}: recorded a tensor of shape {tuple(value.shape)}; give one number, or use record_all")


class MetricBuffer(pl.Callback):
    """Collect device scalars and hand them to `trainer.loggers` every `log_every_n_steps`. Never changes training.

    Each Trainer has one: `MetricBuffer.of(trainer)` finds it or adds it, in front of the checkpoint callbacks. Record
    during training, in any hook up to a callback's `on_train_batch_end`; nothing is read from the device until the
    interval ends. Then there is one transfer a device and one `logger.log_metrics` for each step that recorded
    something, with that step's own values, at the step that Lightning's own `self.log` uses. The same happens at the
    end, before validation, before a checkpoint is written, and when training fails. The latest values stand in
    `trainer.callback_metrics`, for ModelCheckpoint and EarlyStopping to monitor.

    A name that begins with an underscore is not logged; it is for `at_flush`. With `log_every_n_steps=0`, which turns
    Lightning's logging off, nothing is kept.

    Attributes:
        failed: whether the values are read because training has failed. Other ranks may be gone: a function given to
            `at_flush` must then change nothing and ask no other rank.
    """

    def __init__(self) -> None:
        self._trainer: Any = None
        self._every = 0
        self._saves_every: list[int] = []
        self._saved = 0.0  # when the loggers last wrote to the disk
        self._forget()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy, by pickle too, is an empty buffer of no Trainer: a module that holds one can be copied in mid-fit."""
        return type(self), ()

    def _forget(self) -> None:
        """Reset the state that belongs to one fit."""
        self._current = Row()
        self._finished: list[Row] = []
        self._over_ranks: dict[str, OverRanks] = {}
        self._some_ranks: set[str] = set()  # names that `record_largest` was given
        self._derived: list[Callable[[list[Row]], Mapping[str, float]]] = []
        self._warn_once = WarnOnce()
        self._answered: tuple[int, bool] | None = None
        self._step_loss: StepLoss | None = None  # once somebody asks for it
        self._step_norm: StepNorm | None = None
        self.failed = False
        self._last_step = LastStep()

    @classmethod
    def of(cls, trainer: Trainer) -> "MetricBuffer":
        """The Trainer's buffer, added to its callbacks if it has none. Call it once a fit, such as in `setup`."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        buffer = next((callback for callback in callbacks if isinstance(callback, cls)), None) or cls()
        others = [callback for callback in callbacks if callback is not buffer]
        # the Trainer's own list: of `lightning` or of `pytorch_lightning`, whichever made it
        checkpoints: list[Any] = trainer.checkpoint_callbacks
        place = next((i for i, callback in enumerate(others) if callback in checkpoints), len(others))
        # a new list: Lightning may be iterating over the old one
        trainer.callbacks = [*others[:place], buffer, *others[place:]]  # type: ignore[attr-defined]
        buffer._serve(trainer)
        return buffer

    def _serve(self, trainer: Any) -> None:
        self._trainer, self._every = trainer, trainer.log_every_n_steps
        self._saves_every = steps_between_saves(trainer)  # ModelCheckpoints come later, and may look at a step's values

    def record(self, name: str, value: Tensor | float, over_ranks: OverRanks | None = None) -> None:
        """Keep `value` for the running optimizer step; a later one for the same step replaces it.

        Args:
            name: of the metric, such as `train/grad_norm`.
            value: a scalar tensor, of which no copy is made, or a number.
            over_ranks: how the values of all ranks are joined at the end of the interval; None if they are equal, or if
                the value of rank 0 is wanted. Every rank must record the same `over_ranks` names, in the same order.

        Raises:
            UsageError: the tensor holds more than one number.
        """
        if not self._every:
            return
        if over_ranks is not None and not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=torch.float64)  # to be joined like the others
        if isinstance(value, Tensor):
            _check_single(name, value)
            self._current.tensors[(name,)] = value.detach() if value.requires_grad else value
        else:
            self._current.tensors.pop((name,), None)
            self._current.values[name] = float(value)
        if over_ranks is not None:
            self._over_ranks[name] = over_ranks

    def record_mean(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Keep one micro-batch's part of a mean: the sum of all totals over the sum of all counts, over all ranks.

        A step whose totals and counts are all 0, such as one in which no label counts, has no mean and no value.

        Args:
            name: of the metric, such as `train/loss`.
            total: a scalar tensor, such as the nats of a micro-batch.
            count: number of summands in it, such as its tokens.

        Raises:
            UsageError: the total or the count holds more than one number.
        """
        if self._every:
            count = count if isinstance(count, Tensor) else torch.full((), count, device=total.device)
            _check_single(name, total)
            _check_single(name, count)
            self._current.means.setdefault(name, []).append((total.detach(), count.detach()))

    def record_all(self, names: tuple[str, ...], values: Tensor, over_ranks: OverRanks | None = None) -> None:
        """Keep many values that are in one tensor already.

        Args:
            names: of the metrics, n of them.
            values: (n,) tensor, of which no copy is made.
            over_ranks: see `record`.

        Raises:
            UsageError: there are more names than values, or fewer.
        """
        if len(names) != values.numel():
            raise UsageError(f"record_all: {len(names)} names ({', '.join(names[:3])}...), {values.numel()} values")
        if self._every and names:
            self._current.tensors[names] = values.detach()
            if over_ranks is not None:
                self._over_ranks[names[0]] = over_ranks

    def record_largest(self, names: Sequence[str], found: Mapping[str, Tensor]) -> None:
        """Keep the largest value over ranks of each metric. A rank may have no value: its block may not have run.

        Args:
            names: of all possible metrics, at least one: the same names in the same order on every rank.
            found: this rank's scalar tensors by name. A metric that no rank has is not logged.
        """
        device = self._trainer.strategy.root_device
        missing = torch.full((), -math.inf, device=device)
        values = [found.get(name, missing).to(device, torch.float32) for name in names]
        self._some_ranks.update(names)
        self.record_all(tuple(names), torch.stack(values), "max")  # equally many on each rank, for the collective

    def step_loss(self) -> StepLoss:
        """The fit's loss of each step, measured from now on. Call it in `setup` or `on_fit_start`, on every rank."""
        if self._step_loss is None:
            self._step_loss = StepLoss(self._trainer)
        return self._step_loss

    def step_norm(self) -> StepNorm:
        """The fit's gradient norm of each step, likewise; without DeepSpeed's engine."""
        if self._step_norm is None:
            self._step_norm = StepNorm(self._trainer)
        return self._step_norm

    def at_flush(self, derive: Callable[[list[Row]], Mapping[str, float]]) -> None:
        """Call `derive` with each interval's rows, on every rank, and add the values that it returns to the last row.

        Functions are called in the order of their registration, and see the values of earlier ones. Registrations end
        with the fit, so register in a hook that each fit calls, such as `setup`. Idempotent.
        """
        if derive not in self._derived:
            self._derived.append(derive)

    def is_log_step(self) -> bool:
        """Whether the running optimizer step ends an interval: make costly measurements on such steps only."""
        done = logging_step(self._trainer)
        if self._answered is None or self._answered[0] != done:  # one answer for all callers during a step
            dev_run, every, last = self._trainer.fast_dev_run, self._every, self._last_step.is_running(self._trainer)
            self._answered = done, every > 0 and ((done + 1) % every == 0 or bool(dev_run) or last)
        return self._answered[1]

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Begin to count the steps of each batch."""
        self._last_step.begin(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """A micro-batch of the step's loss begins; its gradients' norm may be measured."""
        if self._step_norm is not None:
            self._step_norm.begin_batch()
        if self._step_loss is not None:
            self._step_loss.open(self._current)
            self._step_loss.begin_batch(batch if hooks_have_batch(trainer) else None)

    def on_before_backward(self, trainer: Trainer, pl_module: Module, loss: Tensor) -> None:
        """Take the micro-batch into the step's loss."""
        if self._step_loss is not None:
            self._step_loss.add(pl_module, loss, self._current)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: torch.optim.Optimizer) -> None:
        """The callbacks' hooks are behind, the module's comes next."""
        if self._step_norm is not None:
            self._step_norm.before_hook(pl_module, optimizer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Close the step's row, and the interval if this step ends it."""
        self._end_norm()
        if is_accumulating(trainer):
            return
        self._close_step()
        ends = self.is_log_step()  # asked before `end_batch`, after which the answer is that of the next batch
        if ends or trainer.should_stop or any(trainer.global_step % steps == 0 for steps in self._saves_every):
            self.flush()
        self._last_step.end_batch(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Flush, at the run's end too: EarlyStopping and ModelCheckpoint, which come next, may look at the values."""
        self._end_norm()  # of a batch that the module has left out
        self.flush()
        if self._step_loss is not None:
            self._step_loss.drop(self._current)

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Flush."""
        if not trainer.sanity_checking:
            self.flush()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Flush, to the disk: a run that resumes from this checkpoint will not repeat these steps."""
        self.flush()
        self._save()

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Forget micro-batches that no optimizer step followed: they are no part of a later run's first step."""
        self._current = Row()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Write the values that can still be read, with those of the failed step; the error is raised as usual."""
        self.failed = True
        self._end_norm()
        with only_warn("the metrics since the last logged step are lost"):
            self._close_step()
            self.flush()
        self._forget()  # Lightning calls no `teardown` after an exception

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Forget the values and registrations of this fit."""
        self._forget()

    def _end_norm(self) -> None:
        if self._step_norm is not None:
            self._step_norm.end_batch()

    def _close_step(self) -> None:
        if self._step_loss is not None and self._current:
            self._step_loss.close(self._current)
        if not self._every:
            self._current = Row()
        if self._current:
            self._current.step = logging_step(self._trainer)
            self._current.wall_time = time.time()
            self._finished.append(self._current)
            self._current = Row()

    def flush(self) -> None:
        """Bring the values of finished steps to the host, log them, and start a new interval. Every rank must call."""
        if not self._finished:
            return
        rows, self._finished = self._finished, []
        self._read(rows)
        if self._step_loss is not None:
            self._step_loss.read(rows, logged_in_training(self._trainer))
        for derive in self._derived:
            rows[-1].values.update(derive(rows))
        logged = self._trainer.callback_metrics if self._answered == (logging_step(self._trainer), True) else {}
        if line := not_finite_line(rows, logged):
            self._warn_once("not finite", line)
        latest: dict[str, float] = {}
        for row in rows:
            row.values = {k: v for k, v in self._without_missing(row.values).items() if k[0] != "_"}
            latest.update(row.values)
        tensors = dict(zip(latest, torch.tensor(list(latest.values())).unbind(), strict=True))
        self._trainer.callback_metrics.update(tensors)
        self._trainer.logged_metrics.update(tensors)
        self._log(rows)

    def _log(self, rows: list[Row]) -> None:
        for logger in self._trainer.loggers:
            for row in rows:
                if row.values and getattr(logger, "takes_wall_time", False):
                    logger.log_metrics(row.values, row.step, wall_time=row.wall_time)
                elif row.values:
                    logger.log_metrics(row.values, row.step)
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self._save()

    def _save(self) -> None:
        """Let the loggers write their values to the disk."""
        self._saved = time.monotonic()
        for logger in self._trainer.loggers:
            logger.save()

    def _read(self, rows: list[Row]) -> None:
        """Turn the rows' tensors into numbers, joined over ranks."""
        unread = [(row, names, tensor) for row in rows for names, tensor in row.unread().items()]
        tensors = self._join_ranks([names for _, names, _ in unread], [tensor for _, _, tensor in unread])
        for (row, names, _), numbers in zip(unread, to_host(tensors), strict=True):
            row.values.update(zip(names, numbers, strict=True))
        if (groups := stage_groups(self._trainer)) is not None and not self.failed:
            for row in rows:
                row.values = self._without_missing(row.values)
            joins = {name: join for _, names, _ in unread if (join := self._join_of(names)) for name in names}
            join_over_stages(rows, joins, groups[1])
        for row in rows:
            for name in row.means:
                total, count = row.values[TOTAL + name], row.values[COUNT + name]
                if count or total:
                    row.values[name] = total / count if count else math.nan

    def _join_ranks(self, names: list[Names], tensors: list[Tensor]) -> list[Tensor]:
        """`tensors`, where asked for as sums or maxima over ranks; of rank 0 alone after a failure."""
        joins = list(map(self._join_of, names))
        if is_alone(self._trainer) or not any(joins):
            return tensors
        if self.failed:  # the other ranks may be gone: a collective would not end
            rank_zero_warn("the last steps' metrics before the failure are those of rank 0 alone")
            return tensors
        groups = stage_groups(self._trainer)
        return join_over_ranks(tensors, joins, self._trainer.strategy, groups[0] if groups else None)

    def _without_missing(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values without those of `record_largest` that no rank has."""
        return {name: v for name, v in values.items() if v != -math.inf or name not in self._some_ranks}

    def _join_of(self, names: Names) -> str | None:
        """How the numbers of a tensor are joined over ranks, `sum`, `max` or not at all."""
        return "sum" if names[0].startswith((TOTAL, COUNT)) else self._over_ranks.get(names[0])
