"""The training loop: which micro-batch runs, whether it ends a step or an epoch, what comes next."""

from collections.abc import Mapping
from typing import Any

from lightning_tricks._core.protocols import BeginsNextEpoch
from lightning_tricks._trainer.objects import is_a


def is_accumulating(trainer: Any) -> bool:
    """Whether the running micro-batch is followed by another one of the same optimizer step.

    Read from `_TrainingEpochLoop._should_accumulate` (loops/training_epoch_loop.py).
    """
    return bool(trainer.fit_loop._should_accumulate())


def hooks_have_batch(trainer: Any) -> bool:
    """Whether `on_train_batch_start` gets the batch; where the step takes a `dataloader_iter`, it is the one before.

    Read from `_TrainingEpochLoop.advance` (loops/training_epoch_loop.py) and `_select_data_fetcher`
    (loops/utilities.py).
    """
    return not is_a(trainer.fit_loop._data_fetcher, "_DataLoaderIterDataFetcher")


def validation_follows(trainer: Any) -> bool:
    """In `on_train_batch_end`: whether validation comes before the next batch. If by time, every rank must ask.

    Read from `_TrainingEpochLoop.on_advance_end` and `_EvaluationLoop.skip` (loops/training_epoch_loop.py,
    loops/evaluation_loop.py).
    """
    loop = trainer.fit_loop.epoch_loop
    answer = bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher))
    if answer and loop.val_loop._combined_loader is not None:
        answer = not loop.val_loop.skip  # a loader without batches
    if trainer._val_check_time_interval is not None:
        answer = trainer.strategy.broadcast(answer)  # the clocks of the ranks differ
    return answer


