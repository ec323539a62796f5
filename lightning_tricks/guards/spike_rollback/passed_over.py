"""Make the steps that a rollback has undone without an update, when a resumed run comes to them again."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from lightning_tricks._replaced import replaced
from lightning_tricks._trainer import unwrapped
from lightning_tricks.guards.spike_rollback.training_state import TrainingState


class PassedOver:
    """Keeps weights and optimizer as they are while a resumed run makes undone steps again.

    Forward and backward pass run, so data, counters, schedule and random numbers go on as in the run that made the
    rollback. They change buffers and the loss scale, so the state from before the first of the steps is put back when
    the last one is done, and for as long as a checkpoint is saved in between.
    """

    def __init__(self) -> None:
        self._before: TrainingState | None = None
        self._replacements = ExitStack()  # until the batch ends
        self._saves = ExitStack()  # until the last step is done; after an exception others may still save

    @property
    def active(self) -> bool:
        """Whether the running step is passed over."""
        return self._before is not None

    def begin_batch(self, trainer: Any, pl_module: Any) -> None:
        """The step of the batch that starts now is passed over."""
        if self._before is None:
            self._before = TrainingState(trainer, pl_module)
            save = _saving(trainer, pl_module, self._before)
            self._saves.enter_context(replaced(trainer, "save_checkpoint", save))
        for optimizer in trainer.optimizers:
            self._replacements.enter_context(without_update(unwrapped(optimizer)))

    def end_batch(self) -> None:
        """Put the optimizers' methods back."""
        self._replacements.close()

    def end(self, trainer: Any, pl_module: Any) -> None:
        """The step that comes now is an ordinary one again; callbacks are told as after the rollback itself."""
        if self._before is not None:
            self._before.restore(trainer, pl_module)
            self.drop()
            tell_callbacks(trainer)

    def drop(self) -> None:
        """Forget the state from before, and give the Trainer its own save back."""
        self._saves.close()
        self._before = None


def _saving(trainer: Any, pl_module: Any, before: TrainingState) -> Callable[..., Any]:
    """The Trainer's save, with an earlier state in place while it runs."""
    save = trainer.save_checkpoint

    @wraps(save)
    def save_before(*args: Any, **kwargs: Any) -> Any:
        now = TrainingState(trainer, pl_module)
        before.restore(trainer, pl_module)
        try:
            return save(*args, **kwargs)
        finally:
            now.restore(trainer, pl_module)

    return save_before


def tell_callbacks(trainer: Any) -> None:
    """Call `after_rollback()` of each callback that has it: earlier weights are in place."""
    for callback in trainer.callbacks:
        if hasattr(callback, "after_rollback"):
            callback.after_rollback()


@contextmanager
def without_update(optimizer: Any) -> Iterator[None]:
    """Let the steps of an optimizer inside the `with` find no gradient, so that they change no parameter."""
    step = optimizer.step

    @wraps(step)
    def step_without_gradients(closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        loss = None if closure is None else closure()
        optimizer.zero_grad(set_to_none=True)
        step(*args, **kwargs)
        return loss

    with replaced(optimizer, "step", step_without_gradients):
        yield
