"""The number of checkpoints that lie on the disk at once in a run, from the settings of its savers. Arithmetic only."""

from collections.abc import Sequence
from typing import Any

from lightning_tricks._trainer import is_a, steps_between_saves_of
from lightning_tricks._trainer.lightning import pl


def kept_checkpoints(saver: Any, saves: int | None, permanent: int) -> int:
    """The most checkpoints of one saver at once, with the one that is being written.

    Args:
        saver: a SafeCheckpoint or a ModelCheckpoint.
        saves: of the whole run, the last step's among them; None where they are not known.
        permanent: saves that SafeCheckpoint never deletes.
    """
    most = saves if saves is not None else 10**9
    if is_a(saver, "SafeCheckpoint"):
        others = saver.keep_last + (saver.keep_best if saver.monitor is not None else 0)
        return min(permanent + others + 1, max(most, 1))
    if saver.save_top_k < 0:
        return (saves or 1) + bool(saver.save_last)
    return min(saver.save_top_k + bool(saver.save_last) + 1, max(most, 1) + bool(saver.save_last))


def savers_of(settings: Any) -> list[Any]:
    """The checkpoint callbacks of a Trainer's arguments; Lightning's own one where it adds it."""
    callbacks = settings.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    savers = [callback for callback in callbacks if is_a(callback, "ModelCheckpoint")]
    if not savers and settings.get("enable_checkpointing") is not False:
        savers = [pl.callbacks.ModelCheckpoint()]
    return savers


def saves_of_run(saver: Any, total_steps: int | None, validations: Sequence[int]) -> int | None:
    """Saves of a run, its last step among them; None where minutes or epochs decide."""
    every = steps_between_saves_of(saver)
    if total_steps is None or getattr(saver, "every_n_minutes", None) is not None:
        return None
    if every:
        return -(-total_steps // every)
    return len({*validations, total_steps}) if validations else None
