"""The length of a run in optimizer steps, by `max_steps` and `max_epochs`, its last step, where Lightning keeps it.

Lightning's `Trainer.estimated_stepping_batches` is not enough after a resume. It sets up the training loaders if nobody
has done so yet, and a loader that has not been resumed by then would begin at its first batch. It also counts whole
epochs, though the number of batches may have changed in the middle of one. Here the steps that are left are added to
those that are done.
"""

import math
from typing import Any

from lightning_tricks._core.accumulation import accumulation
from lightning_tricks._trainer.loop import batch_progress


def step_limit(trainer: Any) -> tuple[Any, str]:
    """Owner and name of the attribute that holds `max_steps`. Read from `_TrainingEpochLoop` (its `__init__`)."""
    return trainer.fit_loop.epoch_loop, "max_steps"


def run_length(trainer: Any) -> int | None:
    """The optimizer step at which the running fit ends by `max_steps` or by `max_epochs`, whichever comes first.

    None where that is not known: without either, with loaders without a length, with manual optimization and
    `max_epochs` alone. Ask in `on_train_start`, in `on_train_epoch_start` or when the first batch of the fit starts:
    then the data are there, a checkpoint is loaded, and the counters tell where in an epoch it goes on.
    """
    ends = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if (left := _steps_left_in_epochs(trainer)) is not None:
        ends.append(trainer.global_step + left)
    return min(ends, default=None)