def logging_step(trainer: Any) -> int:
    """The step at which `self.log` logs the running batch: the number of batches that have ended in a step.

    With several optimizers `trainer.global_step` counts the steps of each, this does not. Read from
    `_LoggerConnector.log_metrics` (trainer/connectors/logger_connector/logger_connector.py).
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def take_loops_step(trainer: Any, checkpoint: Mapping[str, Any]) -> None:
    """In an evaluation's `on_load_checkpoint`: count as the fit had, so that values are logged at its step and epoch.

    The step is the one at which the fit's own validation after that step was logged: the number of steps less one.
    Lightning counts the batch after that validation, so a checkpoint may have either. Read from `on_advance_end` of
    `_TrainingEpochLoop` and `restore_loops` of `_CheckpointConnector`, which restores the evaluation's loop alone.
    """
    if state := checkpoint.get("loops", {}).get("fit_loop"):
        trainer.fit_loop.load_state_dict(state)
        loop = trainer.fit_loop.epoch_loop
        if loop._batches_that_stepped == checkpoint.get("global_step"):
            loop._batches_that_stepped = max(loop._batches_that_stepped - 1, 0)


def batch_progress(trainer: Any) -> Any:
    """The counters of training micro-batches, `current` in this epoch and `total`, which a checkpoint restores.

    Read from `_TrainingEpochLoop.batch_progress` (loops/training_epoch_loop.py), a `_BatchProgress`.
    """
    return trainer.fit_loop.epoch_loop.batch_progress


def steps_in_epoch(trainer: Any) -> int:
    """Optimizer steps that are done in this epoch, which a checkpoint restores; in automatic optimization.

    Read from `_AutomaticOptimization.optim_progress` (loops/optimization/automatic.py), an `_OptimizationProgress`.
    """
    return int(trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.current.completed)


def is_restarting(trainer: Any) -> bool:
    """Whether training goes on from a checkpoint. Read from `_Loop.restarting` (loops/loop.py)."""
    return bool(trainer.fit_loop.restarting)


def epoch_is_over(trainer: Any) -> bool:
    """Whether the last batch of an epoch is running, or has run and the next epoch has not begun.

    Read from `_TrainingEpochLoop._num_ready_batches_reached` (loops/training_epoch_loop.py).
    """
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def epoch_end_follows(trainer: Any) -> bool:
    """After a step: whether the hooks of an epoch's end come next, and a save after them goes on with the next epoch.

    With `max_steps`, Lightning goes on within the epoch that has ended and calls them anew without the epoch's metrics,
    unless a callback such as ExactResume prevents it. Read from `_FitLoop.restarting` and `on_advance_start`
    (loops/fit_loop.py).
    """
    goes_on = trainer.max_steps == -1 or any(isinstance(callback, BeginsNextEpoch) for callback in trainer.callbacks)
    return goes_on and epoch_is_over(trainer)


def hook_at_epoch_end(trainer: Any) -> tuple[Any, str]:
    """Owner and name of the last hook that is called at the end of an epoch: of a callback, or of the module.

    Read from `_FitLoop.on_advance_end` (loops/fit_loop.py) and `_call_callback_hooks` (trainer/call.py).
    """
    monitoring = [callback for callback in trainer.callbacks if is_a(callback, "EarlyStopping", "Checkpoint")]
    return (monitoring or [trainer.lightning_module])[-1], "on_train_epoch_end"


def go_on_with_next_epoch(trainer: Any) -> None:
    """After a restart from the end of an epoch, begin the next one, with the hooks of its start.

    Lightning does so where `max_epochs` counts; where `max_steps` does, it goes on within the epoch that has ended.
    The step and the batch that were still being counted when the checkpoint was saved are counted here. Call it in
    `on_train_start`. Read from `_FitLoop.restarting`, `reset` and `on_advance_start` (loops/fit_loop.py), and
    `_TrainingEpochLoop.reset` (loops/training_epoch_loop.py).
    """
    loop = trainer.fit_loop
    if not loop._restarting:
        return
    batches = loop.epoch_loop
    if loop.restarted_mid_epoch:  # saved at the batch's end or in the validation after it
        batches._batches_that_stepped += 1
    if batches.restarted_on_train_batch_end:
        batches.batch_progress.increment_completed()
    for tracker in (loop.epoch_progress.current, loop.epoch_progress.total):
        tracker.completed = tracker.processed = tracker.started  # saved before the hooks of the epoch's end, or in them
    loop._restarting = loop.epoch_loop.restarting = False
    loop.reset_restart_stage()
    loop.epoch_loop.reset_restart_stage()


def end_restart(trainer: Any) -> None:
    """After a restart, let the running epoch end as any other, once its first batch is done.

    Lightning would not let a ReduceLROnPlateau of epochs see the metrics of the first epoch that ends. Read from
    `_FitLoop.on_advance_end` (loops/fit_loop.py).
    """
    trainer.fit_loop._restarting = False


def plateau_updates(trainer: Any) -> list[int | None]:
    """The updates that each scheduler will have had when all is done that belongs to the batches done; None for others.

    Lightning updates a ReduceLROnPlateau behind the hooks in which checkpoints are saved. A run that goes on from such
    a checkpoint leaves the update out, because the metric is not in it. Read from `_TrainingEpochLoop.on_advance_end`,
    `update_lr_schedulers` and `_update_learning_rates` (loops/training_epoch_loop.py), and from
    `_FitLoop.on_advance_end` (loops/fit_loop.py).
    """
    loop = trainer.fit_loop
    batches, epochs = loop.epoch_loop.batch_progress.current, loop.epoch_progress.current
    running = batches.ready > batches.processed
    step_ends = (
        batches.processed > batches.completed or trainer.validating
    ) and not loop.epoch_loop._should_accumulate()
    epoch_ends = epochs.ready > epochs.completed and loop.epoch_loop._num_ready_batches_reached() and not running
    by_interval = {"step": (step_ends, batches.processed), "epoch": (epoch_ends, trainer.current_epoch + 1)}
    updates: list[int | None] = []
    for config in trainer.lr_scheduler_configs:
        is_due, number = by_interval[config.interval]
        due = bool(is_due and number % config.frequency == 0 and trainer.lightning_module.automatic_optimization)
        updates.append(config.scheduler.last_epoch + due if config.reduce_on_plateau else None)
    return updates


def set_callback_metrics(trainer: Any, metrics: dict[str, Any]) -> None:
    """Add to `trainer.callback_metrics`. Read from `_LoggerConnector.callback_metrics` (logger_connector.py)."""
    trainer._logger_connector._callback_metrics.update(metrics)


def logged_in_training(trainer: Any) -> set[str]:
    """Names of the metrics that the module has logged in training by `self.log`, and callbacks by theirs.

    Read from `_ResultCollection` and `_Metadata` (trainer/connectors/logger_connector/result.py).
    """
    return {one.meta.name for one in trainer.fit_loop.epoch_loop._results.values()}


def epoch_means(trainer: Any) -> set[str]:
    """Names of the metrics of training that are reduced over an epoch, of those logged so far in this epoch.

    Read from `_ResultCollection.metrics` and `_Metadata` (trainer/connectors/logger_connector/result.py).
    """
    metas = [one.meta for one in trainer.fit_loop.epoch_loop._results.values() if one.meta.on_epoch]
    return {name for meta in metas for name in (meta.name, meta.forked_name(on_step=False))}


def reopen_epoch(checkpoint: dict[str, Any]) -> None:
    """Mark the epoch of a checkpoint as not ended, where a run has ended in the middle of it.

    Read from `_FitLoop.update_restart_stage` and `done` (loops/fit_loop.py).
    """
    if "loops" not in checkpoint:  # nothing has begun
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    if progress["current"]["ready"] == 0:  # no epoch has begun, as before a search for a learning rate
        return
    for tracker in (progress["current"], progress["total"]):
        tracker["started"] = tracker["ready"]
        tracker["processed"] = tracker["completed"] = tracker["ready"] - 1


def fetch_hooks(trainer: Any) -> tuple[Any, str, str]:
    """Owner and names of the methods that the loop calls before and after it asks the loaders for a training batch.

    Each epoch takes them anew when it begins. Read from `_TrainingEpochLoop.on_run_start`
    (loops/training_epoch_loop.py) and `_DataFetcher.__next__` (loops/fetchers.py).
    """
    return trainer.fit_loop.epoch_loop, "_on_before_fetch", "_on_after_fetch"


def set_consumed(trainer: Any, index: int) -> None:
    """Tell a CombinedLoader that one of its loaders has run to its end before: an epoch lasts until all have.

    Read from `_MaxSizeCycle._consumed` (utilities/combined_loader.py); its other modes have no such list.
    """
    consumed = getattr(trainer.fit_loop._combined_loader._iterator, "_consumed", None)
    if consumed:
        consumed[index] = True


def within_step(trainer: Any) -> tuple[int, bool]:
    """Micro-batches that are done in an optimizer step that is not, and whether one is running."""
    progress = batch_progress(trainer).current
    running = progress.ready > progress.processed
    part = progress.processed % trainer.accumulate_grad_batches
    return (part if running or is_accumulating(trainer) else 0), running


def rewind_to_step(checkpoint: dict[str, Any], trainer: Any) -> None:
    """Count the training micro-batches of a checkpoint that is saved now from the running step on. Idempotent.

    Its gradients are in no checkpoint, so a run that goes on must see all of its micro-batches again. Read from
    `_Loop.state_dict` (loops/loop.py) and `_BatchProgress` (loops/progress.py).
    """
    done, running = within_step(trainer)
    counted, saved = batch_progress(trainer), checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for name in ("current", "total"):
        saved[name] = {event: number - done for event, number in vars(getattr(counted, name)).items()}
        if done:
            saved[name]["completed"] = saved[name]["processed"]  # of the last step, also what is logged at its end
    if done or running:
        saved["is_last_batch"] = False


def forget_running_batch(trainer: Any) -> None:
    """On a restart from a checkpoint of a running micro-batch, count as before it. Call it in `on_train_start`.

    Lightning counts such a batch twice, in all micro-batches (by which it validates across epochs) and in the steps by
    which it logs. Read from `_TrainingEpochLoop.reset` (loops/training_epoch_loop.py) and `_Progress.reset_on_restart`
    (loops/progress.py).
    """
    loop = trainer.fit_loop.epoch_loop
    if not loop.restarting or loop.batch_progress.total.ready == loop.batch_progress.total.processed:
        return
    for tracker in (loop.batch_progress.current, loop.batch_progress.total):
        tracker.ready = tracker.started = tracker.processed
    loop._batches_that_stepped -= 1  # `reset` will add it
