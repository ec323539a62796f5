"""Saves of the Trainer: when the run may be saved, and what happens around a save, in one order for all callbacks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from lightning_tricks._core.random_state import save_random_states
from lightning_tricks._core.replaced import replaced
from lightning_tricks._trainer.loop import epoch_end_follows, is_accumulating, rewind_to_step, validation_follows

_FIELD = "_lightning_tricks_saves"  # on the replaced method: the parts of its pipeline


@dataclass(eq=False)
class _Part:
    before_save: Callable[[Any], None]
    during_save: Callable[[], AbstractContextManager[Any]]


@contextmanager
def around_saves(
    trainer: Any,
    *,
    before_save: Callable[[Any], None] | None = None,
    during_save: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Iterator[None]:
    """Take part in each `trainer.save_checkpoint` inside the `with`; the only replacement of that method.

    All parts' `before_save` come first, in the order in which they joined; then each `during_save` is entered, the
    latest first, because it took the place of the earlier ones' weights last; then the checkpoint is written; then each
    is left in the reverse order, also after an error.

    Args:
        trainer: of this process. A user's own override of its method stays: it is called inside.
        before_save: called with the path.
        during_save: a context for the save itself: it may put in place the weights to save, or take the time.
    """
    part = _Part(before_save or (lambda path: None), during_save or ExitStack)
    saves = getattr(trainer.save_checkpoint, _FIELD, None)
    if saves is None:
        saves = _Saves()
        saves.replacement.enter_context(replaced(trainer, "save_checkpoint", saves.around(trainer.save_checkpoint)))
    saves.parts.append(part)
    try:
        yield
    finally:
        saves.parts.remove(part)
        if not saves.parts:
            saves.replacement.close()


class _Saves:
    """The parts of one Trainer's saves, and the replacement of its method, which ends with the last part."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.replacement = ExitStack()

    def around(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """`save` with what the parts do around it."""

        @wraps(save)
        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> Any:
            for part in self.parts:
                part.before_save(filepath)
            with ExitStack() as during:
                for part in reversed(self.parts):
                    during.enter_context(part.during_save())
                return save(filepath, *args, **kwargs)

        setattr(save_checkpoint, _FIELD, self)
        return save_checkpoint


# ---- when the run may be saved


def may_save(trainer: Any) -> bool:
    """In `on_train_batch_end` and `on_validation_end`: whether nothing more belongs to the running step.

    More may belong to it: other micro-batches, the validation that is due at it, and the hooks of an epoch's end; then
    save in the last of these, `on_train_epoch_end`. If validation comes by time, every rank must ask.
    """
    if trainer.sanity_checking or is_accumulating(trainer) or epoch_end_follows(trainer):
        return False
    return trainer.validating or not validation_follows(trainer)


def save_whole_step(checkpoint: dict[str, Any], trainer: Any, random_state: dict[str, Any] | None = None) -> None:
    """In `on_save_checkpoint`: add the random states; a save within a step goes on from that step's start. Idempotent.

    Args:
        checkpoint: that is being made; every rank must call.
        trainer: of the run.
        random_state: of this process, to save in place of the present one.
    """
    rewind_to_step(checkpoint, trainer)
    save_random_states(checkpoint, random_state)


class DeferredSaves:
    """Holds back the hooks in which a ModelCheckpoint saves, until the run may be saved.

    A checkpoint from within a step holds the number of its micro-batches but not their gradients, and a run that goes
    on from a checkpoint of before a validation leaves that validation out. A ModelCheckpoint writes such checkpoints
    with `train_time_interval`, with validation in mid-step, at the first micro-batch after a resume, and wherever both
    a save and a validation are due.

    Args:
        saver: the ModelCheckpoint.
        replacements: of its hooks, until they end.
    """

    def __init__(self, saver: Any, replacements: ExitStack) -> None:
        names = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")
        self._hooks = {name: getattr(saver, name) for name in names}
        self._held: dict[str, Callable[[], None]] = {}  # calls of these, in order
        for name in names:
            replacements.enter_context(replaced(saver, name, getattr(self, name)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Let the batch's end save if it ends a step."""
        if not is_accumulating(trainer):
            self._hold("on_train_batch_end", trainer, pl_module, *batch)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the validation save; first what the batch's end asked for."""
        self._hold("on_validation_end", trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save what was held back, then what the epoch's end asks for."""
        self._release()
        self._hooks["on_train_epoch_end"](trainer, pl_module)

    def _hold(self, name: str, trainer: Any, *args: Any) -> None:
        self._held[name] = partial(self._hooks[name], trainer, *args)
        if may_save(trainer) or trainer.sanity_checking:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, {}
        for hook in held.values():
            hook()