def _steps_left_in_epochs(trainer: Any) -> int | None:
    """Optimizer steps until `max_epochs`.

    Read from `_FitLoop.done`, `on_advance_start` and `on_advance_end` (loops/fit_loop.py), and from
    `_TrainingEpochLoop._num_ready_batches_reached` and `_accumulated_batches_reached` (loops/training_epoch_loop.py).
    """
    if trainer.max_epochs is None or trainer.max_epochs < 0 or not trainer.lightning_module.automatic_optimization:
        return None
    batches: float = trainer.num_training_batches
    epochs, progress = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
    underway, left = epochs.started > epochs.processed, max(trainer.max_epochs - epochs.processed, 0)
    done = progress.current.processed if underway else 0  # the running batch is not
    in_pass = getattr(trainer.datamodule, "micro_batches_in_pass", None) if trainer.max_steps < 0 else None
    over = underway and (done >= batches or (progress.is_last_batch and done == progress.current.ready))
    if len(accumulation(trainer).starts) > 1:
        return _steps_left_while_batches_grow(trainer, in_pass and in_pass(trainer), left - over, 0 if over else done)
    if in_pass is not None:
        whole = max(in_pass(trainer) // trainer.accumulate_grad_batches, 1)
        return _steps_left_in_passes(trainer, whole, left, done, underway, over)
    if math.isinf(batches):
        return None
    if not left:
        return 0
    running, later = _accumulation(trainer, epochs.processed, left)
    gone = done // running if done < batches else math.ceil(batches / running)
    return sum(math.ceil(batches / micro) * number for micro, number in later) - gone


def _accumulation(trainer: Any, first: int, epochs: int) -> tuple[int, list[tuple[int, int]]]:
    """Micro-batches in a step of epoch `first`, and of all `epochs` from there on with the number of such epochs."""
    schedulers = [c for c in trainer.callbacks if hasattr(c, "get_accumulate_grad_batches")]
    if not schedulers:
        return trainer.accumulate_grad_batches, [(trainer.accumulate_grad_batches, epochs)]
    found = [schedulers[0].get_accumulate_grad_batches(epoch) for epoch in range(first, first + epochs)]
    return schedulers[0].get_accumulate_grad_batches(first), [(micro, 1) for micro in found]


def _steps_left_while_batches_grow(trainer: Any, in_pass: int | None, epochs: int, done: int) -> int | None:
    """`_steps_left_in_epochs` under BatchSizeWarmup.

    Args:
        trainer: of the run.
        in_pass: micro-batches of a pass over data that go on with the next row; None for other data.
        epochs: that have not ended.
        done: micro-batches of the running one.
    """
    plan, step, batches = accumulation(trainer), trainer.global_step, trainer.num_training_batches
    if in_pass is None and math.isinf(batches):
        return None
    for _ in range(epochs):
        ends = [] if math.isinf(batches) else [plan.steps_of_epoch(step, int(batches) - done)]
        if in_pass is not None:
            ends.append(plan.steps_to_end_of_pass(step, in_pass))
        step, done = step + min(ends), 0
    return int(step) - int(trainer.global_step)


def _steps_left_in_passes(trainer: Any, whole: int, epochs: int, done: int, underway: bool, over: bool) -> int:
    """`_steps_left_in_epochs` for data that go on with the next row: an epoch ends with a pass, or with its last batch.

    Args:
        trainer: of the run.
        whole: steps of a pass.
        epochs: that have not ended.
        done: micro-batches of the running epoch.
        underway: whether there is a running epoch.
        over: whether its last batch is done.
    """
    batches, micro = trainer.num_training_batches, trainer.accumulate_grad_batches
    limit = whole if math.isinf(batches) else math.ceil(batches / micro)
    left = whole - trainer.global_step % whole
    if not underway:
        return steps_of_epochs(epochs, left, whole, limit)
    running = 0 if over else left if math.isinf(batches) else min(left, max(limit - done // micro, 0))
    return running + steps_of_epochs(epochs - 1, left - running or whole, whole, limit)


def steps_of_epochs(epochs: int, left: int, whole: int, limit: int) -> int:
    """Steps of epochs that take turns on passes over the data: each ends with a pass, or after `limit` steps.

    Args:
        epochs: number of them.
        left: steps until the running pass ends, at least 1.
        whole: steps of each pass after it.
        limit: of an epoch.

    Example:
        >>> steps_of_epochs(epochs=4, left=3, whole=5, limit=2)  # 2 and 1, then 2 and 2 of the next pass
        7
    """
    first = math.ceil(left / limit)
    if epochs <= first:
        return min(max(epochs, 0) * limit, left)
    passes, rest = divmod(epochs - first, math.ceil(whole / limit))
    return left + passes * whole + min(rest * limit, whole)


def is_last_step(trainer: Any) -> bool:
    """When an optimizer step is done: whether training stops after it, at `max_steps` or because it was asked to.

    The end of the last epoch does not count. Read from `_FitLoop.done` (loops/fit_loop.py).
    """
    loop = trainer.fit_loop
    at_end = loop.max_steps != -1 and loop.epoch_loop.global_step >= loop.max_steps
    return at_end or (trainer.should_stop and loop._can_stop_early)


class LastStep:
    """Tells the last step while it runs: the same before, between and after the optimizer steps of a batch.

    `max_steps` counts the steps of each optimizer. How many a batch makes is known only after it, so the most that any
    batch has made counts: where batches make different numbers, a step shortly before the last may pass for it too.
    """

    def __init__(self) -> None:
        self._before = 0  # `trainer.global_step` when the running batch began
        self._most = 1  # optimizer steps in a batch

    def begin(self, trainer: Any) -> None:
        """Training begins: until a batch has ended, it is taken to step each optimizer once."""
        self._before, self._most = trainer.global_step, max(len(trainer.optimizers), 1)

    def end_batch(self, trainer: Any) -> None:
        """Count the optimizer steps of the batch that ends."""
        self._most = max(self._most, trainer.global_step - self._before)
        self._before = trainer.global_step

    def is_running(self, trainer: Any) -> bool:
        """Whether the running batch is the last of the run, by `max_steps`, `max_epochs` or a wish to stop."""
        if trainer.should_stop or 0 < trainer.max_steps - self._before <= self._most:
            return True
        if trainer.current_epoch + 1 != trainer.max_epochs or not math.isfinite(trainer.num_training_batches):
            return False
        accumulated: int = trainer.accumulate_grad_batches
        left = trainer.num_training_batches - batch_progress(trainer).current.ready
        # the same for each micro-batch of a step, and the last step may have fewer
        return left < ((trainer.num_training_batches - 1) % accumulated + 1)
